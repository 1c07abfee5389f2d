"""Times the CPU kernels over the weights of a bundle, against what the machine can do."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from specrt.bundle import Bundle, Manifest
from specrt.engine.backends import open_engine
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.kernels import KERNELS, SWITCH, aligned_zeros, missing_kernels
from specrt.engine.ort.onnx_file import mapped_weights
from specrt.engine.ort.ort_engine import (
    bind_input,
    bind_output,
    packed_shape,
    shared_pool,
    silent_options,
)
from specrt.engine.protocol import Engine, first_row
from specrt.errors import EngineError, RequestError
from specrt.geometry import Geometry
from specrt.tuning.pass_timer import turned
from specrt_export.checkpoint.tensor_rows import widen_bf16

WIDTHS = (1, 2, 3, 5, 9, 17, 33, 128)
"""Rows of the passes that are timed, as far as the bundle takes them."""

LENGTHS = (128, 512, 1024, 2048, 4096)
"""Positions that attention is timed at, as far as the bundle takes them."""

_CPU, _DOMAIN, _TILE, _STRIP = "ort-cpu", "specrt", 16, 4
_STEPS = 200_000
_MOST_INLINE_BYTES = 2_000_000_000
"""Of weights in one message: protocol buffers end at 2 GiB."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Times:
    """The least and the median of some laps."""

    least_ms: float
    median_ms: float

    @classmethod
    def of(cls, laps_ns: Sequence[int]) -> Times:
        """Sum up laps."""
        return cls(round(min(laps_ns) / 1e6, 4), round(median(laps_ns) / 1e6, 4))


@dataclass(frozen=True)
class WidthTimes:
    """Passes of one width."""

    width: int
    products: Times
    library: Times | None
    """The same products by ONNX Runtime's own operators; None where they are not compared."""
    attention: Mapping[int, Times]
    """By the positions before the pass; empty where no layer attends."""
    recurrence: Times | None
    """Of all layers with a recurrent state, which first add as many earlier tokens to their states;
    None where there are none."""
    whole: Times
    """All of the target's pass, every row scored, at the first of these positions."""
    bytes_per_second: float
    multiply_adds_per_second: float
    limit_ms: float
    """Reading all weights, or multiplying them: the longer of both, at the most measured here."""


