"""Traces as batches: what is trained on and what is held out, cut, padded, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrt.errors import RequestError
from specrt.traces import TraceText
from specrt_export.align.lookup import NOTHING, looked_up
from specrt_export.align.sparse_loss import SparseTarget

HELD_OUT = 0.1
"""Share of the texts that nothing is trained on."""


@dataclass(frozen=True)
class TraceWindow:
    """A text, or a part of it, and the distributions at some of its places.

    Shapes: tokens [S]; ids [A, K] int32, logprobs [A, K] f16, rest [A]. The first distribution is
        that of the token at `first`, the next that of the one after it.
    """

    tokens: NDArray[np.int64]
    first: int
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float16]
    rest: NDArray[np.float32]
    domain: str
    looked_up: NDArray[np.int16] | None = None
    """Of each distribution, see `looked_up`; None where lookup takes no part."""

    @property
    def last(self) -> int:
        """Where the last distribution is."""
        return self.first + len(self.ids) - 1


def split(texts: Sequence[TraceText]) -> tuple[list[TraceText], list[TraceText]]:
    """Return what is trained on and what is held out, which follows from a prompt alone.

    Texts of which nothing can be drafted are on neither side.
    Raises: RequestError where a side is left empty.
    """
    usable = [text for text in texts if len(text.answer) > 1]
    if not usable:
        raise RequestError(
            "the traces hold no answer of two tokens or more; collect them with more --max-tokens"
        )
    held = [text for text in usable if text.chance < HELD_OUT]
    kept = [text for text in usable if text.chance >= HELD_OUT]
    if not held or not kept:
        raise RequestError(
            f"of {len(usable)} answers {len(held)} are held out by the hash of their prompts and "
            f"{len(kept)} are not; collect traces of more prompts, 100 or more"
        )
    return kept, held


def cut(text: TraceText, most: int, lookup: int = 0) -> TraceWindow:
    """Return at most so many tokens of a text: the answer, and what of the prompt fits before it.

    Of an answer that is longer, its beginning is taken, a quarter of the tokens being the prompt.
    `lookup` are the tokens that lookup, which has the whole prompt, drafts first; 0 without it.
    """
    whole = np.concatenate([text.prompt, text.answer]).astype(np.int64)
    asked = len(text.prompt)
    begin = max(0, min(len(whole) - most, asked - most // 4))
    tokens = whole[begin : begin + most]
    count = begin + len(tokens) - asked
    return TraceWindow(
        tokens, asked - begin, text.ids[:count], text.logprobs[:count], text.rest[:count],
        text.domain, looked_up(whole[: begin + most], asked, lookup) if lookup else None,
    )  # fmt: skip


@dataclass(frozen=True)
class TraceBatch:
    """Windows side by side, filled up on the right.

    Shapes: tokens [B, S] int64; of the N places with a known distribution, target; where [N, 2]
        int64, row and token of each, row by row; chosen [N] int64, the tokens that the target wrote
        there; asked [N] bool, whether a round that begins there asks the draft.
    """

    tokens: Tensor
    target: SparseTarget
    where: Tensor
    chosen: Tensor
    asked: Tensor

    @classmethod
    def of(cls, windows: Sequence[TraceWindow], entry_of: Tensor | None) -> TraceBatch:
        """Join windows; `entry_of` [V] has the draft's entry of each id, -1 where it has none."""
        longest = max(len(window.tokens) for window in windows)
        tokens = torch.zeros(len(windows), longest, dtype=torch.int64)
        known = torch.zeros(len(windows), longest, dtype=torch.bool)
        for row, window in enumerate(windows):
            tokens[row, : len(window.tokens)] = torch.from_numpy(window.tokens)
            known[row, window.first : window.last + 1] = True
        asked = [w.looked_up == NOTHING if w.looked_up is not None else _all(w) for w in windows]
        ids, logprobs, rest = (
            torch.from_numpy(np.concatenate([getattr(w, name) for w in windows]))
            for name in ("ids", "logprobs", "rest")
        )
        ids = ids.long()
        entries = ids if entry_of is None else entry_of[ids]
        target = SparseTarget(entries, logprobs.float(), rest)
        own = torch.from_numpy(np.concatenate(asked))
        return cls(tokens, target, known.nonzero(), tokens[known], own)

    def behind(self, places: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the places so many tokens after others, and which of them are in the same row."""
        behind = places + count
        there = behind < len(self.where)
        behind = behind.clamp_max(len(self.where) - 1)
        return behind, there & (self.where[behind, 0] == self.where[places, 0])


def _all(window: TraceWindow) -> NDArray[np.bool_]:
    return np.ones(len(window.ids), np.bool_)


def batches(
    windows: Sequence[TraceWindow], tokens: int, entry_of: Tensor | None, seed: int, begin: int = 0
) -> Iterator[TraceBatch]:
    """Yield batches of about so many tokens without end, from number `begin` on.

    Every pass over the windows has an order of its own, which the seed decides. Windows of a
    batch are of about the same length.
    """
    number = passes = 0
    by_length = sorted(range(len(windows)), key=lambda at: len(windows[at].tokens))
    groups = list(grouped(windows, by_length, tokens))
    while True:
        order = np.random.default_rng([seed, passes]).permutation(len(groups))
        for at in order:
            if number >= begin:
                yield TraceBatch.of([windows[i] for i in groups[at]], entry_of)
            number += 1
        passes += 1


def grouped(
    windows: Sequence[TraceWindow], order: Sequence[int], tokens: int
) -> Iterator[list[int]]:
    """Yield the numbers of windows that follow one another and take up to so many tokens padded."""
    group: list[int] = []
    for at in order:
        longest = max(len(windows[i].tokens) for i in [*group[-1:], at])
        if group and longest * (len(group) + 1) > tokens:
            yield group
            group = []
        group.append(at)
    if group:
        yield group
