"""Measures what a round of each gamma costs on this machine, by the loop that decoding runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, count, islice, pairwise
from math import inf
from time import perf_counter_ns
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from specrt.completion import Completion, SpeculationStats, Timings
from specrt.engine.protocol import (
    ConditionedEngine,
    Engine,
    Feed,
    OffsetRounds,
    Output,
    RowSnapshot,
    Source,
    first_row,
    packs,
    rows_of,
)
from specrt.errors import EngineError
from specrt.geometry import TAKEN_BACK
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.scheduler.request import OutputProcessor
from specrt.speculation.costs import Costs, shared_widths
from specrt.speculation.drafters import DRAFT_KINDS
from specrt.speculation.gamma import FixedGamma
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.pool import Models
from specrt.speculation.round import Drafter, Passes, Proposal, Round, run_rounds, speculate
from specrt.speculation.target import EngineTarget
from specrt.text.tokenizer import Tokenizer

T = TypeVar("T")

CONTEXT = 200
"""Positions that are filled when a round is timed, where the buffers have as many."""

_ROOM = 64
"""Positions kept free for the rounds themselves."""

_GREEDY = SamplingParams(ignore_eos=True)


class Timed(NamedTuple):
    """What one round took.

    Units: nanoseconds.
    """

    drafted: int
    draft_ns: int
    verify_ns: int
    outside_ns: int
    """Between this round and the one before, in neither stage."""

    def divided(self, verify_ns: int) -> Timed:
        """Return a fused round split in two, given what verifying alone takes."""
        draft_ns = max(self.drafted, self.verify_ns - verify_ns)  # a token costs something
        return self._replace(draft_ns=draft_ns, verify_ns=self.verify_ns - draft_ns)


class PassTimer:
    """Runs short bursts of rounds from the same position of the KV buffers, over and over.

    The buffers need no prompt, and an encoder-decoder any source: a pass costs what the number of
    positions it reads costs, whatever they hold. With a tokenizer the tokens become text, as they
    do for a user.
    """

    def __init__(
        self, models: Models, tokenizer: Tokenizer | None, clock: Callable[[], int]
    ) -> None:
        self._models = models
        self._tokenizer = tokenizer
        self._clock = clock
        self._vocabulary = min(e.geometry.vocab_size for e in self._engines())
        widest = max(models.gammas) + 1
        room = models.target.max_length - max(_ROOM, 4 * widest)
        self._context = max(0, min(CONTEXT, room))
        self._kept: dict[int, RowSnapshot] = {}
        """Of engines with recurrent states, by id: the context, read."""

    def fill(self, deadline_ns: int) -> None:
        """Write keys up to the context, in ever wider passes, until the deadline.

        A position never written costs the same to read, or hardly less.
        """
        for engine in self._engines():
            if isinstance(engine, ConditionedEngine):
                engine.condition(0, self._source(engine))
            self._read(engine, deadline_ns)

    def _read(self, engine: Engine, deadline_ns: float) -> None:
        start = 0
        while start < self._context and self._clock() < deadline_ns:
            width = min(max(1, start), self._context - start, engine.max_width)
            tokens = [(start + i) * 37 % self._vocabulary for i in range(width)]
            OffsetEngine(engine, 0).forward((tokens,), start, 1)
            start += width

    def _go_back(self, engine: Engine) -> None:
        """Let passes begin at the context again, which states must have read to the end."""
        if not engine.geometry.recurs:
            if engine.traits.rewind(0) > self._context:  # a text that begins anew may go anywhere
                OffsetEngine(engine, 0).forward(((0,),), 0, 1)
            return
        snapshots, kept = engine.traits.snapshots, self._kept.get(id(engine))
        if snapshots is not None and kept is not None:
            snapshots.restore(0, kept)
            return
        self._read(engine, inf)
        if snapshots is not None:
            self._kept[id(engine)] = snapshots.take(0)

    def _source(self, engine: ConditionedEngine) -> Source:
        """Return a source as long as the context is, where it can be."""
        if self._models.features is not None:
            return np.zeros(self._models.features, np.float32)
        length = max(1, min(engine.max_source, CONTEXT))
        return np.arange(length, dtype=np.int64) * 37 % self._vocabulary

    def burst(self, gamma: int, rounds: int) -> list[Timed]:
        """Run and time `rounds` rounds at one gamma, after a plain step that is not counted.

        The draft's part of a fused round is its time beyond that of verifying alone.
        """
        if gamma >= TAKEN_BACK and self._models.target.geometry.recurs:
            rounds = 1  # what another row's tokens stand for: states of one do not take it back
        timed = self._run(self._drafter(gamma), rounds)
        if self._models.rounds is None or not any(t.drafted for t in timed):
            return timed
        alone = [t.verify_ns for t in self._run(RepeatDrafter(gamma), rounds) if t.drafted == gamma]
        if not alone:
            return timed
        verify_ns = min(alone)
        return [t if t.draft_ns or not t.drafted else t.divided(verify_ns) for t in timed]

    def _run(self, drafter: Drafter, rounds: int) -> list[Timed]:
        models, log = self._models, list[Round]()
        for engine in self._engines():
            self._go_back(engine)
        target = EngineTarget(
            KVCache(OffsetEngine(models.target, self._context)), _GREEDY, Noise(0)
        )
        limit = models.target.max_length - self._context + 1
        rounds_ = run_rounds(speculate(target, drafter, [self._vocabulary // 2], limit))

        deliver = self._delivery()
        ticks = []
        for round_ in islice(rounds_, rounds + 1):
            log.append(round_)
            deliver(round_)
            ticks.append(self._clock())
        return [
            Timed(r.drafted, r.draft_ns, r.verify_ns, after - before - r.draft_ns - r.verify_ns)
            for r, (before, after) in zip(log[1:], pairwise(ticks), strict=False)
        ]

    def _delivery(self) -> Callable[[Round], object]:
        """Return a function that turns rounds into text, where there is a tokenizer."""
        if self._tokenizer is None:
            return lambda round_: None
        completion = Completion(1, 0, SpeculationStats(0), Timings(0))
        reader = OutputProcessor(completion, _GREEDY, frozenset(), self._tokenizer)
        return lambda round_: reader.take(round_, self._clock())

    def _drafter(self, gamma: int) -> Drafter:
        draft = self._models.draft
        if draft is None or gamma > max(self._models.gammas):
            return RepeatDrafter(gamma)
        later, rounds = OffsetEngine(draft, self._context), self._models.rounds
        return DRAFT_KINDS[self._models.draft_kind](
            KVCache(later), _GREEDY, Noise(0), FixedGamma(gamma), self._vocabulary,
            rounds and OffsetRounds(rounds, self._context), max_gamma=gamma,
        )  # fmt: skip

    def _engines(self) -> list[Engine]:
        return [e for e in (self._models.target, self._models.draft) if e is not None]


class OffsetEngine:
    """The first row of an engine, seen from a later position on."""

    def __init__(self, engine: Engine, offset: int) -> None:
        self._engine = engine
        self._forward = first_row(engine).forward
        self._offset = offset
        self.geometry = engine.geometry
        self.batch = 1
        self.max_length = engine.max_length - offset
        self.max_width = engine.max_width
        self.max_rows, self.traits = engine.max_rows, engine.traits

    def forward(self, tokens: ArrayLike, start: Any, rows: int | None = None) -> Output:
        """Run a pass at the same position plus the offset."""
        return self._forward(tokens, start + self._offset, rows)

    def forward_rows(self, feeds: Sequence[Feed]) -> Sequence[Output]:
        """Run a pass of an engine that packs rows at the same positions plus the offset."""
        later = [feed._replace(start=feed.start + self._offset) for feed in feeds]
        return rows_of(self._engine).forward_rows(later)

    def close(self) -> None:
        """Leave the engine open: its owner closes it."""


class RepeatDrafter:
    """Drafts the last token repeated: makes passes of every width without a draft model."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        """Repeat the last token."""
        yield from ()
        return Proposal([tokens[-1]] * min(self._gamma, room))

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Learn nothing."""


