"""ONNX Runtime on a CPU: bindings made once per width, KV buffers updated in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import ArrayLike, NDArray

from specrt.bundle import Geometry
from specrt.engine.onnx_file import files_of, mapped_weights
from specrt.engine.protocol import (
    CLOSED,
    Candidates,
    Confidence,
    Logits,
    Tokens,
    check_bounds,
    pass_size,
)
from specrt.errors import EngineError, first_line, shortage
from specrt.held_file import HeldFile, hold_folder

KERNELS = Path(__file__).parent.parent / "libspecrt_kernels.so"

MemoryBinding = tuple[str, str, int, Any, tuple[int, ...], int]
"""A name, and the memory that is bound to it: device, type, shape and address."""

NUMPY_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


@dataclass(frozen=True)
class _Pass:
    """The bound memory of one (width, rows) pair."""

    binding: Any
    tokens: Tokens
    rows: Tokens
    argmax: Tokens
    logits: Logits
    confidence: Confidence | None = None

    @property
    def candidates(self) -> Candidates | None:
        """None: these graphs compute none."""
        return None


class OrtEngine:
    """A saved ONNX Runtime graph with its KV buffers.

    Kernels of quantized weights compute rows in pairs, and round a single row differently. For
    speculative output to equal plain output, a row must have the same bits at every width. So:

    - `pad_single_token` adds a pad token behind a single one. Its keys are overwritten before they
      are read. The last position stays free for it: `max_length` is one less than the buffers'.
    - `pad_to_even` adds one to every odd width, and a row to score to an odd number of rows. It
      may be changed between passes.
    - `upcast_weights` converts weights that are stored in half precision to fp32 once, when the
      engine is opened, instead of in every pass.

    Shapes: a KV buffer is [batch, kv_heads, max_length, head_dim], bound as input and output.
    Threads: forward passes of one engine must not overlap.
    """

    def __init__(
        self, path: Path, geometry: Geometry, *, batch: int, max_length: int, max_width: int,
        threads: int, pad_single_token: bool = False, pad_to_even: bool = False,
        upcast_weights: bool = False, files: Mapping[str, HeldFile] | None = None,
    ) -> None:  # fmt: skip
        self.pad_single_token = pad_single_token
        self.pad_to_even = pad_to_even
        self.geometry = geometry
        self.batch = batch
        self.max_length = max_length - pad_single_token
        self.max_width = max_width
        self._session, self._weights = open_session(path, files, threads, upcast_weights)
        self._is_confident = any(o.name == "confidence" for o in self._session.get_outputs())
        self._start = np.zeros(batch, np.int64)
        self._caches = self._allocate(max_length)
        self._passes: dict[tuple[int, int, bool], _Pass] = {}

    def _allocate(self, positions: int) -> dict[str, NDArray[Any]]:
        """Allocate the KV buffers; the pages of a zeroed array cost memory only once written."""
        g = self.geometry
        shape = (self.batch, g.kv_heads, positions, g.head_dim)
        inputs = {i.name: i for i in self._session.get_inputs()}
        caches = {}
        for name in [f"{kind}.{i}" for i in range(g.layers) for kind in ("key", "value")]:
            if name not in inputs:
                raise EngineError(
                    f"the engine has no input {name!r}, expected for a model of {g.layers} layers; "
                    "the bundle does not match its manifest: build it again"
                )
            if tuple(inputs[name].shape) != shape:
                raise EngineError(
                    f"the engine's {name} has shape {inputs[name].shape}, and the manifest says "
                    f"{list(shape)}; they do not belong together: build the bundle again"
                )
            caches[name] = np.zeros(shape, NUMPY_TYPES[inputs[name].type])
        return caches

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> _Pass:
        """Run one pass; see `Engine.forward`."""
        batch = np.asarray(tokens, np.int64)
        width, scored = pass_size(self, batch, rows)
        starts = self._start
        starts[:] = start
        if self.batch == 1:
            first = last = int(starts[0])
        else:
            first, last = int(starts.min()), int(starts.max())
        check_bounds(self, width, first, last)
        key = (width, scored, self.pad_to_even)
        bound = self._passes.get(key) or self._bind(*key)
        bound.tokens[:, :width] = batch
        run_bound(self._session, bound.binding, width)
        return bound

    def _bind(self, width: int, rows: int, pad_to_even: bool) -> _Pass:
        """Bind inputs, outputs and caches for one width; done once, then reused."""
        if self._session is None:
            raise EngineError(CLOSED)
        binding = self._session.io_binding()
        batch, vocab = self.batch, self.geometry.vocab_size
        last = [*range(width - rows, width)]
        scored = np.array(last + [0] * (pad_to_even and rows % 2), np.int64)
        pads = width % 2 if pad_to_even else self.pad_single_token and width == 1
        tokens = np.zeros((batch, width + pads), np.int64)
        outputs: dict[str, NDArray[Any]] = {
            "argmax": np.zeros((batch, len(scored)), np.int64),
            "logits": np.zeros((batch, len(scored), vocab), np.float32),
        }
        if self._is_confident:
            outputs["confidence"] = np.zeros((batch, len(scored)), np.float32)
        bind_input(binding, "input_ids", tokens)
        bind_input(binding, "start", self._start)
        bind_input(binding, "rows", scored)
        for name, array in outputs.items():
            bind_output(binding, name, array)
        for name, cache in self._caches.items():
            bind_input(binding, name, cache)
            bind_output(binding, f"present_{name}", cache)
        bound = _Pass(binding, tokens, scored, **{name: a[:, :rows] for name, a in outputs.items()})
        self._passes[width, rows, pad_to_even] = bound
        return bound

    def close(self) -> None:
        """Drop the session, the bindings and the KV buffers."""
        self._passes.clear()
        self._caches.clear()
        self._session = None
        self._weights = ()


def silent_options() -> Any:
    """Return options of a session that writes no log lines: what fails is in its exception."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # fatal
    if KERNELS.is_file():
        options.register_custom_ops_library(str(KERNELS))
    return options


