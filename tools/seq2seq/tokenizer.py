"""The tokenizer of a T5 pair: byte-level BPE, with T5's two special tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, processors

from pair.errors import BadInputError
from pair.tokenizer import new_tokenizer as tokenizer_of

PAD, END = "<pad>", "</s>"
SPECIAL = (PAD, END)  # tokens 0 and 1


def new_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Return a tokenizer of those texts, which puts END after each."""
    tokenizer = tokenizer_of(texts, vocabulary, SPECIAL)
    end = (END, SPECIAL.index(END))
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {END}", None, [end])
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer that `text` wrote.

    Raises: BadInputError where there is none.
    """
    if not path.is_file():
        raise BadInputError(f"no {path}: run `text` first")
    return Tokenizer.from_file(str(path))
