"""The best setting is found on equal terms, and never by luck on one prompt."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.completion import SpeculationStats
from specrt.params import AUTO
from specrt.speculation.costs import Costs
from specrt.speculation.pool import Models
from specrt.tuning.sweep import PLAIN, Candidate, SweepResult, plan_effort
from support.toy import TableEngine, near

COSTS = Costs((1e6,) * 9, (0.0, *[1e5] * 8))
MODEL, FREE, FIXED = Candidate("model", AUTO), Candidate("cascade", AUTO), Candidate("model", 3)


def test_the_best_leaves_gamma_open_unless_a_fixed_one_is_clearly_faster_on_most_prompts() -> None:
    for plain, model, free, fixed, best in (
        ([90] * 4, [50] * 4, [40] * 4, [39] * 4, FREE),
        ([90] * 4, [60] * 4, [40] * 4, [30, 30, 30, 41], FIXED),
        ([90] * 4, [60] * 4, [40] * 4, [5, 5, 41, 41], FREE),
        ([30] * 4, [40] * 4, [35] * 4, [60] * 4, PLAIN),
    ):
        took = {PLAIN: plain, MODEL: model, FREE: free, FIXED: fixed}
        assert SweepResult({c: [[ns] for ns in took[c]] for c in took}).best() == best


def test_the_median_of_repeats_counts_and_settings_hold_what_was_counted() -> None:
    found = SweepResult({PLAIN: [[10, 900, 12]], FREE: [[11, 11, 800]]})
    assert (found.total_ns(PLAIN), found.total_ns(FREE), found.best()) == (12, 11, FREE)
    found.counts = {each: SpeculationStats(each.gamma, each.drafter) for each in found.decode_ns}
    found.counts[FREE].emitted = 5
    plain, free = found.settings()
    assert (plain.drafter, plain.gamma, plain.decode_ns) == ("none", 0, 12)
    assert (free.drafter, free.gamma, free.emitted) == ("cascade", AUTO, 5)


def models(draft: bool = True) -> Models:
    target = TableEngine(memory=1, vocab=300)
    return Models(target, near(target, 1, 0.8) if draft else None, tuple(range(9)))


@settings(max_examples=40)
@given(plain_ns=st.floats(1e4, 1e10), prompts=st.integers(4, 500), quick=st.booleans())
def test_slow_models_get_shorter_sweeps(plain_ns: float, prompts: int, quick: bool) -> None:
    costs = Costs((plain_ns,) * 9, COSTS.draft_ns)
    built = models()
    effort = plan_effort(built, costs, prompts, quick=quick)
    assert 4 <= effort.prompts <= prompts
    assert effort.prompts * effort.tokens >= 256
    assert {PLAIN, MODEL, FREE} < set(effort.candidates)
    slower = plan_effort(built, costs.scaled(verify=30), prompts, quick=quick)
    assert slower.price_s(1.0) <= effort.price_s(1.0)
