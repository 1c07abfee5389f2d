"""The native drafters and gamma policies, held to Python's call by call, or to the same regret."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpp import drafted, drafting
from cpp.conftest import BuildLibrary, run_check

MAKERS: dict[str, Callable[[], dict[str, Any]]] = {
    "costs": drafting.between,
    "gamma": drafting.gamma,
    "ngram": drafting.ngram,
    "draft": drafted.draft,
}


@pytest.mark.parametrize("name", MAKERS)
def test_native_drafting_is_python_s(
    built_library: BuildLibrary, tmp_path: Path, name: str
) -> None:
    vectors = tmp_path / f"{name}.json"
    vectors.write_text(json.dumps(MAKERS[name](), allow_nan=False))
    run_check(built_library("native", sanitize=True), name, vectors)


def test_vectors_hold_what_matters() -> None:
    """Drafts that caught up, and drafts by rejection."""
    sessions = drafted.draft()["cases"]
    steps = [s for case in sessions for g in case["generations"] for s in g["steps"]]
    assert sum(bool(step.get("caught_up")) for step in steps) > 100
    assert sum(bool(step.get("drawn_from")) for step in steps) > 100
