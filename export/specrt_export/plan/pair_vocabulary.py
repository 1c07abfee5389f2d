"""The tokens of a pair: whether the same ids mean the same to both models."""

from __future__ import annotations

import re

from tokenizers import Tokenizer as HubTokenizer

from specrt.bundle import TOKENIZER
from specrt.errors import CheckpointError, first_line
from specrt.held_file import read_file
from specrt_export.checkpoint.checkpoint import TEXT_PARTS, Checkpoint

UNUSED = re.compile(
    r"""
    [<\[] \|? _{0,2}                             # <pad>, [unused7], <|reserved_special_token_3|>
    (pad | unused | reserved | extra | dummy | placeholder | filler)
    [\w ]* \|? [>\]]
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Spellings that fill a vocabulary up to a round size and stand for no text."""


def check_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    """Refuse a pair whose ids do not mean the same tokens.

    Accepted at the end of either: embedding rows without a token, and unused or padding tokens.
    Raises: CheckpointError with the first differing id and both its tokens.
    """
    ours, theirs = read_tokens(target), read_tokens(draft, drafts=True)
    for index in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(index), theirs.get(index)
        if mine == other or (_filler(mine) and _filler(other)):
            continue
        raise CheckpointError(
            f"target and draft differ at token id {index}: {_shown(mine)} in {target.origin}, "
            f"{_shown(other)} in {draft.origin}; a draft must share its target's tokenizer, "
            "choose a smaller model of the same family"
        )


def read_tokens(checkpoint: Checkpoint, *, drafts: bool = False) -> dict[int, str]:
    """Return the token of each id of a checkpoint's tokenizer, added tokens included.

    The small Gemma 3 lack rows for added tokens, such as that of a picture. So may a draft: it
    never proposes them, and is silent once its target has one.
    Raises: CheckpointError if it is missing, unreadable, or has ids the model has no row for.
    """
    path, tokenizer = checkpoint.folder / TOKENIZER, open_tokenizer(checkpoint)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = {index: token for token, index in vocabulary.items()}
    size = checkpoint.config.get("vocab_size")
    added = tokenizer.get_added_tokens_decoder() if drafts or lacks_rows(checkpoint) else {}
    last = max((index for index in tokens if index not in added), default=-1)
    if isinstance(size, int) and last >= size:
        raise CheckpointError(
            f"{path} has token id {last} ({tokens[last]!r}), but the model has vocab_size {size}; "
            "the tokenizer belongs to another model"
        )
    return tokens


def lacks_rows(checkpoint: Checkpoint) -> bool:
    """Tell whether a model has the tokenizer of a larger one that is multimodal."""
    return checkpoint.config.get("model_type") in TEXT_PARTS.values()


def open_tokenizer(checkpoint: Checkpoint) -> HubTokenizer:
    """Read the tokenizer of a checkpoint.

    Raises: CheckpointError if it is missing or unreadable.
    """
    path = checkpoint.folder / TOKENIZER
    if not path.exists():
        raise CheckpointError(
            f"{checkpoint.folder} has no {TOKENIZER}; write one with "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        return HubTokenizer.from_buffer(read_file(path))
    # The tokenizers library raises bare Exception for whatever it cannot read.
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a tokenizer ({first_line(error)}); fetch the checkpoint again"
        ) from error


def _filler(token: str | None) -> bool:
    return token is None or UNUSED.fullmatch(token) is not None


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)
