"""Products of the CPU kernels: what they come to, and that nothing but the row decides it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shared import REPOSITORY
from support.kernels import Stored, instruction_sets, matmul, session, stored

FORMATS = [
    ("int4", 96, 256, 32),
    ("int4", 40, 384, 128),
    ("int4", 16, 64, 16),
    ("int8", 96, 256, 64),
    ("int8", 33, 128, 32),
    ("bf16", 48, 100, 0),
    ("fp16", 50, 64, 0),
    ("fp32", 96, 100, 0),
]
"""Format, outputs, inputs, block: whole tiles and parts of one, pairs of tiles and odd ones."""

formats = pytest.mark.parametrize(("format_", "outputs", "inputs", "block"), FORMATS)


def rows_of(width: int, inputs: int) -> NDArray[np.float32]:
    """Return rows of different sizes, with zeros and large numbers among them."""
    rng = np.random.default_rng(width)
    x = rng.standard_normal((width, inputs)) * 10.0 ** rng.integers(-6, 4, (width, 1))
    x[0, : inputs // 2] = 0
    return x.astype(np.float32)


def product(weights: Stored, x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Multiply in float64, of codes with rows quantized as the kernels document it."""
    if weights.codes is None or weights.scales is None:
        return x.astype(np.float64) @ weights.dense.T.astype(np.float64)
    blocks = x.reshape(len(x), -1, weights.block)
    most = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, where=most > 0, out=np.zeros_like(most))
    codes = np.rint(blocks * inverse).astype(np.float64)
    sums = np.einsum("mbk,nbk->mnb", codes, weights.codes.reshape(*weights.scales.shape, -1))
    scales = (most[..., 0] / np.float32(127)).astype(np.float64)
    return (sums * scales[:, None] * weights.scales[None]).sum(-1)


def close(found: NDArray[Any], expected: NDArray[Any]) -> None:
    """Hold each row to a few roundings of its largest number."""
    assert found.shape == expected.shape
    largest = np.abs(expected).max(-1, keepdims=True)
    assert (np.abs(found - expected) <= 1e-5 * largest).all()


@formats
def test_products_are_those_of_the_codes(
    format_: str, outputs: int, inputs: int, block: int
) -> None:
    weights = stored(format_, outputs, inputs, block)
    bias = np.linspace(-1, 1, outputs, dtype=np.float32)
    for width in (1, 2, 5, 9, 40):
        x = rows_of(width, inputs)
        expected = product(weights, x)
        close(matmul(weights)(x), expected)
        close(matmul(weights, bias)(x), expected + bias)
        if block:
            close(matmul(weights, exact=True)(x), x.astype(np.float64) @ weights.dense.T)


@formats
def test_a_row_has_the_same_bits_in_any_company(
    format_: str, outputs: int, inputs: int, block: int
) -> None:
    weights = stored(format_, outputs, inputs, block)
    run, alone = matmul(weights), matmul(weights, threads=1)
    x = rows_of(40, inputs)
    rows = np.concatenate([alone(x[i : i + 1]) for i in range(40)])
    for width in (*range(1, 14), 17, 33, 40):
        assert np.array_equal(run(x[:width]), rows[:width]), width
        assert np.array_equal(run(x[-width:]), rows[-width:]), width
    many = np.concatenate([x] * 14)  # more than are quantized at a time
    assert np.array_equal(run(many), np.concatenate([rows] * 14))
    assert run(x[:0]).shape == (0, outputs)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@formats
def test_gates_are_activated(
    activation: str, format_: str, outputs: int, inputs: int, block: int
) -> None:
    outputs -= outputs % 2
    weights = stored(format_, outputs, inputs, block, gates=True)
    bias = np.linspace(-1, 1, outputs, dtype=np.float32)
    x = rows_of(7, inputs)
    gate, up = np.split(product(weights, x) + bias, 2, axis=1)
    scaled = gate if activation == "silu" else 1.5957691216 * (gate + 0.044715 * gate**3)
    expected = gate / (1 + np.exp(np.clip(-scaled, None, 80))) * up
    close(matmul(weights, bias, activation=activation)(x), expected)


def test_what_is_no_number_stays_so() -> None:
    for format_, inputs, block in (("int4", 64, 32), ("fp32", 64, 0)):
        run = matmul(stored(format_, 32, inputs, block))
        x = rows_of(3, inputs)
        x[1, 40] = np.nan
        x[2, 3] = np.inf
        y = run(x)
        assert np.isfinite(y[0]).all()
        assert not np.isfinite(y[1]).any()
        assert not np.isfinite(y[2]).any()


@pytest.mark.parametrize("name", instruction_sets())
def test_every_instruction_set_gives_the_bits_of_the_reference(name: str) -> None:
    assert _digest(name) == _digest("scalar")


def _digest(name: str) -> str:
    environment = {**os.environ, "SPECRT_KERNELS": name}
    done = subprocess.run(
        [sys.executable, "-m", "kernels.matmul_digest"], cwd=REPOSITORY / "tests",
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def test_sessions_are_opened_and_run_by_several_threads_at_once() -> None:
    x = rows_of(9, 128)

    def once(seed: int) -> bool:
        weights = stored("int8", 80, 128, 32, seed=seed % 3)
        run = matmul(weights)
        first = run(x)
        return all(np.array_equal(run(x), first) for _ in range(20))

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(once, range(12)))


@pytest.mark.parametrize(("inputs", "block"), [(64, 24), (96, 64), (131072, 131072)])
def test_blocks_that_no_kernel_sums_are_refused(inputs: int, block: int) -> None:
    weights = stored("int8", 16, 64, 32)
    attributes = {**weights.attributes, "K": inputs, "block_size": block}
    with pytest.raises(Exception, match=f"in blocks of {block}"):
        session(
            "MatMul", {"x": (1, [1, "T", inputs])}, {"y": 1}, (weights.tiles,), activation="none",
            exact=0, **attributes,
        )  # fmt: skip


def test_weights_of_another_size_are_refused() -> None:
    weights = stored("int8", 32, 64, 32)
    short = stored("int8", 16, 64, 32)
    opened = session(
        "MatMul", {"x": (1, [1, "T", 64])}, {"y": 1}, (short.tiles,), activation="none", exact=0,
        **weights.attributes,
    )  # fmt: skip
    with pytest.raises(Exception, match="another size"):
        opened.run(None, {"x": np.zeros((1, 1, 64), np.float32)})
