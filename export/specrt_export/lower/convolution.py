"""Short convolutions over a ring of past inputs: found, and fused for the CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from specrt.geometry import CONV
from specrt_export.lower.lazy_tensor import LazyTensor, computed
from specrt_export.lower.projections import SPECRT
from specrt_export.lower.view import GraphView

CONVOLUTION = "Convolution"
"""The kernels' operator."""


@dataclass(frozen=True)
class ConvLayer:
    """One convolution over the ring of the contract.

    ```
    x ─ Unsqueeze ─ TensorScatter(conv.i) ─ Squeeze ─ GatherND ─ Where ─ Transpose ─ Conv ─ y
    ```
    Shapes: x [B, S, C]; y [B, C, S].
    """

    x: str
    ring: str
    weight: LazyTensor
    """[C, 1, taps]."""
    bias: str
    """Empty where it is zero."""
    output: str


def fuse_convolutions(view: GraphView, rows: str, positions: str) -> int:
    """Replace convolutions over rings by the kernels' operator; return how many.

    ```
    x, ring ─ (see `ConvLayer`) ─ y      =>      x, ring, rows, positions, w ─ Convolution ─ y
    ```
    """
    layers = [layer for node in view.nodes("Conv") if (layer := _take_apart(view, node))]
    for layer in layers:
        channels, _, taps = layer.weight.shape
        weight = view.add_stored(_by_tap(layer.weight, taps, channels))
        made = view.fresh("convolution")
        view.add(
            CONVOLUTION,
            [layer.x, layer.ring, rows, positions, weight, *([layer.bias] if layer.bias else [])],
            outputs=[made, f"present_{layer.ring}"],
            domain=SPECRT,
        )
        view.add("Transpose", [made], outputs=[layer.output], perm=[0, 2, 1])
    if layers:
        view.require_domain(SPECRT, 1)
        view.tidy()
    return len(layers)


def _by_tap(weight: LazyTensor, taps: int, channels: int) -> LazyTensor:
    def turned() -> np.ndarray:
        return np.ascontiguousarray(weight.load().astype(np.float32).reshape(channels, taps).T)

    return computed(f"{weight.name}/taps", (taps, channels), turned)


def _take_apart(view: GraphView, node: onnx.NodeProto) -> ConvLayer | None:
    made = node.input[0]
    for kind, place in (("Transpose", 0), ("Where", 1), ("GatherND", 0), ("Squeeze", 0)):
        maker = view.maker(made, kind)
        if maker is None:
            return None
        made = maker.input[place]
    update = view.maker(made, "TensorScatter")
    lifted = update and view.maker(update.input[1], "Unsqueeze")
    weight = _stored(view, node.input[1])
    if not update or not lifted or weight is None or not update.input[0].startswith(f"{CONV}."):
        return None
    bias = node.input[2] if len(node.input) > 2 else ""
    values = view.constant(bias) if bias else None
    cut = view.only_reader(node.output[0], "Slice")  # to as many outputs as there are
    output = cut.output[0] if cut is not None else node.output[0]
    is_zero = values is not None and not values.any()
    return ConvLayer(lifted.input[0], update.input[0], weight, "" if is_zero else bias, output)


def _stored(view: GraphView, name: str) -> LazyTensor | None:
    """Return the weight that lies before squeezes and unsqueezes."""
    while view.stored(name) is None:
        maker = view.maker(name)
        if maker is None or maker.op_type not in ("Squeeze", "Unsqueeze", "Reshape"):
            return None
        name = maker.input[0]
    return view.stored(name)
