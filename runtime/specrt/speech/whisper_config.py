"""What a bundle of Whisper says of its features, its languages and its control tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import Any

from specrt.bundle import (
    GENERATION_CONFIG,
    PREPROCESSOR_CONFIG,
    PROCESSOR_CONFIG,
    Manifest,
    check_unlisted,
    hold_listed,
    read_manifest,
)
from specrt.errors import BundleError, RequestError, did_you_mean
from specrt.speech.log_mel import LogMel, log_mel_of

TRANSCRIBE = "transcribe"

SPEECH_TASK = "automatic-speech-recognition"

_MOST_BYTES = 4 << 20
"""Of a file with settings; early ones list all mel filters."""


@dataclass(frozen=True)
class WhisperConfig:
    """The control tokens of a checkpoint, and its feature extractor."""

    log_mel: LogMel
    start: int
    """<|startoftranscript|>."""
    end: int
    """<|endoftext|>: every token below it is text."""
    no_timestamps: int
    """<|notimestamps|>: every token above it is a timestamp."""
    languages: Mapping[str, int] = field(default_factory=dict)
    """By code, as `en`; empty where the model knows English only."""
    tasks: Mapping[str, int] = field(default_factory=dict)
    """`transcribe` and `translate`; empty where the model has no tasks."""
    language: str | None = None
    """What the checkpoint transcribes where no language is given; None detects it."""
    max_initial_timestamp: int | None = None
    """Most steps of `STEP_S` that the first timestamp of a window may be from its beginning."""
    max_length: int = 448
    """Most tokens of a window after those it begins with."""

    @property
    def no_speech(self) -> int:
        """<|nospeech|>, the token before <|notimestamps|>."""
        return self.no_timestamps - 1

    @property
    def timestamp_begin(self) -> int:
        """<|0.00|>; each token after it is `STEP_S` later."""
        return self.no_timestamps + 1

    @property
    def multilingual(self) -> bool:
        """Whether text begins with a language and a task."""
        return bool(self.languages)

    def prefix(self, language: str | None, task: str, *, timestamps: bool) -> tuple[int, ...]:
        """Return the tokens that a window's text begins with.

        Raises: RequestError for a language or a task that the model does not know.
        """
        self.check(language, task)
        own: tuple[int, ...] = ()
        if self.multilingual:
            assert language is not None, "it was given or detected"
            own = (self.languages[language], self.tasks[task])
        return (self.start, *own, *(() if timestamps else (self.no_timestamps,)))

    def check(self, language: str | None, task: str) -> None:
        """Refuse a language or a task that the model does not know.

        Raises: RequestError.
        """
        if not self.multilingual:
            if language not in (None, "en") or task != TRANSCRIBE:
                raise RequestError(
                    f"language {language!r} and task {task!r} were given, and this model only "
                    "transcribes English; leave them out"
                )
            return
        if language is not None and language not in self.languages:
            raise RequestError(f"language is {language!r}{did_you_mean(language, self.languages)}")
        if task not in self.tasks:
            raise RequestError(f"task is {task!r}{did_you_mean(task, self.tasks)}")


STEP_S = 0.02
"""From one timestamp token to the next."""

STEP_FRAMES = 2
"""The same in frames of the features."""


def read_whisper_config(bundle: str | Path) -> WhisperConfig:
    """Read what a bundle says of its speech.

    Raises: BundleError for a bundle for another task, and for files that are damaged.
    """
    folder = Path(bundle)
    manifest = read_manifest(folder)
    if manifest.task != SPEECH_TASK:
        raise BundleError(
            f"{folder} is a bundle for {manifest.task}; expected one for {SPEECH_TASK}, built from "
            "a Whisper checkpoint"
        )
    check_unlisted(folder, manifest)
    log_mel = _log_mel(folder, manifest)
    encoder = manifest.target.encoder
    sizes = (encoder.features, encoder.frames) if encoder else (0, 0)
    if sizes != (log_mel.feature_size, log_mel.window_frames):
        raise BundleError(
            f"{folder} has an encoder of {sizes[0]} features and {sizes[1]} frames, and its "
            f"feature extractor makes {log_mel.feature_size} and {log_mel.window_frames}; build "
            "the bundle again from one checkpoint"
        )
    settings = _settings(folder, manifest, GENERATION_CONFIG)
    try:
        return whisper_config(settings, log_mel, manifest.target.geometry.vocab_size)
    except ValueError as error:
        raise _damaged(folder / GENERATION_CONFIG, str(error)) from error


def _log_mel(folder: Path, manifest: Manifest) -> LogMel:
    """Return the feature extractor of a bundle; where no file has it, one of the encoder's size."""
    for name in (PREPROCESSOR_CONFIG, PROCESSOR_CONFIG):
        if name not in manifest.files:
            continue
        found = _settings(folder, manifest, name)
        found = found if name == PREPROCESSOR_CONFIG else found.get("feature_extractor", found)
        try:
            if not isinstance(found, dict):
                raise ValueError(f"feature_extractor is {short(found)}; expected an object")
            return log_mel_of(found)
        except ValueError as error:
            raise _damaged(folder / name, str(error)) from error
    encoder = manifest.target.encoder
    return LogMel(encoder.features) if encoder and encoder.features else LogMel()


