"""The executor: rounds of several slots in the same passes, drafts first, then one verification."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple

from specrt.engine.protocol import Engine, Output, RowsEngine, rows_of
from specrt.speculation.round import Pass, Round, Rounds

INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What ends a step, not one slot. Libraries written in Rust raise other non-`Exception`s."""


@dataclass(eq=False)
class ActiveSlot:
    """The rounds of one slot, and the pass they wait for."""

    row: int
    """Of the engines' KV buffers."""
    rounds: Rounds
    pending: Pass | None = None
    """None between rounds."""
    undelivered: bool = False
    """Whether it has a result that is not delivered yet."""

    @property
    def lost(self) -> bool:
        """Whether its pass cannot run: it was interrupted once it had run, and states hold it."""
        pass_ = self.pending
        return pass_ is not None and 0 < pass_.start < pass_.engine.traits.rewind(self.row)


class StepResult(NamedTuple):
    """What a step did in one slot: a round, an error, or the end when both are None."""

    active: ActiveSlot
    round_: Round | None = None
    error: BaseException | None = None


class BatchExecutor:
    """Runs the rounds of several slots, one verification each in a step.

    All slots that draft do so in the same draft passes, and all are verified in one target pass.
    A slot that reads a prompt takes part with one chunk of it in each step, so that the others
    never wait for more; where several read, they share the tokens of one chunk's width, the first
    in order going first.

    `narrow` is the widest pass that is not a prompt: it always takes part.
    """

    def __init__(self, target: Engine, draft: Engine | None, narrow: int) -> None:
        self._target = target
        self._narrow = narrow
        self._drafts = draft is not None
        self.draft_ns = self.draft_passes = self.drafting = 0
        """Of the last step of several slots: time until all had drafted, passes, and slots of the
        first one."""
        self.read_prompt = False
        """Whether a chunk of a prompt took part in the last step of several slots."""
        self._widest = max(e.max_width for e in (target, draft) if e is not None)
        self._rows: dict[int, RowsEngine] = {
            id(engine): rows_of(engine) for engine in (target, draft) if engine is not None
        }

    def step(self, slots: Sequence[ActiveSlot]) -> Iterable[StepResult]:
        """Run a round of every slot, as far as prompts allow, and return the results.

        An error of one slot harms no other; that of an engine is the result of all slots in the
        pass.
        """
        if len(slots) == 1:
            return self._step_alone(slots[0])
        return self._step_together(slots)

    def _step_alone(self, active: ActiveSlot) -> Sequence[StepResult]:
        """Run the passes of one slot directly, up to its next round or a chunk of its prompt."""
        result = None if active.pending else self._resume(active, None)
        while result is None:
            pass_ = active.pending
            assert pass_ is not None, "a slot yields a round or a pass"
            try:
                output = self._run_one(active.row, pass_)
            except INTERRUPTS:
                raise
            except BaseException as error:
                return (_failed(active, error),)
            result = self._resume(active, output)
            if result is None and len(pass_.tokens) > self._narrow:
                return ()
        return (result,)

    def _run_one(self, row: int, pass_: Pass) -> Output:
        (output,) = self._rows[id(pass_.engine)].forward_rows((pass_.feed(row),))
        return output

    def _step_together(self, slots: Sequence[ActiveSlot]) -> Iterator[StepResult]:
        began = perf_counter_ns()
        self.draft_ns = self.draft_passes = self.drafting = 0
        self.read_prompt = False
        for active in slots:
            result = None if active.pending else self._resume(active, None)
            if result is not None:
                yield result
        left = self._widest
        while self._drafts:
            waiting = [a for a in slots if a.pending and a.pending.engine is not self._target]
            chosen, left = self._fitting(waiting, left)
            if not chosen:
                break
            yield from self._run(chosen)
            self.draft_ns = perf_counter_ns() - began
            self.drafting = self.drafting or len(chosen)
            self.draft_passes += 1
        waiting = [a for a in slots if a.pending and a.pending.engine is self._target]
        chosen, _ = self._fitting(waiting, self._widest)
        if chosen:
            yield from self._run(chosen)

    def _fitting(self, waiting: Sequence[ActiveSlot], left: int) -> tuple[list[ActiveSlot], int]:
        """Return the slots whose passes fit together, and how many tokens of prompts may follow."""
        chosen = []
        for active in waiting:
            assert active.pending is not None
            width = len(active.pending.tokens)
            if width > self._narrow:
                if width > left:
                    continue
                left -= width
                self.read_prompt = True
            chosen.append(active)
        return chosen, left

    def _run(self, slots: Sequence[ActiveSlot]) -> Iterator[StepResult]:
        """Run one pass of one engine for all of them."""
        passes = [active.pending for active in slots]
        feeds = [
            pass_.feed(active.row)
            for active, pass_ in zip(slots, passes, strict=True)
            if pass_ is not None
        ]
        try:
            assert passes[0] is not None
            outputs = self._rows[id(passes[0].engine)].forward_rows(feeds)
        except INTERRUPTS:
            raise
        except BaseException as error:  # an engine's error concerns all slots in the pass
            for active in slots:
                yield _failed(active, error)
            return
        for active, output in zip(slots, outputs, strict=True):
            result = self._resume(active, output)
            if result is not None:
                yield result

    def _resume(self, active: ActiveSlot, output: Output | None) -> StepResult | None:
        """Go on with a slot; return its result, None where it yields its next pass."""
        active.undelivered = True
        active.pending = None
        try:
            step = active.rounds.send(output)
        except StopIteration:
            return StepResult(active)
        except INTERRUPTS:
            raise
        except BaseException as error:
            return StepResult(active, error=error)
        if isinstance(step, Round):
            return StepResult(active, step)
        active.pending = step
        active.undelivered = False
        return None


def _failed(active: ActiveSlot, error: BaseException) -> StepResult:
    """Return the end of a slot whose pass failed."""
    active.rounds.close()
    active.pending = None
    return StepResult(active, error=error)