@dataclass(frozen=True)
class KernelReport:
    """What the CPU kernels take, and what limits them."""

    kernels: str
    """The instruction set."""
    forced: bool
    """Whether the environment named one."""
    threads: int
    laps: int
    weight_bytes: int
    """Of all products of a pass."""
    multiply_adds: Mapping[str, int]
    """Of one row, by format."""
    read_bytes_per_second: float
    multiply_adds_per_second: Mapping[str, float]
    """At most, by format."""
    library: str
    """The operator beside."""
    widths: Sequence[WidthTimes]

    def __str__(self) -> str:
        """Return the lines above the table."""
        chosen = f"{self.kernels}{' (SPECRT_KERNELS names it)' if self.forced else ''}"
        speeds = ", ".join(
            f"{rate / 1e9:.0f} G multiply-adds/s of {name}"
            for name, rate in self.multiply_adds_per_second.items()
        )
        return (
            f"kernels of {chosen}, {self.threads} threads, {self.laps} laps in turn: least / "
            f"median ms\nproducts: {self.weight_bytes / 1e6:.1f} MB of weights, "
            f"{sum(self.multiply_adds.values()) / 1e6:.0f} M multiply-adds a row\n"
            f"at most here: {self.read_bytes_per_second / 1e9:.1f} GB/s read, {speeds}"
        )

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return column names and cells."""
        lengths = list(self.widths[0].attention)
        columns = [
            "width", "products", "GB/s", "G multiply-adds/s", "limit", "share", self.library,
            "ratio", *(f"attention at {length}" for length in lengths), "recurrence", "whole pass",
        ]  # fmt: skip
        return columns, [
            [
                f"{w.width}",
                _cell(w.products),
                f"{w.bytes_per_second / 1e9:.1f}",
                f"{w.multiply_adds_per_second / 1e9:.0f}",
                f"{w.limit_ms:.2f}",
                f"{w.limit_ms / w.products.least_ms:.0%}",
                _cell(w.library),
                f"{w.products.median_ms / w.library.median_ms:.2f}" if w.library else "-",
                *(_cell(w.attention.get(length)) for length in lengths),
                _cell(w.recurrence),
                _cell(w.whole),
            ]
            for w in self.widths
        ]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        return asdict(self)


def _cell(times: Times | None) -> str:
    return f"{times.least_ms:.2f} / {times.median_ms:.2f}" if times else "-"


@dataclass(frozen=True)
class _Weights:
    """The weights of one product, as tiles; see `docs/kernels.md`."""

    format: str
    block: int
    inputs: int
    values: Array

    @classmethod
    def of(cls, node: onnx.NodeProto, mapped: Mapping[str, Array]) -> _Weights:
        facts = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        format_: bytes = facts["format"]
        return cls(format_.decode(), facts.get("block_size", 0), facts["K"], mapped[node.input[1]])

    @property
    def outputs(self) -> int:
        """Whole tiles'."""
        return len(self.values) * _TILE

    @property
    def weights(self) -> int:
        return self.outputs * self.inputs

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def strips(self) -> list[Array]:
        """Return the strips of four tiles [strips, 4, bytes of a tile], and the tiles left."""
        whole = len(self.values) // _STRIP * _STRIP
        ends = self.values[:whole], self.values[whole:]
        sides = _STRIP, len(self.values) - whole
        return [e.reshape(-1, n, e.shape[1]) for e, n in zip(ends, sides, strict=True) if len(e)]

    def codes(self) -> tuple[Array, Array]:
        """Return codes [N, K], raised by half their range, and scales [N, blocks]."""
        blocks, small = self.inputs // self.block, self.format == "int4"
        step, codes, scales = 8 if small else 4, [], []
        for strip in self.strips():
            count, side = strip.shape[:2]
            split = self.block // step * side * 64
            parts = strip.reshape(count, blocks, -1)
            groups = parts[..., :split].reshape(count, blocks, -1, 1, side, _TILE, 4)
            if small:
                groups = np.concatenate((groups & 15, groups >> 4), 3)
            codes.append(groups.transpose(0, 4, 5, 1, 2, 3, 6).reshape(-1, self.inputs))
            half = parts.shape[-1] - split == side * _TILE * 2
            beside = np.ascontiguousarray(parts[..., split:])
            beside = beside.view(np.float16 if half else np.float32).astype(np.float32)
            beside = beside.reshape(count, blocks, side, _TILE).transpose(0, 2, 3, 1)
            scales.append(beside.reshape(-1, blocks))
        return np.concatenate(codes), np.concatenate(scales)

    def floats(self) -> Array:
        """Return floats [K, N]."""
        kinds: dict[str, Any] = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32}
        parts = []
        for strip in self.strips():
            whole = strip.reshape(len(strip), self.inputs, -1).view(kinds[self.format])
            if self.format == "bf16":
                whole = widen_bf16(whole)
            parts.append(whole.astype(np.float32).transpose(1, 0, 2).reshape(self.inputs, -1))
        return np.concatenate(parts, axis=1)


class _Library:
    """The measuring functions of the kernels' library."""

    def __init__(self) -> None:
        if lacks := missing_kernels():
            raise EngineError(lacks)
        library = ctypes.CDLL(str(KERNELS))
        library.specrt_kernels.restype = ctypes.c_char_p
        name: bytes = library.specrt_kernels()
        self.name = name.decode()
        self._read, self._multiply = (
            library.specrt_measure_read, library.specrt_measure_multiply,
        )  # fmt: skip
        self._read.restype = self._multiply.restype = ctypes.c_double
        self._read.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
        self._multiply.argtypes = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t

    def read(self, memory: Array, threads: int) -> float:
        """Return bytes a second."""
        seconds: float = self._read(memory.ctypes.data, memory.nbytes, threads)
        return memory.nbytes / seconds

    def multiply(self, format_: str, threads: int) -> float:
        """Return multiply-adds a second."""
        rate: float = self._multiply(format_.encode(), _STEPS, threads)
        return rate


