"""What follows from measured times: held to numbers worked out by hand, and to NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.samples import drafting, plain, rounds, row, sample
from specrt.bench.measure import (
    PLAIN,
    Busy,
    Configuration,
    Spread,
    Stages,
    configurations,
    in_turn,
    quantile,
    repeated_tokens,
    shared_gaps,
)
from specrt.params import Gamma

numbers = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40)


@given(numbers, st.floats(0, 1))
def test_quantiles_are_numpys(values: list[float], share: float) -> None:
    expected = float(np.quantile(values, share))
    assert quantile(values, share) == pytest.approx(expected, rel=1e-9, abs=1e-3)


@given(numbers)
def test_a_quarter_of_the_values_lies_on_either_side_of_the_quartiles(values: list[float]) -> None:
    spread = Spread.of(values)
    assert min(values) <= spread.low <= spread.median <= spread.high <= max(values)
    quarter = (len(values) - 1) // 4 + 1
    assert sum(v < spread.low for v in values) <= quarter
    assert sum(v > spread.high for v in values) <= quarter


def test_a_spread_of_known_numbers() -> None:
    assert Spread.of([7.0]) == (7.0, 7.0, 7.0)
    assert Spread.of([4.0, 1.0, 3.0, 2.0]) == (2.5, 1.75, 3.25)
    assert Spread.of([1 / 3]).to_json() == {"median": 0.3333, "low": 0.3333, "high": 0.3333}


@given(st.lists(st.integers(1, 20), unique=True, max_size=8), st.integers(0, 6))
def test_each_configuration_has_each_place_once(gammas: list[int], cycle: int) -> None:
    compared = configurations(gammas, ["model"])
    count = len(compared)
    turns = [in_turn(compared, cycle * count + i) for i in range(count)]
    for place in zip(*turns, strict=True):
        assert sorted(map(str, place)) == sorted(map(str, compared))
    if count > 2:  # and none always follows the same one
        backwards = [in_turn(compared, (cycle + 1) * count + i) for i in range(count)]
        before = {(t[i - 1], t[i]) for t in turns + backwards for i in range(1, count)}
        assert {(b, a) for a, b in before} == before


def test_configurations_are_gammas_times_drafters_and_plain() -> None:
    gammas: list[Gamma] = [4, 0, "auto", 4]
    assert configurations(gammas, ["model", "none", "ngram"]) == [
        PLAIN,
        Configuration(4, "model"),
        Configuration("auto", "model"),
        Configuration(4, "ngram"),
        Configuration("auto", "ngram"),
    ]
    assert configurations([2], ["none"]) == [PLAIN]
    assert configurations([], []) == [PLAIN]
    assert list(map(str, configurations(["auto", 3], ["ngram"]))) == [
        "plain decoding", "auto (ngram)", "gamma 3 (ngram)",
    ]  # fmt: skip


def test_tokens_that_come_together_share_their_gap() -> None:
    assert shared_gaps([(100, 1)]) == ()
    assert shared_gaps([(100, 1), (400, 3), (450, 1)]) == (100.0, 100.0, 100.0, 50.0)


def test_stages_add_up_to_the_round() -> None:
    assert plain().stages == Stages(draft=0, verify=900, accept=100, other=100)
    assert drafting().stages == Stages(draft=200, verify=1100, accept=100, other=100)
    assert sum(drafting().stages) == 3000 / 2
    assert plain().outside_us == 200
    assert drafting().outside_us == (3000 - 2200 - 300) / 2
    assert Busy(50, 3).since(Busy(20, 1)) == Busy(30, 2)


def test_the_first_round_of_a_draft_is_no_typical_one() -> None:
    """In it the draft model reads the prompt; the cost of a drafted token is another."""
    log = rounds(1, 2, 1, 90_000, 1200) + rounds(4, 2, 1, 200, 1200)
    done = sample(log, decode_us=99_999, inside_us=6000)
    assert done.drafted_token_ns == 100_000
    assert done.verify_ns == 1_200_000
    assert plain().drafted_token_ns is None


def test_rounds_that_draft_nothing_do_not_make_verifying_cheap() -> None:
    log = rounds(5, 0, 0, 10, 1000) + rounds(2, 2, 1, 200, 1500)
    assert sample(log, decode_us=9000, inside_us=8000).verify_ns == 1_500_000


def test_a_row_of_known_numbers() -> None:
    found = row([drafting()], [plain()])
    assert found.tokens_per_second.median == pytest.approx(4 / 3000e-6)
    assert found.speedup.median == pytest.approx(4400 / 3000)
    assert found.overall == pytest.approx(4400 / 3000)
    assert found.draft_steps == pytest.approx(0.1)
    assert found.verify_steps == pytest.approx(1.2)
    assert found.weights_per_second.median == pytest.approx(2 * 10**6 / 2200e-6)
    assert found.ttft_ms.median == 9
    assert found.itl_ms == (0.75, 0.75)
    assert {name: s.median for name, s in found.stages.items()} == {
        "draft": 200, "verify": 1100, "accept": 100, "other": 100,
    }  # fmt: skip
    assert found.outside_us.median == 250
    assert found.acceptance_by_position == [1.0, 0.0]
    assert found.standing == "faster"
    told = found.to_json()
    assert (told["rounds"], told["drafted"], told["evaluated"], told["accepted"]) == (2, 4, 4, 2)
    assert (told["gamma"], told["drafter"], told["tokens_per_round"]) == (2, "model", 2.0)
    assert told["speedup"] == {"median": 1.4667, "low": 1.4667, "high": 1.4667}
    assert told["sources"] == {"model": {"drafted": 4, "accepted": 2}}


def test_a_machine_that_slows_down_slows_both_of_a_pair() -> None:
    pairs = [(p, r) for p in range(3) for r in range(2)]
    slow = {pair: 1 + 2 * number for number, pair in enumerate(pairs)}
    found = row([drafting(p, slow[p]) for p in pairs], [plain(p, slow[p]) for p in pairs])
    assert found.speedup == pytest.approx((4400 / 3000,) * 3)
    assert found.tokens_per_second.high > 2 * found.tokens_per_second.low


def test_the_overall_speedup_is_of_all_time_spent() -> None:
    """One prompt where drafting gains nothing and takes ten times as long as the other."""
    beside = [plain((0, 0)), plain((1, 0), slow=10)]
    log = rounds(4, 0, 0, 0, 10_000)
    found = row([drafting((0, 0)), sample(log, decode_us=44_000, inside_us=1, pair=(1, 0))], beside)
    assert found.overall == pytest.approx((4400 + 44_000) / (3000 + 44_000))
    assert found.speedup.median == pytest.approx((4400 / 3000 + 1) / 2)


@pytest.mark.parametrize(
    ("factors", "standing"),
    [
        ((1, 2, 2), "faster"), ((8, 9, 5), "slower"), ((1, 4, 9), "even"), ((1, 5), "even"),
        ((4, 4, 5), "even"), ((8, 5, 1), "even"), ((1, 1, 1, 9), "faster"),
        ((9, 9, 1, 9), "slower"),
        ((1, 1, 1, 1, 5, 5), "even"), ((5, 5, 5, 5, 1, 1), "even"), ((1,), "faster"),
    ],
)  # fmt: skip
def test_a_row_gains_or_loses_where_three_of_four_pairs_do(
    factors: tuple[int, ...], standing: str
) -> None:
    beside = [plain((0, r), slow=3) for r in range(len(factors))]
    done = [drafting((0, r), slow=factor) for r, factor in enumerate(factors)]
    assert row(done, beside).standing == standing
    assert row(beside, beside, PLAIN).standing == "plain"


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 5))
def test_repeated_tokens_are_those_whose_run_came_before(tokens: list[int], run: int) -> None:
    expected = sum(
        any(tokens[j : j + run] == tokens[i : i + run] for j in range(i))
        for i in range(len(tokens) - run + 1)
    )
    assert repeated_tokens(tokens, run) == expected


def test_text_that_does_not_loop_repeats_nothing() -> None:
    assert repeated_tokens(list(range(100))) == 0
    assert repeated_tokens([1, 2] * 20) == 40 - 15 - 2
