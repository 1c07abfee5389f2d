"""Engines of several rows, packed: every architecture, each row as if it were alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from export.zoo import Exported, architectures
from lower.comparing import equal_on_cpu
from specrt.engine import ort_packed
from specrt.engine.backends import open_engine
from specrt.engine.ort_packed import Packing, RowSlice, pack
from specrt.engine.protocol import Feed, PackedEngine
from specrt.errors import BuildError
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu
from specrt_export.lower.attention import FusedAttention, fuse_attention
from specrt_export.lower.lazy_tensor import stored_weights
from specrt_export.lower.ort_lowering import OrtTarget, lower
from specrt_export.lower.view import GraphView
from specrt_export.portable.graph import GraphRun, geometry_of, read_graph, runs_here

needs_reference = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)
MAX_LENGTH = 64
OUTSIDE = {"llama3": 2, "smollm3": 1, "mistral": 2, "gpt_neox": 2}
"""Layers whose heads of 8 are rotated outside attention, of some."""
_FUSE = "specrt_export.lower.ort_lowering.fuse_attention"


def built(one: Exported, folder: Path, batch: int) -> PackedEngine:
    """Compile an engine of several rows, and open it."""
    compiled = compile_ort_cpu(
        one.graph.path, one.checkpoint.folder, folder, MAX_LENGTH, batch=batch
    )
    engine = open_engine(
        "ort-cpu", folder / "engine.onnx", compiled.geometry, batch=batch, max_length=MAX_LENGTH,
        max_width=32, threads=1,
    )  # fmt: skip
    assert isinstance(engine, PackedEngine)
    return engine


def feeds_of(texts: Sequence[Sequence[int]], passes: int) -> list[list[tuple[int, int, int]]]:
    """Return (row, begin, end) of passes: any rows in any order, some rolled back, to the end."""
    rng, lengths = np.random.default_rng(0), [0] * len(texts)
    made = []
    for _ in range(passes):
        some = rng.permutation(len(texts))[: rng.integers(1, len(texts) + 1)].tolist()
        spans = []
        for row in some:
            if lengths[row] == MAX_LENGTH or rng.random() < 0.2:
                lengths[row] = int(rng.integers(0, lengths[row])) if lengths[row] else 0
            begin = lengths[row]
            end = min(MAX_LENGTH, begin + int(rng.choice([1, 1, 2, 3, 5, 20])))
            spans.append((row, begin, end))
            lengths[row] = end
        made.append(spans)
    return made


@needs_reference
@pytest.mark.export
@pytest.mark.parametrize("name", architectures())
def test_rows_of_any_widths_are_equal_to_rows_alone(
    name: str, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    one, batch = exported(name), 3
    rng = np.random.default_rng(1)
    texts = rng.integers(0, one.graph.geometry.vocab_size, (batch, MAX_LENGTH))
    reference = GraphRun(one.graph.path, one.checkpoint.folder)
    reference.reset(batch, MAX_LENGTH)
    wanted, best = reference(texts, [0] * batch, range(MAX_LENGTH))
    engine = built(one, tmp_path, batch)
    worst = []
    for spans in feeds_of(texts.tolist(), 24):
        feeds = [Feed(row, texts[row, a:b].tolist(), a, b - a) for row, a, b in spans]
        made = engine.forward_rows(feeds)
        for (row, a, b), output in zip(spans, made, strict=True):
            np.testing.assert_array_equal(output.argmax[0], best[row, a:b])
            error = np.abs(output.logits[0] - wanted[row, a:b]).max()
            worst.append(error / np.ptp(wanted[row, a:b]))
    assert max(worst) < 1e-5
    engine.close()


@pytest.mark.export
@pytest.mark.parametrize("batch", [2, 5])
@pytest.mark.parametrize("name", architectures("llama3", "qwen3", "gpt2", "smollm3"))
def test_attention_alone_is_taken_apart(
    name: str, batch: int, exported: Callable[[str], Exported]
) -> None:
    one = exported(name)
    portable = read_graph(one.graph.path)
    weights = stored_weights(portable, one.checkpoint.folder)
    target = OrtTarget(geometry_of(portable), MAX_LENGTH)
    alone = lower(portable, weights, target)
    made = lower(portable, weights, dataclasses.replace(target, batch=batch))
    assert made.fused == {**alone.fused, "packed": "2/2"}
    found = Counter(n.op_type for n in made.model.graph.node)
    assert found["GroupQueryAttention"] == 2 * batch
    assert found["Concat"] == 2
    assert not found.keys() & {"Attention", "TensorScatter", "Range", "Shape"}
    assert {o.domain: o.version for o in made.model.opset_import}[""] == 21
    names = {i.name for i in made.model.graph.input}
    assert {f"{kind}.1.{row}" for kind in ("key", "value") for row in range(batch)} <= names
    assert ("positions" in names) == (name in OUTSIDE or name == "gpt2")
    used = {name for node in made.model.graph.node for name in node.input}
    assert names <= used


@needs_reference
@pytest.mark.export
@pytest.mark.parametrize("name", architectures("mistral", "gpt2"))
def test_a_build_holds_rows_of_all_widths_to_the_graph(
    name: str, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    one = exported(name)
    graph, checkpoint = one.graph.path, one.checkpoint.folder
    compiled = compile_ort_cpu(graph, checkpoint, tmp_path, MAX_LENGTH, batch=4)
    assert equal_on_cpu((graph, checkpoint), compiled, MAX_LENGTH, [1, 5], 4) < 1e-5


def _tokens_of_the_neighbour(made: Packing) -> Packing:
    return dataclasses.replace(made, kept=np.roll(made.kept, 1))


def _attention_of_the_neighbour(made: Packing) -> Packing:
    return dataclasses.replace(made, spread=made.spread[::-1].copy())


@needs_reference
@pytest.mark.export
@pytest.mark.parametrize("wrong", [_tokens_of_the_neighbour, _attention_of_the_neighbour])
def test_tokens_in_a_wrong_place_are_found_by_a_build(
    wrong: Callable[[Packing], Packing],
    exported: Callable[[str], Exported],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def misled(batch: int, parts: tuple[RowSlice, ...], places: int, pad_to_even: bool) -> Packing:
        return wrong(pack(batch, parts, places, pad_to_even))

    one = exported("llama3")
    graph, checkpoint = one.graph.path, one.checkpoint.folder
    compiled = compile_ort_cpu(graph, checkpoint, tmp_path, MAX_LENGTH, batch=2)
    monkeypatch.setattr(ort_packed, "pack", misled)
    with pytest.raises(BuildError, match="differs from the portable graph"):
        equal_on_cpu((graph, checkpoint), compiled, MAX_LENGTH, [1, 5], 2)


@needs_reference
@pytest.mark.export
def test_a_build_finds_rows_that_only_work_when_all_are_fed(
    exported: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_the_idle(
        batch: int, parts: tuple[RowSlice, ...], places: int, pad_to_even: bool
    ) -> Packing:
        made = pack(batch, parts, places, pad_to_even)
        idle = len(parts) < batch
        return dataclasses.replace(made, kept=made.kept * 0) if idle else made

    one = exported("llama3")
    graph, checkpoint = one.graph.path, one.checkpoint.folder
    compiled = compile_ort_cpu(graph, checkpoint, tmp_path, MAX_LENGTH, batch=3)
    monkeypatch.setattr(ort_packed, "pack", without_the_idle)
    with pytest.raises(BuildError, match="differs from the portable graph"):
        equal_on_cpu((graph, checkpoint), compiled, MAX_LENGTH, [1, 5], 3)


def draft(engines: Path) -> tuple[onnx.ModelProto, Path]:
    folder = engines / "codelet"
    return read_graph(folder / "portable" / "draft.onnx"), folder / "checkpoint" / "draft"


def refused(engines: Path) -> str:
    """Lower codelet's draft for two rows; return why that is refused."""
    portable, checkpoint = draft(engines)
    target = OrtTarget(geometry_of(portable), MAX_LENGTH, batch=2)
    with pytest.raises(BuildError) as caught:
        lower(portable, stored_weights(portable, checkpoint), target)
    return str(caught.value)


