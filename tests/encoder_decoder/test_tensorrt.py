"""Encoder-decoders on TensorRT: real plans, and requests over doubles that run what these mean."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import specrt
from encoder_decoder.recipes import MAX_SOURCE
from lower.lowering import DIFFERS, GRAPHS, NEW, OLD, Case, Lowering, findings, lowered, spoil
from portable.zoo import ENCODER_DECODERS, Exported
from specrt.bundle import Bundle
from specrt.engine.protocol import ConditionedEngine, Feed, PaddedRows
from specrt.engine.tensorrt import engine as opening
from specrt.engine.tensorrt.engine_record import read_engine_record
from specrt.engine.tensorrt.library import NATIVE
from specrt.engine.tensorrt.passes import SourceBuffer
from specrt.engine.tensorrt.tensorrt_encoder_decoder import HiddenStates, TensorRtEncoderDecoder
from specrt.errors import BuildError, BundleError, EngineError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt_export.lower import tensorrt_encoder, tensorrt_lowering
from support.gpu_double import MADE, RTX, GraphMachine

pytestmark = pytest.mark.export

Built = Callable[..., Path]
Zoo = Callable[[str], Exported]
Load = Callable[..., Generator]

Array = NDArray[Any]

nightly = pytest.mark.nightly


@pytest.fixture(scope="session")
def planned(built: Built) -> Built:
    """Build a bundle of plans; the graphs that they were made of are kept next to it."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: nothing is built")
    return partial(built, backend=RTX, batch=2)


@pytest.fixture
def load(gpu: GraphMachine, planned: Built) -> Load:
    """Open a bundle of plans on that machine."""
    return lambda *names, **how: gpu.load(planned(*names, **how))


def sources_of(bundle: Path) -> list[Any]:
    """Return sources of different lengths, the first and the last the same."""
    encoder = Bundle.open(bundle).manifest.target.encoder
    assert encoder is not None
    rng = np.random.default_rng(2)
    if encoder.features:
        shape = encoder.features, encoder.frames
        made = [rng.standard_normal(shape).astype(np.float32) for _ in range(3)]
    else:
        made = [rng.integers(8, 100, length).tolist() for length in (MAX_SOURCE, 1, 23, 64)]
    return [*made, made[0]]


def answers(generator: Generator, sources: Sequence[Any]) -> list[list[int]]:
    """Return texts, one after the other and on all rows, with and without speculation."""
    found = []
    for settings in ({"no_repeat_ngram_size": 2}, {"temperature": 0.8, "seed": 3}):
        params = SamplingParams(max_tokens=24, ignore_eos=True, **settings)
        for gamma in (0, 3):
            found += [generator.generate(s, params, gamma=gamma).token_ids for s in sources]
        many = generator.generate_many(sources, params, gamma=1)
        found += [one.token_ids for (one,) in many]
    return found


PAIRS = [
    pytest.param(("t5", "t5"), 1, "", id="one encoder, one row"),
    pytest.param(("bart", "mbart"), 2, "", id="two encoders"),
    pytest.param(("t5", "t5"), 2, "10.3", id="decomposed", marks=nightly),
    pytest.param(("whisper", "whisper_draft"), 2, "", id="speech", marks=nightly),
]


@pytest.mark.parametrize(("names", "batch", "version"), PAIRS)
def test_texts_are_those_of_a_cpu(
    built: Built, load: Load, planned: Built, names: tuple[str, ...], batch: int, version: str
) -> None:
    """Sources of different lengths, of which one comes again, and rows that are padded."""
    sources = sources_of(built(*names))
    with specrt.load(built(*names), threads=1, text_memory_bytes=0) as generator:
        wanted = answers(generator, sources)
    with load(*names, batch=batch, version=version) as generator:
        assert answers(generator, sources) == wanted
        target, draft = generator.models.target, generator.models.draft
        assert isinstance(target, TensorRtEncoderDecoder)
        assert isinstance(target, ConditionedEngine)
        assert isinstance(draft, TensorRtEncoderDecoder)
        # A draft that shares an encoder reads what the target's left.
        assert (draft.hidden is target.hidden) is (names[1] != "mbart")
        assert (generator.models.rounds is not None) is (batch == 1)
    assert len(set(map(tuple, wanted))) > 5
    folder = planned(*names, batch=batch, version=version)
    assert (folder / "draft" / "encoder.plan").exists() is (names[1] == "mbart")


def row_of_another(patched: pytest.MonkeyPatch) -> None:
    keep = SourceBuffer.keep
    patched.setattr(SourceBuffer, "keep", lambda self, row, *rest: keep(self, 0, *rest))


