"""Lowers what conditions a decoder on a source for a CPU: its encoder, and its cross projections.

Both run once a source, of one row and its exact length, so that nothing is padded: what hides
padding goes, products are those of the CPU kernels, and attention is ONNX Runtime's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from specrt.errors import BuildError
from specrt_export.lower.attention import hand_over, pack_heads
from specrt_export.lower.cpu_lowering import emit, fuse_gates
from specrt_export.lower.evaluation import evaluate
from specrt_export.lower.lazy_tensor import LazyTensor
from specrt_export.lower.ort_lowering import OrtTarget, canonical_view, fuse_the_rest
from specrt_export.lower.projections import MICROSOFT
from specrt_export.lower.shapes import Shapes
from specrt_export.lower.view import GraphView, Lowered

LENGTH = "length"
"""Input [B] of a portable encoder: the positions of each row that are not padding."""

_SAMPLE = 37
"""Positions of a source that a mask is computed for to see whether it adds anything."""


def lower_encoder(
    portable: onnx.ModelProto, weights: Mapping[str, LazyTensor], target: OrtTarget
) -> Lowered:
    """Rewrite a portable encoder, or a graph of cross projections, for one row; read no weight."""
    view, counts = canonical_view(portable, weights, target)
    drop_length(view)
    counts["attention"] = _attend(view)
    counts["gate_up"] = fuse_gates(view)
    fuse_the_rest(view, counts, biases=False)
    return emit(view, counts)


def drop_length(view: GraphView) -> None:
    """Let the length of the one row be its number of tokens.

    ```
    length [1] ─ ...      =>      input_ids ─ Shape [1:2] ─ ...
    length ─ Shape ─ ...  =>      1 ─ ...
    ```
    """
    if any(i.name == LENGTH for i in view.graph.input):
        one = view.add_constant("rows", np.array([1], np.int64))
        for node in list(view.readers(LENGTH)):
            if node.op_type == "Shape":
                view.replace(node.output[0], one)
        view.replace(LENGTH, view.add("Shape", ["input_ids"], start=1, end=2))
        inputs = [i for i in view.graph.input if i.name != LENGTH]
        del view.graph.input[:]
        view.graph.input.extend(inputs)
        view.tidy()


def _attend(view: GraphView) -> tuple[int, int]:
    """Replace attention by ONNX Runtime's operator; return how many layers, and of how many.

    ```
    q, k, v ─ Reshape ─ Transpose ─ Attention(mask) ─ Transpose ─ Reshape ─ y
      =>  MultiHeadAttention(q, k, v, mask) ─ y
    ```
    A mask that adds nothing to a source without padding is left out.
    """
    layers = view.nodes("Attention")
    shapes = Shapes(view)
    adding = adding_masks(view)
    for node in layers:
        query, key = shapes.dims(node.input[0]), shapes.dims(node.input[1])
        heads, size = (query[1], query[3]) if query and len(query) == 4 else (0, 0)
        if not isinstance(heads, int) or not isinstance(size, int) or not heads or key is None:
            raise _unknown("its heads are of no fixed number and size")
        attributes: dict[str, Any] = view.attributes(node)
        if key[1] != heads or attributes.get("softcap", 0.0) or attributes.get("is_causal", 0):
            raise _unknown("its attention shares keys, is capped or looks back only")
        mask = node.input[3] if len(node.input) > 3 else ""
        inputs = [pack_heads(view, shapes, name) for name in node.input[:3]]
        joined = view.add(
            "MultiHeadAttention", [*inputs, *(["", "", mask] if mask in adding else [])],
            domain=MICROSOFT, num_heads=heads, scale=attributes.get("scale", size**-0.5),
        )  # fmt: skip
        hand_over(view, shapes, heads, node.output[0], joined)
    if layers:
        view.require_domain(MICROSOFT, 1)
        view.tidy()
    return len(layers), len(layers)


def adding_masks(view: GraphView) -> set[str]:
    """Return the masks that add anything to the scores of a source that has no padding."""
    masks = {node.input[3] for node in view.nodes("Attention") if len(node.input) > 3} - {""}
    sample = {"input_ids": np.zeros((1, _SAMPLE), np.int64)}
    return {mask for mask in masks if evaluate(view, [mask], sample)[0].any()}


def _unknown(what: str) -> BuildError:
    return BuildError(
        f"this model's encoder cannot be lowered for a CPU: {what}. Please report the architecture"
    )