def whisper_config(settings: Mapping[str, Any], log_mel: LogMel, vocabulary: int) -> WhisperConfig:
    """Return what a checkpoint's generation settings say.

    Raises: ValueError naming the first that is missing or out of range.
    """

    def token(name: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value < vocabulary:
            raise ValueError(f"{name} is {short(value)}; expected a token id below {vocabulary}")
        return value

    def table(name: str) -> Iterator[tuple[str, int]]:
        found = settings.get(name) or {}
        if not isinstance(found, dict):
            raise ValueError(f"{name} is {short(found)}; expected an object")
        for key, value in found.items():
            yield key.removeprefix("<|").removesuffix("|>"), token(f"{name}[{key!r}]", value)

    english = settings.get("is_multilingual") is False
    languages = {} if english else dict(table("lang_to_id"))
    tasks = {} if english else dict(table("task_to_id"))
    if not english and (not languages or TRANSCRIBE not in tasks):
        raise ValueError(
            "lang_to_id or task_to_id is missing; expected both, or is_multilingual: false"
        )
    ends = settings.get("eos_token_id")
    first = settings.get("max_initial_timestamp_index")
    longest = settings.get("max_length", WhisperConfig.max_length)
    if type(longest) is not int or longest < 1:
        raise ValueError(f"max_length is {short(longest)}; expected a whole number of 1 or more")
    if first is not None and (type(first) is not int or first < 0):
        raise ValueError(f"max_initial_timestamp_index is {short(first)}; expected 0 or more")
    no_timestamps = token("no_timestamps_token_id", settings.get("no_timestamps_token_id"))
    return WhisperConfig(
        log_mel,
        token("decoder_start_token_id", settings.get("decoder_start_token_id")),
        token("eos_token_id", ends[0] if isinstance(ends, list) and ends else ends),
        no_timestamps,
        languages,
        tasks,
        _own_language(settings, languages),
        first,
        longest,
    )


def _own_language(settings: Mapping[str, Any], languages: Mapping[str, int]) -> str | None:
    """Return the language that a checkpoint was made for, where it names one."""
    named = settings.get("language")
    if (
        isinstance(named, str)
        and (code := named.removeprefix("<|").removesuffix("|>")) in languages
    ):
        return code
    forced = settings.get("forced_decoder_ids")
    if isinstance(forced, list):  # pairs of a place and a token, the language at place 1
        codes = {token: code for code, token in languages.items()}
        found = (codes.get(pair[1]) for pair in forced if _is_pair(pair) and pair[0] == 1)
        return next(found, None)
    return None


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], int)


def _settings(folder: Path, manifest: Manifest, name: str) -> dict[str, Any]:
    """Return the settings of a file that the manifest lists: of the bytes that were hashed."""
    if name not in manifest.files:
        raise BundleError(
            f"{folder} has no {name}, which names the control tokens; build the bundle again from "
            "a checkpoint that has it"
        )
    held = hold_listed(folder, manifest, name)
    if len(held.data) > _MOST_BYTES:
        raise _damaged(folder / name, f"it has {len(held.data)} bytes")
    try:
        settings = json.loads(bytes(held.data))
    except (ValueError, RecursionError) as error:
        raise _damaged(folder / name, f"it is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise _damaged(folder / name, f"it holds {short(settings)}; expected an object")
    return settings


def _damaged(path: Path, why: str) -> BundleError:
    return BundleError(
        f"{path} cannot be used ({why}); correct it in the checkpoint and build the bundle again"
    )
