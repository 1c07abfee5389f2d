"""Rounds of several rows in the same passes: drafts together, then one verification for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specrt.engine.protocol import Engine, Feed, Output, RowsEngine, rows_of
from specrt.speculation.round import Pass, Round, Rounds

INTERRUPTS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What ends a step, not a row. Libraries written in Rust raise other things that are no errors."""


@dataclass(eq=False)
class ActiveSlot:
    """The rounds of one row, and the pass they wait for."""

    row: int
    rounds: Rounds
    asked: Pass | None = None
    """None before they are resumed for the next round."""
    undelivered: bool = False
    """Whether something came of it that is not delivered yet."""


class StepResult(NamedTuple):
    """What became of a row in a step: a round, an end when both are None, or a failure."""

    runner: ActiveSlot
    round_: Round | None = None
    error: BaseException | None = None


class BatchExecutor:
    """Runs the rounds of several rows, one verification each in a step.

    All rows that draft do so in the same draft passes, and all are verified in one target pass.
    A row that reads a prompt takes part with one chunk of it in each step, so that the others
    never wait for more; where several read, they share the tokens of one chunk's width, the first
    in order going first.

    `narrow` is the widest pass that is no prompt: it always takes part.
    """

    def __init__(self, target: Engine, draft: Engine | None, narrow: int) -> None:
        self._target = target
        self._narrow = narrow
        self._drafts = draft is not None
        self._single = target.batch == 1
        self._widest = max(e.max_width for e in (target, draft) if e is not None)
        self._rows: dict[int, RowsEngine] = {
            id(engine): rows_of(engine) for engine in (target, draft) if engine is not None
        }

    def step(self, runners: Sequence[ActiveSlot]) -> Iterable[StepResult]:
        """Run a round of every row, as far as prompts allow, and tell what came of it.

        Errors of a row are told and harm no other; those of an engine are told of all rows in the
        pass.
        """
        if len(runners) == 1:
            return self._alone(runners[0])
        return self._together(runners)

    def _alone(self, runner: ActiveSlot) -> Sequence[StepResult]:
        """Run the passes of one row directly, up to its next round or a chunk of its prompt."""
        event = None if runner.asked else self._resume(runner, None)
        while event is None:
            asked = runner.asked
            assert asked is not None, "a row tells of a round or asks for a pass"
            try:
                output = self._run_one(runner.row, asked)
            except INTERRUPTS:
                raise
            except BaseException as error:
                return (_failed(runner, error),)
            event = self._resume(runner, output)
            if event is None and len(asked.tokens) > self._narrow:
                return ()
        return (event,)

    def _run_one(self, row: int, asked: Pass) -> Output:
        if self._single:
            return asked.run()
        feed = Feed(row, asked.tokens, asked.start, asked.rows)
        (output,) = self._rows[id(asked.engine)].forward_rows((feed,))
        return output

    def _together(self, runners: Sequence[ActiveSlot]) -> Iterator[StepResult]:
        for runner in runners:
            event = None if runner.asked else self._resume(runner, None)
            if event is not None:
                yield event
        left = self._widest
        while self._drafts:
            waiting = [r for r in runners if r.asked and r.asked.engine is not self._target]
            chosen, left = self._fitting(waiting, left)
            if not chosen:
                break
            yield from self._run(chosen)
        waiting = [r for r in runners if r.asked and r.asked.engine is self._target]
        chosen, _ = self._fitting(waiting, self._widest)
        if chosen:
            yield from self._run(chosen)

    def _fitting(self, waiting: Sequence[ActiveSlot], left: int) -> tuple[list[ActiveSlot], int]:
        """Return those whose passes go together, and how many tokens of prompts may follow."""
        chosen = []
        for runner in waiting:
            assert runner.asked is not None
            width = len(runner.asked.tokens)
            if width > self._narrow:
                if width > left:
                    continue
                left -= width
            chosen.append(runner)
        return chosen, left

    def _run(self, runners: Sequence[ActiveSlot]) -> Iterator[StepResult]:
        """Run one pass of one engine for all of them."""
        passes = [runner.asked for runner in runners]
        feeds = [
            Feed(runner.row, asked.tokens, asked.start, asked.rows)
            for runner, asked in zip(runners, passes, strict=True)
            if asked is not None
        ]
        try:
            assert passes[0] is not None
            outputs = self._rows[id(passes[0].engine)].forward_rows(feeds)
        except INTERRUPTS:
            raise
        except BaseException as error:  # what the engine raises concerns all rows in the pass
            for runner in runners:
                yield _failed(runner, error)
            return
        for runner, output in zip(runners, outputs, strict=True):
            event = self._resume(runner, output)
            if event is not None:
                yield event

    def _resume(self, runner: ActiveSlot, output: Output | None) -> StepResult | None:
        """Go on with a row; return what it came to, None where it asks for its next pass."""
        runner.undelivered = True
        runner.asked = None
        try:
            told = runner.rounds.send(output)
        except StopIteration:
            return StepResult(runner)
        except INTERRUPTS:
            raise
        except BaseException as error:
            return StepResult(runner, error=error)
        if isinstance(told, Round):
            return StepResult(runner, told)
        runner.asked = told
        runner.undelivered = False
        return None


def _failed(runner: ActiveSlot, error: BaseException) -> StepResult:
    """Return the end of a row whose pass failed."""
    runner.rounds.close()
    runner.asked = None
    return StepResult(runner, error=error)
