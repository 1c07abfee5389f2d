"""Messages of libraries, in one line."""

from __future__ import annotations

import re

_LONGEST = 200


def one_line(message: str) -> str:
    """Return what a library's message comes down to, in one line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    found = next((line[7:] for line in lines if line.startswith("error: ")), lines[0])
    found = re.sub(r"^(at )?(\d+)\(\d+\): ", r"line \2: ", found)
    shown = "".join(c if c.isprintable() else "?" for c in found)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
