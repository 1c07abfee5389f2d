"""The policy of gamma `auto`, compiled: it decides as `AutoGamma` does, in less time.

It is in the library of the CPU kernels; sources: `runtime/cpp/src/speculation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import (
    POINTER,
    PyDLL,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_size_t,
    c_void_p,
    create_string_buffer,
)
from functools import cache
from typing import Any, NamedTuple, Protocol, cast
from weakref import finalize

from specrt.engine.ort.kernels import KERNELS
from specrt.speculation.auto_gamma import FALLBACK_AFTER, AutoGamma
from specrt.speculation.costs import Costs
from specrt.speculation.gamma import DraftDecision, GammaPolicy
from specrt.speculation.round import Round
from specrt.speculation.shared_step import DraftingRow, SharedStep

ENTRIES = 2
"""Changes with the entries below: a library that was compiled with others is not used."""

_COSTS = POINTER(c_double), c_size_t, POINTER(c_double), c_size_t, c_double, c_int, c_int
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "make_step": (c_void_p, *_COSTS, c_int),
    "free_step": (None, c_void_p),
    "begin": (c_int, c_void_p, c_int, c_int, POINTER(c_void_p), POINTER(c_int), POINTER(c_int)),
    "settle": (c_int, c_void_p, c_int, c_int, c_int, c_int64, c_int64, c_int, c_int, c_int),
    "make": (c_void_p, *_COSTS, c_void_p, c_void_p),
    "free": (None, c_void_p),
    "choose": (c_int, c_void_p),
    "decide": (c_int, c_void_p, c_int, c_double),
    "observe": (c_int, c_void_p, c_size_t, c_size_t, c_size_t, c_int64, c_int64, c_int),
    "rate": (c_double, c_void_p),
    "tokens": (None, c_void_p, POINTER(c_double)),
    "fallback": (c_int, c_void_p, c_size_t, c_char_p, c_size_t),
}
"""What entries return, and what they are called with."""
_DECISIONS = DraftDecision.DISCARD, DraftDecision.STOP, DraftDecision.CONTINUE


class AdaptiveGamma(GammaPolicy, Protocol):
    """A policy of gamma `auto`; see `AutoGamma`."""

    @property
    def tokens(self) -> Sequence[float]:
        """By number of drafted tokens, how many a round is expected to emit."""

    def fallback(self, after: int = FALLBACK_AFTER) -> str | None:
        """Return why nothing is drafted but for probes; None before so many tokens without."""


class StepPlan(Protocol):
    """What the rows of a step share; see `SharedStep`."""

    rows: int
    rest: int
    """How many more steps of the same rows the plan is good for."""

    def begin(self, rows: int, drafting: Sequence[DraftingRow]) -> None:
        """Plan a step of so many rows, some of which may draft by passes of the draft model."""

    def settle(
        self, made: int, drafted: Sequence[int], draft_ns: int, verify_ns: int,
        passes: int = 0, drafting: int = 0, steps: int = 1,
    ) -> None:  # fmt: skip
        """Learn from a step, or from plain ones."""


class AutoFactory(NamedTuple):
    """Makes the policies of gamma `auto`, and what rows share that use them."""

    policy: Callable[..., AdaptiveGamma]
    step: Callable[..., StepPlan]


PYTHON = AutoFactory(AutoGamma, SharedStep)
"""The reference, and the way where no compiler was there."""


def auto_factory() -> AutoFactory:
    """Return what makes compiled policies, or Python's where the library has none."""
    return PYTHON if _library() is None else AutoFactory(CompiledGamma, CompiledStep)


@cache
def _library() -> PyDLL | None:
    """Return the library of the CPU kernels, None where it has no policy that is called so.

    Calls take microseconds, so none of them lets another thread run.
    """
    try:
        library = PyDLL(str(KERNELS))
        version = library.specrt_gamma_entries()
    except (OSError, AttributeError):
        return None
    for name, (result, *arguments) in _PROTOTYPES.items() if version == ENTRIES else ():
        entry = library[f"specrt_gamma_{name}"]
        entry.restype, entry.argtypes = result, arguments
        setattr(library, name, entry)
    return library if version == ENTRIES else None


