"""Heads on TensorRT: real plans of them, and rounds over doubles that run what the plans mean."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import specrt
from heads.conftest import RECIPE, SCORED, VOCABULARY, WIDTH
from heads.test_head_drafting import PROMPTS, SETTINGS, Torch, agreement
from shared import locked, shared_folder
from specrt.bundle import Bundle
from specrt.engine.head_engine import TrimmedEngine
from specrt.engine.protocol import Feed, PackedEngine
from specrt.engine.tensorrt import engine as opening
from specrt.engine.tensorrt import engine_record, library
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.engine_record import FILE_NAME, PLAN, read_engine_record
from specrt.engine.tensorrt.feature_buffer import FeatureBuffer
from specrt.engine.tensorrt.head import TensorRtHead
from specrt.errors import EngineError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt_export.builder import build
from specrt_export.compile.tensorrt_compiler import TensorRtCompiler
from specrt_export.heads.eagle3_format import Head
from specrt_export.lower.lazy_tensor import ENGINE
from specrt_export.recipe import read_recipe
from support.cuda_double import MACHINE, Code, CudaDouble, DoubleDevice
from support.graph_double import GraphDouble
from support.tensorrt_double import library_double

RTX = "tensorrt-rtx"
GAMMAS = (1, 2, 4)
Built = Callable[..., Path]


@pytest.fixture(scope="session")
def built(target: Path, bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the pair in fp32 for a version and a number of rows; keep the lowered graphs."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: nothing is built")
    root = shared_folder(tmp_path_factory) / "tensorrt-heads"
    root.mkdir(exist_ok=True)

    def once(version: str, batch: int, draft: Path = bundle.parent / "head") -> Path:
        folder = root / f"{draft.name}-{version or 'new'}-{batch}"
        with locked(folder.with_suffix(".lock")), pytest.MonkeyPatch.context() as patched:
            if (folder / "bundle").exists():
                return folder / "bundle"
            folder.mkdir()
            compiles = TensorRtCompiler.compile

            def kept(self: Any, lowered: Any, *places: Any) -> Any:
                shutil.copytree(lowered.folder, folder / lowered.role)
                return compiles(self, lowered, *places)

            patched.setattr(TensorRtCompiler, "compile", kept)
            text = RECIPE.format(target=target, head=draft)
            text = text.replace("batch = 2", f'batch = {batch}\nbackend = "{RTX}"')
            text = text.replace("[1, 2, 3, 4, 5, 6, 7, 8]", str(list(GAMMAS)))
            text += 'precision = "fp32"\n[tensorrt]\ncandidates = 0\n'
            text += f'version = "{version}"\n' if version else ""
            (folder / "recipe.toml").write_text(text, encoding="utf-8")
            build(read_recipe(folder / "recipe.toml"), folder / "bundle")
        return folder / "bundle"

    return once


class Gpu:
    """A machine whose plans are run by ONNX Runtime, on a device in NumPy."""

    def __init__(self, size: int = 1 << 24) -> None:
        self.cuda = CudaDouble(size)
        self.devices: list[DoubleDevice] = []
        self.plans: dict[str, GraphDouble] = {}

    def device(self) -> DoubleDevice:
        self.devices.append(DoubleDevice(cuda=self.cuda))
        return self.devices[-1]

    def library(self, bundle: Path) -> Any:
        manifest = Bundle.open(bundle).manifest
        library = library_double(RTX, manifest.versions[RTX], cuda=self.cuda)
        for model in manifest.models:
            role = model.engine.partition("/")[0]
            data = (bundle / role / PLAN).read_bytes()
            library.module.plans[data] = partial(self.plan, bundle, role, model.geometry, manifest)
        return library

    def plan(self, bundle: Path, role: str, geometry: Any, manifest: Any, log: Any) -> GraphDouble:
        record = read_engine_record(bundle / role / FILE_NAME)
        graph = bundle.parent / role / ENGINE
        self.plans[role] = GraphDouble(
            self.cuda, log, record, graph, geometry, manifest.batch, manifest.max_length
        )
        return self.plans[role]

    def hold_closed(self) -> None:
        assert all(device.closed == 1 and not device.leaked for device in self.devices)
        assert (self.cuda.memory, self.cuda.graphs, self.cuda.streams) == ({}, {}, 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """The machine, on which nothing is left open."""
    made = Gpu()
    monkeypatch.setattr(opening, "CudaDevice", made.device)
    monkeypatch.setattr(engine_record, "survey", lambda: MACHINE)
    monkeypatch.setattr(library, "survey", lambda: MACHINE)
    yield made
    made.hold_closed()


@pytest.fixture
def load(gpu: Gpu, built: Built, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Generator]:
    """Open the pair on that machine."""

    def loaded(version: str = "", batch: int = 1, **draft: Path) -> Generator:
        folder = built(version, batch, **draft)
        library = gpu.library(folder)
        monkeypatch.setattr(opening, "open_library", lambda backend: library)
        return specrt.load(folder, threads=1, text_memory_bytes=0)

    return loaded


def engines(generator: Generator) -> tuple[TensorRtEngine, TensorRtHead]:
    """Return the engines below a pair."""
    target, draft = generator.models.target, generator.models.draft
    assert isinstance(target, TensorRtEngine)
    assert isinstance(draft, TrimmedEngine)
    assert isinstance(draft.engine, TensorRtHead)
    return target, draft.engine


FORMS = pytest.mark.parametrize(
    ("version", "batch"), [("", 1), ("", 2), ("10.3", 2)], ids=["native", "rows", "decomposed"]
)


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("version", "batch"),
    [("", 1), pytest.param("", 2, marks=NIGHTLY), pytest.param("10.3", 2, marks=NIGHTLY)],
    ids=["native", "rows", "decomposed"],
)
def test_drafts_are_those_of_torch_after_any_rounds(
    load: Callable[..., Generator], target: Path, head: Head, version: str, batch: int
) -> None:
    """Rolled back anywhere, after rounds without the head, prompts in several passes."""
    with load(version, batch) as generator:
        found = agreement(generator, Torch(target, head), range(2), 8)
        captured = generator.models.cuda_graphs
    assert len(found) == 16
    assert all(found)
    assert captured is not None
    assert captured.captured > 1
    assert captured.refusals == ()


@pytest.mark.parametrize("off", [-1, 1])
def test_features_off_by_one_draft_otherwise(
    load: Callable[..., Generator], target: Path, head: Head, monkeypatch: pytest.MonkeyPatch,
    off: int,
) -> None:  # fmt: skip
    read = FeatureBuffer.read

    def shifted(self: FeatureBuffer, to: int, starts: Sequence[int], width: int) -> None:
        read(self, to, [max(0, start + off) for start in starts], width)

    monkeypatch.setattr(FeatureBuffer, "read", shifted)
    with load() as generator:
        found = agreement(generator, Torch(target, head), range(2), 5)
    assert sum(found) < len(found) / 2


@pytest.fixture(scope="module")
def on_cpu(bundle: Path) -> list[Any]:
    """What the bundle for a CPU answers: texts, and how each round of them went."""
    with specrt.load(bundle, threads=1, text_memory_bytes=0) as generator:
        return answers(generator)


def answers(generator: Generator) -> list[Any]:
    """Return texts and rounds of requests, one after the other and on all rows."""
    found = []
    for settings in SETTINGS:
        for verifier in ("match", "rejection"):
            params = SamplingParams(max_tokens=24, ignore_eos=True, verifier=verifier, **settings)
            for gamma in (0, 2, 4):
                for prompt in PROMPTS[: 4 if gamma == 4 else 1]:
                    done = generator.generate(prompt, params, gamma=gamma, drafter="model")
                    rounds = [(one.drafted, one.accepted) for one in done.speculation.log]
                    found.append((done.token_ids, rounds))
            texts = generator.generate_many(PROMPTS, params, gamma=4, drafter="cascade")
            found.append([text[0].token_ids for text in texts])
    return found


@FORMS
def test_texts_and_rounds_are_those_of_a_cpu(
    on_cpu: list[Any], load: Callable[..., Generator], version: str, batch: int
) -> None:
    with load(version, batch) as generator:
        found = answers(generator)
    for number, (one, other) in enumerate(zip(found, on_cpu, strict=True)):
        assert one == other, number


def test_nothing_of_a_draft_comes_to_the_host_but_its_tokens(
    gpu: Gpu, load: Callable[..., Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rounds: one launch a pass, and of what it leaves the results that are staged."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    monkeypatch.setattr(DoubleDevice, "read", lambda *_: pytest.fail("scores were read"))
    with load() as generator:
        for _ in range(3):  # the first time without a prompt cache, the next with all captured
            for plan in gpu.plans.values():
                plan.passes.clear()
            launched = gpu.cuda.calls["cudaGraphLaunch"]
            generator.generate(PROMPTS[0], params, gamma=4, drafter="model")
        launched = gpu.cuda.calls["cudaGraphLaunch"] - launched
        captured = sum(len(plan.passes) for plan in gpu.plans.values()) - 1  # not the prompt's
        assert launched == captured
        assert {width for width, _ in gpu.plans["draft"].passes} > {1}
        assert generator.models.rounds is None  # no round is one launch


def test_rows_of_a_head_are_copied(load: Callable[..., Generator]) -> None:
    """And what is behind them is drafted as if it had been read there."""
    with load("", 2) as generator:
        target, head = engines(generator)
        target.forward([[5, 9, 17, 3], [5, 9, 17, 3]], 0)
        first = head.forward_rows([Feed(0, [5, 9, 17, 3], 0, 1)])[0].logits.copy()
        head.copy_row(0, 1, 4)
        wanted = head.forward_rows([Feed(0, [7], 4, 1, recursive=True)])[0].logits.copy()
        again = head.forward_rows([Feed(1, [3], 3, 1)])[0].logits.copy()
        np.testing.assert_allclose(again, first, atol=1e-4)
        found = head.forward_rows([Feed(1, [7], 4, 1, recursive=True)])[0].logits
        np.testing.assert_allclose(found, wanted, atol=1e-4)
        with pytest.raises(EngineError, match="expected rows from 0 to 1"):
            head.copy_row(0, 2, 1)
        assert isinstance(head, PackedEngine)


def test_a_head_ends_with_its_target(gpu: Gpu, load: Callable[..., Generator]) -> None:
    """Also where a copy fails, and where the head is closed first."""
    generator = load()
    target, head = engines(generator)
    head.forward([[1, 2, 3]], 0, 1)
    for feed in (Feed(0, [1], 160, 1, recursive=True), Feed(0, [1, 2], 5, 1, recursive=True)):
        with pytest.raises(EngineError, match=r"would write positions|has 2 tokens"):
            head.forward_rows([feed._replace(start=feed.start + 1)])
    gpu.cuda.fail("cudaMemcpyAsync", after=1)
    with pytest.raises(EngineError, match="cannot copy on the device"):
        head.forward_rows([Feed(0, [1], 5, 1, recursive=True)])
    with pytest.raises(EngineError, match="an earlier pass failed"):
        head.forward([[1]], 0)
    target.close()
    with pytest.raises(EngineError, match=r"an earlier pass failed|closed"):
        head.forward([[1]], 0)
    generator.close()
    gpu.hold_closed()
    generator = load()
    target, head = engines(generator)
    head.close()
    with pytest.raises(EngineError, match="closed"):
        head.forward([[1]], 0)
    target.forward([[1, 2]], 0)
    target.end(EngineError("a pass of the target"))
    generator.close()


def test_a_failed_copy_of_features_ends_the_target(
    gpu: Gpu, load: Callable[..., Generator]
) -> None:
    with load() as generator:
        target, head = engines(generator)
        target.forward([[1, 2]], 0)
        for _ in range(2):
            target.forward([[1, 2]], 0)
        gpu.cuda.fail("cudaMemcpyAsync", after=1)  # all but features is copied by what was captured
        with pytest.raises(EngineError, match="cannot copy on the device"):
            target.forward([[1, 2]], 0)
        gpu.cuda.fails = {}
        with pytest.raises(EngineError, match="what the KV buffers hold is not known"):
            target.forward([[1, 2]], 0)
        with pytest.raises(EngineError, match="what the KV buffers hold is not known"):
            head.forward([[1]], 2)


@pytest.mark.parametrize("purpose", ["features", "states of a head"])
def test_too_little_memory_is_told_by_purpose(
    gpu: Gpu, load: Callable[..., Generator], purpose: str
) -> None:
    allocate = DoubleDevice.allocate

    def short(self: DoubleDevice, size: int, name: str) -> int:
        if name == purpose:
            gpu.cuda.fail("cudaMalloc", code=Code.cudaErrorMemoryAllocation)
        return allocate(self, size, name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DoubleDevice, "allocate", short)
        with pytest.raises(EngineError, match=rf"cannot allocate {purpose}: .* are needed"):
            load()
    gpu.cuda.fails = {}


def test_the_parts_of_a_pair_say_what_they_hand_over(built: Built) -> None:
    folder = built("", 1)
    manifest = Bundle.open(folder).manifest
    assert manifest.draft is not None
    assert (manifest.target.features, manifest.draft.features) == (WIDTH, WIDTH)
    target, head = (read_engine_record(folder / r / FILE_NAME) for r in ("target", "draft"))
    assert (target.feature, target.hidden, head.feature, head.hidden) == (WIDTH, 0, 0, WIDTH)
    assert (target.scored, head.scored) == (manifest.target.geometry.vocab_size, SCORED)
    names = [profile.name for profile in head.profiles]
    assert names == ["prefill", "decode", "catch-up", "catch-up 3", "catch-up 4", "catch-up 5"]


@pytest.fixture(scope="session")
def trimmed(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer of the target, which scores some entries of the vocabulary."""
    folder = tmp_path_factory.mktemp("draft") / "trimmed"
    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 1, "draft_vocab_size": SCORED}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    kept = {n: w for n, w in weights.items() if ".layers." not in n or ".layers.0." in n}
    ids = torch.sort(torch.randperm(VOCABULARY)[:SCORED]).values
    kept |= {"lm_head.weight": kept["lm_head.weight"][ids], "d2t": ids - torch.arange(SCORED)}
    save_file({n: w.contiguous() for n, w in kept.items()}, folder / "model.safetensors")
    return folder


