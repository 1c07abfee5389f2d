"""Pairs of token sequences: files of them, and batches of one length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from itn.task import Pair
from pair.errors import BadInputError

Tokens = NDArray[np.uint16]
POOL = 16  # batches that are drawn together and sorted by length, so that little is padded


class TokenPairs:
    """Sources and answers as tokens, END after each.

    Shapes: uint16 [tokens] each, with int64 [pairs + 1] where each pair begins.
    """

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays = arrays

    @classmethod
    def cut(cls, tokenizer: Tokenizer, pairs: Sequence[Pair]) -> TokenPairs:
        """Tokenize pairs of texts."""
        arrays: dict[str, Any] = {}
        for name in ("source", "answer"):
            texts = tokenizer.encode_batch([getattr(pair, name) for pair in pairs])
            rows = [np.array(text.ids, np.uint16) for text in texts]
            arrays[name] = np.concatenate(rows)
            arrays[f"{name}_begins"] = np.cumsum([0, *map(len, rows)])
        return cls(arrays)

    @classmethod
    def load(cls, path: Path) -> TokenPairs:
        """Read what `save` wrote.

        Raises: BadInputError where there is no such file.
        """
        if not path.is_file():
            raise BadInputError(f"no {path}: run `text` first")
        with np.load(path) as arrays:
            return cls(dict(arrays))

    def save(self, path: Path) -> None:
        """Write all to one file."""
        np.savez(path, **self.arrays)

    def __len__(self) -> int:
        return len(self.arrays["source_begins"]) - 1

    def tokens(self) -> int:
        """Return how many tokens there are on both sides."""
        return len(self.arrays["source"]) + len(self.arrays["answer"])

    def row(self, name: str, index: int) -> Tokens:
        """Return a source or an answer."""
        begin, end = self.arrays[f"{name}_begins"][index : index + 2]
        row: Tokens = self.arrays[name][begin:end]
        return row

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return sources and answers, padded with 0 behind.

        Shapes: int64 [batch, longest source]; int64 [batch, longest answer].
        """
        sources, answers = (
            padded([self.row(name, index) for index in indices]) for name in ("source", "answer")
        )
        return sources, answers

    def training_batch(self, step: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a step, which follows from its number and the seed alone."""
        pool, slot = divmod(step, POOL)
        chosen = _pool(seed, pool, len(self), size * POOL)
        lengths = np.diff(self.arrays["source_begins"])[chosen]
        chosen = chosen[np.argsort(lengths, kind="stable")]
        order = np.random.default_rng([seed, pool]).permutation(POOL)
        return self.batch(chosen[order[slot] * size :][:size].tolist())


def padded(rows: Sequence[Tokens]) -> Tensor:
    """Return rows of different lengths as one tensor, padded with 0 behind."""
    out = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return torch.from_numpy(out)


@lru_cache(maxsize=2)
def _pool(seed: int, pool: int, pairs: int, size: int) -> NDArray[np.int64]:
    places = np.arange(pool * size, (pool + 1) * size)
    turns = places // pairs
    orders = {
        t: np.random.default_rng([seed, 1, t]).permutation(pairs) for t in set(turns.tolist())
    }
    return np.array(
        [orders[t][p] for t, p in zip(turns.tolist(), (places % pairs).tolist(), strict=True)]
    )