def _opened() -> PyDLL:
    library = _library()
    assert library is not None, "`auto_factory` makes nothing compiled without the library"
    return library


def _arguments(costs: Costs, most: int) -> tuple[Any, ...]:
    tables = []
    for table in (costs.verify_ns, costs.draft_ns):
        tables += [(c_double * len(table))(*table), len(table)]
    return *tables, costs.outside_ns, costs.assumed + 2 * costs.one_pass, most


class CompiledStep:
    """Decides for all rows of a step as `SharedStep` does."""

    def __init__(self, costs: Costs, most: int, *, padded: bool = False) -> None:
        library = _opened()
        self._begin, self._settle = library.begin, library.settle
        self.handle: int = library.make_step(*_arguments(costs, most), padded)
        finalize(self, library.free_step, self.handle).atexit = False
        self._drafting: Sequence[DraftingRow] = ()
        """Kept, so that no other policy has the address of one of them in this step."""
        self.rows, self.rest = 1, 0

    def begin(self, rows: int, drafting: Sequence[DraftingRow]) -> None:
        """Plan a step of so many rows, some of which may draft by passes of the draft model."""
        self._drafting, numbers = drafting, c_int * len(drafting)
        handles = [cast(CompiledGamma, row.policy).handle for row in drafting]
        self.rows = rows
        self.rest = self._begin(
            self.handle,
            rows,
            len(drafting),
            (c_void_p * len(drafting))(*handles),
            numbers(*[row.lacks for row in drafting]),
            numbers(*[row.room for row in drafting]),
        )
        assert self.rest >= 0, "rows can draft"

    def settle(
        self, made: int, drafted: Sequence[int], draft_ns: int, verify_ns: int,
        passes: int = 0, drafting: int = 0, steps: int = 1,
    ) -> None:  # fmt: skip
        """Learn from a step; see `SharedStep.settle`."""
        total, widest = sum(drafted), max(drafted, default=0)
        done = self._settle(
            self.handle, made, total, widest, draft_ns, verify_ns, passes, drafting, steps
        )  # fmt: skip
        assert done == 0, "no row drafts more than there may be"


class CompiledGamma:
    """Drafts as many tokens as pay, as `AutoGamma` does."""

    def __init__(
        self,
        costs: Costs,
        most: int,
        rival: CompiledGamma | None = None,
        step: CompiledStep | None = None,
    ) -> None:
        self._library = library = _opened()
        self._choose, self._decide, self._observe = library.choose, library.decide, library.observe
        others = [None if one is None else one.handle for one in (rival, step)]
        self.handle: int = library.make(*_arguments(costs, most), *others)
        finalize(self, library.free, self.handle).atexit = False
        self._most, self._step, self._chosen = most, step, most

    @property
    def tokens(self) -> list[float]:
        """By number of drafted tokens, how many a round is expected to emit."""
        table = (c_double * (self._most + 1))()
        self._library.tokens(self.handle, table)
        return list(table)

    @property
    def rate(self) -> float:
        """Tokens per nanosecond that the best number of tokens comes to."""
        return float(self._library.rate(self.handle))

    def fallback(self, after: int = FALLBACK_AFTER) -> str | None:
        """Return why nothing is drafted but for probes; None before so many tokens without."""
        text = create_string_buffer(400)
        self._library.fallback(self.handle, after, text, len(text))
        return text.value.decode() or None

    def choose(self) -> int:
        """Return the most tokens worth drafting now: none, one to probe, or all there may be."""
        chosen: int = self._choose(self.handle)
        self._chosen = chosen
        return chosen

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        """Weigh the chance of a token to be kept against what it costs."""
        decision: int = self._decide(self.handle, drafted, confidence)
        assert decision >= 0, "no more is drafted than there may be"
        return _DECISIONS[decision]

    def observe(self, round_: Round) -> None:
        """Learn from the tokens that were judged, and from what passes took."""
        if not self._chosen and self._step is not None and self._step.rows > 1:
            return
        done = self._observe(
            self.handle, len(round_.tokens), round_.drafted, round_.accepted,
            round_.draft_ns, round_.verify_ns, round_.caught_up,
        )  # fmt: skip
        assert done == 0, "no more is drafted than there may be"
