"""How a built engine is opened: what its weights are stored as decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import specrt
from specrt.bundle import Bundle
from specrt.cli.build import tune_quickly
from specrt.engine.ort import OrtEngine
from specrt.engine.ort_packed import settle_padding
from specrt.tuning.tuning_record import write_tuning
from specrt_export.builder import build
from specrt_export.recipe import read_recipe

Store = Callable[..., Path]


@pytest.fixture
def stored(small: Path, tmp_path: Path) -> Store:
    """Build the small pair in a precision, its target in blocks of so many weights."""

    def make(precision: str, block: int = 0) -> Path:
        (small.parent / "text.txt").write_text("def f(x):\n    return x\n" * 40, encoding="utf-8")
        text = small.read_text(encoding="utf-8")
        text = text.replace("[engine]", f'[engine]\nprecision = "{precision}"')
        text = text.replace("[target]", f"[target]\nblock = {block}" if block else "[target]")
        small.write_text(text + '\n[quality]\ncalibration = "text.txt"\n', encoding="utf-8")
        build(read_recipe(small), tmp_path / precision)
        return tmp_path / precision

    return make


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_half_stored_weights_are_widened_once_not_in_every_pass(
    stored: Store, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    levels = []
    real = ort.InferenceSession

    def session(path: str, options: Any, **rest: Any) -> Any:
        levels.append(options.graph_optimization_level)
        return real(path, options, **rest)

    bundle = stored(precision)
    assert Bundle.open(bundle).manifest.target.half_stored == (precision != "fp32")
    monkeypatch.setattr(ort, "InferenceSession", session)
    with specrt.load(bundle):
        pass
    whole, half = (
        ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
        ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    )
    assert levels == [whole if precision == "fp32" else half] * 2


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_row_has_the_same_bits_in_company_up_to_the_last_position(
    stored: Store, precision: str, block: int
) -> None:
    bundle = stored(precision, block)
    fused = Bundle.open(bundle).manifest.target.fused
    assert all(n == of for n, of in (count.split("/") for count in fused.values())), fused
    with specrt.load(bundle) as generator:
        target = generator.models.target
        assert isinstance(target, OrtEngine)
        assert target.pad_to_even, "until it is known that passes need not be"
        assert target.max_length == 127, "one position of 128 is kept for a partner"
        for settle in (lambda: True, lambda: settle_padding(target)):
            settle()
            hold_bits(target)


def hold_bits(target: OrtEngine) -> None:
    tokens = np.random.default_rng(0).integers(0, 8192, (1, target.max_length))
    for begin in range(0, target.max_length, 2):  # as decoding fills it
        target.forward(tokens[:, begin : begin + 2], begin, 1)
    for end in (target.max_length, 100):  # a partner is written behind the end
        alone = target.forward(tokens[:, end - 1 : end], end - 1).logits[0, -1].copy()
        for width in (2, 3, 4, 5):
            company = target.forward(tokens[:, end - width : end], end - width)
            assert (company.logits[0, -1] == alone).all(), (end, width)


def test_kernels_that_round_a_lone_row_otherwise_are_found_out(
    stored: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = OrtEngine.forward

    def forward(engine: OrtEngine, tokens: Any, start: Any, rows: int | None = None) -> Any:
        output = real(engine, tokens, start, rows)
        if np.shape(tokens)[1] % 2 and not engine.pad_to_even:
            output.logits[0, -1, 5] += 1e-6
        return output

    with specrt.load(stored("int8")) as generator:
        target = generator.models.target
        assert isinstance(target, OrtEngine)
        monkeypatch.setattr(OrtEngine, "forward", forward)
        assert settle_padding(target)
        assert target.pad_to_even


def test_what_tuning_found_holds_when_the_bundle_is_opened(stored: Store) -> None:
    bundle = stored("int8")
    tuned, problem = tune_quickly(bundle)
    assert tuned is not None, problem
    for even in (True, False):
        write_tuning(bundle, replace(tuned, pad_to_even=even))
        with specrt.load(bundle) as generator:
            target = generator.models.target
            assert isinstance(target, OrtEngine)
            assert (target.pad_to_even, target.pad_single_token) == (even, True)
