"""The formats of heads, in one table: a new one is an entry here, and one of `bundle.HEADS`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from specrt_export.checkpoint.checkpoint import Checkpoint, named_head
from specrt_export.heads import assistant_format, dflash_format, eagle3_format, mtp_format
from specrt_export.heads.head_checkpoint import HeadCheckpoint


class HeadFormat(NamedTuple):
    """A format of heads. What needs torch is a place, `module:name`, imported when asked for."""

    read: Callable[[Checkpoint, Checkpoint, tuple[int, ...]], HeadCheckpoint]
    """Reads a head for a target; the layers given replace those that it names."""
    weights: frozenset[str]
    """Names of weights that no model has, by which a head is known whose class says nothing; empty
    where it lies next to a model's."""
    feature: str
    """Takes the config; the torch module that the target's graph has for a head."""
    module: str
    """Takes the config; the torch module of the head itself."""
    trace: str
    """Takes a head and a number of positions; returns its graph, as `Traced`."""
    check_graph: str
    """Compares a head's graph with its torch module; see `check_head`."""
    check_engine: str
    """Compares a head's engine with its graph; see `check_head_engine`."""

    def part(self, name: str) -> Any:
        """Import one of the places."""
        module, _, found = getattr(self, name).partition(":")
        return getattr(import_module(module), found)


_HEADS, _PORTABLE, _CHECK = (f"specrt_export.{room}" for room in ("heads", "portable", "check"))

_CHAIN = (
    f"{_PORTABLE}.head_trace:trace_chain_head",
    f"{_CHECK}.head_equivalence:check_head",
    f"{_CHECK}.head_equivalence:check_head_engine",
)
"""Of heads that read a token and a feature of the target, or a state of their own."""

HEAD_FORMATS = {
    eagle3_format.KIND: HeadFormat(
        eagle3_format.read_head,
        frozenset({"fc.weight", "midlayer.hidden_norm.weight"}),
        f"{_HEADS}.eagle3_module:FeatureProjection",
        f"{_HEADS}.eagle3_module:Eagle3Head",
        *_CHAIN,
    ),
    dflash_format.KIND: HeadFormat(
        dflash_format.read_block_head,
        frozenset({"fc.weight", "hidden_norm.weight"}),
        f"{_HEADS}.dflash_module:ContextProjection",
        f"{_HEADS}.dflash_module:BlockDraftHead",
        f"{_PORTABLE}.head_trace:trace_block_head",
        f"{_CHECK}.block_equivalence:check_block_head",
        f"{_CHECK}.block_equivalence:check_block_engine",
    ),
    mtp_format.KIND: HeadFormat(
        mtp_format.read_mtp_head,
        frozenset(),
        f"{_HEADS}.mtp_module:LastState",
        f"{_HEADS}.mtp_module:MtpModule",
        *_CHAIN,
    ),
    assistant_format.KIND: HeadFormat(
        assistant_format.read_assistant,
        frozenset({"pre_projection.weight", "post_projection.weight"}),
        f"{_HEADS}.mtp_module:LastState",
        f"{_HEADS}.assistant_module:AssistantHead",
        f"{_PORTABLE}.head_trace:trace_assistant",
        f"{_CHECK}.assistant_equivalence:check_assistant",
        f"{_CHECK}.assistant_equivalence:check_assistant_engine",
    ),
}


def head_format(checkpoint: Checkpoint) -> str | None:
    """Name the format of a head, by its config.json or its weights; None for a model."""
    names = set(checkpoint.weights)
    known = ((kind, form.weights) for kind, form in HEAD_FORMATS.items() if form.weights)
    by_weights = (kind for kind, weights in known if weights <= names)
    return named_head(checkpoint.config) or next(by_weights, None)


def is_head(checkpoint: Checkpoint) -> bool:
    """Tell the checkpoint of a head from a model's."""
    return head_format(checkpoint) is not None


def load_head(head: HeadCheckpoint) -> tuple[Any, Any]:
    """Return what the target's graph has for a head, and the head, with its weights in fp32."""
    form = HEAD_FORMATS[head.KIND]
    feature, model = (form.part(name)(head.config).eval() for name in ("feature", "module"))
    load_parts(head, feature, model)
    return feature, model


def load_parts(head: HeadCheckpoint, *parts: Any) -> None:
    """Give torch modules of a head the weights of its checkpoint, in fp32."""
    import torch

    with torch.no_grad():
        for part in parts:
            for name, parameter in part.named_parameters():
                parameter.copy_(torch.from_numpy(head.array(name).astype(np.float32)))
