"""Measure specrt and its peers on one pair: same prompts, weights, precision, threads and lengths.

Greedy, end tokens ignored. All take turns in every repeat; only ratios within one repeat count.
Run by the environment that specrt is installed in, on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specrt.errors import SpecrtError
from specrt.text.prompt_file import read_prompts
from specrt.text.tokenizer import Tokenizer

from peerbench.catalog import HERE, PEERS, MissingError, Models, label
from peerbench.conversion import PRECISIONS
from peerbench.measure import Row, measure
from peerbench.process import Runner, RunnerError
from peerbench.protocol import AUTO, NGRAM, PLAIN, Gamma, Hello, Order, parse_gamma
from peerbench.schedule import Contender
from peerbench.summary import figures, first_tokens
from peerbench.table import first_token_table, markdown, verdict

SPECRT = "specrt"
Command = list[str | Path]
ONCE = {NGRAM, "model", "cascade"}
"""Modes tried at one gamma, or with the peer's own policy where it has one."""


def machine() -> dict[str, object]:
    """Return processor, cores that may be used, memory and system."""
    return {
        "processor": _field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "family": _field(Path("/proc/cpuinfo"), "cpu family"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field(Path("/proc/meminfo"), "MemTotal"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _field(path: Path, name: str) -> str:
    if not path.exists():
        return ""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def arguments() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="@FILE reads arguments, one a line.",
        fromfile_prefix_chars="@",
    )  # fmt: skip
    parser.add_argument("--bundle", type=Path, required=True, help="specrt's bundle of the pair")
    parser.add_argument("--target", type=Path, required=True, help="the target's checkpoint")
    parser.add_argument(
        "--draft", type=Path, help="the draft's checkpoint; left out, nobody drafts with a model"
    )
    parser.add_argument("--precision", choices=PRECISIONS, required=True)
    parser.add_argument("--prompts", type=Path, default=HERE.parent / "prompts" / "code.jsonl")
    parser.add_argument(
        "--limit", type=at_least(1), default=9, help="how many prompts, from the first"
    )
    parser.add_argument("--max-tokens", type=at_least(2), default=128)
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--repeats", type=at_least(1), default=5)
    parser.add_argument("--gammas", default="2,3,4,5", help="for modes that draft with a model")
    parser.add_argument("--peers", default=",".join(PEERS), help="which, by comma")
    parser.add_argument("--contender", action="append", help="peer:mode:gamma instead of all modes")
    parser.add_argument("--base", default="specrt:speculative:auto", help="ratios are to this row")
    parser.add_argument(
        "--first-token", action="store_true", help="print times to the first token, by prompt"
    )
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "peers-work")
    parser.add_argument("--prepare", action="store_true", help="convert models, measure nothing")
    parser.add_argument("--name", help="write results/NAME.json")
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `least` on."""

    def read(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
        return int(text)

    return read


def main() -> None:
    """Prepare, measure, print."""
    parser = arguments()
    given = parser.parse_args()
    try:
        base = Contender.parse(given.base)
        contenders = [Contender.parse(text) for text in given.contender or []]
        gammas = [parse_gamma(text) for text in given.gammas.split(",")]
        order = Order(token_ids(given), given.max_tokens)
        starting = commands(given, contenders)
        if given.prepare:
            return
        with ExitStack() as stack:
            runners = {
                name: stack.enter_context(Runner(starts, given.work / f"{name}.log"))
                for name, starts in starting.items()
            }
            check_bundle(runners[SPECRT].hello, given.precision)
            chosen = list(dict.fromkeys(contenders or everyone(runners.values(), gammas)))
            if base not in chosen:
                raise ValueError(f"{base} is not measured; name another row with --base")
            rows = measure(runners, chosen, order, given.repeats, say)
            hellos = {name: runner.hello for name, runner in runners.items()}
        report(given, hellos, rows, base, list(map(len, order.prompts)))
    except (MissingError, RunnerError, SpecrtError, ValueError, OSError) as error:
        parser.exit(1, f"compare: {error}\n")


def check_bundle(hello: Hello, precision: str) -> None:
    """Refuse a bundle in another precision than the others have."""
    found = hello.settings["precision"]
    if found != precision:
        raise ValueError(f"the bundle is in {found}, and --precision says {precision}")


def token_ids(given: argparse.Namespace) -> list[list[int]]:
    """Make token ids once, with specrt's tokenizer, so that no peer's tokenizer matters."""
    tokenizer = Tokenizer(given.target / "tokenizer.json", None)
    texts = [prompt.text for prompt in read_prompts(given.prompts)[: given.limit]]
    return [tokenizer.encode(text) for text in texts]


def commands(given: argparse.Namespace, contenders: Sequence[Contender]) -> dict[str, Command]:
    """Return what starts each runner wanted, models converted where they are not yet."""
    models = Models(given.target, given.draft, given.precision, given.threads, given.work)
    wanted = {contender.peer for contender in contenders} or {SPECRT, *given.peers.split(",")}
    if unknown := wanted - {SPECRT, *PEERS}:
        raise ValueError(
            f"no peer is called {', '.join(sorted(unknown))}; known: {', '.join(PEERS)}"
        )
    for name in {contender.peer for contender in contenders} & set(PEERS):
        if given.precision not in PEERS[name].precisions:
            raise ValueError(f"{name} is not measured in {given.precision}; leave it out")
    flags = ["--bundle", given.bundle, "--threads", str(given.threads)]
    found: dict[str, Command] = {SPECRT: [sys.executable, HERE / "run_specrt.py", *flags]}
    for name, kind in PEERS.items():
        if name in wanted and given.precision in kind.precisions:
            say(f"preparing {name}")
            found[name] = kind.command(models)
    return found


def everyone(runners: Iterable[Runner], gammas: Sequence[Gamma]) -> list[Contender]:
    """List everything that all peers can do."""
    return [found for runner in runners for found in everything(runner.hello, gammas)]


def everything(hello: Hello, gammas: Sequence[Gamma]) -> list[Contender]:
    """List a peer's modes at every gamma, and with its own policy where it has one."""
    found = [Contender(hello.peer)]
    for mode in hello.modes:
        own: list[Gamma] = [AUTO] if mode in hello.adaptive else []
        tried = (own or gammas[-1:]) if mode in ONCE else [*own, *gammas]
        if mode != PLAIN:
            found += [Contender(hello.peer, mode, gamma) for gamma in tried]
    return found


def report(
    given: argparse.Namespace, hellos: Mapping[str, Hello], rows: Sequence[Row], base: Contender,
    prompts: Sequence[int],
) -> None:  # fmt: skip
    """Print a table and a verdict, and write the results where a name was given."""
    against = next(row for row in rows if row.contender == base)
    table = [figures(row, rows, against) for row in rows]
    said = verdict(rows, against)
    if given.first_token:
        for row, shown in zip(rows, table, strict=True):
            shown["first_tokens"] = first_tokens(row, against)
        print(first_token_table(table, prompts))
    else:
        print(f"{markdown(table)}\n\n{said}")
    if given.name:
        path = HERE / "results" / f"{given.name}.json"
        path.parent.mkdir(exist_ok=True)
        peers = {name: asdict(hello) for name, hello in hellos.items()}
        found = {"name": given.name, "command": typed(given), "settings": settings(given),
                 "machine": machine(), "peers": peers, "base": str(base), "verdict": said,
                 "prompt_tokens": list(prompts), "rows": table}  # fmt: skip
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """Return what everyone had in common; folders by name, because their place means nothing."""
    names = ("precision", "limit", "max_tokens", "threads", "repeats")
    pair = {"target": label(given.target), "draft": given.draft and label(given.draft)}
    return {**pair, "prompts": given.prompts.name, **{name: getattr(given, name) for name in names}}


def typed(given: argparse.Namespace) -> str:
    """Return the command as typed, each path cut down to its last part."""
    parts = [Path(part).name if "/" in part else part for part in sys.argv[1:]]
    return shlex.join(["python", "benchmarks/peers/compare.py", *parts])


def say(line: str) -> None:
    """Tell the one who waits; the table alone goes to standard output."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
