"""What the command line may say, and what a step's own process is told of it."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import NoReturn

from gpucheck.place import GAMMAS, PRECISIONS, SIZES, WORK, Place


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as specrt does."""

    def error(self, message: str) -> NoReturn:
        """Print it and exit with 2."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def _minutes(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of minutes above 0")
    return found


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def parser(description: str | None) -> Parser:
    """Return the parser of the command line."""
    made = Parser(
        prog="check.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_ = made.add_argument
    add_("--only", nargs="+", default=[], metavar="STEP", help="Steps, * for any part of a name.")
    add_("--list", action="store_true", help="Print the steps, and run none.")
    add_("--minutes", type=_minutes, help="Begin no step that is not done by then.")
    add_("--sizes", nargs="*", default=list(SIZES), choices=SIZES, help="Grown targets.")
    add_("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    add_("--gammas", nargs="+", type=_count, default=list(GAMMAS), help="Verify passes to build.")
    add_("--prompts", type=_count, default=Place.prompts, help="Completed in each measurement.")
    add_("--tokens", type=_count, default=Place.tokens, help="Of each completion.")
    add_("--laps", type=_count, default=Place.laps, help="Turns of each interleaved contender.")
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
    return made


def place_of(options: argparse.Namespace) -> Place:
    """Return where a run works, and on what."""
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


def passed_on(options: argparse.Namespace) -> list[str]:
    """Return the arguments that a step's own process gets."""
    said = ["--work", str(options.work), "--experiment", options.experiment]
    said += ["--sizes", *options.sizes, "--precisions", *options.precisions]
    for name in ("prompts", "tokens", "laps"):
        said += [f"--{name}", str(getattr(options, name))]
    said += ["--gammas", *map(str, options.gammas), "--capabilities", *options.capabilities]
    said += ["--scratch", str(options.scratch)] if options.scratch else []
    return [*said, "--rehearse"] if options.rehearse else said
