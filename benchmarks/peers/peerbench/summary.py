"""The figures of a comparison: medians over repeats, ratios within each repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from specrt.bench.report import repeated_tokens

from peerbench.measure import Row
from peerbench.protocol import PLAIN


@dataclass(frozen=True)
class Ratio:
    """A median over repeats, with the least and the most."""

    middle: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.least:.2f} to {self.most:.2f})"


def ratio(row: Row, base: Row) -> Ratio | None:
    """Compare decode rates repeat by repeat; None where one of the two failed."""
    if row.error or base.error:
        return None
    pairs = zip(row.outcomes, base.outcomes, strict=True)
    found = [mine.decode_rate / other.decode_rate for mine, other in pairs]
    return Ratio(median(found), min(found), max(found))


def fastest(rows: Sequence[Row]) -> Row | None:
    """Return the row with the highest median decode rate, failures left out."""
    whole = [row for row in rows if not row.error]
    return max(whole, key=decode_rate, default=None)


def decode_rate(row: Row) -> float:
    """Median tokens per second of decoding."""
    return median(outcome.decode_rate for outcome in row.outcomes)


def figures(row: Row, rows: Sequence[Row], base: Row) -> dict[str, Any]:
    """Return one row's figures as plain JSON types."""
    named = {"peer": row.contender.peer, "mode": row.contender.mode, "gamma": row.contender.gamma}
    if row.error:
        return {**named, "error": row.error}
    compared = ratio(row, base)
    last = row.outcomes[-1]
    return {
        **named,
        "tokens_per_second": round(decode_rate(row), 2),
        "tokens_per_second_by_repeat": [round(o.decode_rate, 2) for o in row.outcomes],
        "tokens_per_second_with_prompt": round(median(o.whole_rate for o in row.outcomes), 2),
        "ttft_ms": round(median(ns for o in row.outcomes for ns in o.ttft_ns) / 1e6, 3),
        "ratio": None if compared is None else round(compared.middle, 4),
        "ratio_spread": compared and [round(compared.least, 4), round(compared.most, 4)],
        "repeats": _repeats(last.tokens),
        "draft_yield": _draft_yield(last.accepted, last.drafted),
        "same_as_own_plain": _agreement(row, _plain(rows, row.contender.peer)),
        "same_as_base_plain": _agreement(row, _plain(rows, base.contender.peer)),
    }


def first_tokens(row: Row, base: Row) -> list[dict[str, Any]] | None:
    """Return each prompt's time to the first token, and its ratio to the base's, medians."""
    if row.error or base.error:
        return None
    turns = [(o.ttft_ns, b.ttft_ns) for o, b in zip(row.outcomes, base.outcomes, strict=True)]
    pairs = zip(*(zip(*turn, strict=True) for turn in turns), strict=True)
    return [_first_token(prompt) for prompt in pairs]


def _first_token(repeats: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Take the medians of one prompt's repeats: this row's time and the base's."""
    return {
        "ms": round(median(mine for mine, _ in repeats) / 1e6, 3),
        "ratio": round(median(mine / base for mine, base in repeats), 4),
    }


def _plain(rows: Sequence[Row], peer: str) -> Row | None:
    wanted = (row for row in rows if (row.contender.peer, row.contender.mode) == (peer, PLAIN))
    return next((row for row in wanted if not row.error), None)


def _agreement(row: Row, other: Row | None) -> dict[str, Any] | None:
    """Count equal outputs; `leading` is the mean share of tokens before the first difference."""
    if other is None:
        return None
    pairs = list(zip(row.outcomes[-1].tokens, other.outcomes[-1].tokens, strict=True))
    leading = [_leading(mine, theirs) / len(mine) for mine, theirs in pairs]
    equal = sum(mine == theirs for mine, theirs in pairs)
    return {"equal": equal, "prompts": len(pairs), "leading": round(sum(leading) / len(pairs), 4)}


def _leading(mine: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = zip(mine, theirs, strict=True)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(mine))


def _repeats(outputs: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens that end a run of 16 that was there before: text that loops."""
    return round(sum(map(repeated_tokens, outputs)) / sum(map(len, outputs)), 4)


def _draft_yield(accepted: Sequence[int | None], drafted: Sequence[int | None]) -> float | None:
    kept = [count for count in accepted if count is not None]
    made = [count for count in drafted if count is not None]
    return round(sum(kept) / sum(made), 4) if sum(made) else None
