"""The native drafters and gamma policies, held to Python's call by call."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cpp import drafted, drafting
from cpp.conftest import BuildLibrary, run_check
from specrt.speculation import acceptance

MAKERS: dict[str, Callable[[], dict[str, Any]]] = {
    "plan": drafting.plans,
    "gamma": drafting.gamma,
    "ngram": drafting.ngram,
    "draft": drafted.draft,
}


def _plain_sum(numbers: Any) -> Any:
    """Add from the first to the last; Python from 3.12 on corrects what rounding took."""
    total: Any = 0
    for number in numbers:
        total += number
    return total


@pytest.mark.parametrize("name", MAKERS)
def test_native_drafting_is_python_s(
    built_library: BuildLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(acceptance, "sum", _plain_sum, raising=False)
    vectors = tmp_path / f"{name}.json"
    vectors.write_text(json.dumps(MAKERS[name](), allow_nan=False))
    run_check(built_library("native", sanitize=True), name, vectors)


def test_vectors_hold_what_matters() -> None:
    """Drafts that caught up, that were left out, and policies that gave up and came back."""
    sessions = drafted.draft()["cases"]
    steps = [s for case in sessions for g in case["generations"] for s in g["steps"]]
    assert sum(bool(step.get("caught_up")) for step in steps) > 100
    assert sum(bool(step.get("drawn_from")) for step in steps) > 100
    assert any(g["fallback"] for case in sessions for g in case["generations"])
    played = [case["events"] for case in drafting.gamma()["cases"]]
    weights = [event[4] for events in played for event in events if event[1] == drafting.WEIGHED]
    assert all(weights.count(weight) > 1000 for weight in range(3))
    assert any(_came_back(events) for events in played)


def _came_back(events: list[Any]) -> bool:
    """Tell whether a policy gave up and drafted again."""
    reasons = [event[9] for event in events if event[:2] == [0, drafting.OBSERVED]]
    return any(early and not late for early, late in pairwise(reasons))