BUDGET_S = 0.5
"""Time to measure the costs of a bundle."""

_PATIENCE = 4
"""Times the budget that measuring may take where the costs are disturbed."""

_TOLERANCE = 2.0
"""By how much a cost may exceed what other widths allow."""

_FEWEST_LAPS = 3

_MOST_LAPS = 40


class TimingPlan(NamedTuple):
    """The gammas to measure, and the rounds in a row of each per lap."""

    gammas: tuple[int, ...]
    rounds: int

    def price_ns(self, plain_ns: float) -> float:
        """Estimate the time of a lap: a plain step before each burst, and two for each round."""
        return len(self.gammas) * (1 + 2 * self.rounds) * plain_ns


def measure_costs(
    models: Models,
    tokenizer: Tokenizer | None = None,
    *,
    budget_s: float = BUDGET_S,
    clock: Callable[[], int] = perf_counter_ns,
    progress: Callable[[float], None] = lambda share: None,
) -> Costs:
    """Run real rounds of every gamma in turn, and return the least that each took.

    Every lap measures all gammas, each lap beginning with another, so that a machine that slows
    down slows all of them. Where a lap over all gammas would take too long for `budget_s`, only
    some are measured and the others are interpolated; there are at least three laps, and up to
    four times as many while something else keeps the machine busy. A pass of several rows is
    taken to cost what one row's pass of as many tokens costs. The KV buffers are overwritten.
    Without a tokenizer the time to turn tokens into text is left out.
    Raises: EngineError from a pass, where the draft model does not draft, and for costs that
        engines cannot have.
    """
    began = clock()
    budget_ns = round(budget_s * 1e9)
    timer = PassTimer(models, tokenizer, clock)
    timer.fill(began + budget_ns // 4)
    plain_ns = min(r.verify_ns for r in timer.burst(0, 3))
    plan = _plan(models.gammas, plain_ns, budget_ns)
    target = models.target
    rows = target.batch if packs(target) else 1
    wide = shared_widths(max(models.gammas), rows, target.max_width)
    order = (*plan.gammas, *(width - 1 for width in wide))
    for gamma in order:
        timer.burst(gamma, 1)  # the first pass of a width binds its buffers
    timed: list[Timed] = []
    for lap in count():
        for gamma in turned(order, lap):
            timed += timer.burst(gamma, plan.rounds)
        laps = lap + 1
        spent = max((clock() - began) / budget_ns, laps / _MOST_LAPS)
        spent = min(spent, laps / _FEWEST_LAPS)
        progress(min(1.0, spent))
        disturbance = _disturbance(timed)
        if spent >= (_PATIENCE if disturbance else 1):
            break
    if disturbance:
        raise EngineError(
            f"other work on this machine disturbed the measurement ({disturbance}); measure with "
            "`specrt tune` when less else runs"
        )
    return _costs(timed, models.gammas)


def _disturbance(timed: Sequence[Timed]) -> str | None:
    """Return what shows that other work held passes up, None where nothing does.

    A wide pass costs no less than a narrow one, and no more than one pass for each of its tokens.
    """
    least = _least(timed, "verify_ns")
    for (narrow, ns), (wide, wider_ns) in combinations(least.items(), 2):
        if wider_ns * _TOLERANCE < ns or wider_ns * (narrow + 1) > _TOLERANCE * ns * (wide + 1):
            return (
                f"passes of {narrow + 1} and {wide + 1} tokens took {ns / 1e6:.2f} and "
                f"{wider_ns / 1e6:.2f} ms"
            )
    return None


def _least(timed: Sequence[Timed], stage: str) -> dict[int, int]:
    """Return the least time of a stage for each number of drafted tokens, in rising order."""
    least: dict[int, int] = {}
    for each in timed:
        ns = getattr(each, stage)
        least[each.drafted] = min(ns, least.get(each.drafted, ns))
    return dict(sorted(least.items()))


def turned(order: Sequence[T], lap: int) -> list[T]:
    """Return the same items, beginning with another one each lap."""
    first = lap % len(order)
    return [*order[first:], *order[:first]]


def _plan(gammas: Sequence[int], plain_ns: float, budget_ns: int) -> TimingPlan:
    """Return the most thorough plan that leaves time for enough laps after the warm-up."""
    every = tuple(sorted(gammas))
    ladder = thinned(every)
    plans = (
        TimingPlan(every, 3),
        TimingPlan(ladder, 2),
        TimingPlan(ladder, 1),
        TimingPlan((*every[:2], *every[2:][-1:]), 1),
    )
    laps = 1 + _FEWEST_LAPS
    return next((p for p in plans if p.price_ns(plain_ns) * laps <= budget_ns), plans[-1])


def thinned(gammas: Sequence[int]) -> tuple[int, ...]:
    """Return 0, the powers of two and the largest of some gammas: close where costs bend."""
    return tuple(g for g in sorted(gammas) if g & (g - 1) == 0 or g == max(gammas))


def _costs(timed: Sequence[Timed], gammas: Sequence[int]) -> Costs:
    most = max(gammas)
    verify = {g: max(1, ns) for g, ns in _least(timed, "verify_ns").items()}
    draft = {g: ns for g, ns in _least(timed, "draft_ns").items() if g <= most}
    if len(draft) < 2 <= len(gammas):
        raise EngineError(
            "the draft model proposed nothing while its cost was measured; name a gamma instead "
            "of auto, or another drafter"
        )
    draft[0] = 0  # the time to draft nothing is not a cost of drafting
    return Costs(
        Costs.between(list(zip(verify, rising([*verify.values()]), strict=True)), max(verify)),
        Costs.between(list(zip(draft, rising([*draft.values()]), strict=True)), most),
        float(max(0, min(each.outside_ns for each in timed))),
    )


def rising(costs: Sequence[float]) -> list[float]:
    """Return the nearest costs that never fall: a wider pass that looks cheaper is noise.

    A policy judges the next token by the difference of two costs, whose sign noise could change.
    Source: pool adjacent violators, Ayer et al. 1955.
    """
    pools: list[tuple[float, int]] = []
    for cost in costs:
        pools.append((cost, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, few), (high, many) = pools.pop(), pools.pop()
            pools.append(((low * few + high * many) / (few + many), few + many))
    return [mean for mean, count in pools for _ in range(count)]
