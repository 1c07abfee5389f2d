"""Hold a draft's vocabulary against its target's, token by token."""

from __future__ import annotations

import re

from tokenizers import Tokenizer

from specrt.errors import CheckpointError
from specrt_export.checkpoint import Checkpoint

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
    ours, theirs = read_tokens(target), read_tokens(draft)
    for index in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(index), theirs.get(index)
        if mine == other or (_filler(mine) and _filler(other)):
            continue
        raise CheckpointError(
            f"target and draft differ at token id {index}: {_shown(mine)} in {target.folder}, "
            f"{_shown(other)} in {draft.folder}; a draft must share its target's tokenizer, "
            "choose a smaller model of the same family"
        )


def read_tokens(checkpoint: Checkpoint) -> dict[int, str]:
    """Return the token of each id of a checkpoint's tokenizer, added tokens included.

    Raises: CheckpointError if it is missing, unreadable, or has ids the model has no row for.
    """
    path = checkpoint.folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(
            f"{checkpoint.folder} has no tokenizer.json; write one with "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    # The tokenizers library raises bare Exception for whatever it cannot read.
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a tokenizer ({error}); fetch the checkpoint again"
        ) from error
    tokens = {index: token for token, index in vocabulary.items()}
    size = checkpoint.config.get("vocab_size")
    last = max(tokens, default=-1)
    if isinstance(size, int) and last >= size:
        raise CheckpointError(
            f"{path} has token id {last} ({tokens[last]!r}), but the model has vocab_size {size}; "
            "the tokenizer belongs to another model"
        )
    return tokens


def _filler(token: str | None) -> bool:
    return token is None or UNUSED.fullmatch(token) is not None


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)
