"""Attention layers: found, taken apart with their rotary embedding, and fused for ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper

from specrt.engine.ort.ort_engine import silent_options
from specrt.errors import BuildError
from specrt.geometry import RECURRENT, SHARED, Geometry
from specrt_export.heads.dflash_format import CONTEXT
from specrt_export.lower.evaluation import evaluate
from specrt_export.lower.lazy_tensor import in_memory
from specrt_export.lower.projections import MICROSOFT, find_projection, join_projections
from specrt_export.lower.shapes import Shapes
from specrt_export.lower.view import GraphView


@dataclass(frozen=True)
class Layer:
    """One attention layer over the KV buffers of the contract.

    ```
    k ─ TensorScatter(key.i) ───┐
    v ─ TensorScatter(value.i) ─┼─ Attention(mask)
    q ──────────────────────────┘
    ```
    """

    node: onnx.NodeProto
    updates: tuple[onnx.NodeProto, ...]
    """What writes keys and values; nothing where a target did."""
    index: int
    """Of the buffers."""
    shares: bool = False
    """Whether an earlier layer, or a target, has written the buffers."""

    @property
    def caches(self) -> list[str]:
        """The buffers, by name."""
        return [f"key.{self.index}", f"value.{self.index}"]

    @property
    def written(self) -> list[str]:
        """The new keys and values, of a layer that has some."""
        return [update.input[1] for update in self.updates]


def find_layers(view: GraphView) -> list[Layer]:
    """Return the attention layers whose keys and values lie in the buffers of the contract.

    They come in the order of the graph.
    """
    found = [layer for node in view.nodes("Attention") if (layer := _take_apart(view, node))]
    owners: dict[int, Layer] = {}
    for layer in found:
        owners.setdefault(layer.index, layer)
    first = [layer is owners[layer.index] and layer.updates for layer in found]
    return [replace(layer, shares=not own) for layer, own in zip(found, first, strict=True)]


def _take_apart(view: GraphView, node: onnx.NodeProto) -> Layer | None:
    makers = (view.maker(name, "TensorScatter") for name in node.input[1:3])
    updates = tuple(maker for maker in makers if maker is not None)
    key, value = (one.input[0] for one in updates) if len(updates) == 2 else node.input[1:3]
    slot, _, index = key.partition(".")
    if len(updates) == 1 or len(node.input) < 4 or slot != "key" or value != f"value.{index}":
        return None
    return Layer(node, updates, int(index))


def fold_query_scale(view: GraphView) -> None:
    """Move a factor of the queries into the scale of their attention.

    ```
    x ─ Mul c ─ Reshape ─ Transpose ─ Attention(scale s)  =>  x ─ ... ─ Attention(scale c · s)
    ```
    """
    for node in view.nodes("Attention"):
        transpose = view.maker(node.input[0], "Transpose")
        reshape = transpose and view.maker(transpose.input[0], "Reshape")
        product = reshape and view.maker(reshape.input[0], "Mul")
        if not product or not reshape or len(view.readers(product.output[0])) > 1:
            continue
        for x, factor in (product.input, reversed(product.input)):
            by = view.scalar(factor)
            stated = next((a for a in node.attribute if a.name == "scale"), None)
            if by is not None and by > 0 and stated is not None:
                stated.f *= by
                view.replace(product.output[0], x)
                break
    view.tidy()


def positions(view: GraphView) -> str:
    """Return the positions [B, S] of the tokens, adding them to the graph once.

    ```
    input_ids ─ Shape ─ Range ─┐
    start ────────── Unsqueeze ─ Add ─ positions
    ```
    """
    name = "specrt.positions"
    if view.maker(name) is None:
        zero, one = (view.add_constant(str(i), np.array(i, np.int64)) for i in (0, 1))
        axis = view.add_constant("axis", np.array([1], np.int64))
        width = view.add("Squeeze", [view.add("Shape", ["input_ids"], start=1, end=2)])
        steps = view.add("Range", [zero, width, one])
        view.add("Add", [view.add("Unsqueeze", ["start", axis]), steps], outputs=[name])
    return name


_WINDOW, _KEYS, _SIZE = 2, 6, 8


def surplus() -> int:
    """Return how many keys more than `local_window_size` the installed kernel sees.

    None in current versions; one in 1.23, where the window was counted next to the query itself.
    Equal queries weigh all the keys they see alike, and each value is a row of its own, so what
    comes out tells which they were.
    """
    options = silent_options()
    session = ort.InferenceSession(_attention(), options, ["CPUExecutionProvider"])
    values = np.eye(_KEYS, _SIZE, dtype=np.float32)[None]
    empty = np.zeros((1, 1, _KEYS, _SIZE), np.float32)
    feed = {"q": 0 * values, "k": 0 * values, "v": values, "key": empty, "value": empty}
    (output,) = session.run(["y"], feed)
    return int((output[0, -1] > 0).sum()) - _WINDOW


def _attention() -> bytes:
    """Return a graph of one layer with a local window of `_TOLD`."""
    inputs = [
        *((name, [1, _KEYS, _SIZE]) for name in ("q", "k", "v")),
        *((name, [1, 1, _KEYS, _SIZE]) for name in ("key", "value")),
    ]
    lengths = [
        helper.make_tensor("last", onnx.TensorProto.INT32, [1], [_KEYS - 1]),
        helper.make_tensor("total", onnx.TensorProto.INT32, [1], [_KEYS]),
    ]
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "key", "value", "last", "total"],
        ["y", "new_key", "new_value"],
        domain="com.microsoft",
        num_heads=1,
        kv_num_heads=1,
        local_window_size=_WINDOW,
    )
    floats = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "window",
        [helper.make_tensor_value_info(name, floats, shape) for name, shape in inputs],
        [helper.make_tensor_value_info("y", floats, [1, _KEYS, _SIZE])],
        lengths,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())


@dataclass(frozen=True)
class Heads:
    """Where query, key or value of a layer come from.

    Shapes: x [B, S, heads · D], before the rotation where there is one.
    """

    x: str
    heads: int
    tables: tuple[str, str, int] | None


@dataclass(frozen=True)
class FusedAttention:
    """How many layers were fused, and what went into them."""

    layers: int
    rotated: int
    """Layers with their rotation inside."""
    joined: int
    """Layers whose query, key and value are one projection."""


class FusedKernel(Protocol):
    """The operator that takes a layer of attention over."""

    domain: str

    def nothing(self, layer: Layer) -> list[str]:
        """Return its inputs for new keys and values, of a layer that has none of its own."""

    def rotates(self, layer: Layer, angles: int) -> bool:
        """Tell whether it rotates queries and keys of a layer by so many angles of a head."""

    def attributes(self, layer: Layer, rotates: bool) -> dict[str, Any]:
        """Return the attributes for a layer besides scale and softcap."""

    def lengths(self) -> list[str]:
        """Return its inputs after the KV buffers: where the tokens stand."""

    def biases(self, layer: Layer) -> str:
        """Return its last input, what a layer adds for distances; empty where nothing.

        Raises: BuildError for what it cannot add.
        """


class GroupQueryAttention:
    """ONNX Runtime's kernel.

    Holds at batch 1 only: on a CPU it refuses a wider batch of several tokens with a past. Keys and
    values have one width; see `widen_values`.
    """

    domain = MICROSOFT

    def __init__(self, view: GraphView, geometry: Geometry) -> None:
        self._view = view
        self._geometry = geometry
        self._lengths = _lengths(view)
        self._surplus = surplus() if any(geometry.windows) else 0
        shares = any(memory.kind == SHARED for memory in geometry.memories)
        version = tuple(int(part) for part in ort.__version__.split(".")[:2])
        if shares and version < _SHARES_FROM:
            raise BuildError(
                f"layers of this model read the keys and values of others, and the attention of "
                f"onnxruntime {ort.__version__} only new ones; install onnxruntime "
                f"{'.'.join(map(str, _SHARES_FROM))} or later"
            )

    def nothing(self, layer: Layer) -> list[str]:
        """See `FusedKernel`: no tokens, of as many numbers as there would be."""
        memory = self._geometry.memories[layer.index]
        none = np.zeros((1, 0, memory.kv_heads * memory.key_width), np.float32)
        return 2 * [self._view.add_constant("none", none)]

    def rotates(self, layer: Layer, angles: int) -> bool:
        """Tell whether the kernel takes the rotation: heads of 16, angles of 16, no more."""
        return self._geometry.memories[layer.index].key_width % 16 == 0 and angles % 16 == 0

    def attributes(self, layer: Layer, rotates: bool) -> dict[str, Any]:
        """See `FusedKernel`; -1 stands for no window."""
        keys = self._geometry.memories[layer.index].window
        return {
            "do_rotary": int(rotates),
            "local_window_size": keys - self._surplus if keys else -1,
        }

    def lengths(self) -> list[str]:
        """See `FusedKernel`."""
        return self._lengths

    def biases(self, layer: Layer) -> str:
        """See `FusedKernel`: no decoder that it runs has any."""
        return ""


_SHARES_FROM = 1, 31
"""The first version of ONNX Runtime seen to attend to a past without new keys."""


def as_wide_as_keys(geometry: Geometry) -> Geometry:
    """Return a geometry whose values are at least as wide as its keys."""
    memories = [
        one
        if one.kind == RECURRENT
        else replace(one, value_width=one.value_width and max(one.key_width, one.value_width))
        for one in geometry.memories
    ]
    return replace(geometry, memories=tuple(memories))


def widen_values(view: GraphView, narrow: Geometry) -> None:
    """Fill values up with zeros where a geometry has them narrower than its keys.

    ```
    v [B, Hkv, S, Dv] ─ TensorScatter ─ Attention ─ y [B, H, S, Dv]

      =>  v ─ Pad [B, Hkv, S, D] ─ TensorScatter ─ Attention ─ Slice ─ y
    ```
    """
    for layer in find_layers(view):
        memory, output = narrow.memories[layer.index], layer.node.output[0]
        lacking = memory.key_width - memory.value_width
        if lacking > 0 and not layer.shares:
            pads = view.add_constant("pads", np.array([*7 * [0], lacking], np.int64))
            layer.updates[1].input[1] = view.add("Pad", [layer.written[1], pads])
        if lacking > 0:
            wide = view.add("Attention", layer.node.input, **view.attributes(layer.node))
            bounds = (view.add_constant("bound", np.array([n])) for n in (0, memory.value_width, 3))
            view.add("Slice", [wide, *bounds], outputs=[output])
    view.tidy()


def fuse_attention(
    view: GraphView, geometry: Geometry, max_length: int, kernel: FusedKernel
) -> FusedAttention:
    """Replace attention over scattered caches by one operator a layer.

    ```
    k ─ rotate ─ TensorScatter(key.i) ───┐
    v ────────── TensorScatter(value.i) ─┼─ Attention(mask) ─ y
    q ─ rotate ──────────────────────────┘
      =>  kernel(q, k, v, key.i, value.i, lengths, cos, sin) ─ y, caches
    ```
    Query, key and value come from one projection where their weights allow.
    """
    layers = find_layers(view)
    if not layers:
        return FusedAttention(0, 0, 0)
    view.require_domain(kernel.domain, 1)
    fusion = _Fusion(view, geometry, Rotations(view, max_length), kernel)
    done = [fusion.fuse(layer) for layer in layers]
    view.tidy()
    return FusedAttention(len(done), sum(r for r, _ in done), sum(j for _, j in done))


class _Fusion:
    """Fuses the layers of one graph, which share lengths and tables."""

    def __init__(
        self, view: GraphView, geometry: Geometry, rotations: Rotations, kernel: FusedKernel
    ) -> None:
        self.view = view
        self.geometry = geometry
        self.rotations = rotations
        self.kernel = kernel
        self.shapes = Shapes(view)

    def fuse(self, layer: Layer) -> tuple[bool, bool]:
        """Fuse one layer; return whether its rotation went in, and whether it was joined."""
        memory, heads = self.geometry.memories[layer.index], self.geometry.heads
        width = memory.key_width
        query = self._heads(layer.node.input[0], heads, width)
        inside = query.tables is not None
        inside = inside and self.kernel.rotates(layer, query.tables[2] if query.tables else 0)
        if layer.shares:
            query = query if inside else self._rotated(query, width)
            self._emit(layer, [query.x, *self.kernel.nothing(layer)], query.tables)
            return inside, False
        keys, values = layer.written
        key = self._heads(keys, memory.kv_heads, width)
        value = self._heads(values, memory.kv_heads, memory.value_width, turns=False)
        inside = inside and query.tables == key.tables
        if not inside:
            query, key = self._rotated(query, width), self._rotated(key, width)
        packed = self._joined(query, key, value)
        self._emit(layer, packed or [query.x, key.x, value.x], query.tables)
        return inside, packed is not None

    def _heads(self, name: str, heads: int, width: int, turns: bool = True) -> Heads:
        rotary = match_rotary(self.view, name) if turns else None
        tables = self.rotations.tables(rotary) if rotary else None
        # Written out: a context of no tokens leaves nothing to tell it from.
        size = heads * width
        if rotary is None or tables is None:
            return Heads(pack_heads(self.view, self.shapes, name, size), heads, None)
        return Heads(pack_heads(self.view, self.shapes, rotary.x, size), heads, tables)

    def _rotated(self, heads: Heads, width: int) -> Heads:
        """Rotate outside attention, in one node."""
        if heads.tables is None:
            return heads
        return Heads(rotate(self.view, heads, width), heads.heads, None)

    def _joined(self, *parts: Heads) -> list[str] | None:
        """Return the inputs of attention if one projection makes all three, else None."""
        candidates = [find_projection(self.view, part.x) for part in parts]
        projections = [p for p in candidates if p is not None]
        if len(projections) < len(parts) or len({part.x for part in parts}) < len(parts):
            return None
        joined = join_projections(self.view, projections)
        return [joined, "", ""] if joined is not None else None

    def _emit(self, layer: Layer, inputs: list[str], rotation: tuple[str, str, int] | None) -> None:
        view, memory = self.view, self.geometry.memories[layer.index]
        tables = rotation[:2] if rotation else ()
        updated = [f"present_{name}" for name in layer.caches]
        read = updated if layer.shares and layer.updates else layer.caches
        joined = view.fresh("attention")
        attributes: dict[str, Any] = view.attributes(layer.node)
        biases = self.kernel.biases(layer)
        beside = [*(tables or ("", "")), biases] if biases else tables
        view.add(
            type(self.kernel).__name__,
            [*inputs, *read, *self.kernel.lengths(), *beside],
            outputs=[joined] if layer.shares else [joined, *updated],
            domain=self.kernel.domain,
            num_heads=self.geometry.heads,
            kv_num_heads=memory.kv_heads,
            scale=attributes.get("scale", memory.key_width**-0.5),
            softcap=attributes.get("softcap", 0.0),
            **self.kernel.attributes(layer, bool(tables)),
        )
        hand_over(view, self.shapes, self.geometry.heads, layer.node.output[0], joined)


def pack_heads(view: GraphView, shapes: Shapes, name: str, width: int = -1) -> str:
    """Return a value [B, S, H · D] for one [B, H, S, D], undoing a reshape if there is one."""
    shape = view.add_constant("shape", np.array([0, 0, width], np.int64))
    transpose = view.maker(name, "Transpose")
    if transpose is None or list(transpose.attribute[0].ints) != [0, 2, 1, 3]:
        turned = view.add("Transpose", [name], perm=[0, 2, 1, 3])
        return view.add("Reshape", [turned, shape])
    reshape = view.maker(transpose.input[0], "Reshape")
    before = reshape and shapes.dims(reshape.input[0])
    after = shapes.dims(transpose.input[0])
    if reshape and before and after and len(before) == 3 and before[:2] == after[:2]:
        return str(reshape.input[0])
    return view.add("Reshape", [transpose.input[0], shape])


def hand_over(view: GraphView, shapes: Shapes, heads: int, old: str, joined: str) -> None:
    """Give the readers of an attention output [B, H, S, D] the joined heads [B, S, H · D]."""
    transpose = view.only_reader(old, "Transpose")
    reshape = transpose and view.only_reader(transpose.output[0], "Reshape")
    if transpose is not None and reshape:
        # Joined heads are what the reshape makes, unless it also folds batch and width.
        dims = shapes.dims(reshape.output[0])
        if dims is not None and len(dims) == 3:
            view.replace(reshape.output[0], joined)
        else:
            view.add("Reshape", [joined, reshape.input[1]], outputs=[reshape.output[0]])
        return
    shape = view.add_constant("heads", np.array([0, 0, heads, -1], np.int64))
    split = view.add("Reshape", [joined, shape])
    view.add("Transpose", [split], outputs=[old], perm=[0, 2, 1, 3])


def rotate(view: GraphView, heads: Heads, head_dim: int) -> str:
    """Rotate heads [B, S, heads · D] by the positions of their tokens, in one node."""
    assert heads.tables is not None
    cos, sin, width = heads.tables
    return view.add(
        "RotaryEmbedding",
        [heads.x, positions(view), cos, sin],
        domain=MICROSOFT,
        num_heads=heads.heads,
        rotary_embedding_dim=0 if width == head_dim else width,
    )


def _lengths(view: GraphView) -> list[str]:
    """Add the lengths GroupQueryAttention reads: index of the last filled, and filled in all."""
    one = view.add_constant("one", np.array([1], np.int32))
    width = view.add("Shape", ["input_ids"], start=1, end=2)
    filled = view.add("Add", ["start", width])
    total = view.add("Cast", [filled], to=onnx.TensorProto.INT32)
    return [view.add("Sub", [total, one]), total]


@dataclass(frozen=True)
class Rotary:
    """A rotation found in the graph: of which value, by which cosines and sines.

    Shapes: x [B, H, S, D]; cos and sin broadcast over x with R <= D angles a position.
    """

    x: str
    cos: str
    sin: str


def match_rotary(view: GraphView, name: str) -> Rotary | None:
    """Return the rotation that makes a value, in the half-split form of Llama.

    ```
    x ─┬────────────────────────────────── Mul cos ─┐
       ├─ Slice upper half ─ Neg ─┐                 Add ─ value
       └─ Slice lower half ───── Concat ── Mul sin ─┘
    ```
    Of a part of each head only, in the form of GPT-NeoX:
    ```
    x ─┬─ Slice first R ─ the above ─┐
       └─ Slice the rest ─────────── Concat ─ value
    ```
    Or of heads [B, S, H, D], transposed after it.
    Source: Su et al. 2021, arXiv:2104.09864.
    """
    transpose = view.maker(name, "Transpose")
    if transpose is not None and view.attributes(transpose).get("perm") == [0, 2, 1, 3]:
        inner = match_rotary(view, transpose.input[0])
        return inner and replace(inner, x=view.add("Transpose", [inner.x], perm=[0, 2, 1, 3]))
    joined = view.maker(name, "Concat")
    if joined is None:
        return _match_whole(view, name)
    if len(joined.input) != 2 or joined.attribute[0].i not in (-1, 3):
        return None
    turned = _match_whole(view, joined.input[0])
    first = turned and view.maker(turned.x, "Slice")
    rest = view.maker(joined.input[1], "Slice")
    if not turned or not first or not rest or first.input[0] != rest.input[0]:
        return None
    return Rotary(first.input[0], turned.cos, turned.sin) if _halves(view, first, rest) else None


def _match_whole(view: GraphView, name: str) -> Rotary | None:
    total = view.maker(name, "Add")
    if total is None:
        return None
    for straight, turned in (total.input, reversed(total.input)):
        first, second = view.maker(straight, "Mul"), view.maker(turned, "Mul")
        if first is None or second is None:
            continue
        for half, sin in (second.input, reversed(second.input)):
            x = _half_turned(view, half)
            if x is not None and x in first.input:
                cos = next(i for i in first.input if i != x)
                return Rotary(x, cos, sin)
    return None


def _half_turned(view: GraphView, name: str) -> str | None:
    """Return x if a value is concat(-x[upper half], x[lower half])."""
    joined = view.maker(name, "Concat")
    if joined is None or len(joined.input) != 2 or joined.attribute[0].i not in (-1, 3):
        return None
    negated = view.maker(joined.input[0], "Neg")
    upper = negated and view.maker(negated.input[0], "Slice")
    lower = view.maker(joined.input[1], "Slice")
    if not upper or not lower or upper.input[0] != lower.input[0]:
        return None
    split = _halves(view, lower, upper)
    high = view.scalar(upper.input[2])
    whole = split and high is not None and (high >= 2**31 - 1 or high == 2 * split)
    return str(lower.input[0]) if whole else None


def _halves(view: GraphView, lower: onnx.NodeProto, upper: onnx.NodeProto) -> int | None:
    """Return where two slices of the last of four axes meet, if the first begins at 0."""
    bounds = [[view.scalar(i) for i in node.input[1:5]] for node in (lower, upper)]
    if any(
        len(bound) < 3 or bound[2] not in (-1, 3) or bound[3:] not in ([], [1]) for bound in bounds
    ):
        return None
    (low, middle, *_), (split, high, *_) = bounds
    meets = low == 0 and split is not None and middle == split
    return int(split) if meets and split is not None and high is not None else None


@dataclass
class Rotations:
    """Tables of cosines and sines, made once for every layer that shares them."""

    view: GraphView
    max_length: int

    def __post_init__(self) -> None:
        self._tables: dict[tuple[str, str], tuple[str, str, int] | None] = {}

    def tables(self, rotary: Rotary) -> tuple[str, str, int] | None:
        """Return the names of the [max_length, R / 2] tables and R; None where halves differ."""
        # A block is rotated by the last of the angles of a pass: each by that of its position.
        rotary = Rotary(rotary.x, self._whole(rotary.cos), self._whole(rotary.sin))
        key = (rotary.cos, rotary.sin)
        if key not in self._tables:
            self._tables[key] = self._make(rotary)
        return self._tables[key]

    def _whole(self, name: str) -> str:
        """Return the angles of all positions of a pass, given those or some of them."""
        cut = self.view.maker(name, "Slice")
        axis = self.view.scalar(cut.input[3]) if cut is not None and len(cut.input) > 3 else None
        return str(cut.input[0]) if cut is not None and axis == 2 else name

    def _make(self, rotary: Rotary) -> tuple[str, str, int] | None:
        whole = tabulate(self.view, rotary, self.max_length)
        cos, sin = (_half(table) for table in whole)
        if cos is None or sin is None:
            return None
        names = [
            self.view.add_stored(in_memory(f"{self.view.fresh(kind)}.table", table))
            for kind, table in (("cos", cos), ("sin", sin))
        ]
        return names[0], names[1], whole[0].shape[1]


def _half(table: NDArray[np.float32]) -> NDArray[np.float32] | None:
    first, second = np.split(table, 2, axis=-1)
    return first if np.array_equal(first, second) else None


def tabulate(view: GraphView, rotary: Rotary, length: int) -> list[NDArray[np.float32]]:
    """Evaluate the cosines and sines of every position below `length`.

    Shapes: returns cos, sin [length, R] f32.
    """
    feeds: dict[str, NDArray[Any]] = {
        "input_ids": np.zeros((1, length), np.int64),
        "start": np.zeros(1, np.int64),
        CONTEXT: np.zeros((1, 0, 1), np.float32),
    }
    tables = evaluate(view, (rotary.cos, rotary.sin), feeds)
    return [t.reshape(length, t.shape[-1]).astype(np.float32) for t in tables]


_LOOK = 3, 5
"""Positions of a context, and of a block after it, to look at a mask with."""


def sees_ahead(view: GraphView, layer: Layer) -> bool:
    """Tell whether the first position of a block sees those after it.

    ```
    start, input_ids [1, S], context [1, C, .] ─ ... ─ mask [1, 1, S, M] ─ Attention
    ```
    """
    behind, width = _LOOK
    buffers = [i for i in view.graph.input if i.name.startswith(("key.", "value."))]
    feeds: dict[str, NDArray[Any]] = {
        "input_ids": np.zeros((1, width), np.int64),
        "start": np.zeros(1, np.int64),
        CONTEXT: np.zeros((1, behind, 1), np.float32),
        **{i.name: np.zeros(_sizes(i), np.float32) for i in buffers},
    }
    (mask,) = evaluate(view, (layer.node.input[3],), feeds)
    return bool(mask[0, 0, 0, behind + 1] == 0)


def _sizes(value: onnx.ValueInfoProto) -> list[int]:
    return [dim.dim_value for dim in value.type.tensor_type.shape.dim]
