"""A random Whisper of a few thousand weights, and what transformers transcribes with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specrt.completion import Completion
from specrt.sampling.processors import build_processors
from specrt.speech.transcription import WindowRequest
from speech.recordings import RATE, Wave
from speech.scripted import BEGIN, END, NO_SPEECH, SETTINGS, START, VOCABULARY, completion

LENGTH = 48
"""Tokens of a window at most."""

SUPPRESSED, AT_BEGIN = (40, 41, START, NO_SPEECH), (32, END)


def tiny(**sizes: int) -> Any:
    """Return a model whose tokens are those of the scripted decoder."""
    torch = pytest.importorskip("torch", reason="needs the export extra")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(sizes.pop("seed", 0))
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY, "num_mel_bins": 4, "d_model": 32, "encoder_layers": 1,
        "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 1500,
        "max_target_positions": LENGTH, "decoder_start_token_id": START, "bos_token_id": END,
        "eos_token_id": END, "pad_token_id": END, "suppress_tokens": None,
        "begin_suppress_tokens": None, "init_std": 0.2, **sizes,
    }  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**options))
    settings = {**SETTINGS, "max_length": LENGTH, "is_multilingual": True}
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    model.generation_config.suppress_tokens = list(SUPPRESSED)
    model.generation_config.begin_suppress_tokens = list(AT_BEGIN)
    model.generation_config.pad_token_id = END
    return model.eval()


def of_transformers(model: Any, wave: Wave, **options: Any) -> list[dict[str, Any]]:
    """Return the segments that transformers finds in a recording."""
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor(feature_size=4)
    features = extractor(
        wave, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest"
    ).input_features
    found = model.generate(features, return_segments=True, do_sample=False, num_beams=1, **options)
    segments: list[dict[str, Any]] = found["segments"][0]
    return segments


def spoken(tokens: Any) -> list[int]:
    """Return a segment's tokens without the timestamp that begins the next one, and its end."""
    found = [int(token) for token in tokens if int(token) != END]
    return found[:-1] if len(found) > 1 and min(found[-2:]) >= BEGIN else found


class Eager:
    """Decodes greedily with an eager model, and with our own processors."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, request: WindowRequest) -> Completion:
        torch = pytest.importorskip("torch")
        params = request.params
        assert params.decoder_start is not None
        text, prompt = list(params.decoder_start), len(params.decoder_start)
        processors = build_processors(params, None, (END,), VOCABULARY)
        features = torch.from_numpy(request.features)[None]
        with torch.no_grad():
            hidden = self._model.model.encoder(features)
        while len(text) - prompt < params.max_tokens:
            with torch.no_grad():
                ids = torch.tensor([text])
                logits = self._model(encoder_outputs=hidden, decoder_input_ids=ids).logits
            row = logits[0, -1].numpy().copy()
            row[list(SUPPRESSED)] = -np.inf
            if len(text) == prompt:
                row[list(AT_BEGIN)] = -np.inf
            if processors is not None:
                processors.learn(text)
                row = processors.edit(row, ())
            text.append(int(row.argmax()))
            if text[-1] == END:
                break
        return completion(text[prompt:])
