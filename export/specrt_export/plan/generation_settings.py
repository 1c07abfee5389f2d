"""Where texts of a checkpoint begin and end, and how it says that they are written."""

from __future__ import annotations

import json
from pathlib import Path
from reprlib import repr as short
from typing import Any

from specrt.bundle import GENERATION_CONFIG
from specrt.errors import CheckpointError, first_line
from specrt.held_file import read_file
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.task import SPEECH, TEXT_GENERATION


def end_tokens(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the tokens that end a text: none, one or several.

    Raises: CheckpointError for what are not token ids of the model.
    """
    path, value = _setting(checkpoint, "eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        _check_id(checkpoint, path, "eos_token_id", token)
    return tuple(ids)


def begin_token(checkpoint: Checkpoint) -> int | None:
    """Return the token that an empty prompt begins with, if there is one.

    Raises: CheckpointError for what is not a token id of the model.
    """
    path, value = _setting(checkpoint, "bos_token_id")
    if value is None:
        return None
    return _check_id(checkpoint, path, "bos_token_id", value)


def decoder_start(checkpoint: Checkpoint, task: str) -> tuple[int, ...]:
    """Return the tokens that a text of a source begins with; none for a task without sources.

    Of Whisper they also name the language (English, where no setting says which), the task
    (to transcribe) and that there are no timestamps.
    Raises: CheckpointError for what are not token ids of the model, or where none is named.
    """
    if task == TEXT_GENERATION:
        return ()
    for key in ("decoder_start_token_id", "bos_token_id"):
        path, first = _setting(checkpoint, key)
        if first is not None:
            break
    else:
        raise CheckpointError(
            f"{path} has no decoder_start_token_id; expected the token that a text begins with: "
            "add it to generation_config.json"
        )
    start = [_check_id(checkpoint, path, key, first)]
    return tuple(start) + (_spoken(checkpoint) if task == SPEECH else ())


def _spoken(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return what follows the first token of a text of speech."""
    _, languages = _setting(checkpoint, "lang_to_id")
    found = _forced(checkpoint) if languages is None else []
    if languages is not None:
        path, language = _setting(checkpoint, "language")
        code = f"<|{str(language or 'en').strip('<|>').lower()}|>"
        if not isinstance(languages, dict) or code not in languages:
            raise CheckpointError(
                f"{path} has language {short(language)}, which its lang_to_id does not; expected "
                "a code such as 'en': correct generation_config.json"
            )
        found.append((path, "lang_to_id", languages[code]))
        _, tasks = _setting(checkpoint, "task_to_id")
        _, wanted = _setting(checkpoint, "task")
        known = tasks if isinstance(tasks, dict) else {}
        found.append((path, f"task_to_id[{wanted}]", known.get(wanted or "transcribe")))
    path, silent = _setting(checkpoint, "no_timestamps_token_id")
    if silent is not None and silent not in [value for _, _, value in found]:
        found.append((path, "no_timestamps_token_id", silent))
    return tuple(_check_id(checkpoint, *one) for one in found)


def _forced(checkpoint: Checkpoint) -> list[tuple[Path, str, Any]]:
    """Return what older settings force after the first token: pairs of a position and an id."""
    path, pairs = _setting(checkpoint, "forced_decoder_ids")
    try:
        return [
            (path, "forced_decoder_ids", token)
            for _, token in sorted(pairs or ())
            if token is not None
        ]
    except (TypeError, ValueError):
        raise CheckpointError(
            f"{path} has forced_decoder_ids {short(pairs)}; expected pairs of a position and a "
            "token id: correct the file, or fetch it again"
        ) from None


SETTINGS = (
    "min_length", "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids",
    "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "num_beams", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "exponential_decay_length_penalty",
)  # fmt: skip
"""Settings of how to write a text, which older checkpoints have in config.json."""


def generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's generation_config.json, or what of it its config.json holds.

    As transformers does, the second is read only where there is no such file.
    Raises: CheckpointError for a file that cannot be read.
    """
    if (checkpoint.folder / GENERATION_CONFIG).is_file():
        return _generation_settings(checkpoint)
    return {k: checkpoint.config[k] for k in SETTINGS if checkpoint.config.get(k) is not None}


def _setting(checkpoint: Checkpoint, key: str) -> tuple[Path, Any]:
    """Return a setting and the file it is from."""
    value = _generation_settings(checkpoint).get(key)
    if value is None:
        return checkpoint.folder / "config.json", checkpoint.config.get(key)
    return checkpoint.folder / GENERATION_CONFIG, value


def _generation_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    path = checkpoint.folder / GENERATION_CONFIG
    try:
        settings = json.loads(read_file(path)) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {first_line(error)}; fetch it again") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} holds {short(settings)}; expected an object, fetch it again")
    return settings


def _check_id(checkpoint: Checkpoint, path: Path, key: str, value: Any) -> int:
    size = checkpoint.config.get("decoder_vocab_size") or checkpoint.config.get("vocab_size")
    last = size - 1 if type(size) is int else None
    if type(value) is int and value >= 0 and (last is None or value <= last):
        return value
    known = "0 or more" if last is None else f"from 0 to {last}"
    raise CheckpointError(
        f"{path} has {key} {short(value)}; expected token ids {known}: correct the file, or fetch "
        "it again"
    )
