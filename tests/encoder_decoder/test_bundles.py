"""Bundles of encoder-decoders: built, measured, shown, and run as transformers runs them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import specrt
from encoder_decoder.recipes import MAX_SOURCE, QUALITY, end_of, save_texts, write_recipe
from specrt.bundle import Bundle
from specrt.engine.backends import open_engine
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.encoder_decoder_engine import EncoderDecoderEngine
from specrt.engine.protocol import Feed, Source
from specrt.errors import BuildError, CheckpointError, EngineError
from specrt.params import SamplingParams
from specrt.speech.log_mel import LogMel
from specrt.text.tokenizer import Tokenizer
from specrt_export.check.equivalence import Reference
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.plan.calibration_text import read_source_pairs
from specrt_export.plan.speech_pairs import read_speech_pairs
from support.builds import build

pytestmark = pytest.mark.export

Built = Callable[..., Path]

FAMILIES = [("t5", "t5"), ("bart",), ("marian",), ("m2m_100",), ("whisper", "whisper_draft")]
NEW = 24
FAR = 150
"""Beyond the 128 positions that relative biases tell apart."""


def sources_of(bundle: Path, count: int) -> list[Source]:
    """Return sources of different lengths, the longest first."""
    encoder = Bundle.open(bundle).manifest.target.encoder
    assert encoder is not None
    rng, lengths = np.random.default_rng(2), (MAX_SOURCE, 1, 23, 64)[:count]
    if encoder.features:
        shape = encoder.features, encoder.frames
        return [rng.standard_normal(shape).astype(np.float32) for _ in lengths]
    return [rng.integers(8, 100, length) for length in lengths]


@contextmanager
def opened(bundle: Path) -> Iterator[tuple[EncoderDecoderEngine, ...]]:
    """Open the engines of a bundle, the target first."""
    held = Bundle.open(bundle)
    engines = list[Any]()
    for model in held.manifest.models:
        target = engines[0] if engines else None
        engines.append(open_engine(EngineSpec.of(held, model, target=target)))
    try:
        yield tuple(engines)
    finally:
        for engine in engines:
            engine.close()


def next_token(logits: NDArray[np.float32], text: Sequence[int]) -> int:
    """Return the likeliest token that repeats no pair of tokens: random models like one token."""
    allowed = logits.copy()
    allowed[[two for one, two in pairwise(text) if one == text[-1]]] = -np.inf
    return int(allowed.argmax())


def greedy(engine: EncoderDecoderEngine, row: int, start: Sequence[int], new: int) -> list[int]:
    """Decode one row, a token at a time."""
    text = list(start)
    found = engine.forward_rows([Feed(row, text, 0, 1)])[0]
    for _ in range(new):
        text.append(next_token(found.logits[0, 0], text))
        found = engine.forward_rows([Feed(row, text[-1:], len(text) - 1, 1)])[0]
    return text


def greedy_reference(
    folder: Path, source: NDArray[Any], start: Sequence[int], new: int
) -> list[int]:
    """Decode with transformers, without a cache."""
    model = Reference(Checkpoint.open(folder)).of([source])
    text = list(start)
    for _ in range(new):
        text.append(next_token(model(np.array([text]))[0, -1], text))
    return text


@pytest.mark.parametrize("names", FAMILIES, ids="-".join)
def test_plain_decoding_is_that_of_transformers(names: tuple[str, ...], built: Built) -> None:
    bundle = built(*names)
    start = Bundle.open(bundle).manifest.decoder_start
    with opened(bundle) as (engine, *_):
        sources = sources_of(bundle, engine.batch)
        for row, source in enumerate(sources):
            engine.condition(row, source)
        for row, source in enumerate(sources):
            new = FAR if names[0] == "t5" and not row else NEW
            expected = greedy_reference(bundle.parent / "target", source, start, new)
            assert greedy(engine, row, start, new) == expected


@pytest.mark.parametrize(
    "names",
    [("t5", "t5"), ("bart", "mbart"), ("whisper", "whisper_draft")],
    ids=["one encoder", "two encoders", "a draft without one"],
)
def test_a_pair_drafts_of_the_same_source(names: tuple[str, str], built: Built) -> None:
    bundle = built(*names)
    manifest = Bundle.open(bundle).manifest
    assert manifest.draft is not None
    assert manifest.draft.encoder is not None
    assert bool(manifest.draft.encoder.encoder) == (names[1] == "mbart")
    assert (bundle / "draft" / "encoder.onnx").exists() == (names[1] == "mbart")
    with opened(bundle) as (target, draft):
        sources = sources_of(bundle, 3)
        if not manifest.draft.encoder.encoder:
            with pytest.raises(EngineError, match="give it to the target first"):
                draft.condition(0, sources[0])
        for row, source in enumerate(sources):
            target.condition(row, source)
            draft.condition(row, source)
        own = bundle.parent / "draft"
        for row, source in enumerate(sources):
            given = source
            if names[1] == "whisper_draft":
                hidden = target.hidden[row]
                assert hidden is not None
                given = hidden
            expected = greedy_reference(own, given, manifest.decoder_start, NEW)
            assert greedy(draft, row, manifest.decoder_start, NEW) == expected


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("t5", "t5"), marks=pytest.mark.nightly), ("bart",),
        ("whisper", "whisper_draft"),
    ],
)  # fmt: skip
def test_quantized_pairs_are_measured_on_sources(names: tuple[str, ...], built: Built) -> None:
    bundle, exact = built(*names, precision="int8"), built(*names)
    manifest = Bundle.open(bundle).manifest
    for model, other in zip(manifest.models, Bundle.open(exact).manifest.models, strict=True):
        assert model.quality is not None
        assert 0 < model.quality.kl < 5e-3
        assert model.quality.tokens > 256
        table = 4 * 2 * 512 * 32 * (model.model_type == "bart")  # positions stay as they are
        table += 4 * (2 * 320 * 32 + 6 * 32 * 3 + 32 * 32 * 3) * (model.model_type == "whisper")
        assert model.weight_bytes - table < (other.weight_bytes - table) / 2
        assert model.parameters == other.parameters
        counts = {name: n for name, n in model.fused.items() if name.endswith("quantized")}
        parts = 3 if model.encoder and model.encoder.encoder else 2
        assert len(counts) == parts
        assert all(n.split("/")[0] == n.split("/")[1] != "0" for n in counts.values()), counts
    assert (manifest.acceptance is None) == (len(names) == 1)
    params = SamplingParams(max_tokens=40, no_repeat_ngram_size=2)
    with specrt.load(bundle, threads=1) as generator:
        for source in sources_of(bundle, 3) if "whisper" not in names else ():
            plain = generator.generate(source.tolist(), params, gamma=0).token_ids
            assert generator.generate(source.tolist(), params, gamma=3).token_ids == plain


REFUSED: list[tuple[tuple[str, ...], str, tuple[str, ...], str]] = [
    (("t5",), "fp16", ("backend = 'ort-cuda'",), "encoder-decoder.*ort-cuda.*ort-cpu"),
    (("t5", "whisper_draft"), "fp32", (), "the draft for automatic-speech-recognition"),
    (("whisper_draft",), "fp32", (), r"no encoder; .* \[draft\]"),
    (("llama3",), "fp32", ("max_source = 180",), "reads no source; remove"),
    (("whisper",), "fp32", ("max_source = 19",), "always has 20 positions"),
    (("bart",), "fp32", ("max_source = 513",), "513, more than the 512"),
    (("whisper",), "int8", (QUALITY,), r"line 1.*names neither audio.*shape \[6, 40\]"),
]


@pytest.mark.parametrize(("names", "precision", "lines", "said"), REFUSED)
def test_what_is_not_built_is_refused_by_a_sentence(
    names: tuple[str, ...], precision: str, lines: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    recipe = write_recipe(
        tmp_path / "one", names, precision, *lines, source=False, max_length=64,
        batch=1 if "cuda" in str(lines) else 3,
    )  # fmt: skip
    with pytest.raises(BuildError, match=said):
        build(recipe, tmp_path / "bundle")


def test_settings_that_no_bundle_opens_with_are_refused_before_any_work(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "t5", ["t5"])
    path = recipe.folder / "target" / "generation_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    settings |= {"decoder_start_token_id": 0, "forced_bos_token_id": 9999}
    path.write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="forced_bos_token_id holds 9999; expected ids"):
        build(recipe, tmp_path / "bundle")


ONE_LAYER = {"kind": "attention", "kv_heads": 4, "key_width": 12, "value_width": 12}
WRONG_PARTS: list[tuple[str, str, dict[str, Any], str]] = [
    ("target", "encoder", {"encoder": "target/cross.onnx"}, r"takes \['hidden'\].*together"),
    ("target", "geometry", {"layers": 1, "memories": [ONE_LAYER]}, "gives.*cross_key.2.*together"),
    ("draft", "encoder", {"width": 3}, f"of width 3, .* leaves up to {MAX_SOURCE} of width"),
]


@pytest.mark.parametrize(("role", "record", "values", "said"), WRONG_PARTS, ids=str)
def test_a_part_that_is_another_is_refused_when_it_is_opened(
    built: Built, tmp_path: Path, role: str, record: str, values: dict[str, Any], said: str
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(built("t5", "t5"), bundle)
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest[role][record] |= values
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(EngineError, match=said):
        specrt.load(bundle, threads=1)


def test_calibration_wants_sources_and_their_texts(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "t5", ["t5"], "int8", QUALITY)
    texts = recipe.folder / "texts.jsonl"
    for content, said in (
        ('{"prompt": "abc"}\n', "texts.jsonl:1 lacks a prompt or a completion"),
        ('{"prompt": "abc", "completion": 3}\n', "texts.jsonl:1 has completion 3"),
        ('{"prompt": "abc", "completion": "ab"}\n', "comes to 3 tokens.*256 or more"),
    ):
        texts.write_text(content, encoding="utf-8")
        with pytest.raises(BuildError, match=said):
            build(recipe, tmp_path / "bundle")
    for content, said in (
        ({"features": "none.npy", "completion": "ab"}, "No such file.*FILE.npy"),
        ({"features": "one.npy", "completion": "ab"}, r"shape \[6, 39\]; expected"),
        ({"features": "two.npy"}, "line 1.*completion"),
    ):
        np.save(recipe.folder / "one.npy", np.zeros((6, 39), np.float32))
        np.save(recipe.folder / "two.npy", np.zeros((6, 40), np.float32))
        texts.write_text(json.dumps(content), encoding="utf-8")
        tokenizer = Tokenizer(recipe.folder / "target" / "tokenizer.json")
        with pytest.raises(BuildError, match=said):
            read_speech_pairs(texts, tokenizer, [2], 30, (6, 40), LogMel(6))
    save_texts(texts, 40)
    tokenizer = Tokenizer(recipe.folder / "target" / "tokenizer.json")
    pieces = read_source_pairs(texts, tokenizer, [0], 30, 60)
    assert 0 < len(pieces.scored) == len(pieces.sources) < 40
    assert max(map(len, pieces.sources)) <= 60
    assert max(map(len, pieces.scored)) == 30
    assert {int(piece[0]) for piece in pieces.scored} == {0}
    assert all(source[-1] == end_of("t5") for source in pieces.sources)
    assert not any(end_of("t5") in piece for piece in pieces.scored)
