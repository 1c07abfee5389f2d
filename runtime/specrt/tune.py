"""Measure what a round of each gamma costs on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple, TypeVar

from specrt.speculation.costs import Costs, shared_widths
from specrt.engine import PackedEngine
from specrt.errors import EngineError
from specrt.models import Models
from specrt.rehearsal import Rehearsal, Timed
from specrt.text import Tokenizer
from specrt.tuning import FILE_NAME, Tuning, read_record

T = TypeVar("T")

BUDGET_S = 0.5
"""What measuring may take before the first token of a bundle that was not tuned."""
_PATIENCE_S = 600
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
    finished whatever it takes. What a pass of several rows costs is taken from one row's of as many
    tokens. What the KV buffers held is overwritten. Without a tokenizer the
    time to turn tokens into text is left out.
    Raises: EngineError from a pass, and where the draft model does not draft.
    """
    began = clock()
    budget_ns = round(budget_s * 1e9)
    rehearsal = Rehearsal(models, tokenizer, clock)
    rehearsal.fill(began + budget_ns // 4)
    plain_ns = min(r.verify_ns for r in rehearsal.burst(0, 3))
    plan = _plan(models.gammas, plain_ns, budget_ns)
    target = models.target
    rows = target.batch if isinstance(target, PackedEngine) else 1
    wide = shared_widths(max(models.gammas), rows, target.max_width)
    order = (*plan.gammas, *(width - 1 for width in wide))
    for gamma in order:
        rehearsal.burst(gamma, 1)  # the first pass of a width makes its bindings
    timed: list[Timed] = []
    for lap in range(_MOST_LAPS):
        for gamma in turned(order, lap):
            timed += rehearsal.burst(gamma, plan.rounds)
        spent = max((clock() - began) / budget_ns, (lap + 1) / _MOST_LAPS)
        progress(min(1.0, spent))
        if spent >= 1:
            break
    return _medians(timed, models.gammas)


def turned(order: Sequence[T], lap: int) -> list[T]:
    """Return the same items, beginning with another one each lap."""
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
    verified = sorted({t.drafted for t in timed})
    drafted = [g for g in verified if g <= max(gammas)]
    if len(drafted) < 2 <= len(gammas):
        raise EngineError(
            "the draft model proposed nothing while its cost was measured; name a gamma instead "
            "of auto, or another drafter"
        )
    most = max(gammas)
    verify = [max(1.0, median(t.verify_ns for t in timed if t.drafted == g)) for g in verified]
    draft = [float(median(t.draft_ns for t in timed if t.drafted == g)) for g in drafted]
    draft[0] = 0.0  # what a drafter takes to draft nothing is no cost of drafting
    return Costs(
        Costs.between(list(zip(verified, rising(verify), strict=True)), max(verified)),
        Costs.between(list(zip(drafted, rising(draft), strict=True)), most),
        max(0.0, median(t.outside_ns for t in timed)),
    )


def rising(costs: Sequence[float]) -> list[float]:
    """Return the nearest costs that never fall: a wider pass that looks cheaper is noise.

    A policy weighs the next token by the difference of two costs, which noise would turn round.
    Source: pool adjacent violators, Ayer et al. 1955.
    """
    pools: list[tuple[float, int]] = []
    for cost in costs:
        pools.append((cost, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, few), (high, many) = pools.pop(), pools.pop()
            pools.append(((low * few + high * many) / (few + many), few + many))
    return [mean for mean, count in pools for _ in range(count)]


def tune_quickly(bundle: Path) -> tuple[Tuning | None, str | None]:
    """Tune a bundle in a process of its own, and return the tuning, or why there is none.

    In its own process the engines have their threads as they will have them for a user, and
    nothing that goes wrong there is the caller's. Never raises; leaves no half-written file.
    """
    import subprocess  # only builds need it

    command = [sys.executable, "-m", "specrt", "tune", "--quick", "--json", "--", str(bundle)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE_S, check=False
        )
        if done.returncode == 0:
            return read_record(bundle / FILE_NAME), None
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        reason = "".join(said).removeprefix("specrt: ")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    return None, f"{bundle} is not tuned: {reason or 'tuning ended without a word'}"
