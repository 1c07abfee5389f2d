"""Everything that has to be verified on a GPU, in one script that needs no network.

    python benchmarks/gpu/check.py                   # all that can be done on this machine
    python benchmarks/gpu/check.py --minutes 10      # the most telling steps first
    python benchmarks/gpu/check.py --only 'codelet.*@tensorrt-rtx' bandwidth
    python benchmarks/gpu/check.py --list

Each step runs in a process of its own and says which backend it is about; one that fails or crashes
stops no other. Results are merged into one JSON file, so that a run may be cut into slices; figures
and a table come last. Without a GPU, the machine is described, plans are built where TensorRT for
RTX is installed, rewritten graphs are held to the others on the CPU, and everything else is listed
as not run. Exit status 1 when a step failed, 130 when the run was interrupted.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

from gpucheck.options import Parser, parser, passed_on, place_of
from gpucheck.place import HERE, RESULTS, ROOT, Place
from gpucheck.results import add, read_results, slug
from gpucheck.step import FAILED, NOT_RUN, Outcome, Step

INTERRUPTED = 130
ENVIRONMENT = ROOT / ".venv-gpu"
PACKAGES = (
    "onnxruntime-gpu[cuda,cudnn]>=1.31", "tensorrt-rtx>=1.7", "cuda-bindings", "onnx>=1.20",
    "pytest>=8", "hypothesis>=6", "scipy",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the steps asked for; return 1 where one failed."""
    try:
        return _main(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # the reader went away; nothing is left to say


def _say(message: str, status: int) -> int:
    print(f"check.py: {message}", file=sys.stderr, flush=True)
    return status


def _main(given: list[str]) -> int:
    reader = parser(__doc__)
    options = reader.parse_args(given)
    if options.probe:
        from gpucheck.probe import child

        backend, way, folder = options.probe
        child(backend, way, Path(folder))
        return 0
    if options.install:
        _elsewhere([one for one in given if one != "--install"])
    place = place_of(options)
    all_steps = _steps(place)
    if options.step:
        return _one(all_steps, place, *options.step)
    chosen = [step for step in all_steps if step.asked(options.only)]
    if not chosen:
        reader.error(f"no step is called {' or '.join(options.only)}; --list tells them all")
    if options.list:
        for step in chosen:
            print(f"{step.key:34}{step.needed}".rstrip(), flush=True)
        return 0
    out = _out(reader, options.out, place)
    return _run(chosen, place, options, given, out)


def _run(
    chosen: list[Step], place: Place, options: argparse.Namespace, given: list[str], out: Path
) -> int:
    from gpucheck.report import kept, progress, report
    from gpucheck.run import run_all
    from gpucheck.wanted import figures

    facts: dict[str, Any] = {"command": f"benchmarks/gpu/check.py {shlex.join(given)}".rstrip()}

    outcomes: list[Outcome] = []

    def begun(step: Step) -> None:
        print(f"{step.key}: ", end="", flush=True)

    def note(done: Outcome) -> dict[str, Any]:
        outcomes.append(done)
        if done.when:
            print(progress(done), flush=True)
        return dict(add(out, [done], facts)["steps"])

    status = 0
    try:
        run_all(chosen, passed_on(options), options.minutes, place, note, begun)
    except KeyboardInterrupt:
        print(flush=True)
        status = _say("interrupted", INTERRUPTED)
    left = [Outcome(one.subject, one.backend, NOT_RUN, "interrupted") for one in chosen]
    found = figures(read_results(out)["steps"])
    data = add(out, [], {"figures": [one.to_json() for one in found]})
    print(f"\n{report([*outcomes, *left[len(outcomes) :]], data, found, out)}")
    print(kept(place.work, out), flush=True)
    return status or int(any(done.status == FAILED for done in outcomes))


def _steps(place: Place) -> list[Step]:
    from gpucheck.steps import steps

    return steps(place)


def _one(steps: list[Step], place: Place, key: str, path: str) -> int:
    from gpucheck.run import answer

    answer(next(step for step in steps if step.key == key), place, Path(path))
    return 0


def _out(reader: Parser, asked: Path | None, place: Place) -> Path:
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
        reader.error(f"--out {out} cannot be written: {error.strerror}")
    except ValueError as error:
        reader.error(str(error))
    return out


def _elsewhere(arguments: list[str]) -> NoReturn:
    """Run again in an environment of its own; specrt goes in without its own dependencies.

    They name `onnxruntime`, which is the same module as `onnxruntime-gpu`: the last one wins.
    """
    python = str(ENVIRONMENT / "bin" / "python")
    try:
        _install(python)
    except subprocess.CalledProcessError as error:
        command = shlex.join(error.cmd)
        sys.exit(_say(f"--install: {command} ended with {error.returncode}", 2))
    os.execv(python, [python, str(HERE / "check.py"), *arguments])


def _install(python: str) -> None:
    import tomllib

    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [d for d in project["dependencies"] if not d.startswith("onnxruntime")]
    install = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*install, *PACKAGES, *needs], check=True)
    subprocess.run([*install, "--no-deps", "-e", str(ROOT)], check=True)


if __name__ == "__main__":
    sys.exit(main())