def test_drafts_of_some_entries_are_those_of_a_cpu(
    load: Callable[..., Generator], target: Path, trimmed: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(target=target, head=trimmed), encoding="utf-8")
    build(read_recipe(recipe), tmp_path / "bundle")
    with specrt.load(tmp_path / "bundle", threads=1, text_memory_bytes=0) as generator:
        wanted = answers(generator)
    with load(draft=trimmed) as generator:
        draft = generator.models.draft
        assert isinstance(draft, TrimmedEngine)
        assert isinstance(draft.engine, TensorRtEngine)
        assert draft.engine.scored == SCORED
        assert answers(generator) == wanted


@pytest.mark.parametrize(
    "precision",
    [pytest.param("fp16", marks=NIGHTLY), pytest.param("int8", marks=NIGHTLY), "int4"],
)
def test_a_pair_with_a_head_builds_in_every_precision(
    target: Path, bundle: Path, tmp_path: Path, precision: str
) -> None:
    """The build compares its lowered graphs with the portable ones, and lints its plans."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: nothing is built")
    words = np.random.default_rng(0).integers(0, VOCABULARY, 400)
    lines = [f'{{"prompt": "t{word}"}}\n' for word in words]
    (tmp_path / "words.jsonl").write_text("".join(lines), encoding="utf-8")
    text = RECIPE.format(target=target, head=bundle.parent / "head").partition("batch = 2")[0]
    text += f'batch = 1\ngammas = [1]\nbackend = "{RTX}"\nprecision = "{precision}"\n'
    text += '[quality]\ncalibration = "words.jsonl"\nmax_kl = 9\nmin_top1 = 0\nmin_acceptance = 0\n'
    (tmp_path / "recipe.toml").write_text(text, encoding="utf-8")
    build(read_recipe(tmp_path / "recipe.toml"), tmp_path / "bundle")
    record = read_engine_record(tmp_path / "bundle" / "draft" / FILE_NAME)
    assert (record.hidden, record.scored) == (WIDTH, SCORED)


def test_a_head_beside_another_target_is_refused(
    gpu: Gpu, load: Callable[..., Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FeatureBuffer, "width", 7, raising=False)
    made = FeatureBuffer.__init__

    def wider(self: FeatureBuffer, memory: Any, batch: int, length: int, width: int) -> None:
        made(self, memory, batch, length, width + 1)

    monkeypatch.setattr(FeatureBuffer, "__init__", wider)
    with pytest.raises(EngineError, match="reads features of width 32, and its target leaves"):
        load()
