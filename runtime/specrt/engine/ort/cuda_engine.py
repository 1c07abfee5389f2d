"""ONNX Runtime on an NVIDIA GPU: KV stays there, one copy in and one out for each pass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnxruntime as ort
from numpy.typing import ArrayLike, NDArray

from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.onnx_file import files_of
from specrt.engine.ort.ort_engine import shared_pool, silent_options
from specrt.engine.protocol import (
    CLOSED,
    Candidates,
    Confidence,
    CudaGraphs,
    EngineTraits,
    Logits,
    Tokens,
    check_bounds,
    pass_size,
)
from specrt.errors import EngineError, first_line
from specrt.held_file import HeldFile
from specrt.system.gpu import find_devices

PROVIDER = "CUDAExecutionProvider"

INSTALL = "`pip uninstall onnxruntime`, then `pip install 'onnxruntime-gpu[cuda,cudnn]'`"
"""Both packages are the one module `onnxruntime`, and the one installed last wins."""


def open_session(
    path: Path, files: Mapping[str, HeldFile], device: str, device_id: int, captures: bool
) -> Any:
    """Open a saved graph on a device.

    The library opens the files by their names, to copy weights to the device.
    Raises: EngineError when there is no such device, a library is missing, or the graph is
        refused; BundleError when a file is not the one in `files` any more.
    """
    read = {path.name, *files_of(path, files)}
    if device == "cuda":
        _check_device(path, device_id)
    try:
        with without_warnings():
            session = ort.InferenceSession(
                str(path),
                _options(device),
                providers=[_provider(device, device_id, captures)],
                enable_fallback=0,
            )
    except Exception as error:  # the library raises its own pybind types
        if device == "cuda" and (absent := unloadable()):
            raise EngineError(_not_started(path, absent)) from error
        reason = first_line(error)
        raise EngineError(
            f"ONNX Runtime {ort.__version__} cannot open {path} on {device}: {reason}; ask "
            "`specrt doctor` what is missing, or build the bundle again with this version"
        ) from error
    if device == "cuda" and PROVIDER not in session.get_providers():
        raise EngineError(_not_started(path, unloadable() or "it gives no reason"))
    for name in read:
        files[name].require_same()
    return session


_WARNING, _ERROR = 2, 3
"""Levels of ONNX Runtime's log; it begins with the first."""


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keep ONNX Runtime from warning that CUDA is not a plugin, which it looks for first.

    It does so in the log of the process, whatever a session's options say.
    """
    ort.set_default_logger_severity(_ERROR)
    try:
        yield
    finally:
        ort.set_default_logger_severity(_WARNING)


def _not_started(path: Path, reason: str) -> str:
    return (
        f"{path} needs the CUDA provider of ONNX Runtime {ort.__version__}, which does not start: "
        f"{reason}; {INSTALL}"
    )


def missing(device_id: int = 0) -> str:
    """Return what this machine lacks to run on a GPU; empty where nothing is known."""
    devices = find_devices()
    if devices.problem:
        return f"{devices.problem}; install the driver, or build for ort-cpu"
    if PROVIDER not in ort.get_available_providers():
        return f"onnxruntime {ort.__version__} has no CUDA provider; {INSTALL}"
    if device_id >= len(devices.names):
        return f"device {device_id} was asked for, and there are {len(devices.names)}"
    return ""


_PROBE = """
import contextlib, ctypes, io, pathlib, onnxruntime
with contextlib.redirect_stdout(io.StringIO()):
    getattr(onnxruntime, "preload_dlls", int)()
folder = pathlib.Path(onnxruntime.__file__).parent / "capi"
ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
"""

_PROBE_PATIENCE_S = 60.0


def unloadable() -> str:
    """Return which library the CUDA provider does not find, or how it fails; empty where it loads.

    In a process of its own: ONNX Runtime itself must be the first to load its provider.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, timeout=_PROBE_PATIENCE_S,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not done.returncode:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    silent = f"the probe ended with status {done.returncode}"
    return lines[-1].removeprefix("OSError: ") if lines else silent


def _check_device(path: Path, device_id: int) -> None:
    lacks = missing(device_id)
    if lacks:
        raise EngineError(f"{path} runs on an NVIDIA GPU only: {lacks}")
    if hasattr(ort, "preload_dlls"):
        with redirect_stdout(StringIO()):  # it prints each place where it finds nothing
            ort.preload_dlls()


def _options(device: str) -> Any:
    options = silent_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.use_per_session_threads = not shared_pool  # next to a shared pool others are refused
    if device == "cuda":
        options.intra_op_num_threads = 1
        # A node without a CUDA kernel would be slow, and cannot be captured: better an error.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    else:
        # Only checks run here, next to other work: waiting threads must not take its cores.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _provider(device: str, device_id: int, captures: bool) -> Any:
    if device != "cuda":
        return "CPUExecutionProvider"
    return PROVIDER, {"device_id": str(device_id), "enable_cuda_graph": str(int(captures))}


CAPTURED = "specrt.captured"
"""Metadata of an engine: the widest pass that is run as a CUDA graph; none where it is missing."""