def _read(engine: Engine, end: int, width: int, most: int) -> None:
    """Feed the positions before `end`, the last `width` in one pass: what states hold is read."""
    last = max(0, end - width)
    for start, stop in pairwise([*range(0, last, most), last, end]):
        engine.forward(np.full((1, stop - start), 1, np.int64), np.array([start]), 1)


def measure_kernels(
    path: Path, threads: int, *, laps: int, widths: Sequence[int] = WIDTHS,
    progress: Callable[[float], None] = lambda share: None,
) -> KernelReport:  # fmt: skip
    """Time the products, the attention and whole passes of a bundle's target, in turns.

    All products of a pass run one after another, so that weights come from memory as they do in a
    pass. Every row is scored, as in a verify pass.
    Raises: RequestError for a bundle that runs on anything else; EngineError without kernels.
    """
    bundle = Bundle.open(path)
    manifest, target = bundle.manifest, bundle.manifest.target
    _check_backend(path, manifest)
    library = _Library()
    files, engine_file = bundle.beside(target.engine), bundle.file(target.engine)
    mapped = {w.name: w.array for w in mapped_weights(engine_file, files)}
    largest = np.frombuffer(max((f.data for f in files.values()), key=len), np.uint8)
    graph = onnx.ModelProto.FromString(bytes(files[engine_file.name].data)).graph
    nodes = _layers(graph, "MatMul")
    if not nodes:
        raise RequestError(
            f"{path} was built without CPU kernels; build it again with `specrt build RECIPE`"
        )
    stored = [_Weights.of(node, mapped) for node in nodes]
    formats = dict.fromkeys(w.format for w in stored)
    multiply_adds = {f: sum(w.weights for w in stored if w.format == f) for f in formats}
    spec = replace(EngineSpec.of(bundle, target, threads), held=None)
    engine = first_row(open_engine(spec))
    fitting = [w for w in widths if w <= manifest.max_width]
    most = manifest.max_length - max(fitting)
    lengths = [n for n in LENGTHS if n <= most] or [most]
    made = {
        "products": _products(nodes, stored, threads),
        "library": _library_products(stored, threads),
        "recurrence": recurrence_passes(graph, target.geometry, manifest.max_width, threads),
    }
    if _layers(graph, "Attention"):
        attention = _Attention(graph, mapped, target.geometry, manifest.max_length, threads)
        made |= {f"attention {n}": partial(attention, length=n) for n in lengths}
    reads: list[float] = []
    rates: dict[str, list[float]] = {name: [] for name in formats}
    taken: dict[int, dict[str, list[int]]] = {}
    for done, width in enumerate(fitting):
        tokens, start = np.full((1, width), 1, np.int64), np.array([lengths[0]])
        cases = {name: passes(width) for name, passes in made.items() if passes}
        cases["whole"] = lambda: engine.forward(tokens, start, tokens.shape[1])  # noqa: B023
        taken[width] = {name: [] for name in cases}
        for lap in range(laps + 1):
            for name in turned(list(cases), lap):
                if name == "whole" and target.geometry.recurs:
                    _read(engine, lengths[0], width, manifest.max_width)
                began = perf_counter_ns()
                cases[name]()
                if lap:  # the first one warms up
                    taken[width][name].append(perf_counter_ns() - began)
            reads.append(library.read(largest, threads))
            for name in rates:
                rates[name].append(library.multiply(name, threads))
        progress((done + 1) / len(fitting))
    engine.close()
    size, read = sum(w.nbytes for w in stored), max(reads)
    multiply = {name: max(found) for name, found in rates.items()}
    rows = []
    for width, laps_of in taken.items():
        times = {name: Times.of(laps_ns) for name, laps_ns in laps_of.items()}
        least = min(laps_of["products"]) / 1e9
        arithmetic = sum(width * count / multiply[f] for f, count in multiply_adds.items())
        attended = {n: times[f"attention {n}"] for n in lengths if f"attention {n}" in times}
        rows.append(
            WidthTimes(
                width,
                times["products"],
                times.get("library"),
                attended,
                times.get("recurrence"),
                times["whole"],
                round(size / least),
                round(width * sum(multiply_adds.values()) / least),
                round(max(size / read, arithmetic) * 1e3, 4),
            )
        )
    operator = "MatMulNBits" if any(w.block for w in stored) else "MatMul of fp32"
    return KernelReport(
        library.name, bool(os.environ.get(SWITCH)), threads, laps, size, multiply_adds,
        round(read), {name: round(rate) for name, rate in multiply.items()}, operator, rows,
    )  # fmt: skip


