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
    vectors, made = tmp_path / f"{name}.json", MAKERS[name]()
    # Where rounding decides nothing can be compared; almost everywhere it does not.
    assert made.get("left_out", 0) < 0.05 * len(made.get("cases", [1]))
    vectors.write_text(json.dumps(made, allow_nan=False))
    run_check(built_library("native", sanitize=True), name, vectors)


@pytest.mark.parametrize("gammas", [(0,), (0, 2, 5), (0, 1, 3, 7)])
def test_the_gamma_is_the_smallest_built_one_that_reaches(
    built_library: BuildLibrary, tmp_path: Path, gammas: tuple[int, ...]
) -> None:
    chosen = [min((g for g in gammas if g >= most), default=gammas[-1]) for most in range(10)]
    vectors = tmp_path / "built.json"
    vectors.write_text(json.dumps({"cases": [{"gammas": gammas, "chosen": chosen}]}))
    run_check(built_library("native", sanitize=True), "built", vectors)
