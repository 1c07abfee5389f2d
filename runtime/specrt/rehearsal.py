"""Rounds that nobody reads: the real loop over the real engines, to see what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from statistics import median
from typing import Any, NamedTuple

from numpy.typing import ArrayLike

from specrt.completion import Completion
from specrt.draft import Drafter, ModelDrafter
from specrt.engine import Engine, Output
from specrt.speculation.gamma import FixedGamma
from specrt.models import Models
from specrt.noise import Noise
from specrt.padding import first_row
from specrt.params import SamplingParams
from specrt.passes import Asking
from specrt.reader import Reader
from specrt.round import Round
from specrt.speculate import played, speculate
from specrt.stats import SpeculationStats, Timings
from specrt.target import CachedTokens, EngineTarget
from specrt.text import Tokenizer
from specrt.verify import Proposal
from specrt.whole import LaterRounds

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
        """Return a round of one launch with as much of it apart as verifying alone takes."""
        draft_ns = max(1, self.verify_ns - verify_ns)
        return self._replace(draft_ns=draft_ns, verify_ns=self.verify_ns - draft_ns)


class Rehearsal:
    """Runs short bursts of rounds from the same place in the KV buffers, over and over.

    The buffers need no prompt: what a pass costs depends on how many positions it reads, not on
    what they hold. With a tokenizer the tokens become text, as they do for a user.
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

    def fill(self, deadline_ns: int) -> None:
        """Write keys up to the context, in ever wider passes, for as long as there is time.

        A position that nothing was written to costs the same to read, or hardly less.
        """
        for engine in self._engines():
            start = 0
            while start < self._context and self._clock() < deadline_ns:
                width = min(max(1, start), self._context - start, engine.max_width)
                tokens = [(start + i) * 37 % self._vocabulary for i in range(width)]
                _Later(engine, 0).forward((tokens,), start, 1)
                start += width

    def burst(self, gamma: int, rounds: int) -> list[Timed]:
        """Run and time so many rounds at one gamma, after a plain step that is not counted.

        Of rounds in one launch the draft's part is what they take longer than verifying alone.
        """
        timed = self._played(self._drafter(gamma), rounds)
        if self._models.rounds is None or not any(t.drafted for t in timed):
            return timed
        alone = [t.verify_ns for t in self._played(_Blind(gamma), rounds) if t.drafted == gamma]
        if not alone:
            return timed
        verify_ns = round(median(alone))
        return [t if t.draft_ns or not t.drafted else t.divided(verify_ns) for t in timed]

    def _played(self, drafter: Drafter, rounds: int) -> list[Timed]:
        models, log = self._models, list[Round]()
        target = EngineTarget(CachedTokens(_Later(models.target, self._context)), _GREEDY, Noise(0))
        limit = models.target.max_length - self._context + 1
        rounds_ = played(speculate(target, drafter, [self._vocabulary // 2], limit))

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
        """Return what turns rounds into text, where there is a tokenizer to do it with."""
        if self._tokenizer is None:
            return lambda round_: None
        completion = Completion(1, 0, SpeculationStats(0), Timings(0))
        reader = Reader(completion, _GREEDY, frozenset(), self._tokenizer)
        return lambda round_: reader.take(round_, self._clock())

    def _drafter(self, gamma: int) -> Drafter:
        draft = self._models.draft
        if draft is None or gamma > max(self._models.gammas):
            return _Blind(gamma)
        later, rounds = _Later(draft, self._context), self._models.rounds
        return ModelDrafter(
            CachedTokens(later), _GREEDY, Noise(0), FixedGamma(gamma), self._vocabulary,
            rounds and LaterRounds(rounds, self._context),
        )  # fmt: skip

    def _engines(self) -> list[Engine]:
        return [e for e in (self._models.target, self._models.draft) if e is not None]


class _Later:
    """An engine of one row, whose first position is a later one of another's first row."""

    def __init__(self, engine: Engine, offset: int) -> None:
        self._forward = first_row(engine).forward
        self._offset = offset
        self.geometry = engine.geometry
        self.batch = 1
        self.max_length = engine.max_length - offset
        self.max_width = engine.max_width

    def forward(self, tokens: ArrayLike, start: Any, rows: int | None = None) -> Output:
        """Run a pass further on."""
        return self._forward(tokens, start + self._offset, rows)

    def close(self) -> None:
        """Leave the engine open: it is another's."""


class _Blind:
    """Drafts the same token over and over: passes of every width where no model drafts."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def propose(self, tokens: Sequence[int], room: int) -> Asking[Proposal]:
        """Repeat the last token."""
        yield from ()
        return Proposal([tokens[-1]] * min(self._gamma, room))

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Learn nothing."""
