"""Texts as files of token ids, and the windows that training takes from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from pair.errors import BadInputError

Tokens = NDArray[np.uint16]


def write_tokens(tokenizer: Tokenizer, texts: list[str], path: Path) -> int:
    """Write the texts' ids, END after each, as uint16 to `path`; return how many."""
    tokenizer.encode_special_tokens = True  # END spelled out in a text is ordinary text
    with path.open("wb") as file:
        for start in range(0, len(texts), 256):
            part = texts[start : start + 256]
            for encoding in tokenizer.encode_batch(part, add_special_tokens=False):
                np.array([*encoding.ids, 0], np.uint16).tofile(file)
    return path.stat().st_size // 2


def write_split(
    tokenizer: Tokenizer, train: list[str], held_out: list[str], out: Path
) -> dict[str, int]:
    """Write both sides' tokens and the tokenizer into OUT; return the figures for the report."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").unlink(missing_ok=True)  # back once the tokens are all written
    figures = {
        "files": len(train),
        "characters": sum(map(len, train)),
        "tokens": write_tokens(tokenizer, train, out / "train.bin"),
        "held_out_files": len(held_out),
        "held_out_tokens": write_tokens(tokenizer, held_out, out / "held_out.bin"),
    }
    tokenizer.save(str(out / "tokenizer.json"))
    return figures


def load_tokens(out: Path, name: str, window: int) -> Tokens:
    """Map OUT/name.bin, which must hold two windows at least.

    Shapes: uint16 [tokens].
    Raises: BadInputError where the file is missing or too short.
    """
    path = out / f"{name}.bin"
    if not path.is_file():
        raise BadInputError(f"no {path}: run `text` first")
    size = path.stat().st_size // 2
    if size < 2 * window + 2:
        raise BadInputError(f"too little text: {size} tokens in {path}, window {window}")
    return np.memmap(path, np.uint16, "r")


def windows_at(tokens: Tokens, starts: Iterable[int], window: int, device: str) -> Tensor:
    """Return the windows that begin there, each with the token after it, on the device.

    Shapes: int64 [starts, window + 1].
    """
    rows = np.stack([tokens[start : start + window + 1] for start in starts])
    return torch.from_numpy(rows.astype(np.int64)).to(device)


def training_starts(size: int, step: int, batch: int, window: int, seed: int) -> Iterator[int]:
    """Yield where the step's windows start in `size` tokens.

    A pass takes every window once, in an order and at an offset that follow from the seed and
    the pass: a resumed run goes on exactly where it was, with no generator's state to keep.
    """
    count = (size - 1 - window) // window
    for index in range(step * batch, (step + 1) * batch):
        turn, slot = divmod(index, count)
        yield int(_order(seed, turn, count)[slot]) * window + turn * 97 % window


@lru_cache(maxsize=2)
def _order(seed: int, turn: int, count: int) -> NDArray[np.int64]:
    # A permutation of the windows for each pass; a batch may lie across two.
    return np.random.default_rng([seed, turn]).permutation(count)
