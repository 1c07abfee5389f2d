"""Recordings and texts of them, which a model of speech is measured on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specrt.bundle import PREPROCESSOR_CONFIG, PROCESSOR_CONFIG
from specrt.engine.protocol import Source
from specrt.errors import BuildError, CheckpointError, RequestError, first_line
from specrt.held_file import read_file
from specrt.speech.log_mel import LogMel, log_mel_of
from specrt.speech.wav import read_wav
from specrt.text.prompt_file import read_text
from specrt.text.tokenizer import Tokenizer
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.plan.calibration_text import CalibrationPieces, pieces_of_sources
from specrt_export.portable.graph import Tokens


def read_speech_pairs(
    path: Path, tokenizer: Tokenizer, start: Sequence[int], context: int, shape: tuple[int, int],
    log_mel: LogMel, *, fits: bool = False,
) -> CalibrationPieces:  # fmt: skip
    """Read speech and texts of it from JSON lines, as a model of speech is scored on.

    A line is `{"audio": "FILE.wav", "completion": TEXT}`, whose features `log_mel` makes, or
    `{"features": "FILE.npy", "completion": TEXT}` with those that the checkpoint's feature
    extractor made, of a `shape` [C, F]. Files lie next to the one that names them; those that are
    scored are read. Texts begin with `start`, and are cut at `context` tokens.
    Raises: BuildError for a file that is missing, malformed or too short; `fits` is for one that
    codes are to be found on, too.
    """
    expected = (
        'expected lines such as {"audio": "FILE.wav", "completion": "TEXT"}, or {"features": '
        '"FILE.npy", "completion": "TEXT"} with features of type float32 and shape '
        f"{list(shape)}, as the checkpoint's feature extractor makes them"
    )
    pairs: list[tuple[_Speech, Tokens]] = []
    try:
        lines = [line for line in read_text(path).split("\n") if line.strip()]
    except RequestError as error:
        raise BuildError(f"quality.calibration: {error}") from error
    for number, line in enumerate(lines, 1):
        place = f"quality.calibration: {path}, line {number} of those that are not blank"
        try:
            named = json.loads(line)
            kinds = named.keys() & {"audio", "features"}
            if len(kinds) != 1:
                raise BuildError(f"{place}, names {_both_or_none(kinds)}; {expected}")
            file = path.parent / named[kinds.pop()]
            text = [*start, *tokenizer.encode(named["completion"], special=False)][:context]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise BuildError(f"{place}, cannot be read ({error}); {expected}") from error
        speech = _Speech(file, place, "audio" in named, log_mel, shape)
        pairs.append((speech, np.array(text, np.int64)))
    return pieces_of_sources(path, pairs, lambda speech: speech.features(expected), fits=fits)


def _both_or_none(kinds: AbstractSet[str]) -> str:
    return "both audio and features" if kinds else "neither audio nor features"


@dataclass(frozen=True)
class _Speech:
    """A recording, or the features of one, in a file."""

    file: Path
    place: str
    is_audio: bool
    log_mel: LogMel
    shape: tuple[int, int]

    def features(self, expected: str) -> Source:
        """Read a file, and make features [C, F] of a recording.

        Raises: BuildError for one that cannot be read, is longer than an encoder hears, or has
            features of another shape.
        """
        if self.is_audio:
            return self._heard()
        try:
            found = np.load(self.file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise BuildError(f"{self.place}, cannot be read ({error}); {expected}") from error
        if found.shape != self.shape or found.dtype.kind != "f":
            raise BuildError(
                f"{self.place}, has features of type {found.dtype} and shape {list(found.shape)}; "
                f"{expected}"
            )
        return np.asarray(found, np.float32)

    def _heard(self) -> Source:
        log_mel = self.log_mel
        if (log_mel.feature_size, log_mel.window_frames) != self.shape:
            raise BuildError(
                f"{self.place}, is a recording, of which the checkpoint's feature extractor makes "
                f"{log_mel.feature_size} features in {log_mel.window_frames} frames, and its "
                f"encoder reads {self.shape[0]} in {self.shape[1]}; correct "
                f"{PREPROCESSOR_CONFIG} in the checkpoint"
            )
        try:
            samples = read_wav(self.file, log_mel.sampling_rate)
        except RequestError as error:
            raise BuildError(f"{self.place}: {error}") from error
        if len(samples) > log_mel.window_samples:
            raise BuildError(
                f"{self.place}: {self.file} lasts {len(samples) / log_mel.sampling_rate:.1f} s, "
                f"and the encoder hears {log_mel.chunk_length}; cut it, and its text with it"
            )
        return log_mel(samples)


def feature_extractor(checkpoint: Checkpoint) -> LogMel:
    """Return what makes features of recordings for a checkpoint of speech.

    Raises: CheckpointError for settings that are damaged, or of another extractor.
    """
    for name in (PREPROCESSOR_CONFIG, PROCESSOR_CONFIG):
        path = checkpoint.folder / name
        if not path.is_file():
            continue
        try:
            found = json.loads(read_file(path))
            found = found if name == PREPROCESSOR_CONFIG else found.get("feature_extractor", found)
            return log_mel_of(found)
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} cannot be used ({first_line(error)}); fetch it again"
            ) from error
    bins = checkpoint.config.get("num_mel_bins")
    return LogMel(bins) if isinstance(bins, int) and bins > 0 else LogMel()
