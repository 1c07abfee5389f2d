"""Hold speculative output to plain output, and explain every divergence by its margin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specrt.errors import RequestError
from specrt.generate import Generator
from specrt.models import Gamma
from specrt.padding import first_row
from specrt.params import SamplingParams
from specrt.passes import alone
from specrt.target import CachedTokens

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
class Report:
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
) -> Iterator[Report]:
    """Complete every prompt greedily, plain and at each gamma; yield the report as it grows.

    `drafter` is the draft model where there is one, else lookup, when None: the bundle's default
    may be to draft nothing.
    Raises: RequestError for a tolerance that is no number of logits.
    """
    if not 0.0 <= tolerance < float("inf"):
        raise RequestError(f"tolerance is {tolerance!r}; expected a number of logits, 0 or more")
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    drafter = drafter or default_drafter(generator)
    report = Report(tolerance=tolerance)
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
    return "model" if generator.models.draft else "ngram"


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
    cache = CachedTokens(first_row(generator.models.target))
    if len(tokens) > 1:
        alone(cache.feed(tokens[:-1], 1))
    logits = alone(cache.feed(tokens[-1:], 1)).logits[0, 0]
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)
