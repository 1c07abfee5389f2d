"""A bar chart for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float, width: int) -> str:
    """Return a bar over a share of a width, to the eighth of a character."""
    whole, part = divmod(round(min(1.0, max(0.0, share)) * width * 8), 8)
    return "█" * whole + (_EIGHTHS[part] if part else "")


def chart(rows: Sequence[tuple[str, str, float]], width: int = 48) -> str:
    """Return a line for each (group, name, value), bars from 0 to the largest value.

    The group is written beside its first row.
    """
    longest = max((value for _, _, value in rows), default=0.0) or 1.0
    groups = max((len(group) for group, _, _ in rows), default=0)
    names = max((len(name) for _, name, _ in rows), default=0)
    lines = []
    for group, members in groupby(rows, key=lambda row: row[0]):
        for number, (_, name, value) in enumerate(members):
            head = group if number == 0 else ""
            drawn = bar(value / longest, width)
            lines.append(f"{head:{groups}}  {name:>{names}} {drawn:{width}} {value:.0f}")
    return "\n".join(lines)
