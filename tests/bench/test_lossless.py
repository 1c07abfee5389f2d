"""Outputs against plain decoding: every difference is listed once, with its margin."""

from __future__ import annotations

from collections.abc import Sequence

from bench.samples import DRAFTING, drafting, plain
from specrt.bench.lossless import Comparison, Difference, compare_outputs, first_difference
from specrt.bench.measure import PLAIN, Configuration

AUTO = Configuration("auto", "model")
IDLE = Configuration(4, "ngram")
OTHER = [1, 2, 9, 4, 5]


def margins(prompt: int, before: Sequence[int]) -> float:
    return prompt + len(before) / 1000


def test_the_first_difference_is_where_prefixes_end() -> None:
    for other, at in (([1, 2, 3], None), ([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0)):
        assert first_difference([1, 2, 3], other) == at


def test_each_pair_of_prompt_and_configuration_counts_once() -> None:
    pairs = [(p, r) for p in range(2) for r in range(2)]
    same = [1, 2, 3, 4, 5]
    samples = {
        PLAIN: [plain(pair) for pair in pairs],
        DRAFTING: [drafting(pair, tokens=OTHER) for pair in pairs],
        AUTO: [drafting(pair, tokens=OTHER if pair == (1, 1) else same) for pair in pairs],
        IDLE: [plain(pair) for pair in pairs],  # where nothing was drafted nothing is proved
    }
    comparison = compare_outputs(samples, margins, "int8", promised=False)
    assert comparison.differences == (
        Difference(DRAFTING, 0, 2, 3, 9, 0.002),
        Difference(DRAFTING, 1, 2, 3, 9, 1.002),
        Difference(AUTO, 1, 2, 3, 9, 1.002),
    )
    assert "3 of 4 outputs differ" in str(comparison)
    facts = comparison.to_json()
    assert (facts["compared"], facts["undrafted"], facts["differing"]) == (4, 2, 3)
    few = compare_outputs({PLAIN: samples[PLAIN], AUTO: [drafting((0, 0))], IDLE: samples[IDLE]},
                          margins, "fp32")  # fmt: skip
    assert "1 compared; 2 more drafted nothing" in str(few)
    itself = {PLAIN: [plain((0, 0)), plain((0, 1), tokens=[1, 2, 3, 4, 6])]}
    comparison = compare_outputs(itself, margins, "fp32")
    assert comparison.differences == (Difference(PLAIN, 0, 4, 5, 6, 0.004),)


def test_rounding_explains_small_margins_where_identity_is_promised() -> None:
    for margin, unexplained in ((5e-4, 0), (5e-3, 1), (None, 1)):
        difference = Difference(DRAFTING, 0, 3, 1, 2, margin)
        assert len(Comparison(4, (difference,)).unexplained) == unexplained
        assert Comparison(4, (difference,), promised=False).unexplained == []
