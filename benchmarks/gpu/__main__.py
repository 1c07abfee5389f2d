"""Everything that has to be verified on a GPU, in one script that needs no network.

    python benchmarks/gpu                    # all that can be done on this machine
    python benchmarks/gpu --minutes 10       # begins no step that is not done by then
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
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gpucheck.evidence import FAILED, Evidence, Outcome, Results, slug
from gpucheck.orders import INVENTORY, Step, run_order, steps
from gpucheck.settings import (
    GAMMAS,
    PRECISIONS,
    RESULTS,
    SCRIPT,
    SIZES,
    WORK,
    RunSettings,
    add_source,
)
from gpucheck.supervisor import command, report, supervise

INTERRUPTED = 130
NAME = "gpu-check"


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as specrt does."""

    def error(self, message: str) -> NoReturn:
        """Print it and exit with 2."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of minutes above 0")
    return minutes


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(
        prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = made.add_argument, RunSettings
    add("--only", nargs="+", default=[], metavar="STEP", help="Steps, * for any part of a name.")
    add("--list", action="store_true", help="Print the steps, and run none.")
    add("--minutes", type=_minutes, help="Begin no step that is not done by then.")
    add("--sizes", nargs="*", default=list(SIZES), choices=SIZES, help="Grown targets.")
    add("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    add("--gammas", nargs="+", type=_count, default=list(GAMMAS), help="Verify passes to build.")
    add("--prompts", type=_count, default=default.prompts, help="Completed in each measurement.")
    add("--tokens", type=_count, default=default.tokens, help="Of each completion.")
    add("--laps", type=_count, default=default.laps, help="Of interleaved measurements.")
    add("--work", type=Path, default=WORK, help="Folder of bundles and plans.")
    add("--scratch", type=Path, help="Folder of weights while a plan is built.  [default: --work]")
    add("--out", type=Path, help="JSON file, merged with what it holds.")
    add("--step", help=argparse.SUPPRESS)
    return made


def settings_of(options: argparse.Namespace) -> RunSettings:
    """Return the settings that the options ask for."""
    return RunSettings(
        work=options.work.resolve(), scratch=options.scratch and options.scratch.resolve(),
        sizes=tuple(options.sizes), precisions=tuple(options.precisions),
        gammas=tuple(sorted(set(options.gammas))), prompts=options.prompts,
        tokens=options.tokens, laps=options.laps,
    )  # fmt: skip


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


def _interrupted() -> int:
    print(f"{NAME}: interrupted", file=sys.stderr, flush=True)
    return INTERRUPTED


def _main(given: list[str]) -> int:
    reader = parser()
    options = reader.parse_args(given)
    add_source()
    settings = settings_of(options)
    known = steps(settings)
    if options.step:
        return _child(next(one for one in known if one.key == options.step), settings, options)
    chosen = [step for step in known if step.matches(options.only)]
    if not chosen:
        reader.error(f"no step is called {' or '.join(options.only)}; --list names them all")
    if options.list:
        for step in chosen:
            print(f"{step.key:34}{'' if step.needs_gpu else 'no GPU needed'}".rstrip(), flush=True)
        return 0
    if chosen[0].key != INVENTORY:  # the others depend on what it finds
        chosen.insert(0, known[0])
    return _run(chosen, _results(reader, options, settings), given)


def _child(step: Step, settings: RunSettings, options: argparse.Namespace) -> int:
    """Run a step in this process."""

    def work(evidence: Evidence) -> None:
        if step.key == INVENTORY:  # it is known even where engine libraries cannot be imported
            from gpucheck.inventory import Machine

            return step.run(Machine(), "", evidence)
        from gpucheck.workbench import Workbench

        return step.run(Workbench(settings), step.backend, evidence)

    report(Results(options.out), step.key, work)
    return 0


def _run(chosen: list[Step], results: Results, given: list[str]) -> int:
    from gpucheck.conclusion import figures, progress, summary

    results.note(command=shlex.join([NAME, *given]))
    outcomes: list[Outcome] = []

    def launch(step: Step, seconds: float) -> Outcome:
        hidden = ["--step", step.key, "--out", str(results.path)]
        arguments = [sys.executable, str(SCRIPT), *given, *hidden]
        return supervise(results, step.key, command(arguments), seconds)

    def started(step: Step) -> None:
        print(f"{step.key}: ", end="", flush=True)

    def ended(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if outcome.when:
            print(progress(outcome), flush=True)

    status, minutes = 0, parser().parse_args(given).minutes
    try:
        run_order(chosen, results, launch, minutes=minutes, started=started, ended=ended)
    except KeyboardInterrupt:
        print(flush=True)
        status = _interrupted()
    results.note(figures=[figure.to_json() for figure in figures(results.read()["steps"])])
    print(f"\n{summary(outcomes, results.read(), results.path)}", flush=True)
    return status or int(any(outcome.status == FAILED for outcome in outcomes))


def _results(reader: Parser, options: argparse.Namespace, settings: RunSettings) -> Results:
    """Return the file for results, which can be written and holds nothing else."""
    from specrt.system import survey

    gpus = survey().gpus
    folder = RESULTS if gpus else settings.work
    out = options.out or folder / f"gpu-{slug(gpus[0].name if gpus else '')}.json"
    try:
        if options.out is None:
            out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()  # now, not after an hour of steps
        Results(out).read()
    except OSError as error:
        reader.error(f"--out {out} cannot be written: {error.strerror}")
    except ValueError as error:
        reader.error(str(error))
    return Results(out.resolve())


if __name__ == "__main__":
    sys.exit(main())
