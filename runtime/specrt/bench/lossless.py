"""Compares speculative output with plain output, and explains each divergence by its margin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specrt.bench.samples import PLAIN, Configuration, Sample
from specrt.engine.protocol import first_row
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import Gamma, SamplingParams
from specrt.speculation.drafters import available_drafters
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import run_alone

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


FP32_TOLERANCE = 1e-3
"""Logits. Passes of different widths sum in different orders; in fp32 on a CPU that moves a logit
by 1e-5, so a margin a hundred times larger cannot be rounding."""


@dataclass(frozen=True)
class Divergence:
    """Where a speculative output left the plain one."""

    prompt: int
    gamma: Gamma
    position: int
    """Index of the first emitted token that differs."""
    plain_token: int
    speculative_token: int
    margin: float
    """Logit of the plain pass's best token minus that of its second best."""
    explained: bool
    """Whether the margin is within the tolerance: a near-tie that rounding may turn."""


@dataclass
class LosslessReport:
    """What a comparison found."""

    prompts: int = 0
    tokens: int = 0
    drafted: int = 0
    """Tokens that were drafted; where none were, plain decoding was held to itself."""
    tolerance: float = FP32_TOLERANCE
    divergences: tuple[Divergence, ...] = ()

    @property
    def unexplained(self) -> int:
        """Count the divergences that rounding does not explain."""
        return sum(not d.explained for d in self.divergences)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON types."""
        return {**asdict(self), "unexplained": self.unexplained}


def compare(
    generator: Generator,
    prompts: Sequence[str | Sequence[int]],
    gammas: Sequence[Gamma],
    max_tokens: int,
    tolerance: float = FP32_TOLERANCE,
    drafter: str | None = None,
) -> Iterator[LosslessReport]:
    """Complete every prompt greedily, plain and at each gamma; yield the report as it grows.

    `drafter` is the draft model where there is one, else lookup, when None: the bundle's default
    may be to draft nothing.
    Raises: RequestError for a tolerance that is no number of logits.
    """
    if not 0.0 <= tolerance < float("inf"):
        raise RequestError(f"tolerance is {tolerance!r}; expected a number of logits, 0 or more")
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    drafter = drafter or default_drafter(generator)
    report = LosslessReport(tolerance=tolerance)
    for number, prompt in enumerate(prompts):
        ids = generator.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        generator.forget()
        plain = generator.generate(ids, params, gamma=0).token_ids
        for gamma in gammas:
            generator.forget()
            done = generator.generate(ids, params, gamma=gamma, drafter=drafter)
            found = done.token_ids
            report.tokens += len(found)
            report.drafted += done.speculation.drafted
            at = first_difference(plain, found)
            if at is not None:
                margin = plain_margin(generator, ids + plain[:at])
                divergence = Divergence(
                    number, gamma, at, plain[at], found[at], margin, margin <= tolerance
                )
                report.divergences += (divergence,)
        report.prompts += 1
        yield report


def default_drafter(generator: Generator) -> str:
    """Return the drafter that a comparison uses where none is asked for."""
    return available_drafters(has_model=generator.models.draft is not None)[0]


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which two outputs differ, None where they are equal."""
    pairs = zip(plain, other, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    return at if at < max(len(plain), len(other)) else None


def plain_margin(generator: Generator, tokens: Sequence[int]) -> float:
    """Return how far the best next token is ahead of the second best, in logits.

    The last token goes through alone, as in plain decoding.
    """
    generator.forget()
    cache = KVCache(first_row(generator.models.target))
    if len(tokens) > 1:
        run_alone(cache.feed(tokens[:-1], 1))
    logits = run_alone(cache.feed(tokens[-1:], 1)).logits[0, 0]
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)
