"""A comparison as Markdown, and its verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from peerbench.measure import Row
from peerbench.summary import decode_rate, fastest, ratio

HEADINGS = (
    "runtime",
    "mode",
    "gamma",
    "tokens/s",
    "ratio",
    "with prompt",
    "TTFT ms",
    "accepted / drafted",
    "loops",
    "same as its plain",
    "same as specrt's plain",
)


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Draw a table of figures, the fastest first and failures last."""
    ordered = sorted(rows, key=lambda row: -row.get("tokens_per_second", 0.0))
    return _draw([HEADINGS, *map(_cells, ordered)])


def first_token_table(rows: Sequence[dict[str, Any]], prompts: Sequence[int]) -> str:
    """Draw times to the first token, with ratios, a column for each prompt, by its tokens."""
    headings = (*HEADINGS[:3], *(f"{count} tokens: ms (ratio)" for count in prompts))
    ordered = sorted(rows, key=lambda row: row.get("ttft_ms", inf))
    return _draw([headings, *(_first_token_cells(row, len(headings)) for row in ordered)])


def _first_token_cells(row: dict[str, Any], columns: int) -> tuple[str, ...]:
    if "error" in row:
        return _failed(row, columns)
    times = row["first_tokens"] or []
    return (*_name(row), *(f"{time['ms']:.1f} ({time['ratio']:.2f})" for time in times))


def _draw(lines: Sequence[tuple[str, ...]]) -> str:
    ruled = [lines[0], tuple("---" for _ in lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in ruled)


def _name(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["peer"], row["mode"], "" if row["mode"] == "plain" else str(row["gamma"])


def _failed(row: dict[str, Any], columns: int) -> tuple[str, ...]:
    failed = row["error"].replace("|", "/").replace("\n", " ")
    return (*_name(row), failed, *[""] * (columns - 4))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return _failed(row, len(HEADINGS))
    return (
        *_name(row),
        f"{row['tokens_per_second']:.0f}",
        _ratio(row),
        f"{row['tokens_per_second_with_prompt']:.0f}",
        f"{row['ttft_ms']:.1f}",
        "" if row["draft_yield"] is None else f"{row['draft_yield']:.2f}",
        f"{row['repeats']:.0%}",
        _agreement(row["same_as_own_plain"]),
        _agreement(row["same_as_base_plain"]),
    )


def _ratio(row: dict[str, Any]) -> str:
    if row["ratio"] is None:
        return ""
    least, most = row["ratio_spread"]
    return f"{row['ratio']:.2f} ({least:.2f} to {most:.2f})"


def _agreement(same: dict[str, Any] | None) -> str:
    if same is None:
        return ""
    text = f"{same['equal']} of {same['prompts']}"
    return text if same["equal"] == same["prompts"] else f"{text}, {same['leading']:.0%} of tokens"


def verdict(rows: Sequence[Row], base: Row) -> str:
    """Compare the base with the fastest row of any other peer, in one sentence."""
    if base.error:
        return f"{base.contender} failed: {base.error}"
    other = fastest([row for row in rows if row.contender.peer != base.contender.peer])
    if other is None:
        return f"{base.contender} made {decode_rate(base):.0f} tokens/s; no other peer finished"
    return (
        f"{base.contender} made {decode_rate(base):.0f} tokens/s, {ratio(base, other)} times "
        f"{other.contender}, the fastest of the others with {decode_rate(other):.0f}"
    )
