"""Short convolutions over past inputs: found, fused for the CPU kernels, and written out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from specrt.geometry import CONV
from specrt_export.lower.lazy_tensor import LazyTensor, computed, joined
from specrt_export.lower.projections import SPECRT
from specrt_export.lower.view import GraphView
from specrt_export.lower.window import Windows

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


def write_out_convolutions(
    view: GraphView, batch: int, length: int, windows: Windows | None = None
) -> int:
    """Write convolutions out in products and sums; return how many.

    ```
    conv.i, x, start ─ TensorScatter ─ Gather at start - taps + 1 .. start - 1 ─ Where there ─┐
    x ────────────────────────────────────────────────────────────────────────────────── Concat z
    z ─ Slice ─ Mul, for each tap ─ Add ─ y
    ```
    The ring becomes a buffer of all `length` positions, which a pass writes from `start` on, as it
    does keys; or one of the `windows`. Each row of y is computed by itself. TensorRT for RTX 1.7
    crashes where the buffer is read before it is written.
    Shapes: conv.i [B, 1, M, C]; x [B, S, C]; z [B, taps - 1 + S, C]; y [B, C, S].
    """
    layers = [layer for node in view.nodes("Conv") if (layer := _take_apart(view, node))]
    past: dict[int, tuple[str, str]] = {}
    for layer in layers:
        channels, _, taps = layer.weight.shape
        if taps not in past:
            places = _places(view, taps - 1, batch, length)
            past[taps] = windows.ahead(taps - 1) if windows else places
        new = view.add("Unsqueeze", [layer.x, _number(view, 1)])
        if windows:
            written = windows.move(layer.ring, layer.ring, new, taps - 1)
        else:
            update = [layer.ring, new, "start"]
            written = view.add("TensorScatter", update, outputs=[f"present_{layer.ring}"], axis=-2)
        before = _read_past(view, written, past[taps], (batch, taps - 1, channels), length)
        inputs = view.add("Concat", [before, layer.x], axis=1)
        _convolve(view, layer, inputs, taps)
    view.tidy()
    return len(layers)


def _places(view: GraphView, count: int, batch: int, length: int) -> tuple[str, str]:
    """Return where the `count` inputs before a pass lie in all rows, and whether they are there.

    Shapes: both [B, count]; places count through the rows.
    """
    steps = view.add_constant("steps", np.arange(-count, 0))
    at = view.add("Add", [view.add("Unsqueeze", ["start", _number(view, 1)]), steps])
    none = view.add_constant("none", np.array(0, np.int64))
    there = view.add("Unsqueeze", [view.add("GreaterOrEqual", [at, none]), _number(view, 2)])
    places = view.add("Max", [at, none])
    if batch > 1:
        firsts = view.add_constant("firsts", length * np.arange(batch)[:, None])
        places = view.add("Add", [places, firsts])
    return places, there


def _read_past(
    view: GraphView, buffer: str, where: tuple[str, str], shape: tuple[int, int, int], length: int
) -> str:
    """Return the inputs [B, taps - 1, C] that lie at some places; 0 where there are none yet."""
    places, there = where
    batch, _, channels = shape
    if batch > 1:
        rows = view.add_constant("rows", np.array([1, 1, batch * length, channels]))
        buffer = view.add("Reshape", [buffer, rows])
    found = view.add("Gather", [buffer, places], axis=2)
    found = view.add("Reshape", [found, view.add_constant("shape", np.array(shape))])
    return view.add("Where", [there, found, view.add_constant("nothing", np.array(0, np.float32))])


def _convolve(view: GraphView, layer: ConvLayer, inputs: str, taps: int) -> None:
    """Sum the products of each tap with the inputs that it sees."""
    total = ""
    for tap in range(taps):
        weight = view.add_stored(_of_tap(layer.weight, tap))
        bounds = [_number(view, n) for n in (tap, tap + 1 - taps or _END, 1)]
        seen = view.add("Slice", [inputs, *bounds])
        product = view.add("Mul", [seen, weight])
        total = view.add("Add", [total, product]) if total else product
    made = view.add("Add", [total, layer.bias]) if layer.bias else total
    view.add("Transpose", [made], outputs=[layer.output], perm=[0, 2, 1])


_END = 2**31 - 1


def _number(view: GraphView, number: int) -> str:
    return view.add_constant("number", np.array([number], np.int64))


def _of_tap(weight: LazyTensor, tap: int) -> LazyTensor:
    def column() -> np.ndarray:
        return np.ascontiguousarray(weight.load().astype(np.float32)[:, 0, tap])

    return computed(f"{weight.name}/tap{tap}", (weight.shape[0],), column)


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
    """Return the weight that lies before squeezes and unsqueezes, put together of its strips."""
    while view.stored(name) is None:
        maker = view.maker(name)
        if maker is not None and maker.op_type == "Concat":
            strips = [view.stored(part) for part in maker.input]
            whole = [strip for strip in strips if strip is not None]
            return joined(whole) if len(whole) == len(strips) else None
        if maker is None or maker.op_type not in ("Squeeze", "Unsqueeze", "Reshape"):
            return None
        name = maker.input[0]
    return view.stored(name)
