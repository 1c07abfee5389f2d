"""Times the CPU kernels over the weights of a bundle, against what the machine can do."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.bundle import Bundle, Geometry
from specrt.engine.backends import open_engine
from specrt.engine.kernels import KERNELS, aligned_zeros, missing_kernels
from specrt.engine.onnx_file import fields_of, mapped_weights
from specrt.engine.protocol import first_row
from specrt.errors import EngineError, RequestError
from specrt.tuning import turned

WIDTHS = (1, 2, 3, 5, 9, 17, 33, 128)
"""Rows of the passes that are timed, as far as the bundle takes them."""

LENGTHS = (128, 512, 1024, 2048, 4096)
"""Positions that attention is timed at, as far as the bundle takes them."""

_CPU, _DOMAIN, _TILE, _STRIP = "ort-cpu", "specrt", 16, 4
_STEPS = 200_000
_MOST_INLINE_BYTES = 2_000_000_000
"""Of weights in one message: protocol buffers end at 2 GiB."""

Array = NDArray[Any]
Field = tuple[int, Any]


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
    """By the positions before the pass."""
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
            "ratio", *(f"attention at {length}" for length in lengths), "whole pass",
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
class _Node:
    """A node of a graph, its attributes as they are written."""

    kind: str
    domain: str
    inputs: list[str]
    outputs: list[str]
    attributes: list[bytes]

    def attribute(self, name: str, otherwise: Any = None) -> Any:
        for data in self.attributes:
            found = dict(fields_of(data))
            if found[1] == name.encode():
                value = found.get(3, found.get(4))
                return value.decode() if isinstance(value, bytes) else value
        return otherwise


@dataclass(frozen=True)
class _Weights:
    """The weights of one product, as tiles; see `docs/kernels.md`."""

    format: str
    block: int
    inputs: int
    values: Array

    @property
    def outputs(self) -> int:
        """Those of whole tiles."""
        return len(self.values) * _TILE

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def strips(self) -> list[Array]:
        """Return the strips of four tiles [strips, 4, bytes of a tile], and that of those left."""
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
                whole = (whole.astype(np.uint32) << 16).view(np.float32)
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


def measure_kernels(
    path: Any, threads: int, *, laps: int, widths: Sequence[int] = WIDTHS,
    progress: Callable[[float], None] = lambda share: None,
) -> KernelReport:  # fmt: skip
    """Time the products, the attention and whole passes of a bundle's target, in turns.

    All products of a pass run one after another, so that weights come from memory as they do in a
    pass. Every row is scored, as in a verify pass.
    Raises: RequestError for a bundle that runs on anything else; EngineError without kernels.
    """
    bundle = Bundle.open(path)
    manifest, target = bundle.manifest, bundle.manifest.target
    if manifest.backend_of(target) != _CPU:
        raise RequestError(
            f"{path} runs on {manifest.backend_of(target)}, and the kernels are those of a CPU; "
            f"give a bundle that was built with `--backend {_CPU}`"
        )
    library = _Library()
    files = bundle.beside(target.engine)
    engine_file = bundle.file(target.engine)
    weights = {w.name: w.array for w in mapped_weights(engine_file, files)}
    memory = np.frombuffer(max((f.data for f in files.values()), key=len), np.uint8)
    nodes, tensors = _read_graph(bytes(files[engine_file.name].data))
    products = [n for n in nodes if (n.domain, n.kind) == (_DOMAIN, "MatMul")]
    if not products:
        raise RequestError(
            f"{path} was built without CPU kernels; build it again with `specrt build RECIPE`"
        )
    stored = [_weights_of(node, weights) for node in products]
    engine = first_row(
        open_engine(
            _CPU, engine_file, target.geometry, batch=manifest.batch,
            max_length=manifest.max_length, max_width=manifest.max_width, threads=threads,
        )
    )  # fmt: skip
    ours = _products(products, stored, threads)
    theirs = (
        _rivals(stored, threads) if sum(w.nbytes for w in stored) < _MOST_INLINE_BYTES else None
    )
    attend = _Attention(nodes, tensors, weights, target.geometry, manifest.max_length, threads)
    fitting = [w for w in widths if w <= manifest.max_width]
    most = manifest.max_length - max(fitting)
    lengths = [n for n in LENGTHS if n <= most] or [most]
    formats = {f: sum(w.outputs * w.inputs for w in stored if w.format == f) for f in
               dict.fromkeys(w.format for w in stored)}  # fmt: skip
    reads: list[float] = []
    rates: dict[str, list[float]] = {name: [] for name in formats}
    taken: dict[int, dict[str, list[int]]] = {}
    for done, width in enumerate(fitting):
        inputs = np.full((1, width), 1, np.int64)
        start = np.array([lengths[0]])
        cases: dict[str, Callable[[], object]] = {
            "products": ours(width),
            "whole": lambda: engine.forward(inputs, start, inputs.shape[1]),  # noqa: B023
            **{f"attention {n}": attend(width, n) for n in lengths},
        }
        if theirs:
            cases["library"] = theirs(width)
        times: dict[str, list[int]] = {name: [] for name in cases}
        for lap in range(laps + 1):
            for name in turned(list(cases), lap):
                began = perf_counter_ns()
                cases[name]()
                if lap:  # the first one warms up
                    times[name].append(perf_counter_ns() - began)
            reads.append(library.read(memory, threads))
            for name in rates:
                rates[name].append(library.multiply(name, threads))
        taken[width] = times
        progress((done + 1) / len(fitting))
    engine.close()
    size, read = sum(w.nbytes for w in stored), max(reads)
    multiply = {name: max(found) for name, found in rates.items()}
    rows = []
    for width, times in taken.items():
        least = min(times["products"]) / 1e9
        arithmetic = sum(width * count / multiply[name] for name, count in formats.items())
        rows.append(
            WidthTimes(
                width,
                Times.of(times["products"]),
                Times.of(times["library"]) if theirs else None,
                {n: Times.of(times[f"attention {n}"]) for n in lengths},
                Times.of(times["whole"]),
                round(size / least),
                round(width * sum(formats.values()) / least),
                round(max(size / read, arithmetic) * 1e3, 4),
            )
        )
    beside = "MatMulNBits" if any(w.block for w in stored) else "MatMul of fp32"
    return KernelReport(
        library.name, bool(os.environ.get("SPECRT_KERNELS")), threads, laps, size, formats,
        round(read), {name: round(rate) for name, rate in multiply.items()}, beside, rows,
    )  # fmt: skip


def _read_graph(model: bytes) -> tuple[list[_Node], dict[str, bytes]]:
    """Return the nodes of a graph, and what it holds of tensors by name."""
    graph = next(v for number, v in fields_of(model) if number == 7 and isinstance(v, bytes))
    nodes, tensors = [], {}
    for number, value in fields_of(graph):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            found: dict[int, list[bytes]] = {}
            for place, part in fields_of(value):
                if isinstance(part, bytes):
                    found.setdefault(place, []).append(part)
            kind, domain = (found.get(n, [b""])[-1].decode() for n in (4, 7))
            inputs, outputs = ([p.decode() for p in found.get(n, [])] for n in (1, 2))
            nodes.append(_Node(kind, domain, inputs, outputs, found.get(5, [])))
        elif number == 5:
            name = dict(fields_of(value)).get(8, b"")
            tensors[name.decode() if isinstance(name, bytes) else ""] = value
    return nodes, tensors


def _weights_of(node: _Node, weights: Mapping[str, Array]) -> _Weights:
    block = node.attribute("block_size", 0)
    return _Weights(
        node.attribute("format"),
        block,
        node.attribute("K"),
        weights[node.inputs[1]],
    )


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _message(*fields: Field) -> bytes:
    """Write a message of protocol buffers: numbers, texts, and messages within."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts += [_varint(number << 3), _varint(value)]
        else:
            data = value.encode() if isinstance(value, str) else value
            parts += [_varint(number << 3 | 2), _varint(len(data)), data]
    return b"".join(parts)


