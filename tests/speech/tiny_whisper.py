"""A random Whisper of a few thousand weights, a draft of it, and what transformers transcribes."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from specrt.speech.log_mel import Features
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.portable.attachment import attach_graph
from speech.scripted import BEGIN, END, NO_SPEECH, SETTINGS, SILENT, START, VOCABULARY
from support.toy import byte_level

LENGTH = 48
"""Tokens of the decoder's context."""

BINS = 4

GRAPHS = Path(__file__).with_name("tiny_whisper.tar.xz")
"""Its graphs without weights, which a test exports anew."""

RECIPE = f"""
name = "whisper"

[target]
checkpoint = "target"
graph = "target.onnx"

[draft]
checkpoint = "draft"
graph = "draft.onnx"

[engine]
max_length = {LENGTH}
prefill = 8
batch = 2
gammas = [1, 3]
"""

SIZES = {
    "vocab_size": VOCABULARY, "num_mel_bins": BINS, "d_model": 32, "encoder_layers": 1,
    "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 1500,
    "max_target_positions": LENGTH, "decoder_start_token_id": START, "bos_token_id": END,
    "eos_token_id": END, "pad_token_id": END, "suppress_tokens": None,
    "begin_suppress_tokens": None, "init_std": 0.2,
}  # fmt: skip
"""Tokens are those of the scripted decoder."""

GENERATION = {
    **SETTINGS, "max_length": LENGTH, "is_multilingual": True,
    "bos_token_id": END, "pad_token_id": END,
    "suppress_tokens": [40, START, NO_SPEECH, 918, 1018], "begin_suppress_tokens": [END, 355, 608],
}  # fmt: skip
"""Some of the suppressed are what the model would often say."""


def save_pair(folder: Path) -> Path:
    """Write a Whisper and one of the same encoder that says nearly the same; return their recipe.

    A graph knows names and shapes alone, so one is both's.
    """
    torch = pytest.importorskip("torch", reason="needs the export extra")
    library = pytest.importorskip("transformers")
    torch.manual_seed(1)
    model = library.WhisperForConditionalGeneration(library.WhisperConfig(**SIZES))
    model.generation_config = library.GenerationConfig(**GENERATION)
    for role in ("target", "draft"):
        model.save_pretrained(folder / role)
        byte_level(folder / role)
        library.WhisperFeatureExtractor(feature_size=BINS).save_pretrained(folder / role)
        for weight in model.model.decoder.parameters():
            weight.data += 0.03 * weight.data.std() * torch.randn_like(weight)
    with tarfile.open(GRAPHS) as archive:
        archive.extractall(folder, filter="data")
    attach_graph(folder / "target.onnx", Checkpoint.open(folder / "target"))
    for part in folder.glob("target*.onnx"):
        shutil.copyfile(part, folder / part.name.replace("target", "draft"))
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "recipe.toml"


class EagerWhisper:
    """What transformers makes of recordings with a checkpoint, greedily."""

    def __init__(self, folder: Path) -> None:
        library = pytest.importorskip("transformers")
        self._model = library.WhisperForConditionalGeneration.from_pretrained(folder).eval()

    def text(self, features: Features, **options: Any) -> list[int]:
        """Return the tokens of a window after those it begins with, the end token included."""
        torch = pytest.importorskip("torch")
        found = self._generate(
            torch.from_numpy(features)[None], force_unique_generate_call=True,
            return_dict_in_generate=True, **options,
        )["sequences"][0]  # fmt: skip
        tokens = found.tolist()
        return list(tokens[tokens.index(SILENT) + 1 :])

    def segments(
        self, features: Features, **options: Any
    ) -> list[tuple[float, float, tuple[int, ...]]]:
        """Return the times of the segments of a recording that have text, and their tokens."""
        torch = pytest.importorskip("torch")
        found = self._generate(
            torch.from_numpy(features)[None], return_segments=True, return_timestamps=True,
            **options,
        )["segments"][0]  # fmt: skip
        segments = [
            (float(one["start"]), float(one["end"]), _without_end(one["tokens"].tolist()))
            for one in found
        ]
        return [one for one in segments if _text(one[2]).strip()]

    def _generate(self, features: Any, **options: Any) -> Any:
        return self._model.generate(features, do_sample=False, num_beams=1, **options)


def _without_end(tokens: list[int]) -> tuple[int, ...]:
    """Return a segment's tokens without its end, and the timestamp that begins the next one."""
    found = tuple(token for token in tokens if token != END)
    return found[:-1] if len(found) > 1 and min(found[-2:]) >= BEGIN else found


def _text(tokens: tuple[int, ...]) -> str:
    return bytes(token for token in tokens if token < END).decode(errors="replace")
