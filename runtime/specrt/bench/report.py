"""What a benchmark found: a row per class of tasks and configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrt.bench.configuration import PLAIN, Configuration
from specrt.bench.measure import Samples
from specrt.bench.outputs import Comparison
from specrt.bench.row import Row
from specrt.bench.sample import Sample, repeated_tokens

ALL = "all"
"""The class of every prompt, where there is more than one."""


@dataclass(frozen=True)
class Task:
    """One class of prompts: code, prose, text copied from the prompt."""

    category: str
    prompts: int
    rows: tuple[Row, ...]
    """Plain decoding first."""
    repetition: float
    """Share of plain output inside a 16-token run that came before: text that loops."""

    @property
    def plain(self) -> Row:
        """Plain decoding."""
        return self.rows[0]

    def to_json(self) -> dict[str, Any]:
        """Return the class as plain JSON types."""
        return {
            "category": self.category,
            "prompts": self.prompts,
            "repetition": round(self.repetition, 4),
            "results": [row.to_json() for row in self.rows],
        }


@dataclass(frozen=True)
class Report:
    """Each class apart, and all together where there are several."""

    tasks: tuple[Task, ...]
    outputs: Comparison

    @property
    def total(self) -> Task:
        """All prompts."""
        return self.tasks[-1]

    def to_json(self) -> dict[str, Any]:
        """Return everything measured as plain JSON types."""
        return {
            "outputs": self.outputs.to_json(),
            "tasks": [task.to_json() for task in self.tasks],
        }


def report(
    samples: Samples, categories: Sequence[str], outputs: Comparison, weight_bytes: int
) -> Report:
    """Sort samples by the category of their prompt.

    `categories` holds one entry a prompt; `weight_bytes` are the target's.
    """
    names = list(dict.fromkeys(categories))
    of = {n: {i for i, c in enumerate(categories) if c == n} for n in names}
    if len(names) > 1:
        of[ALL] = set(range(len(categories)))
    tasks = (_task(name, samples, members, weight_bytes) for name, members in of.items())
    return Report(tuple(tasks), outputs)


def _task(name: str, samples: Samples, members: set[int], weight_bytes: int) -> Task:
    its: Mapping[Configuration, list[Sample]] = {
        c: [s for s in found if s.prompt in members] for c, found in samples.items()
    }
    plain = {s.pair: s for s in its[PLAIN]}
    rows = tuple(Row(c, found, plain, weight_bytes) for c, found in its.items())
    once = [s.tokens for s in its[PLAIN] if s.repeat == 0]
    loops = sum(map(repeated_tokens, once)) / sum(map(len, once))
    return Task(name, len(members), rows, loops)
