"""Hold gamma `auto` to plain decoding and to every fixed gamma, in turns, and print the worst cell.

    python benchmarks/never_slower.py engines/build/codelet engines/build/other --json out.json

Each cell is a bundle, a drafter, a number of texts at once and a machine, quiet or next to two busy
loops. A turn runs the same texts plain, at each gamma and with `auto`, beginning with another each
time; a ratio is that of a turn. The median of the turns counts, and a cell loses where the whole
interval that holds the median with 95 % lies below what is aimed at. Plain decoding runs twice in a
turn: what one is over the other is what the machine drifts by.
Bundles of 4 rows run several texts in company. `auto` keeps what it learned from turn to turn, as
a server does; the first turn warms up and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import sqrt
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from specrt.generator import Generator
from specrt.loading import load
from specrt.params import AUTO, Gamma, SamplingParams
from specrt.speculation.drafters import available_drafters
from specrt.text.prompt_file import read_prompts
from specrt.tuning.pass_timer import turned

LEAST = {"quiet": 0.97, "busy": 0.95}
"""What `auto` must reach of plain decoding, and of the best fixed gamma."""
AGAIN = -1
"""Plain decoding, a second time in a turn."""
LOOPS = 2
"""Busy loops next to it on a busy machine."""
PROMPTS = Path(__file__).parent / "prompts" / "code.jsonl"


class Ratio(NamedTuple):
    """A median of turns, and the interval of order statistics that holds it with 95 %."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, turns: Sequence[float]) -> Ratio:
        """Return that of so many turns."""
        ranked, count = sorted(turns), len(turns)
        cut = max(0, int(count / 2 - 0.98 * sqrt(count)))
        return cls(ranked[cut], median(ranked), ranked[-1 - cut])

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


class Cell(NamedTuple):
    """What `auto` came to, as medians of the turns."""

    bundle: str
    drafter: str
    texts: int
    machine: str
    over_plain: Ratio
    over_best: Ratio
    """Over the fixed gamma whose own median is best, plain decoding among them."""
    drift: Ratio
    """What plain decoding is over plain decoding."""
    best: int
    tokens_per_second: float
    rates: dict[str, float]
    """Of each gamma, medians in tokens per second."""

    @property
    def margin(self) -> float:
        """By how much it is better than it must be; below 0 it loses."""
        return min(self.over_plain.median, self.over_best.median) - LEAST[self.machine]

    @property
    def lost(self) -> bool:
        """Whether the turns show that it falls short."""
        return min(self.over_plain.high, self.over_best.high) < LEAST[self.machine]


def main() -> int:
    """Run every cell; exit 1 where one loses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 2, 4, 8], help="at once")
    parser.add_argument("--drafters", nargs="+", help="default: all that a bundle can run")
    parser.add_argument("--machines", nargs="+", choices=LEAST, default=[*LEAST])
    parser.add_argument("--gammas", type=int, nargs="+", help="default: all that were built")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=48, help="of each text")
    parser.add_argument("--json", type=Path, help="also write the cells here")
    arguments = parser.parse_args()

    prompts = [prompt.text for prompt in read_prompts(PROMPTS)]
    cells = []
    for bundle in arguments.bundles:
        with load(bundle, owns_process=True, text_memory_bytes=0, prompt_cache=False) as generator:
            drafters = arguments.drafters or available_drafters(
                has_model=generator.models.draft is not None
            )
            gammas = arguments.gammas or [g for g in generator.models.gammas if g]
            ids = [generator.tokenizer.encode(text) for text in prompts]
            for machine in arguments.machines:
                for drafter in drafters:
                    for texts in arguments.texts:
                        few = [ids[i % len(ids)] for i in range(texts)]
                        cell = measure(generator, few, drafter, gammas, machine, arguments)
                        cell = cell._replace(bundle=bundle.name)
                        cells.append(cell)
                        print(line(cell), flush=True)
    worst = min(cells, key=lambda cell: cell.margin)
    print(f"worst: {line(worst)}")
    if arguments.json:
        table = [{**cell._asdict(), "margin": cell.margin, "lost": cell.lost} for cell in cells]
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")
    return int(any(cell.lost for cell in cells))


def measure(
    generator: Generator, prompts: Sequence[Sequence[int]], drafter: str, gammas: Sequence[int],
    machine: str, arguments: Any,
) -> Cell:  # fmt: skip
    """Run the turns of one cell."""
    params = SamplingParams(max_tokens=arguments.tokens, temperature=0.0, ignore_eos=True)
    choices: list[Gamma] = [0, AGAIN, *gammas, AUTO]
    rates: dict[Gamma, list[float]] = {choice: [] for choice in choices}
    with busy(LOOPS if machine == "busy" else 0):
        for turn in range(arguments.turns + 1):
            for choice in turned(choices, turn):
                gamma = 0 if choice == AGAIN else choice
                rate = tokens_per_second(generator, prompts, params, drafter, gamma)
                if turn:
                    rates[choice].append(rate)
    best = max((0, *gammas), key=lambda choice: median(rates[choice]))

    def over(one: Gamma, other: Gamma) -> Ratio:
        return Ratio.of([a / b for a, b in zip(rates[one], rates[other], strict=True)])

    return Cell(
        "", drafter, len(prompts), machine, over(AUTO, 0), over(AUTO, best), over(AGAIN, 0), best,
        median(rates[AUTO]),
        {str(choice): median(each) for choice, each in rates.items() if choice != AGAIN},
    )  # fmt: skip


def tokens_per_second(
    generator: Generator, prompts: Sequence[Sequence[int]], params: SamplingParams, drafter: str,
    gamma: Gamma,
) -> float:  # fmt: skip
    """Run all texts at once, each until it has all of its tokens."""
    began = perf_counter()
    done = generator.generate_many(prompts, params, gamma=gamma, drafter=drafter)
    taken = perf_counter() - began
    return sum(len(one.token_ids) for completions in done for one in completions) / taken


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Keep cores busy with loops of other processes; they end with this one."""
    loop = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    command = [sys.executable, "-c", loop]
    others = [subprocess.Popen(command) for _ in range(loops)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def line(cell: Cell) -> str:
    """Return a cell in one line."""
    lost = "  LOST" if cell.lost else ""
    return (
        f"{cell.bundle:20} {cell.drafter:8} {cell.texts:2} texts  {cell.machine:6}"
        f"{cell.tokens_per_second:9.1f} tokens/s, over plain {cell.over_plain}, over gamma "
        f"{cell.best} {cell.over_best}, plain over plain {cell.drift}{lost}"
    )


if __name__ == "__main__":
    sys.exit(main())
