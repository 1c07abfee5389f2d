"""Products of the CPU kernels: what they come to, and that nothing but the row decides it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from specrt_export.lower.lazy_tensor import in_memory
from specrt_export.lower.tiles import tiled_floats
from support.kernels import Norm, Stored, matmul, session, stored

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


def check_products(weights: Stored, widths: Sequence[int]) -> None:
    """Hold products of rows to those in float64, with a bias and without, and exact ones."""
    outputs, inputs = weights.dense.shape
    bias = np.linspace(-1, 1, outputs, dtype=np.float32)
    run, biased, exact = matmul(weights), matmul(weights, bias), matmul(weights, exact=True)
    for width in widths:
        x = rows_of(width, inputs)
        expected = product(weights, x)
        close(run(x), expected)
        close(biased(x), expected + bias)
        if weights.block:
            close(exact(x), x.astype(np.float64) @ weights.dense.T)


@formats
def test_products_are_those_of_the_codes(
    format_: str, outputs: int, inputs: int, block: int
) -> None:
    check_products(stored(format_, outputs, inputs, block), (1, 2, 5, 9, 40))


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


@pytest.mark.parametrize(
    "format_", ["int4", "int4-zeros", "int4-minimums", "int8-zeros", "int8-minimums", "fp4", "fp8"]
)
def test_scales_that_fp16_does_not_hold_are_fp32(format_: str) -> None:
    """Of five blocks, as those of int4 share zeros by two."""
    check_products(stored(format_, 104, 80, 16, scale=1e6), (1, 5, 9))


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


def identity_of(inputs: int) -> Stored:
    """Return weights whose products show what was multiplied."""
    tiles = tiled_floats(in_memory("w", np.eye(inputs, dtype="f4")))
    return replace(stored("fp32", inputs, inputs, 0), tiles=tiles)


@pytest.mark.parametrize("inputs", [100, 256, 1284])
def test_norms_are_those_of_the_formula_and_of_onnx_runtime(inputs: int) -> None:
    """Within 16 roundings of the largest number that goes in, as it is scaled.

    Sums of some 160 numbers in a lane have more of them, most of which cancel. A product with the
    identity in fp32 shows what was multiplied.
    """
    identity, x = identity_of(inputs), rows_of(40, inputs) + 3
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
def test_a_row_has_the_same_bits_in_any_company(
    format_: str, outputs: int, inputs: int, block: int
) -> None:
    """Normed or not; what is normed is multiplied as the same row is that was normed before."""
    weights, x = stored(format_, outputs, inputs, block), rows_of(40, inputs)
    alone, identity = matmul(weights, threads=1), identity_of(inputs)
    residual = rows_of(41, inputs)[1:]
    for norm in (None, *norms(inputs)):
        given = (x, residual) if norm and norm.has_residual else (x,)
        shown = first_of(matmul(identity, norm=norm, threads=1)(*given)) if norm else x
        rows = np.concatenate([alone(shown[i : i + 1]) for i in range(40)])
        run, exact = matmul(weights, norm=norm), matmul(weights, norm=norm, exact=True)
        for width in (*range(1, 10), 13, 17, 33, 40):
            for part in (slice(width), slice(-width, None)):
                found = first_of(run(*(value[part] for value in given)))
                assert np.array_equal(found, rows[part]), (norm, width)
        many = [np.concatenate([value] * 14) for value in given]  # more than are read at a time
        assert np.array_equal(first_of(run(*many)), np.concatenate([rows] * 14))
        assert first_of(run(*(value[:0] for value in given))).shape == (0, outputs)
        if norm:
            close(first_of(exact(*given)), shown @ weights.dense.T)


def first_of(made: Any) -> NDArray[Any]:
    """Return y of what an operator makes."""
    return np.asarray(made[0] if isinstance(made, list) else made)


ROWS, NORM = (1, ["T", None]), (1, [None])
LEFT_OUT: dict[str, Any] = {" ": (0, []), "  ": (0, [])}
HALF = {"x": np.ones((1, 64), np.float32)}


@pytest.mark.parametrize(
    ("inputs", "feeds", "attributes", "said"),
    [
        ({}, {}, {"K": 64, "block_size": 24}, "in blocks of 24"),
        ({}, {}, {"K": 96, "block_size": 64}, "in blocks of 64"),
        ({}, {}, {"K": 131072, "block_size": 131072}, "in blocks of 131072"),
        ({}, HALF, {"N": 32, "K": 64, "block_size": 32}, "another size"),
        ({}, HALF, {"K": 64, "norm": "rms"}, "norm of another size"),
        ({**LEFT_OUT, "weight": NORM}, HALF | {"weight": np.ones(63, np.float32)},
         {"K": 64, "norm": "rms"}, "norm"),
        ({**LEFT_OUT, "weight": NORM}, HALF | {"weight": np.ones(64, np.float32)},
         {"K": 64, "norm": "mean"}, "norm"),
        ({**LEFT_OUT, "weight": NORM}, HALF | {"weight": np.ones(64, np.float32)},
         {"K": 64, "norm": "rms", "sum": True}, "sum without a residual"),
    ],
)  # fmt: skip
def test_products_of_other_sizes_are_refused(
    inputs: dict[str, Any], feeds: dict[str, Any], attributes: dict[str, Any], said: str
) -> None:
    """Of weights [16, K] or of what a graph says they are."""
    format_ = "int8" if "block_size" in attributes else "fp32"
    weights = stored(format_, 16, 64, 32 if format_ == "int8" else 0)
    options = {**weights.attributes, "activation": "none", "exact": 0, "norm": "none",
               "epsilon": 1e-5, **attributes}  # fmt: skip
    outputs = {"y": 1, **({"sum": 1} if options.pop("sum", False) else {})}
    with pytest.raises(Exception, match=said):
        session("MatMul", {"x": ROWS, **inputs}, outputs, (weights.tiles,), **options).run(
            None, feeds
        )


@pytest.mark.parametrize("outputs", [-1, 1 << 60])
def test_tables_of_sizes_that_none_has_are_refused(outputs: int) -> None:
    tiles = in_memory("tiles", np.zeros((0, 1024), np.uint8))
    sizes: dict[str, Any] = {"N": outputs, "K": 16, "block_size": 0, "format": "fp32"}
    with pytest.raises(Exception, match=f"has N {outputs}"):
        session("Embedding", {"tokens": (TensorProto.INT64, [None])}, {"y": 1}, (tiles,), **sizes)


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


def test_sessions_are_opened_and_run_by_several_threads_at_once() -> None:
    x = rows_of(9, 128)

    def once(seed: int) -> bool:
        weights = stored("int8", 80, 128, 32, seed=seed % 3)
        run = matmul(weights)
        first = run(x)
        return all(np.array_equal(run(x), first) for _ in range(20))

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(once, range(12)))
