"""Everything that has to be verified on a GPU, in one script that needs no network.

    python benchmarks/gpu/check.py                   # all that can be done on this machine
    python benchmarks/gpu/check.py --minutes 10      # the most telling steps first
    python benchmarks/gpu/check.py --only 'codelet.*@tensorrt-rtx' bandwidth
    python benchmarks/gpu/check.py --list

Each step runs in a process of its own and says which backend it is about; one that fails or crashes
stops no other. Results are merged into one JSON file, so that a run may be cut into slices; figures
and a table come last. Without a GPU, the machine is described, plans are built where TensorRT for
RTX is installed, rewritten graphs are held to the others on the CPU, and everything else is listed
as not run. Exit status 1 when a step failed.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpucheck.place import GAMMAS, HERE, PRECISIONS, RESULTS, ROOT, SIZES, WORK, Place
from gpucheck.results import add, read_results, slug
from gpucheck.step import FAILED, Outcome, Step

ENVIRONMENT = ROOT / ".venv-gpu"
PACKAGES = (
    "onnxruntime-gpu[cuda,cudnn]>=1.31", "tensorrt-rtx>=1.7", "cuda-bindings", "onnx>=1.20",
    "pytest>=8", "hypothesis>=6", "scipy",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the steps asked for; return 1 where one failed."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    options = parser.parse_args(given)
    if options.probe:
        from gpucheck.probe import child

        backend, way, folder = options.probe
        child(backend, way, Path(folder))
        return 0
    if options.install:
        return _elsewhere([one for one in given if one != "--install"])
    place = _place(options)
    all_steps = _steps(place)
    if options.step:
        return _one(all_steps, place, *options.step)
    chosen = [step for step in all_steps if step.asked(options.only)]
    if not chosen:
        parser.error(f"no step is called {' or '.join(options.only)}; --list tells them all")
    if options.list:
        for step in chosen:
            print(f"{step.key:34}{'' if step.needs_gpu else 'no GPU needed'}".rstrip())
        return 0
    out = _out(parser, options.out, place)
    return _run(chosen, place, options, given, out)


def _run(
    chosen: list[Step], place: Place, options: argparse.Namespace, given: list[str], out: Path
) -> int:
    from gpucheck.run import run_all
    from gpucheck.table import table
    from gpucheck.wanted import figures

    facts: dict[str, Any] = {"command": f"benchmarks/gpu/check.py {shlex.join(given)}".rstrip()}

    def note(done: Outcome) -> dict[str, Any]:
        known = add(out, [done], facts)["steps"]
        print(f"{done.step} {done.backend}: {done.status} {done.reason}".rstrip(), flush=True)
        return dict(known)

    outcomes = run_all(chosen, _passed_on(options), options.minutes, place, note)
    data = read_results(out)
    found = figures(data["steps"])
    data = add(out, [], {"figures": [one.to_json() for one in found]})
    print(f"\n{table(data, found)}\n\n{out}")
    return 1 if any(done.status == FAILED for done in outcomes) else 0


def _steps(place: Place) -> list[Step]:
    from gpucheck.steps import steps

    return steps(place)


def _one(steps: list[Step], place: Place, key: str, path: str) -> int:
    from gpucheck.run import answer

    answer(next(step for step in steps if step.key == key), place, Path(path))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_ = parser.add_argument
    add_("--only", nargs="+", default=[], metavar="STEP", help="Steps, * for any part of a name.")
    add_("--list", action="store_true", help="Print the steps, and run none.")
    add_("--minutes", type=float, help="Begin no step that is not done by then.")
    add_("--sizes", nargs="*", default=list(SIZES), choices=SIZES, help="Grown targets.")
    add_("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    add_("--gammas", nargs="+", type=int, default=list(GAMMAS), help="Verify passes to build.")
    add_("--prompts", type=int, default=Place.prompts, help="Completed in each measurement.")
    add_("--tokens", type=int, default=Place.tokens, help="Of each completion.")
    add_("--laps", type=int, default=Place.laps, help="Turns of each interleaved contender.")
    add_("--experiment", default=Place.experiment, choices=("codelet", *SIZES),
         help="The model that questions about lowering are put to.")  # fmt: skip
    add_("--capabilities", nargs="*", default=[], metavar="N.N",
         help="What tensorrt-rtx builds for.  [default: its own choice]")  # fmt: skip
    add_("--work", type=Path, default=WORK, help="Where bundles and plans are kept.")
    add_("--scratch", type=Path, help="Where weights lie while a plan is built.  [default: --work]")
    add_("--out", type=Path, help="JSON file, merged with what it holds.")
    add_("--rehearse", action="store_true", help="Run engine checks over plans in NumPy as well.")
    add_("--install", action="store_true", help="Install what is needed into .venv-gpu first.")
    add_("--step", nargs=2, help=argparse.SUPPRESS)
    add_("--probe", nargs=3, help=argparse.SUPPRESS)
    return parser


def _place(options: argparse.Namespace) -> Place:
    return Place(
        work=options.work.resolve(),
        scratch=options.scratch and options.scratch.resolve(),
        sizes=tuple(options.sizes),
        precisions=tuple(options.precisions),
        gammas=tuple(sorted(set(options.gammas))),
        prompts=options.prompts,
        tokens=options.tokens,
        laps=options.laps,
        experiment=options.experiment,
        capabilities=tuple(options.capabilities),
        rehearse=options.rehearse,
    )


def _passed_on(options: argparse.Namespace) -> list[str]:
    """Return the arguments that a step's own process gets."""
    said = ["--work", str(options.work), "--experiment", options.experiment]
    said += ["--sizes", *options.sizes, "--precisions", *options.precisions]
    for name in ("prompts", "tokens", "laps"):
        said += [f"--{name}", str(getattr(options, name))]
    said += ["--gammas", *map(str, options.gammas), "--capabilities", *options.capabilities]
    said += ["--scratch", str(options.scratch)] if options.scratch else []
    return [*said, "--rehearse"] if options.rehearse else said


def _out(parser: argparse.ArgumentParser, asked: Path | None, place: Place) -> Path:
    """Return the file for results, which can be written and holds nothing else."""
    gpus = place.found.gpus
    name = f"gpu-{slug(gpus[0].name if gpus else '')}.json"
    out = asked or (RESULTS if gpus else place.work) / name
    try:
        if asked is None:
            out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()  # now, not after an hour of steps
        read_results(out)
    except OSError as error:
        parser.error(f"--out {out} cannot be written: {error.strerror}")
    except ValueError as error:
        parser.error(str(error))
    return out


def _elsewhere(arguments: list[str]) -> int:
    """Run again in an environment of its own; specrt goes in without its own dependencies.

    They name `onnxruntime`, which is the same module as `onnxruntime-gpu`: the last one wins.
    """
    import tomllib

    python = str(ENVIRONMENT / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [d for d in project["dependencies"] if not d.startswith("onnxruntime")]
    install = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*install, *PACKAGES, *needs], check=True)
    subprocess.run([*install, "--no-deps", "-e", str(ROOT)], check=True)
    return subprocess.run([python, str(HERE / "check.py"), *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