_BF16 = 16

_KV_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(bfloat16)": _BF16,  # NumPy has none; this is its number in ONNX
}

_ALIGNMENT = 256

_NO_CAPTURE = -1

_GRAPH_FEATURE = "graph capture"
"""What ONNX Runtime says where it opens no session that captures: `cannot use the graph capture
feature as requested`."""


@dataclass(frozen=True)
class _Feed:
    """The inputs that change with every pass: host and device memory of one layout.

    They lie in one buffer, so that a pass copies once.
    """

    host: NDArray[np.uint8]
    device: Any
    tokens: Tokens
    start: Tokens
    lengths: NDArray[np.int32]
    offsets: Mapping[str, int]

    def send(self) -> None:
        """Copy to the device, to where the bound inputs are."""
        self.device.update_inplace(self.host)


@dataclass
class _Pass:
    """The bound memory of one (width, rows) pair, and what has been read of its outputs."""

    binding: Any
    options: Any
    feed: _Feed
    values: Mapping[str, Any]
    """Outputs by name, on the device."""
    constants: tuple[Any, ...]
    """Inputs that nothing else refers to."""
    captured: bool
    """Whether the first run captures the pass, and later ones replay it."""
    has_run: bool = False
    refusal: str = ""
    """Why it is not captured, where it was to be."""
    _read: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def argmax(self) -> Tokens:
        """The most likely next tokens, [B, R] int64."""
        return self._host("argmax")

    @property
    def logits(self) -> Logits:
        """The scores, [B, R, V] f32; copied from the device only here."""
        return self._host("logits")

    @property
    def confidence(self) -> Confidence | None:
        """Probability of each row's likeliest token, where the engine computes it."""
        return self._host("confidence") if "confidence" in self.values else None

    @property
    def candidates(self) -> Candidates | None:
        """None: these graphs compute none."""
        return None

    def _host(self, name: str) -> NDArray[Any]:
        if name not in self._read:
            self._read[name] = self.values[name].numpy()
        return self._read[name]

    def forget(self) -> None:
        """Drop what was read: a pass is about to overwrite the outputs."""
        self._read.clear()


