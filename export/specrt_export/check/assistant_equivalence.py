"""Equivalence of assistants: graphs compute what transformers does, and engines what graphs do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specrt.engine.head_engine import HeadEngine
from specrt.errors import ExportError
from specrt_export.check.equivalence import PARITY_TOLERANCE
from specrt_export.check.head_equivalence import check_head_engine, relative_error
from specrt_export.heads.assistant_format import Assistant
from specrt_export.heads.assistant_module import AssistantHead, load_assistant
from specrt_export.portable.graph import GraphRun

Floats = NDArray[np.float32]

BEYOND = 9
"""Positions of a text beyond the widest window."""


def run_assistant(
    model: AssistantHead, token: int, hidden: Floats, keys: dict[str, tuple[Floats, Floats]]
) -> tuple[Floats, Floats]:
    """Run an assistant of transformers on one token; return its logits [V], and its state [H].

    Shapes: hidden [H], what came before the token; keys of each type of layers, and values,
        [1, heads, P, width], of all positions before it.
    """
    position = next(iter(keys.values()))[0].shape[2]
    lent = {kind: tuple(torch.from_numpy(x) for x in pair) for kind, pair in keys.items()}
    with torch.no_grad():
        embeds = model.embeds(torch.tensor([[token]]))
        made = model.assistant(
            inputs_embeds=torch.cat([embeds, torch.from_numpy(hidden)[None, None]], dim=-1),
            position_ids=torch.tensor([[position]]), shared_kv_states=lent, use_cache=False,
        )  # fmt: skip
    return made.logits[0, 0].numpy(), made.last_hidden_state[0, 0].numpy()


def check_assistant(head: Assistant, graph: Path, weights: Path) -> float:
    """Compare an assistant's graph with transformers' own, at the edges of its windows.

    Raises: ExportError above the tolerance.
    """
    run, model = GraphRun(graph, weights), load_assistant(head)
    rng, geometry = np.random.default_rng(3), run.geometry
    widest = max(one.window for one in geometry.memories)
    shapes = {n: a.shape for n, a in geometry.filled(1, widest + BEYOND).items()}
    run.lent = {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
    run.reset(1, widest + BEYOND)
    types = model.assistant.model.config.layer_types
    worst = 0.0
    for end in sorted({1, 2, widest, widest + 1, widest + 2, widest + BEYOND} - {0}):
        keys = {
            types[int(name.partition(".")[2])]: (
                buffer[:, :, :end], run.lent[name.replace("key", "value")][:, :, :end]
            )
            for name, buffer in run.lent.items() if name.startswith("key")
        }  # fmt: skip
        token = rng.integers(0, geometry.vocab_size, (1, 1))
        hidden = rng.normal(size=head.config.width).astype(np.float32)
        expected = run_assistant(model, int(token[0, 0]), hidden, keys)
        found: list[Any] = run.outputs(
            ("logits", "state"), token, [end - 1], [0], hidden=hidden[None, None]
        )
        for name, one, other in zip(("logits", "state"), found, expected, strict=True):
            error = relative_error(one[0, 0], other)
            if not error <= PARITY_TOLERANCE:
                raise ExportError(
                    f"{graph} disagrees with transformers after {end} tokens: the error of {name} "
                    f"is {error:.1e} of the largest, the tolerance {PARITY_TOLERANCE:.0e}. Do not "
                    "use this graph; report the config.json"
                )
            worst = max(worst, error)
    return worst


def check_assistant_engine(
    reference: GraphRun, engine: HeadEngine, widths: list[int], compute: str
) -> float:
    """Compare an assistant's engine with its graph, over the same buffers of a target.

    Raises: BuildError as `check_head_engine` does.
    """
    lent: Any = engine.engine
    for name, packed in lent.read_only.items():
        width = reference.geometry.inputs[name].width
        reference.lent[name] = unpacked(packed) if packed.ndim == 5 else packed[..., :width]
    return check_head_engine(reference, engine, widths, compute)


def unpacked(keys: Floats) -> Floats:
    """Return keys [B, heads, P / 16, width, 16] of the CPU kernels as [B, heads, P, width]."""
    batch, heads, groups, width, tile = keys.shape
    return keys.transpose(0, 1, 2, 4, 3).reshape(batch, heads, groups * tile, width)
