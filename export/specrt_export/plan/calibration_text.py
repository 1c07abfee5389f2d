"""The text that models are measured on, in pieces, and the pieces that codes are found on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from specrt.engine.protocol import Source
from specrt.errors import BuildError, RequestError
from specrt.text.prompt_file import read_prompts, read_text
from specrt.text.tokenizer import Tokenizer
from specrt_export.portable.graph import Tokens

PIECE = 512
"""Tokens that are scored one after another, the earlier ones as context of the later."""

MOST, FEWEST = 2048, 256
"""Tokens scored, spread over the whole text, and those a text needs to say anything."""

MOST_FITTED, FEWEST_FITTED = 6144, 2048
"""The same of tokens that codes are found on; more of them cost time in proportion."""


@dataclass(frozen=True)
class CalibrationPieces:
    """Pieces of a text: those that models are scored on, and those that codes are found on."""

    scored: list[Tokens]
    fitted: list[Tokens]
    """Of one length, but for texts of sources; none of them is scored."""
    sources: Sequence[Source] = ()
    """What each piece that is scored is a text of, where they are texts of sources."""
    fitted_sources: Sequence[Source] = ()
    """The same of each piece that codes are found on."""


def read_calibration(
    path: Path, tokenizer: Tokenizer, context: int, *, fits: bool = False
) -> CalibrationPieces:
    """Read a text file, or prompts from JSON lines, as pieces of up to `context` tokens.

    Prompts follow one another, as if they were one text.
    Raises: BuildError for a file that is missing, malformed or too short; `fits` is for one that
    codes are to be found on, too.
    """
    try:
        lines = path.suffix == ".jsonl"
        texts = [p.text for p in read_prompts(path)] if lines else [read_text(path)]
        tokens = [token for text in texts if text for token in tokenizer.encode(text)]
    except RequestError as error:
        raise BuildError(f"quality.calibration: {error}") from error
    if len(tokens) < FEWEST:
        raise BuildError(
            f"quality.calibration: {path} comes to {len(tokens)} tokens; expected {FEWEST} or more "
            "of text like what the model will be used for"
        )
    pieces = _pieces(np.array(tokens, np.int64), min(PIECE, context))
    left = sum(map(len, pieces.fitted))
    if fits and left < FEWEST_FITTED:
        raise _too_short_to_fit(path, len(tokens), left)
    return pieces


def read_source_pairs(
    path: Path, tokenizer: Tokenizer, start: Sequence[int], context: int, max_source: int,
    *, fits: bool = False,
) -> CalibrationPieces:  # fmt: skip
    """Read sources and texts of them from JSON lines, as an encoder-decoder is scored on.

    A line is `{"prompt": SOURCE, "completion": TEXT}`. Texts begin with `start`, and are cut at
    `context` tokens. Lines whose source is longer than `max_source` tokens are left out.
    Raises: BuildError for a file that is missing, malformed or too short; `fits` is for one that
    codes are to be found on, too.
    """
    expected = 'expected lines such as {"prompt": "SOURCE", "completion": "TEXT"}'
    if path.suffix != ".jsonl":
        raise BuildError(
            f"quality.calibration: {path} is no .jsonl file, and the model makes its text of a "
            f"source; {expected}"
        )
    pairs: list[tuple[Source, Tokens]] = []
    try:
        for line in read_prompts(path):
            if not line.completion.strip() or not line.text.strip():
                raise BuildError(
                    f"quality.calibration: {line.place} lacks a prompt or a completion; {expected}"
                )
            source = np.array(tokenizer.encode(line.text), np.int64)
            # What follows the last token of a text is nothing that the model learned.
            text = [*start, *tokenizer.encode(line.completion)][:-1][:context]
            if len(source) <= max_source:
                pairs.append((source, np.array(text, np.int64)))
    except RequestError as error:
        raise BuildError(f"quality.calibration: {error}") from error
    return pieces_of_sources(path, pairs, lambda source: source, fits=fits)


Unread = TypeVar("Unread")


def pieces_of_sources(
    path: Path, pairs: Sequence[tuple[Unread, Tokens]], read: Callable[[Unread], Source],
    *, fits: bool = False,
) -> CalibrationPieces:  # fmt: skip
    """Return pairs from the whole file, whose texts come to `MOST` tokens; read their sources.

    Where codes are to be found, too, `MOST_FITTED` tokens of the others are for that.
    Raises: BuildError for fewer than `FEWEST` or `FEWEST_FITTED`.
    """
    lengths = [len(text) for _, text in pairs]
    total = sum(lengths)
    scored = _spread(len(pairs), MOST * len(pairs) // max(1, total))
    rest = [at for at in range(len(pairs)) if fits and at not in set(scored)]
    left = sum(lengths[at] for at in rest)
    fitted = [rest[at] for at in _spread(len(rest), MOST_FITTED * len(rest) // max(1, left))]
    found = CalibrationPieces(
        [pairs[at][1] for at in scored], [pairs[at][1] for at in fitted],
        [read(pairs[at][0]) for at in scored], [read(pairs[at][0]) for at in fitted],
    )  # fmt: skip
    if total < FEWEST:
        raise BuildError(
            f"quality.calibration: {path} comes to {total} tokens of texts whose sources fit; "
            f"expected {FEWEST} or more, of texts like what the model will be used for"
        )
    if fits and left < FEWEST_FITTED:
        raise _too_short_to_fit(path, total, left)
    return found


def _too_short_to_fit(path: Path, total: int, left: int) -> BuildError:
    return BuildError(
        f"quality.calibration: {path} comes to {total} tokens, which leaves {left} besides those "
        f"that are scored, and quantizer 'gptq' takes {FEWEST_FITTED} or more; give it "
        f'{MOST + MOST_FITTED} tokens of text, or use quantizer = "search"'
    )


def _pieces(tokens: Tokens, length: int) -> CalibrationPieces:
    """Cut tokens into whole pieces, `MOST` tokens of them scored; a short text is one piece."""
    if len(tokens) < length:
        return CalibrationPieces([tokens], [])
    whole = tokens[: len(tokens) // length * length].reshape(-1, length)
    scored = _spread(len(whole), MOST // length)
    rest = [at for at in range(len(whole)) if at not in scored]
    fitted = [rest[at] for at in _spread(len(rest), MOST_FITTED // length)]
    return CalibrationPieces([whole[at] for at in scored], [whole[at] for at in fitted])


def _spread(there: int, most: int) -> list[int]:
    """Return places in a list, at the same distances."""
    places = np.linspace(0, there - 1, min(there, max(1, most))).round()
    return [int(place) for place in places]
