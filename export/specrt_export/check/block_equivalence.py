"""Equivalence of block heads: graphs compute what the modules do, and engines what graphs do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrt.engine.ort.block_engine import OrtBlockEngine
from specrt.engine.protocol import Feed
from specrt.errors import BuildError, ExportError
from specrt_export.check.equivalence import PARITY_TOLERANCE, TOLERANCES, passes
from specrt_export.heads.dflash_format import (
    CONFIDENCE,
    MARKOV,
    MARKOV_CONFIDENCE,
    BlockConfig,
    BlockHead,
)
from specrt_export.heads.dflash_module import BlockDraftHead
from specrt_export.heads.head_formats import load_head
from specrt_export.portable.graph import GraphRun

Floats = NDArray[np.float32]

LENGTH, CUT, ROLLED_BACK = 24, 16, 5
"""Positions of a context, those fed first, and those fed again."""

PREVIOUS_TOKENS = 3
"""Tokens that a Markov head is asked about at once."""


def block_states(model: BlockDraftHead, token: int, context: Floats) -> Tensor:
    """Return the states of torch that drafted tokens are scored from, [drafts, width]."""
    config, behind = model.flags, len(context)
    block = torch.full((1, config.block_size), config.mask_token_id)
    block[0, 0] = token
    positions = torch.arange(behind + config.block_size)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attended(config, layer, query, key, value)

    with torch.no_grad():
        states: Tensor = model(
            model.embed_tokens(block), torch.from_numpy(context)[None], positions[None], attend
        )[0]
    return states[: config.drafts] if config.predicts_next else states[1:]


def _graph_outputs(
    model: BlockDraftHead, token: int, context: Floats, previous: NDArray[np.int64] | None
) -> dict[str, NDArray[Any]]:
    """Return what a graph tells of a block, and of tokens before others."""
    states, markov, sure = block_states(model, token, context), model.markov_head, {}
    with torch.no_grad():
        found = {"logits": model.lm_head(states)}
        if model.confidence_head is not None:
            odds = model.confidence_head.of_states(states)
            reads = model.flags.confidence_reads_markov
            found[CONFIDENCE] = odds if reads else odds.sigmoid()
        if markov is not None and previous is not None:
            tokens = torch.from_numpy(previous)
            found[MARKOV] = markov(tokens)
            if model.confidence_head is not None and model.flags.confidence_reads_markov:
                sure[MARKOV_CONFIDENCE] = model.confidence_head.of_tokens(markov.markov_w1(tokens))
    return {name: tensor.numpy() for name, tensor in (found | sure).items()}


def attended(config: BlockConfig, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend as `Attend` says, over keys that are all there are."""
    size, there = query.shape[2], key.shape[2]
    at, places = torch.arange(there - size, there)[:, None], torch.arange(there)[None]
    seen = places <= at if config.causal[layer] else places >= 0
    if config.windows[layer]:
        seen = seen & (places > at - config.windows[layer])
    shared = query.shape[1] // key.shape[1]
    keys, values = (t.repeat_interleave(shared, 1) for t in (key, value))
    made = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
    return made.transpose(1, 2)


def check_block_head(head: BlockHead, graph: Any, weights: Any) -> float:
    """Compare a block head's graph with its module, with contexts in pieces and over stale keys.

    Raises: ExportError above the tolerance.
    """
    run, (_, model) = GraphRun(graph, weights), load_head(head)
    rng, config = np.random.default_rng(3), head.config
    context = rng.normal(size=(2, LENGTH, config.width)).astype(np.float32)
    ids = np.arange(config.scored) if head.entries is None else head.entries
    run.reset(2, LENGTH + config.block_size)
    worst = 0.0
    for begin, end in ((0, CUT), (CUT, LENGTH), (CUT - ROLLED_BACK, LENGTH)):
        blocks = np.full((2, config.block_size), config.mask_token_id)
        blocks[:, 0] = rng.integers(0, run.geometry.vocab_size, 2)
        before = None
        if config.markov_rank:
            before = rng.integers(0, run.geometry.vocab_size, (2, PREVIOUS_TOKENS))
        expected = [
            _graph_outputs(
                model, blocks[r, 0], context[r, :end], None if before is None else before[r]
            )
            for r in range(2)
        ]  # fmt: skip
        wanted = ("argmax", *expected[0])
        best, *found = run.outputs(
            wanted, blocks, [begin] * 2, range(config.drafts), context=context[:, begin:end],
            previous=before,
        )  # fmt: skip
        for name, values in zip(expected[0], found, strict=True):
            error = _error(values, np.stack([each[name] for each in expected]))
            if not error <= PARITY_TOLERANCE:
                raise ExportError(
                    f"{graph} disagrees with the head: the error of {name} is {error:.1e} of the "
                    f"largest, the tolerance {PARITY_TOLERANCE:.0e}. Do not use this graph; report "
                    "the config.json"
                )
            worst = max(worst, error)
        if not np.array_equal(best, ids[found[0].argmax(-1)]):
            raise ExportError(f"{graph} tells other ids than those of the entries it scores")
    return worst


def check_block_engine(
    reference: GraphRun, engine: OrtBlockEngine, widths: list[int], compute: str
) -> float:
    """Run a block head's engine and its portable graph on the same; return the largest error.

    Every width twice, the second time over stale keys.
    Raises: BuildError above the tolerance of `compute`.
    """
    features, block, worst = engine.target_features, engine.block, 0.0
    batch, length, _ = features.shape
    room = length - block.block_size
    near = passes(engine.geometry, room, [min(width, room) for width in widths])
    reference.reset(batch, max(start + width for start, width in near) + block.block_size)
    rng = np.random.default_rng(0)
    for start, width in near:
        tokens = rng.integers(0, engine.geometry.vocab_size, (batch, width))
        blocks = np.full((batch, block.block_size), block.mask_token_id)
        blocks[:, 0] = tokens[:, -1]
        expected, *added = reference.outputs(
            ("logits", MARKOV) if block.chained else ("logits",), blocks, [start] * batch,
            range(block.drafts), context=features[:, start : start + width - 1],
            previous=blocks[:, :1] if block.chained else None,
        )  # fmt: skip
        if added:  # to what follows the last committed token
            expected[:, :1] += added[0]
        feeds = [Feed(r, tokens[r].tolist(), start, block.drafts) for r in range(batch)]
        for row, output in enumerate(engine.forward_rows(feeds)):
            error = _error(output.logits, expected[row : row + 1])
            if not error <= TOLERANCES[compute]:
                raise BuildError(
                    f"the head's engine differs from its portable graph by {error:.1e} of the "
                    f"largest of its logits at position {start}; expected below "
                    f"{TOLERANCES[compute]:.0e}. This is a defect of the lowering: please report it"
                )
            worst = max(worst, error)
    return worst


def _error(found: Floats, expected: Floats) -> float:
    return float(np.abs(found - expected).max()) / (float(np.abs(expected).max()) or 1.0)
