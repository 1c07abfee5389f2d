"""Speech: audio files, log-mel features, and the transcription of recordings of any length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrt.speech.transcription import (
        Transcription,
        TranscriptionOptions,
        TranscriptionSegment,
        transcribe,
    )
    from specrt.speech.wav import read_wav
    from specrt.speech.whisper_config import WhisperConfig, read_whisper_config

__all__ = [
    "Transcription",
    "TranscriptionOptions",
    "TranscriptionSegment",
    "WhisperConfig",
    "read_wav",
    "read_whisper_config",
    "transcribe",
]

_HOMES = {
    "read_wav": "wav",
    "WhisperConfig": "whisper_config",
    "read_whisper_config": "whisper_config",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'specrt.speech' has no attribute {name!r}")
    from importlib import import_module

    home = _HOMES.get(name, "transcription")
    return getattr(import_module(f"specrt.speech.{home}"), name)
