"""The parts of the native implementation that are functions of numbers, held to Python's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpp import edits, numeric, rounds
from cpp.conftest import BuildLibrary, run_check

MAKERS: dict[str, Callable[[], dict[str, Any]]] = {
    "noise": numeric.noise,
    "sampling": numeric.sampling,
    "rules": edits.rules,
    "verify": rounds.verify,
    "logprobs": numeric.logprobs,
}


@pytest.mark.parametrize("name", MAKERS)
def test_native_numbers_are_python_s(
    built_library: BuildLibrary, tmp_path: Path, name: str
) -> None:
    vectors = tmp_path / f"{name}.json"
    vectors.write_text(json.dumps(MAKERS[name](), allow_nan=False))
    run_check(built_library("native", sanitize=True), name, vectors)


def test_few_vectors_are_left_out() -> None:
    """Where rounding decides nothing can be compared; almost everywhere it does not."""
    made = numeric.sampling()
    assert made["left_out"] < 0.05 * len(made["cases"])
