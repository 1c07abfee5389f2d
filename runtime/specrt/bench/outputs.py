"""Outputs held to plain decoding: what differs, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrt.bench.configuration import PLAIN, Configuration
from specrt.bench.sample import Sample
from specrt.lossless import FP32_TOLERANCE, first_difference

Margin = Callable[[int, Sequence[int]], float]
"""Of a prompt and the plain tokens before the difference: the plain pass's top-2 margin."""


@dataclass(frozen=True)
class Difference:
    """Where the output of a configuration left the plain one."""

    configuration: Configuration
    prompt: int
    position: int
    plain_token: int
    token: int
    margin: float | None
    """Logits between the plain pass's best and second best; None where tokens were drawn."""


@dataclass(frozen=True)
class Comparison:
    """All outputs of a run against the plain ones."""

    compared: int
    """Pairs of a prompt and a configuration that drafted, or that differs all the same."""
    differences: tuple[Difference, ...] = ()
    precision: str = "fp32"
    promised: bool = True
    """Whether passes of every width round alike but for the order of sums in fp32, so that only
    a margin within the tolerance of `specrt verify` can be rounding. Where it is not, outputs may
    part at a near-tie that is wider."""
    untold: str = "nothing was drafted"
    """Why nothing was compared, where that is so."""

    @property
    def unexplained(self) -> list[Difference]:
        """What no rounding explains: a bug, and no figure is worth showing."""
        if not self.promised:
            return []
        found = self.differences
        return [d for d in found if d.margin is None or d.margin > FP32_TOLERANCE]

    def __str__(self) -> str:
        """Return a sentence."""
        if not self.compared:
            return f"outputs not compared: {self.untold}"
        if not self.differences:
            return f"outputs identical: {self.compared} compared with plain decoding"
        told = f"{len(self.differences)} of {self.compared} outputs differ from plain decoding"
        margins = sorted(d.margin for d in self.differences if d.margin is not None)
        if not margins:
            return f"{told}; sampled, so no margin tells by how little ({self.precision})"
        return (
            f"{told}, where the plain pass's best two tokens are {margins[0]:.1e} to "
            f"{margins[-1]:.1e} logits apart ({self.precision}; `specrt verify` lists them)"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain JSON types."""
        listed = [{**vars(d), "configuration": str(d.configuration)} for d in self.differences]
        return {"compared": self.compared, "differing": len(listed), "differences": listed}


def compare_outputs(
    samples: Mapping[Configuration, Iterable[Sample]],
    margin: Margin | None,
    precision: str,
    promised: bool = True,
) -> Comparison:
    """Hold every output to the first plain one of its prompt, plain repeats included.

    Where nothing was drafted an equal output proves nothing, and is not counted.
    """
    first: dict[int, tuple[int, ...]] = {}
    for sample in samples[PLAIN]:
        first.setdefault(sample.prompt, sample.tokens)
    seen: set[tuple[Configuration, int]] = set()
    found: dict[tuple[Configuration, int], Difference] = {}
    for configuration, its in samples.items():
        for sample in its:
            name = configuration, sample.prompt
            plain = first[sample.prompt]
            if sample.counts.drafted:
                seen.add(name)
            at = first_difference(plain, sample.tokens)
            if at is not None and name not in found:
                before = margin(sample.prompt, plain[:at]) if margin else None
                found[name] = Difference(*name, at, plain[at], sample.tokens[at], before)
    return Comparison(len(seen | found.keys()), tuple(found.values()), precision, promised)
