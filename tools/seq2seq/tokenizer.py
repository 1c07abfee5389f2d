"""The tokenizer of a T5 pair: byte-level BPE, with T5's two special tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from pair.errors import BadInputError

PAD, END = "<pad>", "</s>"
SPECIAL = (PAD, END)  # tokens 0 and 1


def new_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Return a tokenizer of those texts: single digits, END behind each text."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
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
