"""What drafting gained on one prompt, measured against plain decoding in turns."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from specrt.bench.measure import PLAIN, Configuration, measure
from specrt.bundle import read_manifest
from specrt.cli.bench import compared_outputs
from specrt.cli.options import progress
from specrt.completion import Completion
from specrt.errors import EngineError, RequestError
from specrt.generator import Generator
from specrt.params import Gamma, SamplingParams
from specrt.speculation.target import VERIFIERS


def refuse_comparison(
    params: SamplingParams, gamma: Gamma | None, others: Mapping[str, Any]
) -> None:
    """Refuse what --compare says nothing about.

    Raises: RequestError.
    """
    with_it = next((name for name, given in others.items() if given), None)
    if with_it is not None:
        raise RequestError(
            f"--compare is about one completion here, and {with_it} was given; leave one of them "
            "out (`specrt bench` compares on files of prompts)"
        )
    if gamma == 0:
        raise RequestError(
            "--compare was given with gamma 0, which is plain decoding; leave one of them out"
        )
    if VERIFIERS[params.verifier].needs_distributions:
        raise RequestError(
            f"--compare needs one text, and --verifier {params.verifier} keeps the distribution, "
            "not the text; leave --verifier out"
        )


MOST_TURNS, TURNS_S = 5, 10.0
"""Turns of a comparison, and about how long all drafted ones of them may take."""


@dataclass(frozen=True)
class PlainComparison:
    """What drafting gained, as measured on one prompt."""

    turns: int
    """How often the text was made with drafts and, right before or after that, without."""
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    """Median over the turns."""
    least: float
    most: float
    outputs: str
    """Whether all texts are the same, in words."""

    def __str__(self) -> str:
        turns = f" ({self.least:.2f} to {self.most:.2f} in {self.turns} turns)"
        return (
            f"measured: {self.speedup:.2f} times plain decoding{turns if self.turns > 1 else ''}"
            f"{', slower' if self.speedup < 1 else ''}, {self.tokens_per_second:.0f} tokens/s with "
            f"drafts, {self.plain_tokens_per_second:.0f} without; {self.outputs}"
        )


def compare_with_plain(
    generator: Generator, bundle: Path, params: SamplingParams, completion: Completion
) -> PlainComparison | None:  # fmt: skip
    """Complete a prompt again, drafting and plainly in turns; None where there is nothing to time.

    Raises: BundleError where texts differ, and rounding does not explain it.
    """
    counts, arrivals = completion.speculation, completion.timings.arrivals
    if not counts.drafted or len(arrivals) < 2:
        print("note: nothing was drafted, so there is nothing to compare", file=sys.stderr)
        return None
    ids = [[*completion.prompt_token_ids]]
    turns = int(TURNS_S * 1e9 / (arrivals[-1][0] - completion.timings.began_ns))
    turns = min(MOST_TURNS, max(1, turns))
    own, params = Configuration(counts.gamma, counts.drafter), replace(params, seed=completion.seed)
    with progress("compare") as line:
        samples = measure(
            generator, ids, [PLAIN, own], params, repeats=turns,
            progress=lambda share: line(share, "with plain decoding"),
        )  # fmt: skip
    outputs = compared_outputs(generator, read_manifest(bundle), ids, samples, params)
    if outputs.unexplained:
        raise EngineError(f"{outputs}, so no speed is reported; run `specrt verify {bundle}`")
    rates = [[s.tokens_per_second for s in samples[each]] for each in (own, PLAIN)]
    ratios = [drafted / plain for drafted, plain in zip(*rates, strict=True)]
    same = "the same text, token for token" if not outputs.differences else str(outputs)
    return PlainComparison(
        len(ratios), median(rates[0]), median(rates[1]), median(ratios), min(ratios), max(ratios),
        same,
    )  # fmt: skip
