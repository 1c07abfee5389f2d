"""Engines of encoder-decoders: rows of different sources are what their portable graphs make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from lower.lowering import DIFFERS, Case, Lowering, lowered
from portable.zoo import ENCODER_DECODERS, Exported
from specrt.engine.ort.encoder_decoder_engine import EncoderDecoderEngine
from specrt.engine.protocol import ConditionedEngine, Feed
from specrt.errors import BuildError, EngineError
from specrt_export.check.equivalence import random_sources
from specrt_export.portable.graph import GraphRun

pytestmark = pytest.mark.export

Zoo = Callable[[str], Exported]
Array = NDArray[Any]

OFTEN = ("t5_untied", "bart_biased", "marian", "whisper")
ROWS, LENGTH, WIDTH = 3, 200, 64
"""Positions beyond the 128 that relative biases tell apart."""
LENGTHS = (180, 5, 33)


def families() -> list[Any]:
    """Return all families, those not of `OFTEN` nightly."""
    nightly = pytest.mark.nightly
    return [n if n in OFTEN else pytest.param(n, marks=nightly) for n in ENCODER_DECODERS]


def make(name: str, exported: Zoo, folder: Path, precision: str = "fp32") -> Case:
    """Lower a family for three rows."""
    most = 0 if "whisper" in name else 180
    return lowered(
        *exported(name).source, folder / "case", Lowering("ort-cpu", precision, batch=ROWS),
        max_length=LENGTH, max_source=most,
    )  # fmt: skip


@contextmanager
def opened(case: Case) -> Iterator[EncoderDecoderEngine]:
    """Open a lowered model, its products in fp32."""
    with case.compiler.score(case.lowered, WIDTH, exact=True) as engine:
        assert isinstance(engine, EncoderDecoderEngine)
        assert isinstance(engine, ConditionedEngine)
        yield engine


def sources_of(reference: GraphRun, lengths: tuple[int, ...] = LENGTHS) -> list[Array]:
    assert reference.source is not None
    encodes = reference.source.encodes
    return random_sources(reference.source.geometry, lengths, encodes=encodes)


def tokens_of(engine: EncoderDecoderEngine, seed: int = 1) -> Array:
    shape = (ROWS, LENGTH)
    return np.random.default_rng(seed).integers(0, engine.geometry.vocab_size, shape)


def fill(engine: EncoderDecoderEngine, sources: list[Array]) -> None:
    for row, source in enumerate(sources):
        engine.condition(row, source)


@pytest.mark.parametrize("name", families())
@pytest.mark.parametrize(
    "precision", ["fp32", "int8", pytest.param("int4", marks=pytest.mark.nightly)]
)
def test_engines_are_their_graphs(name: str, precision: str, exported: Zoo, tmp_path: Path) -> None:
    """Ragged sources, rows of lengths of their own, rolled back, over stale keys."""
    assert make(name, exported, tmp_path, precision).error() < 1e-5


@pytest.mark.parametrize("name", ["t5_untied", "whisper"])
def test_a_row_has_the_same_bits_in_any_company(name: str, exported: Zoo, tmp_path: Path) -> None:
    case = make(name, exported, tmp_path, "int8")
    sources = sources_of(GraphRun(case.source.graph, case.source.weights))
    with case.compiler.score(case.lowered, WIDTH) as engine:
        assert isinstance(engine, EncoderDecoderEngine)
        fill(engine, sources)
        tokens = tokens_of(engine)
        together = engine.forward(tokens[:, :20], 0).logits.copy()
        for row in range(ROWS):
            for at in range(20):
                (alone,) = engine.forward_rows([Feed(row, [int(tokens[row, at])], at, 1)])
                np.testing.assert_array_equal(alone.logits[0, 0], together[row, at])


def test_what_is_no_source_is_refused_and_the_row_keeps_its_own(
    exported: Zoo, tmp_path: Path
) -> None:
    case = make("bart", exported, tmp_path)
    with opened(case) as engine:
        with pytest.raises(EngineError, match="given a source; call condition"):
            engine.forward_rows([Feed(1, [3], 0, 1)])
        source = np.arange(9)
        fill(engine, [source] * ROWS)
        tokens = tokens_of(engine)[:, :5]
        before = engine.forward(tokens, 0).logits.copy()
        wrong: list[tuple[Any, str]] = [
            (np.zeros(0, np.int64), "0 tokens"),
            (np.zeros(181, np.int64), "181 tokens .* 1 to 180: .* max_source"),
            (np.zeros((1, 4), np.int64), "in one row"),
            (np.zeros(4, np.float32), "type float32"),
            (np.array([3, 10**6]), "of length 2"),
        ]
        for one, said in wrong:
            with pytest.raises(EngineError, match=said):
                engine.condition(0, one)
        with pytest.raises(EngineError, match="row 3; expected a row from 0 to 2"):
            engine.condition(3, source)
        np.testing.assert_array_equal(engine.forward(tokens, 0).logits, before)
    with pytest.raises(EngineError, match="closed"):
        engine.condition(0, source)


def test_features_of_another_shape_are_refused(exported: Zoo, tmp_path: Path) -> None:
    with opened(make("whisper", exported, tmp_path)) as engine:
        for wrong in (np.zeros((6, 39), np.float32), np.zeros((6, 40), np.int64), np.arange(9)):
            with pytest.raises(EngineError, match=r"float32 and shape \[6, 40\]"):
                engine.condition(0, wrong)


def attentions(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "CrossAttention"]


def add(model: onnx.ModelProto, op_type: str, inputs: list[str], output: str) -> str:
    """Put an operation before all others."""
    model.graph.node.insert(0, helper.make_node(op_type, inputs, [output]))
    return output


def zero(model: onnx.ModelProto) -> str:
    model.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "zero"))
    return "zero"


def source_of_row_0(model: onnx.ModelProto) -> None:
    """Let every token attend to the source of the first row."""
    slots = add(model, "Mul", ["slots", zero(model)], "first")
    for node in attentions(model):
        node.input[3] = slots


def length_of_the_longest(model: onnx.ModelProto) -> None:
    """Let every row see as many positions of its source as the longest has."""
    add(model, "Add", ["longest", "none"], "lengths")
    add(model, "Mul", ["source_lengths", zero(model)], "none")
    model.graph.node.insert(0, helper.make_node("ReduceMax", ["source_lengths"], ["longest"]))
    for node in attentions(model):
        node.input[4] = "lengths"


def bias_of_another_row(model: onnx.ModelProto) -> None:
    """Add to scores the bias of a query one further on."""
    for name in {n.input[i] for n in model.graph.node for i in range(len(n.input))}:
        if name.endswith(".table") and "biases" in name:
            table = next(t for t in model.graph.initializer if t.name == name)
            turned = np.roll(numpy_helper.to_array(table), -1, axis=1)
            table.CopyFrom(numpy_helper.from_array(turned, name))


@pytest.mark.parametrize("change", [source_of_row_0, length_of_the_longest, bias_of_another_row])
def test_another_rows_source_length_or_bias_is_seen(
    change: Callable[[onnx.ModelProto], None], exported: Zoo, tmp_path: Path
) -> None:
    case = make("t5", exported, tmp_path)
    model = onnx.load(case.lowered.folder / "engine.onnx")
    before = model.SerializeToString(deterministic=True)
    change(model)
    assert model.SerializeToString(deterministic=True) != before
    case.save(model)
    with pytest.raises(BuildError, match=DIFFERS):
        case.error()
