"""Equivalence of heads: graphs compute what the modules do, and engines what their graphs do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specrt.engine.head_engine import HeadEngine
from specrt.engine.protocol import Feed
from specrt.errors import BuildError, ExportError
from specrt_export.check.equivalence import (
    PARITY_TOLERANCE,
    TOLERANCES,
    Reference,
    misread,
    passes,
    reachable,
)
from specrt_export.compile.tensorrt_compiler import LoweredHead
from specrt_export.heads.head_checkpoint import HeadCheckpoint
from specrt_export.heads.head_formats import HEAD_FORMATS, load_head, load_parts
from specrt_export.portable.graph import GraphRun, Tokens

LENGTH, CUT, ROLLED_BACK = 24, 16, 5
"""Tokens of a text, those fed first, and those fed again."""

Floats = NDArray[np.float32]


def run_head(model: Any, tokens: Tokens, hidden: Floats) -> tuple[Floats, Floats, Floats]:
    """Run a head of torch on whole texts; return its logits, states, and what it feeds back.

    Shapes: tokens [B, S], hidden [B, S, H] -> [B, S, entries], [B, S, H], [B, S, H].
    """
    width = tokens.shape[1]
    mask = torch.full((width, width), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        embeds = model.embed_tokens(torch.from_numpy(tokens))
        positions = torch.arange(width)[None]
        states = model(embeds, torch.from_numpy(hidden), positions, mask, None)
        return model.logits(states).numpy(), states.numpy(), model.fed_back(states).numpy()


def entering(reference: Reference, layers: tuple[int, ...], tokens: Tokens) -> list[torch.Tensor]:
    """Return what enters layers of a target, [B, S, width] each."""
    with torch.no_grad():
        output = reference.model(
            input_ids=torch.from_numpy(tokens), use_cache=False, output_hidden_states=True
        )
    return [output.hidden_states[i] for i in layers]


def check_feature(head: HeadCheckpoint, reference: Reference, graph: Path, weights: Path) -> float:
    """Compare the feature of a target's graph with the one that transformers and torch compute.

    Raises: ExportError above the tolerance.
    """
    run = GraphRun(graph, weights)
    feature = HEAD_FORMATS[head.KIND].part("feature")(head.config)
    load_parts(head, feature)
    tokens = _tokens(run.geometry.vocab_size)
    with torch.no_grad():
        expected = feature(entering(reference, head.config.inputs, tokens)).numpy()
    run.reset(len(tokens), LENGTH)
    (first,) = run.outputs(("feature",), tokens[:, :CUT], [0, 0], [0])
    (rest,) = run.outputs(("feature",), tokens[:, CUT:], [CUT, CUT], [0])
    return _held("feature", np.concatenate([first, rest], 1), expected, graph)


def check_head(head: HeadCheckpoint, graph: Path, weights: Path) -> float:
    """Compare a head's graph with its module, over stale keys and after its own states.

    Raises: ExportError above the tolerance.
    """
    run, (_, model) = GraphRun(graph, weights), load_head(head)
    tokens = _tokens(run.geometry.vocab_size)
    shape = (*tokens.shape, head.config.width)
    hidden = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    logits, _, fed_back = run_head(model, tokens, hidden)
    run.reset(len(tokens), LENGTH)
    wanted, worst = ("logits", "argmax", "state"), 0.0
    ids = np.arange(head.config.scored) if head.entries is None else head.entries
    for begin, end in ((0, CUT), (CUT, LENGTH), (CUT - ROLLED_BACK, LENGTH)):
        piece, beside = tokens[:, begin:end], hidden[:, begin:end]
        found = run.outputs(wanted, piece, [begin] * 2, range(end - begin), hidden=beside)
        worst = max(worst, _held("logits", found[0], logits[:, begin:end], graph))
        worst = max(worst, _held("state", found[2], fed_back[:, begin:end], graph))
        if not np.array_equal(found[1], ids[found[0].argmax(-1)]):
            raise ExportError(f"{graph} tells other ids than those of the entries it scores")
    return worst


def check_head_engine(
    reference: GraphRun, engine: HeadEngine, widths: list[int], compute: str
) -> float:
    """Run a head's engine and its portable graph on the same tokens; return the largest error.

    Every width twice, the second time over stale keys, each followed by recursive passes. A lowered
    graph goes on at the end of the context, over copies of the keys written so far.
    Raises: BuildError above the tolerance of `compute`, or where argmax, confidence or candidates
    are not those of the logits next to them.
    """
    batch, length, _ = engine.features.shape
    room = length - 2
    widths = [min(width, room) for width in widths]
    near = passes(engine.geometry, room, widths)
    reach = max(start + width for start, width in near) + 2
    if isinstance(engine, LoweredHead):
        reach = reachable(engine, reach)
    reference.reset(batch, reach)
    worst = _compare(reference, engine, near, compute)
    if isinstance(engine, LoweredHead):
        filled = near[0][1]
        reference.repeat(filled, 0)
        engine.repeat(filled, 0)
        far = [(reach - 2 - width, width) for width in widths]
        worst = max(worst, _compare(reference, engine, far, compute))
    return worst


def _compare(
    reference: GraphRun, engine: HeadEngine, near: list[tuple[int, int]], compute: str
) -> float:
    """Run passes (start, width) with both, and a recursive one after each.

    Both go on from the engine's state, so that each pass is judged by what it adds.
    """
    features, worst, batch = engine.features, 0.0, engine.batch
    rng, wanted = np.random.default_rng(0), ("logits", "argmax", "state")
    for start, width in near:
        tokens = rng.integers(0, engine.geometry.vocab_size, (batch, width))
        hidden, scored = features[:, start : start + width], min(width, 8)
        rows = range(width - scored, width)
        found = reference.outputs(wanted, tokens, [start] * batch, rows, hidden=hidden)
        feeds = [Feed(r, tokens[r].tolist(), start + 1, scored) for r in range(batch)]
        error, state = _agree(reference, engine, feeds, found, compute)
        worst = max(worst, error)
        tokens = rng.integers(0, engine.geometry.vocab_size, (batch, 1))
        end = start + width
        found = reference.outputs(wanted, tokens, [end] * batch, [0], hidden=state)
        feeds = [Feed(r, tokens[r].tolist(), end + 1, 1, recursive=True) for r in range(batch)]
        error, _ = _agree(reference, engine, feeds, found, compute)
        worst = max(worst, error)
    return worst


def _agree(
    reference: GraphRun, engine: HeadEngine, feeds: list[Feed], found: list[Any], compute: str
) -> tuple[float, Floats]:
    """Return the largest error of a pass, and the engine's last states, [batch, 1, width]."""
    worst, states, outputs = 0.0, [], engine.forward_rows(feeds)
    for row, output in enumerate(outputs):
        parts: Any = output
        for name, expected in (("logits", found[0]), ("state", found[2])):
            error = relative_error(getattr(parts, name), expected[row : row + 1])
            if not error <= TOLERANCES[compute]:
                raise BuildError(
                    f"the head's engine differs from its portable graph by {error:.1e} of the "
                    f"largest of its {name} at position {feeds[row].start}; expected below "
                    f"{TOLERANCES[compute]:.0e}. This is a defect of the lowering: please report it"
                )
            worst = max(worst, error)
        if wrong := misread(output, reference.entries):
            raise BuildError(
                f"the head's engine has a wrong {wrong} at position {feeds[row].start}. This is a "
                "defect of the lowering: please report it"
            )
        states.append(parts.state[0, -1:].copy())
    return worst, np.stack(states)


def _held(name: str, found: Floats, expected: Floats, graph: Path) -> float:
    error = relative_error(found, expected)
    if not error <= PARITY_TOLERANCE:
        raise ExportError(
            f"{graph} disagrees with the head: the error of {name} is {error:.1e} of the largest, "
            f"the tolerance {PARITY_TOLERANCE:.0e}. Do not use this graph; report the config.json"
        )
    return error


def relative_error(found: Floats, expected: Floats) -> float:
    """Return the largest error, as a share of the largest number expected."""
    return float(np.abs(found - expected).max()) / (float(np.abs(expected).max()) or 1.0)


def _tokens(vocabulary: int) -> Tokens:
    return np.random.default_rng(2).integers(0, vocabulary, (2, LENGTH))