def test_attention_that_is_not_fused_is_refused(
    engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_FUSE, lambda *_: FusedAttention(0, 0, 0))
    said = refused(engines)
    assert "cannot run several rows in one pass" in said
    assert "Attention" in said
    assert "batch = 1" in said


def test_positions_that_are_not_recognised_are_refused(
    engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(view: GraphView, *rest: object) -> FusedAttention:
        found = fuse_attention(view, *rest)  # type: ignore[arg-type]
        view.replace("input_ids", "moved")
        view.add("Add", ["input_ids", "start"], outputs=["moved"])
        return found

    monkeypatch.setattr(_FUSE, hidden)
    assert "its positions are of a kind that lowering does not know (Add)" in refused(engines)


@needs_reference
@pytest.mark.export
@pytest.mark.parametrize("name", architectures("mistral", "qwen3", "gpt2"))
def test_rows_side_by_side_may_be_longer_than_the_context(
    name: str, exported: Callable[[str], Exported], tmp_path: Path
) -> None:
    engine = built(exported(name), tmp_path, 3)
    tokens = np.ones((3, 32), np.int64)
    for begin in (0, 32):
        made = engine.forward(tokens, begin, 1)
    np.testing.assert_array_equal(made.logits[0], made.logits[2])
    engine.close()
