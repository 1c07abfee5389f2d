"""Outputs against plain decoding: every difference is found, and told with its margin."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime.samples import DRAFTING, drafting, plain, rounds, sample
from specrt.bench.lossless import Comparison, Difference, compare_outputs
from specrt.bench.measure import PLAIN, Configuration

AUTO = Configuration("auto", "model")


def margins(prompt: int, before: Sequence[int]) -> float:
    return prompt + len(before) / 1000


def test_equal_outputs_are_identical() -> None:
    samples = {
        PLAIN: [plain((p, r)) for p in range(2) for r in range(2)],
        DRAFTING: [drafting((p, r)) for p in range(2) for r in range(2)],
    }
    found = compare_outputs(samples, margins, "fp32")
    assert (found.compared, found.differences, found.unexplained) == (2, (), [])
    assert str(found) == "outputs identical: 2 compared with plain decoding"


def test_a_difference_is_told_once_with_its_first_token_and_margin() -> None:
    other = [1, 2, 9, 4, 5]
    samples = {
        PLAIN: [plain((p, r)) for p in range(2) for r in range(2)],
        DRAFTING: [drafting((p, r), tokens=other) for p in range(2) for r in range(2)],
        AUTO: [
            drafting((0, 0)),
            drafting((0, 1)),
            drafting((1, 0)),
            drafting((1, 1), tokens=other),
        ],
    }
    found = compare_outputs(samples, margins, "int8", promised=False)
    assert found.compared == 4
    assert found.differences == (
        Difference(DRAFTING, 0, 2, 3, 9, 0.002),
        Difference(DRAFTING, 1, 2, 3, 9, 1.002),
        Difference(AUTO, 1, 2, 3, 9, 1.002),
    )
    assert found.unexplained == []
    assert str(found) == (
        "3 of 4 outputs differ from plain decoding, where the plain pass's best two tokens are "
        "2.0e-03 to 1.0e+00 logits apart (int8; `specrt verify` lists them)"
    )
    listed = found.to_json()
    assert listed["differing"] == 3
    assert listed["differences"][2] == {
        "configuration": "auto (model)", "prompt": 1, "position": 2, "plain_token": 3, "token": 9,
        "margin": 1.002,
    }  # fmt: skip


def test_plain_decoding_that_disagrees_with_itself_is_a_difference() -> None:
    samples = {PLAIN: [plain((0, 0)), plain((0, 1), tokens=[1, 2, 3, 4, 6])]}
    found = compare_outputs(samples, margins, "fp32")
    assert found.differences == (Difference(PLAIN, 0, 4, 5, 6, 0.004),)
    assert str(found).startswith("1 of 1 outputs differ from plain decoding")


def test_plain_decoding_proves_nothing_about_itself() -> None:
    idle = sample(rounds(4, 0, 0, 0, 1000), decode_us=4400, inside_us=3600, configuration=AUTO)
    for samples in ({PLAIN: [plain()]}, {PLAIN: [plain(), plain((0, 1))], AUTO: [idle]}):
        found = compare_outputs(samples, margins, "fp32")
        assert found.compared == 0
        assert str(found) == "outputs not compared: nothing was drafted"


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4", "bf16"])
@pytest.mark.parametrize(("margin", "unexplained"), [(5e-4, 0), (5e-3, 1), (None, 1)])
def test_only_rounding_explains_a_difference_where_none_is_promised(
    precision: str, margin: float | None, unexplained: int
) -> None:
    difference = Difference(DRAFTING, 0, 3, 1, 2, margin)
    held = Comparison(4, (difference,), precision)
    assert len(held.unexplained) == unexplained
    assert Comparison(4, (difference,), precision, promised=False).unexplained == []


def test_of_several_repeats_the_first_difference_is_told() -> None:
    samples = {
        PLAIN: [plain((0, r)) for r in range(3)],
        DRAFTING: [
            drafting((0, 0)),
            drafting((0, 1), tokens=[1, 2, 3, 4, 9]),
            drafting((0, 2), tokens=[1, 9, 3, 4, 5]),
        ],
    }
    found = compare_outputs(samples, margins, "int8")
    assert found.differences == (Difference(DRAFTING, 0, 4, 5, 9, 0.004),)


def test_what_cannot_be_compared_is_said() -> None:
    law = "the rejection rule keeps the distribution, not the text"
    assert str(Comparison(0, untold=law)) == f"outputs not compared: {law}"
    drawn = Comparison(4, (Difference(DRAFTING, 0, 3, 1, 2, None),), "int8")
    assert str(drawn) == (
        "1 of 4 outputs differ from plain decoding; sampled, so no margin tells by how little "
        "(int8)"
    )
