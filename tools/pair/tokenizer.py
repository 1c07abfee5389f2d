"""Tokenizers: making one of some texts, and reading one that fits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pair.errors import BadInputError

END = "<|endoftext|>"  # token 0, after every file


def new_tokenizer(
    texts: Iterable[str], vocabulary: int, special: Sequence[str] = (END,)
) -> Tokenizer:
    """Return a byte-level BPE tokenizer of those texts: single digits, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path, like: Path | None = None) -> Tokenizer:
    """Read a tokenizer.json with END = 0 and ids of 16 bits, which cuts as that at `like`.

    Raises: BadInputError where there is no such tokenizer.
    """
    if not path.is_file():
        raise BadInputError(f"no tokenizer: {path}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise BadInputError(f"not a tokenizer: {path}: {error}") from None
    if tokenizer.token_to_id(END) != 0 or tokenizer.get_vocab_size() > 2**16:
        raise BadInputError(f"tokenizer without {END} = 0, or of over 65536 entries: {path}")
    if like is not None and _cutting(tokenizer) != _cutting(load_tokenizer(like)):
        raise BadInputError(f"tokenizer mismatch: {path} and {like} differ")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _cutting(tokenizer: Tokenizer) -> dict[str, Any]:
    # The parts that decide which ids a text becomes.
    parts = json.loads(tokenizer.to_str())
    return {key: parts[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}