class OrtCudaEngine:
    """A saved half-precision graph with its KV buffers on a GPU.

    Passes up to the width that the engine names are captured as CUDA graphs, one for each
    (width, rows) pair, on their first run; wider ones, which prefill uses, are launched kernel by
    kernel, and so is a pass whose capture fails. `device="cpu"` runs the same engine and bindings
    on the CPU provider, slowly, which captures nothing but is told what to.
    Shapes: a KV buffer is [batch, heads, max_length, width], bound as input and output.
    Threads: forward passes of one engine must not overlap.
    """

    def __init__(
        self, spec: EngineSpec, device: str = "cuda", device_id: int = 0, *, capture: bool = True
    ) -> None:
        self.geometry = spec.geometry
        self.batch = spec.batch
        self.max_length = spec.max_length
        self.max_width = self.max_rows = spec.max_width
        self.traits = EngineTraits()
        self._device = (device, device_id)
        self._refusal = ""
        """Why no pass is captured at all."""
        self._session = self._open(spec, capture)
        self._most = _captured_width(self._session) if capture else 0
        self._captured = 0 if self._refusal else self._most
        self._inputs = {i.name: i for i in self._session.get_inputs()}
        self._outputs = {o.name for o in self._session.get_outputs()}
        self._start = np.zeros(self.batch, np.int64)
        self._caches = self._allocate()
        self._passes: dict[tuple[int, int], _Pass] = {}

    def _open(self, spec: EngineSpec, capture: bool) -> Any:
        """Open the session; one that ONNX Runtime refuses to capture is opened without."""
        try:
            return open_session(spec.path, spec.files, *self._device, capture)
        except EngineError as error:
            if not capture or _GRAPH_FEATURE not in str(error):
                raise
            self._refusal = str(error)
            return open_session(spec.path, spec.files, *self._device, False)

    @property
    def cuda_graphs(self) -> CudaGraphs | None:
        """The passes that were captured, and why others are not; None where none is to be.

        ONNX Runtime does not say what it captured: it fails where it could not.
        """
        if not self._most:
            return None
        refusals = [
            f"passes of width {width} with {rows} scored rows run kernel by kernel: {bound.refusal}"
            for (width, rows), bound in self._passes.items()
            if bound.refusal
        ]
        if self._refusal:
            refusals.insert(0, f"all passes run kernel by kernel: {self._refusal}")
        captured = sum(bound.captured and bound.has_run for bound in self._passes.values())
        return CudaGraphs(captured, tuple(refusals))

    def captures(self, width: int, rows: int) -> bool:
        """Tell whether passes of one size are to be captured on their first run."""
        return rows <= width <= self._most

    def _allocate(self) -> dict[str, Any]:
        """Allocate the KV buffers, cleared: attention may read what it then multiplies by 0."""
        caches = {}
        for name, one in self.geometry.buffers.items():
            shape = self.batch, one.heads, self.max_length, one.width
            actual = tuple(self._inputs[name].shape) if name in self._inputs else None
            if actual != shape:
                raise EngineError(
                    f"the engine's {name} has shape {actual and list(actual)}, and the manifest "
                    f"says {list(shape)}; they do not belong together: build the bundle again"
                )
            kind = _KV_TYPES[self._inputs[name].type]
            caches[name] = self._value(shape, kind)
            caches[name].update_inplace(_zeros(shape, kind))
        return caches

    def _value(self, shape: tuple[int, ...], kind: Any) -> Any:
        return ort.OrtValue.ortvalue_from_shape_and_type(shape, kind, *self._device)

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> _Pass:
        """Run one pass; see `Engine.forward`."""
        batch = np.asarray(tokens, np.int64)
        width, scored = pass_size(self, batch, rows)
        starts = self._start
        starts[:] = start
        check_bounds(self, width, int(starts.min()), int(starts.max()))
        bound = self._passes.get((width, scored)) or self._bind(width, scored)
        feed = bound.feed
        feed.tokens[:] = batch
        feed.start[:] = starts
        feed.lengths[:] = starts + (width - 1)
        bound.forget()
        try:
            self._run(bound)
        except Exception as error:  # the library raises its own pybind types
            reason = first_line(error)
            raise EngineError(
                f"ONNX Runtime failed in a pass of width {width} on {self._device[0]}: {reason}"
            ) from error
        return bound

    def _run(self, bound: _Pass) -> None:
        """Run a pass; where its first run cannot be captured, run it kernel by kernel.

        What a failed capture may have written are the same keys and values that are written again.
        """
        bound.feed.send()
        try:
            self._session.run_with_iobinding(bound.binding, bound.options)
        except Exception as error:
            if bound.has_run or not bound.captured:
                raise
            self._session.run_with_iobinding(bound.binding, _run_options(_NO_CAPTURE))
            bound.captured, bound.options = False, _run_options(_NO_CAPTURE)
            bound.refusal = first_line(error)
        bound.has_run = True

    def _bind(self, width: int, rows: int) -> _Pass:
        """Bind inputs, outputs and caches for one width; done once, then reused."""
        if self._session is None:
            raise EngineError(CLOSED)
        binding, feed = self._session.io_binding(), self._feed(width)
        shapes = {
            "input_ids": (self.batch, width),
            "start": (self.batch,),
            "lengths": (self.batch,),
        }
        for name in shapes.keys() & self._inputs.keys():
            kind = np.int32 if name == "lengths" else np.int64
            place = feed.device.data_ptr() + feed.offsets[name]
            binding.bind_input(name, *self._device, kind, shapes[name], place)
        fixed = {"rows": np.arange(width - rows, width), "steps": np.arange(width)}
        constants = {n: self._sent(v) for n, v in fixed.items() if n in self._inputs}
        values = self._output_values(rows)
        for name, value in {**constants, **self._caches}.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in values.items():
            binding.bind_ortvalue_output(name, value)
        for name, cache in self._caches.items():
            binding.bind_ortvalue_output(f"present_{name}", cache)
        captured = width <= self._captured
        graph = len(self._passes) + 1 if captured else _NO_CAPTURE
        options = _run_options(graph) if self._captured else None
        bound = _Pass(binding, options, feed, values, tuple(constants.values()), captured)
        self._passes[width, rows] = bound
        return bound

    def _feed(self, width: int) -> _Feed:
        items = {
            "input_ids": 8 * self.batch * width,
            "start": 8 * self.batch,
            "lengths": 4 * self.batch,
        }
        offsets, end = {}, 0
        for name, size in items.items():
            offsets[name] = end
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        host = np.zeros(end, np.uint8)
        parts = {name: host[at : at + items[name]] for name, at in offsets.items()}
        return _Feed(
            host=host,
            device=self._value((end,), np.uint8),
            tokens=parts["input_ids"].view(np.int64).reshape(self.batch, width),
            start=parts["start"].view(np.int64),
            lengths=parts["lengths"].view(np.int32),
            offsets=offsets,
        )

    def _sent(self, array: NDArray[np.int64]) -> Any:
        value = self._value(array.shape, np.int64)
        value.update_inplace(array)
        return value

    def _output_values(self, rows: int) -> dict[str, Any]:
        shape, vocab = (self.batch, rows), self.geometry.vocab_size
        values = {
            "argmax": self._value(shape, np.int64),
            "logits": self._value((*shape, vocab), np.float32),
        }
        if "confidence" in self._outputs:
            values["confidence"] = self._value(shape, np.float32)
        return values

    def close(self) -> None:
        """Drop the bindings, the KV buffers and the session."""
        self._passes.clear()
        self._caches.clear()
        self._session = None


def _run_options(graph: int) -> Any:
    """Name the CUDA graph of a pass."""
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options


def _zeros(shape: tuple[int, ...], kind: Any) -> Any:
    if kind != _BF16:
        return np.zeros(shape, kind)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(shape, np.uint16), kind)


def _captured_width(session: Any) -> int:
    width = cast("dict[str, str]", session.get_modelmeta().custom_metadata_map).get(CAPTURED, "0")
    return int(width) if width.isdecimal() else 0