def open_session(
    path: Path, files: Mapping[str, HeldFile] | None, threads: int, upcast_weights: bool
) -> tuple[Any, tuple[Any, ...]]:
    """Open a saved graph; return its session, and the weights that must live as long.

    Weights are used where `files` have them mapped; those that are widened are copied, from files
    that the library opens by their names. `files` are those beside the graph; all when None.
    Raises: EngineError when the library refuses it, or a file is not among them; BundleError when
        a name has come to mean another file.
    """
    options = silent_options()
    files = hold_folder(path.parent) if files is None else files
    levels = ort.GraphOptimizationLevel  # the graph was optimised when it was compiled
    options.graph_optimization_level = (
        levels.ORT_ENABLE_BASIC if upcast_weights else levels.ORT_DISABLE_ALL
    )
    if shared_pool:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = _own_threads(files, threads)
        options.inter_op_num_threads = 1
    read = files_of(path, files)
    # Folding reads the weights of the graph, not those that are shared with it.
    weights = [] if upcast_weights else mapped_weights(path, files)
    values = tuple(
        [ort.OrtValue.ortvalue_from_numpy_with_onnx_type(w.array, w.type) for w in weights]
    )
    for weight, value in zip(weights, values, strict=True):
        options.add_initializer(weight.name, value)
    graph = str(path) if upcast_weights else bytes(files[path.name].data)
    try:
        with _empty_files(path, read) as folder:
            if not upcast_weights:
                options.add_session_config_entry(_FOLDER, str(folder))
            session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the library raises its own pybind types
        reason = first_line(error)
        remedy = shortage(error) or "build the bundle again with the version installed here"
        raise EngineError(
            f"ONNX Runtime {ort.__version__} cannot open {path}: {reason}; {remedy}"
        ) from error
    for name in (path.name, *read):
        if upcast_weights:
            files[name].require_same()
        files[name].release()
    return session, values


@contextmanager
def _empty_files(path: Path, names: Iterable[str]) -> Iterator[Path]:
    """Give a folder of files with nothing in them, or that of the graph where none can be made.

    The library wants the files of weights to exist, though it is handed what is in them. So it
    fails where it reads them after all.
    """
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()
        except OSError:
            folder = path.parent
        yield folder


def share_pool(threads: int) -> None:
    """Create the one thread pool that every session of this process runs on.

    Two pools of spinning threads on the same cores make a target three times slower, so without
    a shared pool the draft has one thread. With it, target and draft use all of them in turn.
    Only the owner of a process may call this: afterwards ONNX Runtime refuses every session of
    the process that has threads of its own.
    """
    if not shared_pool:
        with suppress(Exception):  # the application has one already: then that is the pool
            ort.set_global_thread_pool_sizes(threads, 1)
        shared_pool.append(threads)


shared_pool: list[int] = []
"""The threads of the shared pool, once there is one: the library has no way to ask."""

_SMALL_BYTES = 64 << 20

_FOLDER = "session.model_external_initializers_file_folder_path"


def _own_threads(files: Mapping[str, HeldFile], threads: int) -> int:
    """Return the threads of a session's own pool: one for an engine as small as a draft."""
    size = sum(len(file.data) for file in files.values())
    return 1 if size < _SMALL_BYTES else threads


def run_bound(session: Any, binding: Any, width: int) -> None:
    """Run one pass over bound memory.

    Raises: EngineError with the library's reason.
    """
    try:
        session.run_with_iobinding(binding)
    except Exception as error:  # the library raises its own pybind types
        reason = "; ".join(filter(None, (first_line(error), shortage(error))))
        raise EngineError(f"ONNX Runtime failed in a pass of width {width}: {reason}") from error


def memory_binding(name: str, array: NDArray[Any]) -> MemoryBinding:
    """Describe an array, which must outlive what is bound to it, to the library."""
    return name, "cpu", 0, array.dtype, array.shape, array.ctypes.data


def bind_input(binding: Any, name: str, array: NDArray[Any]) -> None:
    """Let a pass read an input from an array."""
    binding.bind_input(*memory_binding(name, array))


def bind_output(binding: Any, name: str, array: NDArray[Any]) -> None:
    """Let a pass write an output into an array."""
    binding.bind_output(*memory_binding(name, array))
