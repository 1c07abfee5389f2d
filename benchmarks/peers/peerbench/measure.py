"""Let contenders take turns, and keep what each turn came to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from peerbench.process import RunnerError
from peerbench.protocol import Order, Outcome
from peerbench.schedule import Contender, interleave

WARM_TOKENS = 8


class Answering(Protocol):
    """What is needed of a runner."""

    def ask(self, order: Order) -> Outcome:
        """Do an order and wait for it. Raises: RunnerError."""


@dataclass
class Row:
    """A contender and its outcomes, one a repeat; with an error there may be fewer."""

    contender: Contender
    outcomes: list[Outcome] = field(default_factory=list)
    error: str = ""


def measure(
    runners: Mapping[str, Answering],
    contenders: Sequence[Contender],
    order: Order,
    repeats: int,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Run every prompt once per contender and repeat, in turn.

    One round before the first is not counted: models load and memory is touched. A contender that
    fails keeps its error and takes no further turns.
    """
    rows = {contender: Row(contender) for contender in contenders}
    for contender, row in rows.items():
        progress(f"warming {contender}")
        _turn(runners[contender.peer], row, replace(order, prompts=order.prompts[:2]))
        row.outcomes.clear()
    for repeat, contender in interleave(contenders, repeats):
        row = rows[contender]
        if not row.error:
            _turn(runners[contender.peer], row, order)
            rate = row.error or f"{row.outcomes[-1].decode_rate:.1f} tokens/s"
            progress(f"{repeat + 1}/{repeats} {contender}: {rate}")
    return list(rows.values())


def _turn(runner: Answering, row: Row, order: Order) -> None:
    """Warm up for a few tokens, because others had the caches since, then measure.

    With the first prompt read backwards: as long, and nothing of it is kept for the first one.
    """
    mine = replace(order, mode=row.contender.mode, gamma=row.contender.gamma)
    backwards = [prompt[::-1] for prompt in mine.prompts[:1]]
    warm = replace(mine, prompts=backwards, max_tokens=min(WARM_TOKENS, mine.max_tokens))
    try:
        outcome = runner.ask(warm)
        outcome = outcome if outcome.error else runner.ask(mine)
    except RunnerError as error:
        outcome = Outcome(error=str(error))
    row.error = outcome.error or _shortfall(outcome, mine)
    if not row.error:
        row.outcomes.append(outcome)


def _shortfall(outcome: Outcome, order: Order) -> str:
    """Say what is wrong with an outcome that is not what was ordered."""
    lengths = [len(tokens) for tokens in outcome.tokens]
    if lengths != [order.max_tokens] * len(order.prompts):
        return f"made {lengths} tokens where {order.max_tokens} each were ordered"
    return ""
