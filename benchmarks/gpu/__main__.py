"""Everything that has to be verified on a GPU, in one script that needs no network.

    python benchmarks/gpu --minutes 10       # ends with tokens per second of a 1 B target
    python benchmarks/gpu                    # 30 minutes: of an 8 B target too
    python benchmarks/gpu --minutes 240      # all that can be done on this machine
    python benchmarks/gpu --only 'codelet.*@tensorrt-rtx' bandwidth
    python benchmarks/gpu --list

Each step runs in a process of its own with a time limit; one that fails or crashes stops no other.
Its facts are written to one JSON file as they are found. Without a GPU the steps that need none
are run, and the rest is listed. Exit status 1 when a step failed, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from gpucheck.conclusion import figures, summary
from gpucheck.evidence import FAILED, Evidence, Outcome, Results
from gpucheck.settings import PRECISIONS, SCRIPT, SIZES, WORK, RunSettings, environment
from gpucheck.steps import INVENTORY, LONG, Step, run_steps, steps, working_way
from gpucheck.supervisor import report, supervise

INTERRUPTED = 130
NAME = "gpu-check"
MODELS = ("driver/nvidia/gpus/*/information", "device-tree/model")
"""Where Linux tells what the GPU or the board is called, below /proc; no driver is asked."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as specrt does."""

    def error(self, message: str) -> NoReturn:
        """Print it and exit with 2."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def _minutes(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number of minutes above 0")


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(
        prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--only", nargs="+", default=[], metavar="STEP", help="Steps, * for any part of a name.")
    add("--list", action="store_true", help="Print the steps, and run none.")
    add("--minutes", type=_minutes, default=LONG, help="End by then.  [default: %(default)g]")
    add("--sizes", nargs="*", choices=SIZES,
        help=f"Grown targets.  [default: 1B, and 8B too from {LONG:g} minutes on]")  # fmt: skip
    add("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    add("--resume", action="store_true", help="Leave out what ended well in an earlier run.")
    add("--work", type=Path, default=WORK, help="Folder of bundles, plans and packages.")
    add("--scratch", type=Path, help="Folder of weights while a plan is built.  [default: --work]")
    add("--out", type=Path, help="JSON file, merged with what it holds.  [default: in --work]")
    add("--step", help=argparse.SUPPRESS)
    return made


def main(given: Sequence[str] | None = None) -> int:
    """Run the steps named; return 1 where one failed."""
    arguments = sys.argv[1:] if given is None else list(given)
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # the reader went away; nothing is left to say
    except OSError as error:
        print(f"{NAME}: results cannot be written ({error})", file=sys.stderr, flush=True)
        return 1


def _interrupted() -> int:
    print(f"{NAME}: interrupted", file=sys.stderr, flush=True)
    return INTERRUPTED


def _main(given: list[str]) -> int:
    reader = parser()
    options = reader.parse_args(given)
    sizes = SIZES if options.minutes >= LONG else SIZES[:1]
    settings = RunSettings(
        work=options.work.resolve(), scratch=options.scratch and options.scratch.resolve(),
        sizes=sizes if options.sizes is None else tuple(options.sizes),
        precisions=tuple(options.precisions),
    )  # fmt: skip
    known = steps(settings)
    if options.step:
        return _child(next(one for one in known if one.key == options.step), settings, options.out)
    chosen = [step for step in known if step.matches(options.only)]
    if not chosen:
        reader.error(f"no step is called {' or '.join(options.only)}; --list names them all")
    if options.list:
        for step in chosen:
            print(f"{step.key:34}{'' if step.needs_gpu else 'no GPU needed'}".rstrip(), flush=True)
        return 0
    if chosen[0].key != INVENTORY:  # the others depend on what it finds
        chosen.insert(0, known[0])
    return _run(chosen, _results(reader, options.out, settings.work), options, given)


def _child(step: Step, settings: RunSettings, out: Path) -> int:
    """Run a step in this process."""
    results = Results(out)

    def work(evidence: Evidence) -> None:
        if step.key == INVENTORY:  # it is known even where engine libraries cannot be imported
            return step.run(None, evidence)
        from gpucheck.workbench import RTX, Workbench

        way = working_way(RTX, results.read()["steps"])
        return step.run(Workbench(settings.opened(way)), evidence)

    report(results, step.key, work)
    return 0


def _run(
    chosen: list[Step], results: Results, options: argparse.Namespace, given: list[str]
) -> int:
    results.note(command=shlex.join([NAME, *given]))
    outcomes: list[Outcome] = []
    begun: set[str] = set()
    surroundings = environment(options.work.resolve())

    def launch(step: Step, seconds: float) -> Outcome:
        begun.add(step.key)
        print(f"{step.key}: ", end="", flush=True)
        hidden = ["--step", step.key, "--out", str(results.path)]
        command = [sys.executable, str(SCRIPT), *given, *hidden]
        return supervise(results, step.key, command, surroundings, seconds)

    def ended(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if outcome.key in begun:
            results.note(figures=figures(results.read()["steps"]))
            reason = f": {outcome.reason}" if outcome.reason else ""
            print(f"{outcome.status}, {outcome.seconds:.1f} s{reason}", flush=True)

    status = 0
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # `timeout` sends it
    try:
        run_steps(
            chosen, results, launch, minutes=options.minutes, resume=options.resume, ended=ended
        )
    except KeyboardInterrupt:
        print(flush=True)
        status = _interrupted()
    print(f"\n{summary(outcomes, results.read()['steps'], results.path)}", flush=True)
    return status or int(any(outcome.status == FAILED for outcome in outcomes))


def _results(reader: Parser, named: Path | None, work: Path) -> Results:
    """Return the file for results, which can be written and holds nothing else."""
    gpu = re.sub(r"[^a-z0-9]+", "-", _model().lower().removeprefix("nvidia ")).strip("-")
    out = named or work / f"gpu-{gpu or 'none'}.json"
    try:
        if named is None:
            out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()  # now, not after an hour of steps
        Results(out).read()
    except OSError as error:
        reader.error(f"--out {out} cannot be written: {error.strerror}")
    except ValueError as error:
        reader.error(str(error))
    return Results(out.resolve())


def _model(proc: Path = Path("/proc")) -> str:
    """Return what the GPU or the board is called, else this machine's name."""
    with suppress(OSError):
        for path in (path for pattern in MODELS for path in sorted(proc.glob(pattern))):
            lines = path.read_text("utf-8", "replace").strip("\0\n ").splitlines()
            named = [line.partition(":")[2] for line in lines if line.startswith("Model:")]
            return (named or lines)[0].strip()
    return platform.node()


if __name__ == "__main__":
    sys.exit(main())
