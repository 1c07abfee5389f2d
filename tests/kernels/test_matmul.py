"""Products of the CPU kernels: what they come to, and that nothing but the row decides it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from shared import REPOSITORY
from specrt_export.lower.lazy_tensor import in_memory
from specrt_export.lower.tiles import tiled_floats
from support.kernels import Norm, Stored, instruction_sets, matmul, session, stored

FORMATS = [
    ("int4", 96, 256, 32),
    ("int4", 40, 384, 128),
    ("int4", 16, 64, 16),
    ("int8", 96, 256, 64),
    ("int8", 33, 128, 32),
    ("int4-zeros", 96, 256, 32),
    ("int4-zeros", 40, 384, 384),
    ("int4-minimums", 96, 256, 32),
    ("int4-minimums", 33, 64, 16),
    ("int8-zeros", 50, 384, 128),
    ("int8-zeros", 16, 1024, 512),
    ("int8-minimums", 96, 256, 32),
    ("fp4", 96, 256, 32),
    ("fp4", 33, 64, 16),
    ("fp8", 96, 256, 128),
    ("fp8", 40, 48, 48),
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
    if not weights.block or weights.format == "fp8":
        return x.astype(np.float64) @ weights.dense.T.astype(np.float64)
    blocks = x.reshape(len(x), -1, weights.block)
    most = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, where=most > 0, out=np.zeros_like(most))
    codes = np.rint(blocks * inverse).astype(np.float64)
    rows = (codes * (most / np.float32(127))).reshape(x.shape)
    return np.asarray(rows @ weights.dense.T.astype(np.float64))


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
def test_a_row_that_is_looked_up_has_the_bits_of_the_weights(
    format_: str, outputs: int, inputs: int, block: int
) -> None:
    weights = stored(format_, outputs, inputs, block)
    tokens = np.random.default_rng(0).permutation(outputs)
    table = session(
        "Embedding", {"tokens": (TensorProto.INT64, [None])}, {"y": 1}, (weights.tiles,),
        **weights.attributes,
    )  # fmt: skip
    assert np.array_equal(table.run(None, {"tokens": tokens})[0], weights.dense[tokens])


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


def norms(inputs: int) -> list[Norm]:
    """Return norms of both kinds, with a residual and a bias or without."""
    rng = np.random.default_rng(inputs)
    weight, bias = (rng.standard_normal(inputs).astype(np.float32) for _ in range(2))
    return [
        Norm(kind, weight, bias if kind == "layer" or has_residual else None, epsilon, has_residual)
        for kind, epsilon in (("rms", 1e-6), ("layer", 1e-3))
        for has_residual in (False, True)
    ]


def normed(norm: Norm, x: NDArray[Any]) -> NDArray[np.float64]:
    """Norm rows in float64."""
    whole = x.astype(np.float64)
    if norm.kind == "layer":
        whole -= whole.mean(-1, keepdims=True)
    whole /= np.sqrt((whole**2).mean(-1, keepdims=True) + norm.epsilon)
    return whole * norm.weight + (0 if norm.bias is None else norm.bias)


@pytest.mark.parametrize("inputs", [100, 256, 2564])
def test_norms_are_those_of_the_formula_and_of_onnx_runtime(inputs: int) -> None:
    """Within 16 roundings of the largest number that goes in, as it is scaled.

    Sums of some 160 numbers in a lane have more of them, most of which cancel. A product with the
    identity in fp32 shows what was multiplied.
    """
    identity = stored("fp32", inputs, inputs, 0)
    identity = replace(identity, tiles=tiled_floats(in_memory("w", np.eye(inputs, dtype="f4"))))
    x = rows_of(40, inputs) + 3
    residual = rows_of(41, inputs)[1:]
    for norm in norms(inputs):
        run = matmul(identity, norm=norm)
        y, total = run(x, residual) if norm.has_residual else (run(x), x)
        if norm.has_residual:
            assert np.array_equal(total, x + residual)
        for expected in (normed(norm, total), by_onnx_runtime(norm, total)):
            spread = total.std(-1) if norm.kind == "layer" else np.sqrt((total**2).mean(-1))
            scaled = np.abs(total).max(-1) / np.sqrt(spread**2 + norm.epsilon)
            bound = 2.0**-20 * (scaled * np.abs(norm.weight).max() + 3)[:, None]
            assert (np.abs(y - expected) <= bound).all()


def by_onnx_runtime(norm: Norm, x: NDArray[Any]) -> NDArray[Any]:
    """Norm rows by ONNX Runtime's operators."""
    kind = "SimplifiedLayerNormalization" if norm.kind == "rms" else "LayerNormalization"
    node = helper.make_node(kind, ["x", "weight"], ["y"], axis=-1, epsilon=norm.epsilon)
    values = [helper.make_tensor_value_info(n, 1, None) for n in ("x", "weight", "y")]
    graph = helper.make_graph([node], "one", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    made = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = made.run(None, {"x": x, "weight": norm.weight})
    return np.asarray(y + (0 if norm.bias is None else norm.bias))


@formats
def test_a_row_is_normed_alike_in_any_company(
    format_: str, outputs: int, inputs: int, block: int
) -> None:
    """It is multiplied as the same row is that was normed before."""
    weights = stored(format_, outputs, inputs, block)
    identity = stored("fp32", inputs, inputs, 0)
    identity = replace(identity, tiles=tiled_floats(in_memory("w", np.eye(inputs, dtype="f4"))))
    x, residual = rows_of(40, inputs), rows_of(41, inputs)[1:]
    for norm in norms(inputs):
        given = (x, residual) if norm.has_residual else (x,)
        run, shown = matmul(weights, norm=norm), matmul(identity, norm=norm, threads=1)
        exact = matmul(weights, norm=norm, exact=True)
        first = matmul(weights)(first_of(shown(*given)))
        for width in (*range(1, 14), 17, 33, 40):
            part = [value[-width:] for value in given]
            assert np.array_equal(first_of(run(*part)), first[-width:]), width
            close(first_of(exact(*part)), first_of(shown(*part)) @ weights.dense.T)
        many = [np.concatenate([value] * 14) for value in given]  # more than are normed at a time
        assert np.array_equal(first_of(run(*many)), np.concatenate([first] * 14))


def first_of(made: Any) -> NDArray[Any]:
    """Return y of what an operator makes."""
    return np.asarray(made[0] if isinstance(made, list) else made)


def test_norms_of_another_size_are_refused() -> None:
    weights = stored("int8", 32, 64, 32)
    for wrong in (Norm("rms", np.ones(63, np.float32)), Norm("mean", np.ones(64, np.float32))):
        with pytest.raises(Exception, match="norm"):
            matmul(weights, norm=wrong)(rows_of(1, 64))


def one_product(inputs: dict[str, Any], outputs: dict[str, int], **attributes: Any) -> Any:
    """Open a product without a bias with fp32 weights [16, K]."""
    tiles = in_memory("tiles", np.zeros((1, 64 * attributes["K"]), np.uint8))
    attributes = {"N": 16, "block_size": 0, "format": "fp32", "activation": "none", "exact": 0,
                  "epsilon": 1e-5, **attributes}  # fmt: skip
    return session("MatMul", inputs, outputs, (tiles,), **attributes)


def test_norms_without_a_weight_and_sums_without_a_residual_are_refused() -> None:
    rows = (1, ["T", None])
    bare = one_product({"x": rows}, {"y": 1}, K=1, norm="rms")
    with pytest.raises(Exception, match="norm of another size"):
        bare.run(None, {"x": np.ones((2, 1), np.float32)})
    left_out = {" ": (0, []), "  ": (0, [])}
    alone = one_product(
        {"x": rows, **left_out, "weight": (1, [None])}, {"y": 1, "sum": 1}, K=16, norm="rms"
    )
    with pytest.raises(Exception, match="sum without a residual"):
        alone.run(None, {"x": np.ones((2, 16), np.float32), "weight": np.ones(16, np.float32)})


@pytest.mark.parametrize("outputs", [-1, 1 << 60])
def test_tables_of_sizes_that_none_has_are_refused(outputs: int) -> None:
    tiles = in_memory("tiles", np.zeros((0, 1024), np.uint8))
    with pytest.raises(Exception, match=f"has N {outputs}"):
        session(
            "Embedding", {"tokens": (TensorProto.INT64, [None])}, {"y": 1}, (tiles,),
            N=outputs, K=16, block_size=0, format="fp32",
        )  # fmt: skip


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
            exact=0, norm="none", epsilon=0.0, **attributes,
        )  # fmt: skip


def test_weights_of_another_size_are_refused() -> None:
    weights = stored("int8", 32, 64, 32)
    short = stored("int8", 16, 64, 32)
    opened = session(
        "MatMul", {"x": (1, [1, "T", 64])}, {"y": 1}, (short.tiles,), activation="none", exact=0,
        norm="none", epsilon=0.0, **weights.attributes,
    )  # fmt: skip
    with pytest.raises(Exception, match="another size"):
        opened.run(None, {"x": np.zeros((1, 1, 64), np.float32)})