_ONNX_TYPES = {"float32": 1, "uint8": 2, "int64": 7, "float16": 10}


def _value(name: str, array: Array, dynamic: bool = False) -> bytes:
    sizes = [(2, "T") if dynamic and i == array.ndim - 2 else (1, size)
             for i, size in enumerate(array.shape)]  # fmt: skip
    shape = _message(*((1, _message(size)) for size in sizes))
    tensor = _message((1, _ONNX_TYPES[array.dtype.name]), (2, shape))
    return _message((1, name), (2, _message((1, tensor))))


def _tensor(name: str, array: Array) -> bytes:
    dims = [(1, size) for size in array.shape]
    kind = (2, _ONNX_TYPES[array.dtype.name])
    return _message(*dims, kind, (8, name), (9, np.ascontiguousarray(array).tobytes()))


def _integer(name: str, value: int) -> bytes:
    return _message((1, name), (3, value), (20, 2))


def _node(
    kind: str, domain: str, inputs: Sequence[str], outputs: Sequence[str],
    attributes: Sequence[bytes],
) -> bytes:  # fmt: skip
    return _message(
        *((1, name) for name in inputs), *((2, name) for name in outputs), (4, kind),
        *((5, data) for data in attributes), (7, domain),
    )  # fmt: skip


def _session(
    nodes: Sequence[bytes], inputs: Sequence[bytes], outputs: Sequence[bytes],
    tensors: Sequence[bytes], threads: int,
) -> Any:  # fmt: skip
    import onnxruntime as ort

    from specrt.engine.ort import shared_pool, silent_options

    graph = _message(
        *((1, node) for node in nodes), (2, "kernels"), *((5, tensor) for tensor in tensors),
        *((11, value) for value in inputs), *((12, value) for value in outputs),
    )  # fmt: skip
    versions = (("", 21), (_DOMAIN, 1), ("com.microsoft", 1))
    opsets = [(8, _message((1, domain), (2, version))) for domain, version in versions]
    options = silent_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if shared_pool:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = threads
    model = _message((1, 10), (7, graph), *opsets)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _bound(session: Any, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Any:
    from specrt.engine.ort import bind_input, bind_output

    binding = session.io_binding()
    for name, array in inputs.items():
        bind_input(binding, name, array)
    for name, array in outputs.items():
        bind_output(binding, name, array)
    return binding


Passes = Callable[[int], Callable[[], object]]


def _rows_of(stored: Sequence[_Weights], width: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    sizes = sorted({w.inputs for w in stored})
    return {f"x{k}": rng.standard_normal((1, width, k)).astype(np.float32) for k in sizes}


def _products(nodes: Sequence[_Node], stored: Sequence[_Weights], threads: int) -> Passes:
    """Return what makes passes of the kernels' products, over weights where they are."""
    given: dict[str, Array] = {}
    written = []
    for place, (node, own) in enumerate(zip(nodes, stored, strict=True)):
        name = f"values{place}"
        given[name] = own.values
        inputs = [f"x{own.inputs}", name]
        written.append(_node("MatMul", _DOMAIN, inputs, [f"y{place}"], node.attributes))
    return _passes(written, given, [], stored, threads)


def _rivals(stored: Sequence[_Weights], threads: int) -> Passes:
    """Return what makes passes of ONNX Runtime's own products, over the same weights."""
    written, tensors = [], []
    for place, own in enumerate(stored):
        x, y = f"x{own.inputs}", f"y{place}"
        if not own.block:
            tensors.append(_tensor(f"w{place}", own.floats()))
            written.append(_node("MatMul", "", [x, f"w{place}"], [y], []))
            continue
        small = own.format == "int4"
        codes, scales = own.codes()
        codes = codes[:, ::2] | codes[:, 1::2] << 4 if small else codes
        tensors.append(
            _tensor(f"w{place}", codes.reshape(own.outputs, own.inputs // own.block, -1))
        )
        tensors.append(_tensor(f"s{place}", scales.reshape(-1)))
        facts = {"K": own.inputs, "N": own.outputs, "bits": 4 if small else 8,
                 "block_size": own.block, "accuracy_level": 4}  # fmt: skip
        attributes = [_integer(*fact) for fact in facts.items()]
        inputs = [x, f"w{place}", f"s{place}"]
        written.append(_node("MatMulNBits", "com.microsoft", inputs, [y], attributes))
    return _passes(written, {}, tensors, stored, threads)


def _passes(
    nodes: Sequence[bytes], given: Mapping[str, Array], tensors: Sequence[bytes],
    stored: Sequence[_Weights], threads: int,
) -> Passes:  # fmt: skip
    inputs = [_value(name, array, dynamic=True) for name, array in _rows_of(stored, 1).items()]
    inputs += [_value(name, array) for name, array in given.items()]
    last = f"y{len(nodes) - 1}"
    float_value = _message((1, last), (2, _message((1, _message((1, 1))))))
    session = _session(nodes, inputs, [float_value], tensors, threads)

    def at(width: int) -> Callable[[], object]:
        x = _rows_of(stored, width)
        binding = _bound(session, {**x, **given}, {})
        binding.bind_output(last, "cpu")
        return lambda: (session.run_with_iobinding(binding), x)

    return at


class _Attention:
    """Passes of the attention of all layers, over KV buffers that are full."""

    def __init__(
        self, nodes: Sequence[_Node], tensors: Mapping[str, bytes], weights: Mapping[str, Array],
        geometry: Geometry, max_length: int, threads: int,
    ) -> None:  # fmt: skip
        own = [n for n in nodes if (n.domain, n.kind) == (_DOMAIN, "Attention")]
        g, groups = geometry, -(-max_length // _TILE)
        key = (1, g.kv_heads, groups, g.head_dim, _TILE)
        value = (1, g.kv_heads, groups * _TILE, -(-g.head_dim // _TILE) * _TILE)
        self._buffers: dict[str, Array] = {}
        self._sizes: dict[str, int] = {}
        written, tables, given = [], {}, {}
        for place, node in enumerate(own):
            joined = not node.inputs[1]
            sizes = [(g.heads + 2 * g.kv_heads if joined else g.heads) * g.head_dim]
            sizes += [] if joined else [g.kv_heads * g.head_dim] * 2
            names = [f"x{size}" for size in sizes]
            self._sizes |= dict(zip(names, sizes, strict=True))
            buffers = {f"key{place}": key, f"value{place}": value}
            self._buffers |= {n: aligned_zeros(s) for n, s in buffers.items()}
            for name in buffers:
                self._buffers[name].fill(0.01)
            for name in filter(None, node.inputs[7:]):
                if name in weights:
                    given[name] = weights[name]
                else:
                    tables[name] = tensors[name]
            inputs = [*names, *[""] * (3 - len(names)), *buffers, "slots", "positions"]
            outputs = [f"y{place}", *(f"new_{name}" for name in buffers)]
            inputs += node.inputs[7:]
            written.append(_node("Attention", _DOMAIN, inputs, outputs, node.attributes))
        self._given = given
        values = [_value(n, np.zeros((1, 1, s), np.float32), dynamic=True)
                  for n, s in self._sizes.items()]  # fmt: skip
        values += [_value(n, a) for n, a in (self._buffers | given).items()]
        places_type = _message((1, 7), (2, _message((1, _message((2, "T"))))))
        values += [
            _message((1, n), (2, _message((1, places_type)))) for n in ("slots", "positions")
        ]
        results = [_value(f"new_{n}", a) for n, a in self._buffers.items()]
        self._session = _session(written, values, results, list(tables.values()), threads)

    def __call__(self, width: int, length: int) -> Callable[[], object]:
        """Return a pass of so many tokens behind so many positions."""
        rng = np.random.default_rng(0)
        x = {
            name: rng.standard_normal((1, width, size)).astype(np.float32)
            for name, size in self._sizes.items()
        }
        places: dict[str, Array] = {
            "slots": np.zeros(width, np.int64),
            "positions": np.arange(length, length + width),
        }
        inputs = {**x, **places, **self._given, **self._buffers}
        outputs = {f"new_{name}": array for name, array in self._buffers.items()}
        binding = _bound(self._session, inputs, outputs)
        return lambda: (self._session.run_with_iobinding(binding), inputs)
