"""Outputs against plain decoding: every difference is found, and told with its margin."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime.samples import DRAFTING, drafting, plain
from specrt.bench.configuration import PLAIN, Configuration
from specrt.bench.outputs import Comparison, Difference, compare_outputs

AUTO = Configuration("auto", "model")


def margins(prompt: int, before: Sequence[int]) -> float:
    return prompt + len(before) / 1000


def test_equal_outputs_are_identical() -> None:
    samples = {
        PLAIN: [plain((p, r)) for p in range(2) for r in range(2)],
        DRAFTING: [drafting((p, r)) for p in range(2) for r in range(2)],
    }
    found = compare_outputs(samples, margins, "fp32")
    assert (found.compared, found.differences, found.unexplained) == (4, (), [])
    assert str(found) == "outputs identical: 4 compared with plain decoding"


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
    found = compare_outputs(samples, margins, "int8")
    assert found.compared == 6
    assert found.differences == (
        Difference(DRAFTING, 0, 2, 3, 9, 0.002),
        Difference(DRAFTING, 1, 2, 3, 9, 1.002),
        Difference(AUTO, 1, 2, 3, 9, 1.002),
    )
    assert found.unexplained == []
    assert str(found) == (
        "3 of 6 outputs differ from plain decoding, where the plain pass's best two tokens are "
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


@pytest.mark.parametrize(
    ("precision", "margin", "unexplained"),
    [("fp32", 5e-4, 0), ("fp32", 5e-3, 1), ("fp32", None, 1), ("int8", 5e-3, 0), ("int4", None, 0)],
)
def test_only_rounding_explains_a_difference(
    precision: str, margin: float | None, unexplained: int
) -> None:
    difference = Difference(DRAFTING, 0, 3, 1, 2, margin)
    assert len(Comparison(4, (difference,), precision).unexplained) == unexplained


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
    assert "keeps the distribution, not the text" in str(Comparison(0))
    drawn = Comparison(4, (Difference(DRAFTING, 0, 3, 1, 2, None),), "int8")
    assert str(drawn) == (
        "1 of 4 outputs differ from plain decoding; sampled, so no margin tells by how little "
        "(int8)"
    )