def _layers(graph: onnx.GraphProto, operator: str) -> list[onnx.NodeProto]:
    return [node for node in graph.node if (node.domain, node.op_type) == (_DOMAIN, operator)]


def _check_backend(path: Path, manifest: Manifest) -> None:
    backend = manifest.backend_of(manifest.target)
    if backend != _CPU:
        raise RequestError(
            f"{path} runs on {backend}, and the kernels are those of a CPU; "
            f"give a bundle that was built with `--backend {_CPU}`"
        )


def _value(name: str, array: Array, *, any_rows: bool = False) -> onnx.ValueInfoProto:
    """Declare an array as it is, or with `any_rows` in its last dimension but one."""
    shape: list[int | str] = [*array.shape]
    if any_rows:
        shape[-2] = "T"
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, kind, shape)


def _session(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto], tensors: Sequence[onnx.TensorProto], threads: int,
) -> ort.InferenceSession:  # fmt: skip
    graph = helper.make_graph(nodes, "kernels", inputs, outputs, tensors)
    versions = {"": 21, _DOMAIN: 1, "com.microsoft": 1}
    opsets = [helper.make_opsetid(*version) for version in versions.items()]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = silent_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if shared_pool:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = threads
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def _bound(
    session: ort.InferenceSession, inputs: Mapping[str, Array], outputs: Mapping[str, Array]
) -> Any:
    binding = session.io_binding()
    for name, array in inputs.items():
        bind_input(binding, name, array)
    for name, array in outputs.items():
        bind_output(binding, name, array)
    return binding


Passes = Callable[[int], Callable[[], object]]
"""Makes a pass of so many rows."""


def _products(nodes: Sequence[onnx.NodeProto], stored: Sequence[_Weights], threads: int) -> Passes:
    """Return what makes passes of the kernels' products, over weights where they are.

    Without the norms before them, which the library's products lack.
    """
    given: dict[str, Array] = {}
    written = []
    for place, (node, own) in enumerate(zip(nodes, stored, strict=True)):
        name = f"values{place}"
        given[name] = own.values
        product = helper.make_node(
            "MatMul", [f"x{own.inputs}", name], [f"y{place}"], domain=_DOMAIN
        )
        product.attribute.extend(a for a in node.attribute if a.name != "norm")
        product.attribute.append(helper.make_attribute("norm", "none"))
        written.append(product)
    return _passes(written, given, [], stored, threads)


