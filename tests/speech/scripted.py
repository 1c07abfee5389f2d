"""A decoder that says what a script tells it, and hears nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specrt.completion import Completion, SpeculationStats, Timings
from specrt.sampling.distribution import Logprob
from specrt.speculation.round import Round
from specrt.speech.log_mel import LogMel
from specrt.speech.transcription import (
    Recording,
    Transcriber,
    Transcription,
    TranscriptionOptions,
    WindowRequest,
)
from specrt.speech.whisper_config import WhisperConfig
from specrt.text.tokenizer import Tokenizer

# Tokens below 256 are bytes, as in the toy engines' tokenizer.
END, START, EN, DE, TRANSLATE, TRANSCRIBE, NO_SPEECH, SILENT, BEGIN = range(256, 265)
VOCABULARY = BEGIN + 1501
SETTINGS: Mapping[str, Any] = {
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "no_timestamps_token_id": SILENT,
    "lang_to_id": {"<|en|>": EN, "<|de|>": DE},
    "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
    "max_initial_timestamp_index": 50,
    "max_length": 448,
}
CONFIG = WhisperConfig(
    LogMel(feature_size=4), START, END, SILENT, {"en": EN, "de": DE},
    {"translate": TRANSLATE, "transcribe": TRANSCRIBE}, None, 50,
)  # fmt: skip


def at(seconds: float) -> int:
    """Return the token of a time."""
    return BEGIN + round(seconds / 0.02)


def said(*parts: float | str) -> list[int]:
    """Return the tokens of times and texts."""
    tokens: list[int] = []
    for part in parts:
        tokens += part.encode() if isinstance(part, str) else [at(part)]
    return [*tokens, END]


def completion(tokens: Sequence[int], probability: float = 0.5) -> Completion:
    """Return a finished completion, whose tokens all have one probability."""
    stats = SpeculationStats(2, "model")
    if len(tokens) > 1:
        stats.add(Round(list(tokens[1:]), 2, 1, 0, 0), len(tokens) - 1)
    logprob = Logprob(float(np.log(probability)), 1, "")
    return Completion(
        1500, 0, stats, Timings(0), token_ids=[*tokens], finish_reason="stop",
        logprobs=[{token: logprob} for token in tokens],
    )  # fmt: skip


class Scripted:
    """Sends the texts of a script to a transcriber, and keeps what it asked for."""

    def __init__(
        self, *texts: Sequence[int], silence: float = 0.0, language: int = DE, mean: float = 0.5
    ) -> None:
        self.asked: list[WindowRequest] = []
        """The windows, without what only listens."""
        self.heard = 0
        self._texts = iter(texts)
        self._silence = silence
        self._language = language
        self._mean = mean

    def __call__(self, request: WindowRequest) -> Completion:
        if request.params.max_tokens == 1:
            self.heard += 1
            done = completion([self._language])
            assert done.logprobs
            if self._silence:
                done.logprobs[0][NO_SPEECH] = Logprob(float(np.log(self._silence)), 2, "")
            return done
        self.asked.append(request)
        return completion(next(self._texts), self._mean)


def transcribed(
    samples: Any, decode: Callable[[WindowRequest], Completion], tokenizer: Tokenizer,
    config: WhisperConfig = CONFIG, context: int = 448, **options: Any,
) -> Transcription:  # fmt: skip
    """Return what a decoder makes of a recording."""
    recording = Recording(samples, config.log_mel)
    chosen = TranscriptionOptions(**options)
    work = Transcriber(recording, config, tokenizer, context, chosen)
    done = None
    while (request := work.advance(done)) is not None:
        done = decode(request)
    return work.result()
