"""The text that quantized models are held to, as pieces of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specrt.errors import BuildError, RequestError
from specrt.prompts import read_prompts, read_text
from specrt.text import Tokenizer
from specrt_export.portable import Tokens

PIECE = 512
"""Tokens that are scored one after another, the earlier ones as context of the later."""

MOST, FEWEST = 2048, 256
"""Tokens scored, spread over the whole text, and those a text needs to say anything."""


def read_calibration(path: Path, tokenizer: Tokenizer, context: int) -> list[Tokens]:
    """Read a text file, or prompts from JSON lines, as pieces of up to `context` tokens.

    Prompts follow one another, as if they were one text.
    Raises: BuildError for a file that is missing, malformed or too short.
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
    return _pieces(np.array(tokens, np.int64), min(PIECE, context))


def _pieces(tokens: Tokens, length: int) -> list[Tokens]:
    """Cut tokens into whole pieces, `MOST` tokens of them; a short text is one piece."""
    if len(tokens) < length:
        return [tokens]
    whole = len(tokens) // length
    chosen = np.linspace(0, whole - 1, min(whole, max(1, MOST // length))).round()
    return [tokens[at : at + length] for at in chosen.astype(int) * length]
