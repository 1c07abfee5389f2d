"""The formats of heads, in one table: a new one is an entry here, and one of `bundle.HEADS`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from specrt_export.checkpoint.checkpoint import Checkpoint, named_head
from specrt_export.heads import dflash_format, eagle3_format
from specrt_export.heads.head_checkpoint import HeadCheckpoint


class HeadFormat(NamedTuple):
    """A format of heads. What needs torch is a place, `module:name`, imported when asked for."""

    read: Callable[[Checkpoint, Checkpoint, tuple[int, ...]], HeadCheckpoint]
    """Reads a head for a target; the layers given replace those that it names."""
    weights: frozenset[str]
    """Names of weights that no model has, by which a head is known whose class says nothing."""
    feature: str
    """Takes the config; the torch module that the target's graph has for a head."""
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

HEAD_FORMATS = {
    eagle3_format.KIND: HeadFormat(
        eagle3_format.read_head,
        frozenset({"fc.weight", "midlayer.hidden_norm.weight"}),
        f"{_HEADS}.eagle3_module:FeatureProjection",
        f"{_PORTABLE}.head_trace:trace_eagle3_head",
        f"{_CHECK}.head_equivalence:check_head",
        f"{_CHECK}.head_equivalence:check_head_engine",
    ),
    dflash_format.KIND: HeadFormat(
        dflash_format.read_block_head,
        frozenset({"fc.weight", "hidden_norm.weight"}),
        f"{_HEADS}.dflash_module:ContextProjection",
        f"{_PORTABLE}.head_trace:trace_block_head",
        f"{_CHECK}.block_equivalence:check_block_head",
        f"{_CHECK}.block_equivalence:check_block_engine",
    ),
}


def head_format(checkpoint: Checkpoint) -> str | None:
    """Name the format of a head, by its config.json or its weights; None for a model."""
    names = set(checkpoint.weights)
    by_weights = (kind for kind, form in HEAD_FORMATS.items() if form.weights <= names)
    return named_head(checkpoint.config) or next(by_weights, None)


def is_head(checkpoint: Checkpoint) -> bool:
    """Tell the checkpoint of a head from a model's."""
    return head_format(checkpoint) is not None


def read_head(
    checkpoint: Checkpoint, target: Checkpoint, layers: tuple[int, ...] = ()
) -> HeadCheckpoint:
    """Read a head of any format, for a target; see `HeadFormat.read`.

    Raises: CheckpointError for what is missing, unknown, or does not fit the target.
    """
    form = head_format(checkpoint)
    assert form is not None, "a model is not a head"
    return HEAD_FORMATS[form].read(checkpoint, target, layers)