def states_of_another(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(HiddenStates, "copy_row", lambda *_: None)
    patched.setattr(SourceBuffer, "copy_row", lambda *_: None)


def prefix_stays(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(PaddedRows, "copy_row", lambda *_: None)


def test_rows_keep_their_sources(load: Load) -> None:
    """Copied with a row, replaced by a shorter one, and the engine's own where a pass is."""
    with load("bart", "mbart") as generator:
        engine = generator.models.target
        assert isinstance(engine, TensorRtEncoderDecoder)
        rng = np.random.default_rng(5)
        long, short = rng.integers(0, 160, MAX_SOURCE), rng.integers(0, 160, 7)
        text, other = rng.integers(0, 160, (2, 20)).tolist()

        def scores() -> list[Array]:
            engine.condition(0, long)
            engine.condition(1, short)
            engine.forward_rows([Feed(0, text[:15], 0, 1), Feed(1, other[:12], 0, 1)])
            engine.copy_row(0, 1, 15)
            feeds = [Feed(0, text[15:17], 15, 2), Feed(1, text[15:19], 15, 4)]
            found = [output.logits[0].copy() for output in engine.forward_rows(feeds)]
            for row in (0, 1):
                engine.condition(row, short)
                (output,) = engine.forward_rows([Feed(row, text, 0, 4)])
                found.append(output.logits[0].copy())
            return found

        right = scores()
        assert np.abs(right[0] - right[1][:2]).max() < 1e-5
        assert np.abs(right[2] - right[3]).max() < 1e-5
        for broken in (row_of_another, states_of_another, prefix_stays):
            with pytest.MonkeyPatch.context() as patched:
                broken(patched)
                found = scores()
            errors = [np.abs(a - b).max() for a, b in zip(found, right, strict=True)]
            assert max(errors) > 1e-2, broken


def test_a_pass_that_ran_already_is_not_that_of_another_source(load: Load) -> None:
    """A fused round leaves the scores of its verify pass for one that is the same."""
    with load("t5", "t5", batch=1) as generator:
        engine = generator.models.target
        assert isinstance(engine, TensorRtEncoderDecoder)
        engine.condition(0, [9, 8, 7])
        scores = engine.forward([[5, 6]], 0)
        first = scores.logits.copy()
        engine.finish([5, 6], 0, scores)
        engine.condition(0, [20, 30, 40, 50])
        assert np.abs(engine.forward([[5, 6]], 0).logits - first).max() > 1e-2


def test_what_is_no_source_is_refused(gpu: GraphMachine, load: Load) -> None:
    """The row keeps its own; a failure of the device ends the engine."""
    with load("bart", "mbart") as generator:
        engine, draft = generator.models.target, generator.models.draft
        assert isinstance(engine, TensorRtEncoderDecoder)
        assert isinstance(draft, TensorRtEncoderDecoder)
        with pytest.raises(EngineError, match="given a source; call condition"):
            engine.forward_rows([Feed(1, [3], 0, 1)])
        engine.condition(1, np.arange(9))
        before = engine.forward_rows([Feed(1, [3, 4], 0, 2)])[0].logits.copy()
        wrong: list[tuple[Any, str]] = [
            (np.zeros(0, np.int64), "0 tokens"),
            (np.zeros(MAX_SOURCE + 1, np.int64), "181 tokens .* 1 to 180: .* max_source"),
            (np.zeros((1, 4), np.int64), "in one row"),
            (np.zeros(4, np.float32), "type float32"),
            (np.array([3, 160]), "from 3 to 160 .* 0 to 159"),
        ]
        for one, said in wrong:
            with pytest.raises(EngineError, match=said):
                engine.condition(1, one)
        with pytest.raises(EngineError, match="row 2; expected a row from 0 to 1"):
            engine.condition(2, np.arange(9))
        after = engine.forward_rows([Feed(1, [3, 4], 0, 2)])[0].logits
        np.testing.assert_array_equal(after, before)
        gpu.cuda.fail("execute_async_v3")
        with pytest.raises(EngineError, match="does not run"):
            engine.condition(0, np.arange(9))
        gpu.cuda.fails = {}
        for again in (lambda: engine.condition(0, [3]), lambda: engine.copy_row(0, 1, 3)):
            with pytest.raises(EngineError, match="an earlier pass failed"):
                again()
    with pytest.raises(EngineError, match="closed"):
        engine.condition(0, np.arange(9))


def test_a_draft_without_an_encoder_reads_its_targets(load: Load) -> None:
    with load("t5", "t5", batch=1) as generator:
        target, draft = generator.models.target, generator.models.draft
        assert isinstance(draft, TensorRtEncoderDecoder)
        with pytest.raises(EngineError, match="give it to the target first"):
            draft.condition(0, [3])
        assert isinstance(target, TensorRtEncoderDecoder)
        target.condition(0, [3, 4])
        draft.condition(0, [3, 4])
        assert draft.lengths == target.lengths == [2]
        target.close()
        with pytest.raises(EngineError, match="closed"):
            draft.condition(0, [3, 4])


def test_parts_that_do_not_belong_together_are_refused(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = opening.read_engine_record

    def other(path: Path, text: bytes | None = None) -> Any:
        path = path.with_name("engine.json") if path.name == "cross.json" else path
        return read(path) if path.name == "engine.json" else read(path, text)

    monkeypatch.setattr(opening, "read_engine_record", other)
    with pytest.raises((BundleError, EngineError), match=r"cross.plan is not the plan"):
        load("bart", "mbart")


MATRIX = [
    pytest.param(name, precision, marks=() if (name, precision) in often else nightly)
    for often in [{("whisper", "int8")}]
    for name in ("t5", "t5_untied", "umt5", "bart", "mbart", "marian", "whisper")
    for precision in ("fp16", "bf16", "int8", "int4")
]


@pytest.mark.parametrize(("name", "precision"), MATRIX)
def test_plans_of_all_graphs_are_built(planned: Built, name: str, precision: str) -> None:
    """And the library, of the version that parses them, has nothing against the graphs."""
    bundle = planned(name, precision=precision)
    model = Bundle.open(bundle).manifest.target
    compute = "bf16" if precision == "bf16" else "fp16"
    assert model.encoder is not None
    assert (model.encoder.cross, model.encoder.encoder) == (
        "target/cross.plan", "target/encoder.plan",
    )  # fmt: skip
    sizes = 0
    for part in GRAPHS:
        record = read_engine_record(bundle / "target" / f"{part}.json")
        plan = bundle / "target" / f"{part}.plan"
        assert (record.form, record.compute) == (NATIVE, compute)
        assert record.part == (part if part != "engine" else "")
        assert record.plan_bytes == plan.stat().st_size
        assert record.source is not None
        assert record.source.positions == model.encoder.max_source
        sizes += record.weight_bytes
    assert model.weight_bytes == sizes
    assert findings(bundle.parent / MADE / "target") == []


def case_of(name: str, exported: Zoo, folder: Path, **how: Any) -> Case:
    most = 0 if "whisper" in name else 180
    lowering = Lowering("tensorrt", batch=2, **how)
    return lowered(
        *exported(name).source, folder / "case", lowering, max_length=200, max_source=most
    )


FORMS = [
    pytest.param(name, version, marks=() if name in ("t5", "whisper") else nightly)
    for version in (NEW, OLD)
    for name in ENCODER_DECODERS
]


@pytest.mark.parametrize(("name", "version"), FORMS)
def test_lowered_graphs_are_their_portable_ones(
    name: str, version: str, exported: Zoo, tmp_path: Path
) -> None:
    """Ragged sources, rows at lengths of their own, over stale keys, at the end of the buffers."""
    case = case_of(name, exported, tmp_path, version=version)
    assert case.error() < 1e-5
    assert findings(case.lowered.folder, (11, 0) if version == NEW else (10, 3)) == []


def test_a_part_that_makes_something_else_is_refused(exported: Zoo, tmp_path: Path) -> None:
    case = case_of("bart", exported, tmp_path)
    spoil(case.lowered.folder / "cross.onnx", "cross_value.1")
    with pytest.raises(BuildError, match=DIFFERS):
        case.error()


def test_products_beyond_fp16_are_kept(
    exported: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T5's feed-forward layers, whose products end beyond 65504 in trained models."""
    folder = tmp_path / "large"
    shutil.copytree(exported("t5").checkpoint.folder, folder)
    grow(folder, 1e5)
    source = exported("t5").graph, folder
    lowering = Lowering("tensorrt", "fp16", batch=2)
    sizes = {"max_length": 64, "max_source": 40}
    assert lowered(*source, tmp_path / "kept", lowering, **sizes).error() < 1e-2
    for module in (tensorrt_encoder, tensorrt_lowering):
        monkeypatch.setattr(module, "exact_modules", lambda graph: ())
    with pytest.raises(BuildError, match="In fp16 the model may overflow"):
        lowered(*source, tmp_path / "lost", lowering, **sizes).error()


def grow(folder: Path, by: float) -> None:
    """Multiply the last product of each feed-forward layer, in place."""
    from specrt_export.checkpoint.checkpoint import Checkpoint

    for name, weight in Checkpoint.open(folder).weights.items():
        if ".wo." in name:
            count = int(np.prod(weight.shape))
            values = np.memmap(weight.file, np.float32, "r+", weight.offset, count)
            values *= by
            values.flush()
