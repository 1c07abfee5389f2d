"""Measure what a round of each gamma costs on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple

from specrt.costs import Costs
from specrt.errors import EngineError
from specrt.models import Models
from specrt.rehearsal import Rehearsal, Timed
from specrt.text import Tokenizer

BUDGET_S = 0.5
"""What measuring may take before the first token of a bundle that was not tuned."""
_FEWEST_LAPS = 3
_MOST_LAPS = 40


class Plan(NamedTuple):
    """Which gammas are measured, and how many rounds in a row of each per lap."""

    gammas: tuple[int, ...]
    rounds: int

    def price_ns(self, plain_ns: float) -> float:
        """Guess what a lap costs: a plain step before each burst, and twice that for a round."""
        return len(self.gammas) * (1 + 2 * self.rounds) * plain_ns


def measure_costs(
    models: Models,
    tokenizer: Tokenizer | None = None,
    *,
    budget_s: float = BUDGET_S,
    clock: Callable[[], int] = perf_counter_ns,
    progress: Callable[[float], None] = lambda done: None,
) -> Costs:
    """Run real rounds of every gamma in turn, and return the medians of what they took.

    All gammas have a turn in each lap, each lap beginning with another, so that a machine that
    slows down slows all of them. Where a lap over all gammas would take too long for `budget_s`
    only some are measured, and those between them lie on the lines through them; the first lap is
    finished whatever it takes. What the KV buffers held is overwritten. Without a tokenizer the
    time to turn tokens into text is left out.
    Raises: EngineError from a pass, and where the draft model does not draft.
    """
    began = clock()
    budget_ns = round(budget_s * 1e9)
    rehearsal = Rehearsal(models, tokenizer, clock)
    rehearsal.fill(began + budget_ns // 4)
    plain_ns = min(r.verify_ns for r in rehearsal.burst(0, 3))
    plan = _plan(models.gammas, plain_ns, budget_ns)
    for gamma in plan.gammas:
        rehearsal.burst(gamma, 1)  # the first pass of a width makes its bindings
    timed: list[Timed] = []
    for lap in range(_MOST_LAPS):
        for gamma in turned(plan.gammas, lap):
            timed += rehearsal.burst(gamma, plan.rounds)
        spent = max((clock() - began) / budget_ns, (lap + 1) / _MOST_LAPS)
        progress(min(1.0, spent))
        if spent >= 1:
            break
    return _medians(timed, models.gammas)


def turned(order: Sequence[int], lap: int) -> list[int]:
    """Return the same numbers, beginning with another one each lap."""
    first = lap % len(order)
    return [*order[first:], *order[:first]]


def _plan(gammas: Sequence[int], plain_ns: float, budget_ns: int) -> Plan:
    """Return the most thorough plan that leaves time for some laps after the warm-up."""
    every = tuple(sorted(gammas))
    ladder = thinned(every)
    plans = (
        Plan(every, 3),
        Plan(ladder, 2),
        Plan(ladder, 1),
        Plan((*every[:2], *every[2:][-1:]), 1),
    )
    laps = 1 + _FEWEST_LAPS
    return next((p for p in plans if p.price_ns(plain_ns) * laps <= budget_ns), plans[-1])


def thinned(gammas: Sequence[int]) -> tuple[int, ...]:
    """Return 0, the powers of two and the largest of some gammas: close where costs bend."""
    return tuple(g for g in sorted(gammas) if g & (g - 1) == 0 or g == max(gammas))


def _medians(timed: Sequence[Timed], gammas: Sequence[int]) -> Costs:
    drafted = sorted({t.drafted for t in timed})
    if len(drafted) < 2 <= len(gammas):
        raise EngineError(
            "the draft model proposed nothing while its cost was measured; name a gamma instead "
            "of auto, or another drafter"
        )
    verify = [(g, max(1.0, median(t.verify_ns for t in timed if t.drafted == g))) for g in drafted]
    draft = [(g, float(median(t.draft_ns for t in timed if t.drafted == g))) for g in drafted]
    most = max(gammas)
    return Costs(
        Costs.between(verify, most),
        Costs.between([(0, 0.0), *draft[1:]], most),
        max(0.0, median(t.outside_ns for t in timed)),
    )