def _library_products(stored: Sequence[_Weights], threads: int) -> Passes | None:
    """Return what makes passes of ONNX Runtime's own products, over the same weights.

    None where they are too many for one message, or in codes that it multiplies otherwise or not.
    """
    sizes = {"int4": 0.5, "int8": 1.0}
    if any(w.block and w.format not in sizes for w in stored):
        return None
    if sum(w.weights * sizes.get(w.format, 4) for w in stored) > _MOST_INLINE_BYTES:
        return None
    written, tensors = [], []
    for place, own in enumerate(stored):
        x, w, s, y = f"x{own.inputs}", f"w{place}", f"s{place}", f"y{place}"
        if not own.block:
            tensors.append(numpy_helper.from_array(own.floats(), w))
            written.append(helper.make_node("MatMul", [x, w], [y]))
            continue
        small = own.format == "int4"
        codes, scales = own.codes()
        codes = codes[:, ::2] | codes[:, 1::2] << 4 if small else codes
        codes = codes.reshape(own.outputs, own.inputs // own.block, -1)
        tensors += [
            numpy_helper.from_array(codes, w),
            numpy_helper.from_array(scales.reshape(-1), s),
        ]
        written.append(
            helper.make_node(
                "MatMulNBits", [x, w, s], [y], domain="com.microsoft", K=own.inputs,
                N=own.outputs, bits=4 if small else 8, block_size=own.block, accuracy_level=4,
            )
        )  # fmt: skip
    return _passes(written, {}, tensors, stored, threads)


def _passes(
    nodes: Sequence[onnx.NodeProto], given: Mapping[str, Array],
    tensors: Sequence[onnx.TensorProto], stored: Sequence[_Weights], threads: int,
) -> Passes:  # fmt: skip
    sizes = {f"x{w.inputs}": w.inputs for w in stored}
    inputs = [_value(name, array, any_rows=True) for name, array in _rows(sizes, 1).items()]
    inputs += [_value(name, array) for name, array in given.items()]
    last = f"y{len(nodes) - 1}"
    output = helper.make_tensor_value_info(last, TensorProto.FLOAT, None)
    session = _session(nodes, inputs, [output], tensors, threads)

    def at(width: int) -> Callable[[], object]:
        x = _rows(sizes, width)
        binding = _bound(session, {**x, **given}, {})
        binding.bind_output(last, "cpu")
        return lambda: (session.run_with_iobinding(binding), x)

    return at


def _rows(sizes: Mapping[str, int], width: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shapes = {name: (1, width, size) for name, size in sizes.items()}
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def _fed(node: onnx.NodeProto, sizes: dict[str, int]) -> list[str]:
    """Return names for the query, key and value that attention is fed; note their sizes."""
    stated = {a.name: a.i for a in node.attribute}
    key, value = stated["head_size"], stated.get("value_size") or stated["head_size"]
    heads, kv_heads = stated["num_heads"], stated["kv_num_heads"]
    each = [heads * key, kv_heads * key, kv_heads * value]
    if not node.input[1]:
        each = each[:1] if stated.get("shared") else [sum(each)]
    names = [f"x{size}" for size in each]
    sizes.update(zip(names, each, strict=True))
    return names + [""] * (3 - len(names))


class _Attention:
    """Passes of the attention of all layers, over KV buffers that are full."""

    def __init__(
        self, graph: onnx.GraphProto, mapped: Mapping[str, Array], geometry: Geometry,
        max_length: int, threads: int,
    ) -> None:  # fmt: skip
        nodes = _layers(graph, "Attention")
        read = {name for node in nodes for name in node.input}
        self._buffers: dict[str, Array] = {
            name: aligned_zeros(packed_shape(name, one.heads, one.width, 1, max_length))
            for name, one in geometry.buffers.items()
            if name in read
        }
        for buffer in self._buffers.values():
            buffer.fill(0.01)
        self._sizes: dict[str, int] = {}
        written, tables = [], set[str]()
        for place, node in enumerate(nodes):
            names = _fed(node, self._sizes)
            later = node.input[7:]
            tables.update(later)
            attend = helper.make_node(
                "Attention",
                [*names, *node.input[3:5], "slots", "positions", *later],
                [f"y{place}", *node.output[1:]],
                domain=_DOMAIN,
            )
            attend.attribute.extend(node.attribute)
            written.append(attend)
        self._given = {name: array for name, array in mapped.items() if name in tables}
        inputs = [_value(n, a, any_rows=True) for n, a in _rows(self._sizes, 1).items()]
        inputs += [_value(n, a) for n, a in (self._buffers | self._given).items()]
        inputs += [
            helper.make_tensor_value_info(n, TensorProto.INT64, ["T"])
            for n in ("slots", "positions")
        ]
        outputs = [_value(f"present_{n}", a) for n, a in self._buffers.items()]
        inline = [t for t in graph.initializer if t.name in tables - {*self._given}]
        self._session = _session(written, inputs, outputs, inline, threads)

    def __call__(self, width: int, length: int) -> Callable[[], object]:
        """Return a pass of so many tokens after so many positions."""
        places: dict[str, Array] = {
            "slots": np.zeros(width, np.int64),
            "positions": np.arange(length, length + width),
        }
        inputs = {**_rows(self._sizes, width), **places, **self._given, **self._buffers}
        outputs = {f"present_{name}": array for name, array in self._buffers.items()}
        binding = _bound(self._session, inputs, outputs)
        return lambda: (self._session.run_with_iobinding(binding), inputs)


def recurrence_passes(
    graph: onnx.GraphProto, geometry: Geometry, max_width: int, threads: int
) -> Passes | None:
    """Return what makes passes of the recurrent layers of a graph; None where it has none.

    Each adds the tokens of an earlier pass of its width to the states, as far as these follow.
    """
    sizes: dict[str, int] = {}
    buffers: dict[str, Array] = {}
    bases: dict[str, Array] = {}
    written, lag = [], 0
    for place, node in enumerate(_layers(graph, "Recurrence")):
        stated = {a.name: a.i for a in node.attribute}
        heads, keys = stated["num_heads"], stated["key_heads"] * stated["key_size"]
        each = keys, keys, heads * stated["value_size"], heads, heads
        names = ["query", "key", "value", "decay", "beta"]
        names = [f"{name}{size}" for name, size in zip(names, each, strict=True)]
        sizes.update(zip(names, each, strict=True))
        kept, lag = list(node.input[5:8]), stated["lag"]
        for name in kept[:2]:
            one = geometry.buffers[name]
            positions = one.positions(max_width, max_width)
            buffers[name] = aligned_zeros(packed_shape(name, one.heads, one.width, 1, positions))
        bases[kept[2]] = np.zeros(1, np.int64)
        ring = buffers[kept[1]].shape[2]
        recur = helper.make_node(
            "Recurrence", [*names, *kept, "slots", "positions"],
            [f"y{place}", *(f"present_{name}" for name in kept)], domain=_DOMAIN,
        )  # fmt: skip
        recur.attribute.extend(node.attribute)
        written.append(recur)
    if not written:
        return None
    memory = {**buffers, **bases}
    inputs = [_value(n, a, any_rows=True) for n, a in _rows(sizes, 1).items()]
    inputs += [_value(n, a) for n, a in memory.items()]
    inputs += [
        helper.make_tensor_value_info(n, TensorProto.INT64, ["T"]) for n in ("slots", "positions")
    ]
    outputs = [_value(f"present_{n}", a) for n, a in memory.items()]
    session = _session(written, inputs, outputs, [], threads)

    def at(width: int) -> Callable[[], object]:
        start = 2 * ring
        before = start - min(lag + width, ring)
        fed = {n: -abs(x) if n.startswith("decay") else x for n, x in _rows(sizes, width).items()}
        fed |= {"slots": np.zeros(width, np.int64), "positions": np.arange(start, start + width)}
        binding = _bound(session, {**fed, **memory}, {f"present_{n}": a for n, a in memory.items()})

        def run() -> object:
            for base in bases.values():
                base[:] = before
            return session.run_with_iobinding(binding), fed

        return run

    return at
