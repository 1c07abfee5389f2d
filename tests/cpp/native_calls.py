"""Calls of the native implementation, and their answers, as JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Document = dict[str, Any]
Case = tuple[Document, Any]
"""A call, and the answer that is expected."""


def plain(value: Any) -> Any:
    """Return a value as JSON has it: numbers that it does not know become texts."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def near(found: Any, expected: Any, within: float) -> bool:
    """Tell whether an answer is the expected one, numbers up to a share of theirs.

    Of a refusal the message holds what is expected of it.
    """
    if isinstance(expected, dict) and "status" in expected:
        same = isinstance(found, dict) and found.get("status") == expected["status"]
        return same and expected.get("message", "") in found["message"]
    if isinstance(expected, dict):
        return isinstance(found, dict) and found.keys() == expected.keys() and all(
            near(found[name], item, within) for name, item in expected.items()
        )  # fmt: skip
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(
            near(one, other, within) for one, other in zip(found, expected, strict=True)
        )  # fmt: skip
    if isinstance(expected, float) and isinstance(found, float | int) and found != expected:
        # Numbers too small for all of their digits have an absolute rounding.
        return abs(found - expected) <= within * abs(expected) + (1e-320 if within else 0)
    return bool(found == expected) and isinstance(found, bool) == isinstance(expected, bool)
