"""A machine with a GPU in host memory: CUDA, TensorRT and plans in NumPy.

CUDA answers like `cuda.bindings.runtime`, and is strict where that is silent: memory that is not
there or was given back, and calls that no capture allows, fail here with an AssertionError. Work
that was put on the stream is done when somebody waits, and not before. What TensorRT would forgive
or punish in silence fails alike: addresses that are missing or not aligned, work enqueued without
shapes, a context captured before it was run. A plan looks scores up in a table, or is the graph
that TensorRT was handed, run by ONNX Runtime; all above it is the runtime's own.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from functools import partial
from math import prod
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

import specrt
from specrt.bundle import FORMAT, Bundle, Manifest, ModelRecord, hash_file
from specrt.engine.backends import BACKENDS
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.kernels import LAYOUT
from specrt.engine.ort.ort_engine import silent_options
from specrt.engine.protocol import Drafted
from specrt.engine.tensorrt import engine as opening
from specrt.engine.tensorrt import engine_record, library
from specrt.engine.tensorrt.device import ALIGNMENT, CudaDevice
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.engine_record import (
    FILE_NAME,
    HIDDEN,
    KV_LENGTH,
    PLAN,
    EngineRecord,
    Profile,
    read_engine_record,
)
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.engine.tensorrt.library import FLAVOURS, NATIVE, Library, describe
from specrt.engine.tensorrt.passes import CANDIDATES, KV_TYPES, expected
from specrt.engine.tensorrt.plan import TYPES, TrtPlan
from specrt.generator import Generator
from specrt.geometry import Geometry
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.speculation.drafters import ModelDrafter
from specrt.speculation.gamma import GammaPolicy
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import Drafter, Round, run_rounds, speculate
from specrt.speculation.target import EngineTarget
from specrt.system.gpu import Gpu, Survey
from specrt_export.compile.network import profiles
from specrt_export.compile.tensorrt_compiler import TensorRtCompiler
from support.toy import TableEngine, byte_level, near

MACHINE = Survey((Gpu(0, "A GPU", "8.9", 8 << 30), Gpu(1, "B GPU", "8.9", 8 << 30)), "", (13, 0))
POISON, ALWAYS = 0xA5, 0
Work = Callable[[], object]


Code = IntEnum(
    "Code",
    {
        "cudaSuccess": 0, "cudaErrorInvalidValue": 1, "cudaErrorMemoryAllocation": 2,
        "cudaErrorInsufficientDriver": 35, "cudaErrorIllegalAddress": 700,
    },
)  # fmt: skip
LOST = Code.cudaErrorIllegalAddress


class CudaDouble:
    """One runtime with `size` bytes of device memory, whose calls can be told to fail."""

    cudaError_t = Code  # noqa: N815
    cudaMemcpyKind = SimpleNamespace(  # noqa: N815
        cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDefault=4
    )
    cudaDeviceAttr = SimpleNamespace(  # noqa: N815
        cudaDevAttrIntegrated="integrated", cudaDevAttrCanMapHostMemory="maps"
    )
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)  # noqa: N815
    cudaHostAllocDefault, cudaHostAllocMapped = 0, 2  # noqa: N815
    cudaStreamNonBlocking = 1  # noqa: N815

    def __init__(self, size: int = 1 << 22, *, integrated: bool = False, maps: bool = True) -> None:
        self.size = size
        self.attributes = {"integrated": int(integrated), "maps": int(maps)}
        self.calls: Counter[str] = Counter()
        self.fails: dict[str, int] = {}
        self.code = Code.cudaErrorInvalidValue
        self.lost = False
        self.memory: dict[int, NDArray[np.uint8]] = {}
        self.host: dict[int, NDArray[np.uint8]] = {}
        self.graphs: dict[int, list[Work]] = {}
        self.streams = 0
        self.capturing: list[Work] | None = None
        self.waited: Work = lambda: None
        """Called whenever the host has waited."""
        self._queue: list[Work] = []
        self._taken: list[tuple[int, int, Any]] = []
        """Addresses, sizes and memory, never let go, so that no address comes twice."""

    def fail(self, name: str, after: int = 1, code: Code = Code.cudaErrorInvalidValue) -> None:
        """Let one call fail, the next when `after` is 1; every one when it is `ALWAYS`."""
        self.fails = {name: self.calls[name] + after if after else ALWAYS}
        self.code = code

    def enter(self, name: str) -> Code:
        """Count a call and return what it answers; a device that is lost stays so."""
        self.calls[name] += 1
        if self.lost:
            return LOST
        if self.fails.get(name) not in (ALWAYS, self.calls[name]):
            return Code.cudaSuccess
        if self.code == LOST:
            self.lost = True
            self._queue.clear()
        return self.code

    def __getattr__(self, name: str) -> Any:
        method = getattr(type(self), "_" + name[4:].lower(), None)
        if not name.startswith("cuda") or method is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            code = self.enter(name)
            if code and not any(part in name for part in ("cudaGet", "Free", "Destroy")):
                if name == "cudaStreamEndCapture":
                    self.capturing = None
                return (code,)
            answer = method(self, *arguments)
            return (answer,) if isinstance(answer, Code) else (Code.cudaSuccess, *answer)

        return call

    def put(self, work: Work) -> tuple[()]:
        """Put work on the stream, or into what is being captured."""
        (self._queue if self.capturing is None else self.capturing).append(work)
        return ()

    def at(self, address: int, size: int) -> NDArray[np.uint8]:
        """Return bytes of one live block."""
        block = self._block(address, size)
        assert block is not None, f"bytes {address} to {address + size} belong to no block"
        return block

    def _block(self, address: int, size: int) -> NDArray[np.uint8] | None:
        """Return bytes of a live block; None for memory that was never this runtime's."""
        number = bisect_right(self._taken, address, key=itemgetter(0))
        first, size_there, _ = self._taken[number - 1] if number else (0, 0, None)
        if address >= first + size_there:
            return None
        block = self.memory.get(first, self.host.get(first))
        assert block is not None, "used after it was given back"
        assert address + size <= first + len(block), "used beyond its end"
        return block[address - first : address - first + size]

    def _take(self, size: int, where: dict[int, NDArray[np.uint8]]) -> tuple[int]:
        assert self.capturing is None, "memory was taken during a capture"
        assert size > 0
        raw = np.full(size + ALIGNMENT, POISON, np.uint8)
        first = -raw.ctypes.data % ALIGNMENT
        address = int(raw.ctypes.data) + first
        where[address] = raw[first : first + size]
        insort(self._taken, (address, size, raw), key=itemgetter(0))
        return (address,)

    def _done(self, *_: Any) -> tuple[()]:
        return ()

    _setdevice = _getlasterror = _done

    def _devicegetattribute(self, which: str, _: int) -> tuple[int]:
        return (self.attributes[which],)

    def _streamcreatewithflags(self, _: int) -> tuple[int]:
        self.streams += 1
        return (77,)

    def _streamdestroy(self, _: int) -> tuple[()]:
        assert not self._queue, "a stream was given back before its work was done"
        self.streams -= 1
        return ()

    def _streamsynchronize(self, _: int) -> tuple[()]:
        assert self.capturing is None, "waited during a capture"
        queue, self._queue = self._queue, []
        for work in queue:
            work()
        self.waited()
        return ()

    def _memgetinfo(self) -> tuple[int, int]:
        return self.size - sum(map(len, self.memory.values())), self.size

    def _malloc(self, size: int) -> tuple[int] | Code:
        if size > self._memgetinfo()[0]:
            return Code.cudaErrorMemoryAllocation
        return self._take(size, self.memory)

    def _hostalloc(self, size: int, _: int) -> tuple[int]:
        return self._take(size, self.host)

    def _hostgetdevicepointer(self, pointer: int, _: int) -> tuple[int]:
        return (pointer,)

    def _free(self, pointer: int) -> tuple[()]:
        assert not self._queue, "memory was given back before the work on it was done"
        self.memory.pop(pointer)[:] = POISON
        return ()

    def _freehost(self, pointer: int) -> tuple[()]:
        self.host.pop(pointer)[:] = POISON
        return ()

    def _memsetasync(self, to: int, value: int, size: int, _: int) -> tuple[()]:
        self.at(to, size)[:] = value  # at once: nothing on the stream knows of new memory
        return ()

    def _memcpyasync(self, to: int, source: int, size: int, kind: int, _: int) -> tuple[()]:
        assert kind in vars(self.cudaMemcpyKind).values()

        def copy() -> None:
            known = self._block(to, size)
            if known is None:  # an array of the caller's
                ctypes.memmove(to, self.at(source, size).ctypes.data, size)
            else:
                known[:] = self.at(source, size)

        return self.put(copy)

    def _streambegincapture(self, _: int, mode: int) -> tuple[()]:
        assert mode == 1
        assert not self._queue, "captured before earlier work was done"
        self.capturing = []
        return ()

    def _streamendcapture(self, _: int) -> tuple[Any]:
        work, self.capturing = self.capturing or [], None
        self.graphs[id(work)] = work
        return (work,)

    def _graphinstantiate(self, template: list[Work], _: int) -> tuple[Any]:
        handle = list(template)
        self.graphs[id(handle)] = handle
        return (handle,)

    def _graphlaunch(self, handle: list[Work], _: int) -> tuple[()]:
        assert id(handle) in self.graphs, "launched a graph that was given back"
        for work in handle:
            self.put(work)
        return ()

    def _graphdestroy(self, template: Any) -> tuple[()]:
        del self.graphs[id(template)]
        return ()

    _graphexecdestroy = _graphdestroy

    def _geterrorname(self, code: Code) -> tuple[bytes]:
        return (code.name.encode(),)

    _geterrorstring = _geterrorname


class DoubleDevice(CudaDevice):
    """A device over a double, which knows what is not given back."""

    def __init__(
        self, size: int = 1 << 22, *, cuda: CudaDouble | None = None, **options: Any
    ) -> None:
        self.cuda = cuda or CudaDouble(size, **options)
        self.calls, self.closed = self.cuda.calls, 0
        self.leaked: list[str] = []
        """What nobody had given back when the device was closed."""
        self._taken: dict[int, str] = {}
        super().__init__(runtime=self.cuda, devices=MACHINE)

    def allocate(self, size: int, purpose: str) -> int:
        address = super().allocate(size, purpose)
        if purpose != "a buffer for the host":  # which goes with the device
            self._taken[address] = purpose
        return address

    @property
    def live(self) -> list[str]:
        """What was taken and not given back."""
        memory = [self._taken[a] for a in self._memory & self._taken.keys()]
        return memory + ["graph"] * len(self._graphs)

    def close(self) -> None:
        self.leaked += [] if self.closed else self.live
        self.closed += 1
        super().close()


# TensorRT


GAMMAS = (1, 2, 3, 4, 8)
PREFILL = 16
VERSIONS = {"tensorrt": "10.15.1.29", "tensorrt-rtx": "1.7.1.116"}
NAMES = {name: theirs for theirs, name in TYPES.items()}
BARE = ("ILogger", "IBuilderConfig", "IExecutionContext", "ICudaEngine")
Log = Callable[[int, str], None]


class ContextDouble:
    """One way to run a plan, in one profile."""

    def __init__(self, engine: EngineDouble) -> None:
        self._engine, self._profile = engine, -1
        self._scratch = (0, 0)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self._warm = False

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._profile = profile
        return self._engine.answer("set_optimization_profile_async")

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size >= self._engine.device_memory_size_v2, "less than the library asks for"
        self._engine.cuda.at(memory, size)
        self._scratch = memory, size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        fixed = self._engine.get_tensor_shape(name)
        assert self._engine.tensors[name].is_input
        assert all(t in (-1, s) for t, s in zip(fixed, shape, strict=True))
        self._warm = self._warm and self.shapes.get(name) == shape
        self.shapes[name] = shape
        return self._engine.answer("set_input_shape")

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert name in self._engine.tensors, name
        assert address % ALIGNMENT == 0, f"{name} is bound to {address}, which is not aligned"
        self.addresses[name] = address
        return self._engine.answer("set_tensor_address")

    def is_stream_capturable(self, stream: int) -> bool:
        return self._engine.capturable

    def execute_async_v3(self, stream: int) -> bool:
        engine = self._engine
        assert self._warm or engine.cuda.capturing is None, "captured before it was run"
        if not engine.answer("execute_async_v3"):
            return False
        assert self.addresses.keys() == engine.tensors.keys(), "not every tensor has an address"
        width, rows, length = engine.sizes(self.shapes)
        assert engine.record.profiles[self._profile].takes(width, rows, length), self.shapes
        self._warm = True
        addresses = dict(self.addresses)
        engine.cuda.put(lambda: self._run(addresses, width, rows, length))
        return True

    def _run(self, addresses: Mapping[str, int], width: int, rows: int, length: int) -> None:
        scratch = self._engine.cuda.at(*self._scratch) if self._scratch[1] else np.zeros(0)
        scratch[:] = POISON
        self._engine.read.append(length)
        self._engine.run(addresses, width, rows)
        scratch[:] = POISON


class EngineDouble:
    """A plan that looks its logits up in a table by the tokens that its KV buffers hold.

    Every number of a key is the token plus 1, of a value its opposite; all must agree. Positions
    in `broken_at` have scores that are not numbers.
    """

    def __init__(
        self, cuda: CudaDouble, log: Log, record: EngineRecord, toy: Any,
        geometry: Geometry | None = None,
    ) -> None:  # fmt: skip
        self.cuda, self.log, self.record, self.toy = cuda, log, record, toy
        self.geometry = geometry or geometry_of(toy)
        self.batch, self.max_length = toy.batch, toy.max_length
        self.tensors = expected(record, self.geometry, self.batch, self.max_length)
        self.num_io_tensors = len(self.tensors)
        self.profiles = record.profiles
        self.broken_at: Collection[int] = ()
        self.read: list[int] = []
        """The KV length of each pass; 0 for all."""
        self.capturable = True
        self.weight_streaming_budget_v2 = -1

    def sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int, int]:
        """Return the width, the rows and the KV length of a pass that was told its shapes."""
        if self.record.part:  # which reads a source: the positions it was told, or all
            assert self.record.source is not None
            width = shapes.get("input_ids", (1, self.record.source.positions))[1]
            return width, width, 0
        width, rows = shapes["input_ids"][1], shapes["rows"][0]
        length = shapes.get(KV_LENGTH, (0,))[0]
        assert bool(length) is (KV_LENGTH in self.tensors)
        beside = (self.batch, width, self.record.hidden) if self.record.hidden else None
        assert shapes.get(HIDDEN) == beside
        return width, rows, length

    def answer(self, name: str) -> bool:
        """Count a call of the library with those of CUDA; where it fails, log why."""
        if not self.cuda.enter(name):
            return True
        lost = "Cuda Runtime (an illegal memory access was encountered)"
        self.log(1, lost if self.cuda.lost else f"Error Code 1: {name} is refused\nand more")
        return False

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=NAMES[self.tensors[name].type])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def get_tensor_mode(self, name: str) -> str:
        return "in" if self.tensors[name].is_input else "out"

    def get_tensor_location(self, name: str) -> str:
        return "DEVICE"

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        """Return the shapes that the plan itself was built for, whatever its record says."""
        sized = self.profiles[profile]
        ranges = {
            "input_ids": sized.width, HIDDEN: sized.width, "rows": sized.rows,
            KV_LENGTH: sized.kv_length,
        }  # fmt: skip
        sizes = ranges.get(name)
        if sizes is None:
            return [self.tensors[name].shape] * 3
        head = (self.batch,) if name in ("input_ids", HIDDEN) else ()
        tail = (self.record.hidden,) if name == HIDDEN else ()
        return [(*head, size, *tail) for size in (sizes.least, sizes.best, sizes.most)]

    @property
    def device_memory_size_v2(self) -> int:
        """Return what suits every profile, which is more than any of them needs."""
        return 500 * len(self.profiles) + 100

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        """Return something else for every profile."""
        return 500 * (profile + 1)

    def get_aliased_input_tensor(self, output: str) -> str | None:
        native = self.record.form == NATIVE and output.startswith("present_")
        return output.removeprefix("present_") if native else None

    def get_weight_streaming_automatic_budget(self) -> int:
        return 1 << 20

    def create_runtime_config(self) -> Any:
        return ConfigDouble()

    def create_execution_context(self, how: Any) -> ContextDouble | None:
        assert self.cuda.capturing is None, "a context was made during a capture"
        self.how = how
        return ContextDouble(self) if self.answer("create_execution_context") else None

    def run(self, addresses: Mapping[str, int], width: int, rows: int) -> None:
        """Do one pass on the bytes at the addresses."""
        fed = self.array(addresses["input_ids"], np.int64, (self.batch, width)).copy()
        start = self.array(addresses["start"], np.int64, (self.batch,)).copy()
        wanted = self.array(addresses["rows"], np.int64, (rows,)).copy()
        vocab = self.geometry.vocab_size
        assert set(wanted.tolist()) <= set(range(width))
        assert set(fed.ravel().tolist()) <= set(range(-1, vocab))
        seen = self.update(addresses, fed % vocab, start)[:, : self.read[-1] or None]
        logits = self.array(addresses["logits"], np.float32, (self.batch, rows, vocab))
        for b in range(self.batch):
            for r, row in enumerate(wanted):
                until = int(start[b] + row) + 1
                assert until <= seen.shape[1], "a position of its own is not read"
                text = np.maximum(seen[b, :until], 0)  # memory that is only cleared may be read
                logits[b, r] = np.nan if until in self.broken_at else self.toy.row(text)
        self.tell(addresses, logits)

    def update(self, at: Mapping[str, int], fed: NDArray[Any], start: NDArray[Any]) -> NDArray[Any]:
        """Write the KV buffers; return the tokens that they hold, of which all must be sure."""
        held = []
        for name in self.geometry.buffers:
            source, to = self.cache(at[name]), self.cache(at[f"present_{name}"])
            if self.record.form == NATIVE:
                assert at[name] == at[f"present_{name}"], f"{name} is not updated in place"
            else:
                assert not np.shares_memory(source, to), f"{name} is read and written at once"
                to[:] = source
            sign = 1 if name.startswith("key") else -1
            for b, first in enumerate(start.tolist()):
                last = min(first + fed.shape[1], self.max_length)  # the rest is ignored, as by TRT
                to[b, :, first:last] = sign * (fed[b, : last - first, None] + 1)
            assert (to == to[:, :1, :, :1]).all(), f"{name} disagrees with itself"
            held.append(to[:, 0, :, 0].astype(np.int64) * sign - 1)
        assert all((h == held[0]).all() for h in held), "the layers disagree"
        return held[0]

    def tell(self, at: Mapping[str, int], logits: NDArray[np.float32]) -> None:
        """Write what follows from the logits."""
        shape = logits.shape[:2]
        broken = np.isnan(logits).any(-1)
        self.array(at["argmax"], np.int64, shape)[:] = np.where(broken, -1, logits.argmax(-1))
        if self.record.confidence:
            sums = np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
            self.array(at["confidence"], np.float32, shape)[:] = 1 / sums
        if count := self.record.candidates:
            ids = np.argsort(-logits, axis=-1, kind="stable")[..., :count]
            best = np.take_along_axis(logits, ids, -1)
            for name, kind, values in zip(
                CANDIDATES, (np.float32, np.int64), (best, ids), strict=True
            ):
                self.array(at[name], kind, (*shape, count))[:] = values

    def cache(self, address: int) -> Any:
        """Return a KV buffer, whose bytes are whole numbers here, whatever their type is."""
        g, halves = self.geometry, KV_TYPES[self.record.compute] != "float32"
        one = g.memories[0]
        shape = (self.batch, one.kv_heads, self.max_length, one.key_width)
        return self.array(address, np.int16 if halves else np.int32, shape)

    def array(self, address: int, kind: Any, shape: tuple[int, ...]) -> Any:
        """Return an array on the device."""
        size = prod(shape) * np.dtype(kind).itemsize
        return self.cuda.at(address, size).view(kind).reshape(shape)


class CacheDouble:
    """Kernels made at run time."""

    held = b""

    def deserialize(self, data: bytes) -> bool:
        self.held = data
        return True

    def serialize(self) -> bytes:
        return self.held


class ConfigDouble:
    """How a context of TensorRT for RTX is made."""

    dynamic_shapes_kernel_specialization_strategy = cuda_graph_strategy = ""
    cache: Any = None
    create_runtime_cache = CacheDouble

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy

    def set_runtime_cache(self, cache: CacheDouble) -> None:
        self.cache = cache


def module_double(
    backend: str = "tensorrt", version: str = "", cuda: CudaDouble | None = None, **names: Any
) -> Any:
    """Return a module like either library, with the plans that it can open; `names` are extra."""
    plans = dict[bytes, Callable[[Log], EngineDouble]]()

    class Runtime:
        engine_host_code_allowed = False

        def __init__(self, logger: Any) -> None:
            self._logger = logger

        def deserialize_cuda_engine(self, data: Any) -> Any:
            if cuda is not None and cuda.enter("deserialize_cuda_engine"):
                self._logger.log(1, module.says)
                return None
            module.host_code = self.engine_host_code_allowed
            return plans[bytes(data)](self._logger.log)

    module = SimpleNamespace(
        __version__=version or VERSIONS[backend], plans=plans, Runtime=Runtime,
        says="Error Code 1: something is wrong\nand more", flags=0,
        **{name: type(name, (), {}) for name in BARE},
        TensorLocation=SimpleNamespace(DEVICE="DEVICE"),
        TensorIOMode=SimpleNamespace(INPUT="in"),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="ours"),
        DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager", NONE="none"),
        CudaGraphStrategy=SimpleNamespace(DISABLED="off"),
        EngineInvalidityDiagnostics=IntEnum("Flags", ["VERSION_MISMATCH", "UNSUPPORTED_CC"]),
    )  # fmt: skip
    if backend == "tensorrt-rtx":
        validity = {"get_engine_validity": lambda runtime, data: (2, module.flags)}
        module.Runtime = type("Runtime", (Runtime,), validity)
        module.IExecutionContext, module.ICudaEngine = ContextDouble, EngineDouble
        module.IRuntimeConfig = ConfigDouble
    vars(module).update(names)
    return module


def library_double(backend: str = "tensorrt", version: str = "", **how: Any) -> Library:
    """Return the runtime's record of such a module."""
    return describe(FLAVOURS[backend], module_double(backend, version, **how))


def target_profiles(
    gammas: Collection[int], prefill: int, kv_lengths: Sequence[int] = ()
) -> tuple[Profile, ...]:
    return profiles("target", prefill, gammas, kv_lengths)


def draft_profiles(prefill: int, kv_lengths: Sequence[int] = ()) -> tuple[Profile, ...]:
    return profiles("draft", prefill, (), kv_lengths)


def geometry_of(toy: TableEngine) -> Geometry:
    """Return a geometry with several layers, heads and numbers in each."""
    return Geometry.uniform(2, 4, 2, 3, toy.geometry.vocab_size, toy.max_length, (0, 0))


def record_of(built: tuple[Profile, ...], **options: Any) -> EngineRecord:
    """Return the record of a plan."""
    said: dict[str, Any] = {"backend": "tensorrt", "version": "11.0", "form": NATIVE}
    return EngineRecord(1, **{**said, "compute": "fp16", **options}, profiles=built)


def opened(
    device: DoubleDevice, toy: TableEngine, built: tuple[Profile, ...] | None = None, *,
    capture: bool = True, broken_at: Collection[int] = (), record: EngineRecord | None = None,
    **options: Any,
) -> TensorRtEngine:  # fmt: skip
    """Return an engine that answers as a table does, or one told another record than its own.

    `options` are those of its own record.
    """
    own = record_of(built or target_profiles(GAMMAS, PREFILL), **options)
    library = library_double(own.backend, cuda=device.cuda)
    engine = EngineDouble(device.cuda, library.logger.log, own, toy)
    engine.broken_at = broken_at
    path = Path("nowhere", "engine.plan")
    plan = TrtPlan(path, library, device, None, engine)
    spec = EngineSpec(own.backend, path, geometry_of(toy), toy.batch, toy.max_length, PREFILL)
    return TensorRtEngine(plan, device, record or own, spec, capture=capture)


def double_of(engine: TensorRtEngine) -> EngineDouble:
    """Return the double below an engine."""
    found: EngineDouble = engine.model.plan._engine
    return found


LENGTH = 96
GREEDY = SamplingParams()
PROMPT = list(range(1, 20))


class Noted(CapturedRounds):
    """Whole rounds that are counted."""

    ran: list[tuple[int, int]]
    """Pending tokens and gamma of each."""

    def run(self, pending: Sequence[int], *places: Any) -> Drafted:
        self.ran.append((len(pending), places[-1]))
        return super().run(pending, *places)


class Pair:
    """Two tables as TensorRT engines on one device, and their rounds.

    `options` are those of both records, `own` of the draft's; `kv_lengths` are the target's and the
    draft's.
    """

    def __init__(
        self, target: TableEngine, draft: TableEngine, broken_at: Collection[int] = (), *,
        device: DoubleDevice | None = None, capture: bool = True,
        own: Mapping[str, Any] | None = None, kv_lengths: Sequence[Sequence[int]] = ((), ()),
        **options: Any,
    ) -> None:  # fmt: skip
        self.device = device or DoubleDevice()
        profiles = target_profiles(GAMMAS, PREFILL, kv_lengths[0])
        self.target = opened(self.device, target, profiles, capture=capture, **options)
        self.draft = opened(
            self.device, draft, draft_profiles(PREFILL, kv_lengths[1]), broken_at=broken_at,
            capture=capture,
            **{"confidence": True, **options, **(own or {})},
        )  # fmt: skip
        found = Noted(self.target, self.draft, capture=capture)
        found.ran = []
        self.rounds = found if found.gammas else None

    def close(self) -> None:
        self.target.close()
        self.draft.close()
        assert self.device.live == []

    def drafter(self, policy: GammaPolicy, params: SamplingParams = GREEDY) -> ModelDrafter:
        both = min(self.target.geometry.vocab_size, self.draft.geometry.vocab_size)
        return ModelDrafter(KVCache(self.draft), params, Noise(3), policy, both, self.rounds)

    def run(
        self, drafter: Drafter, prompt: Sequence[int], new: int, params: SamplingParams = GREEDY
    ) -> tuple[list[int], list[Round]]:
        tokens = list(prompt)
        limit = min(len(prompt) + new, LENGTH + 1)
        target = EngineTarget(KVCache(self.target), params, Noise(3))
        rounds = list(run_rounds(speculate(target, drafter, tokens, limit)))
        return tokens[len(prompt) :], rounds


# Plans of real graphs


class GraphDouble(EngineDouble):
    """A plan in fp32 that computes what its graph means, of a decoder or of what conditions one."""

    def __init__(
        self, cuda: CudaDouble, log: Log, record: EngineRecord, graph: Path, geometry: Geometry,
        batch: int, max_length: int,
    ) -> None:  # fmt: skip
        sizes = SimpleNamespace(batch=batch, max_length=max_length)
        super().__init__(cuda, log, record, sizes, geometry)
        options = silent_options()
        options.intra_op_num_threads = 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = ort.InferenceSession(str(graph), options, ["CPUExecutionProvider"])
        self.passes: list[tuple[int, int]] = []
        """Width and rows of each."""

    def run(self, addresses: Mapping[str, int], width: int, rows: int) -> None:
        """Do one pass on the bytes at the addresses."""
        self.passes.append((width, rows))
        inputs = [name for name, tensor in self.tensors.items() if tensor.is_input]
        for name in () if self.record.part else self.geometry.buffers:
            same = addresses[name] == addresses[f"present_{name}"]
            in_place = self.record.form == NATIVE and name in self.geometry.in_place
            assert same is in_place, f"{name} is updated elsewhere"
        feed = {name: self._bytes(addresses, name, width, rows).copy() for name in inputs}
        names = [output.name for output in self._session.get_outputs()]
        for name, made in zip(names, self._session.run(names, feed), strict=True):
            self._bytes(addresses, name, width, rows)[:] = made

    def _bytes(self, addresses: Mapping[str, int], name: str, width: int, rows: int) -> Any:
        tensor = self.tensors[name]
        of_rows = name in ("rows", "logits", "argmax", "confidence", "state")
        size = rows if of_rows or name.startswith("candidates") else width
        shape = tuple(size if s == -1 else s for s in tensor.shape)
        return self.array(addresses[name], np.dtype(tensor.type), shape)


# Machines


POSITIONS = 160


def plan_bytes(backend: str, name: str = "") -> bytes:
    """Return a plan that begins as those of its library do."""
    body = bytes(40) + name.encode()
    magic = FLAVOURS[backend].magics[0]
    return magic + bytes(12) + (24 + len(body)).to_bytes(8, "little") + body


RTX = "tensorrt-rtx"
MADE = "made"
"""Where the lowered graphs of plans are kept, next to the bundle."""


class Machine:
    """What is installed, and what was opened."""

    def __init__(self) -> None:
        self.cuda = CudaDouble(1 << 24)
        self.libraries = {name: library_double(name, cuda=self.cuda) for name in VERSIONS}
        self.devices: list[DoubleDevice] = []

    def device(self) -> DoubleDevice:
        self.devices.append(DoubleDevice(cuda=self.cuda))
        return self.devices[-1]

    def install(self, patched: pytest.MonkeyPatch) -> None:
        """Let the runtime find this machine."""
        patched.setattr(opening, "CudaDevice", self.device)
        patched.setattr(opening, "open_library", lambda name: self.libraries[name])
        for module in (engine_record, library):
            patched.setattr(module, "survey", lambda: MACHINE)

    def hold_closed(self) -> None:
        """Say that nothing is open, and all was given back."""
        assert all(device.closed == 1 and not device.leaked for device in self.devices)
        assert (self.cuda.memory, self.cuda.graphs, self.cuda.streams) == ({}, {}, 0)


class GraphMachine(Machine):
    """A machine that runs the graphs that plans were made of."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._patched = patched
        self.plans: dict[str, GraphDouble] = {}

    def load(self, bundle: Path) -> Generator:
        """Open a bundle whose lowered graphs were kept; the machine has a GPU from then on."""
        manifest = Bundle.open(bundle).manifest
        self.libraries[RTX] = library_double(RTX, manifest.versions[RTX], cuda=self.cuda)
        for model in manifest.models:
            for plan in (bundle / model.engine).parent.glob("*.plan"):
                made = partial(self._plan, plan, model.geometry, manifest)
                self.libraries[RTX].module.plans[plan.read_bytes()] = made
        self.install(self._patched)
        return specrt.load(bundle, threads=1, text_memory_bytes=0)

    def _plan(self, plan: Path, geometry: Any, manifest: Manifest, log: Any) -> GraphDouble:
        """Open what a plan was made of."""
        role, part = plan.parent.name, plan.stem
        record = read_engine_record(plan.with_suffix(".json"))
        graph = plan.parents[2] / MADE / role / f"{part}.onnx"
        batch = 1 if record.part else manifest.batch
        made = GraphDouble(self.cuda, log, record, graph, geometry, batch, manifest.max_length)
        self.plans[f"{role} {part}" if record.part else role] = made
        return made


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[GraphMachine]:
    """A machine that runs what plans mean, on which nothing is left open."""
    made = GraphMachine(monkeypatch)
    yield made
    made.hold_closed()


@contextmanager
def kept_graphs(folder: Path) -> Iterator[None]:
    """Keep the lowered graphs of the plans that are built."""
    compiles = TensorRtCompiler.compile

    def kept(self: Any, lowered: Any, *places: Any) -> Any:
        shutil.copytree(lowered.folder, folder / MADE / lowered.role)
        return compiles(self, lowered, *places)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TensorRtCompiler, "compile", kept)
        yield


class Site(Machine):
    """A machine for bundles whose plans are tables."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.tokenizer = folder, byte_level(folder)
        self.toys: dict[Path, TableEngine] = {}
        self.tables: list[TableEngine] = []
        self.changes: dict[str, Callable[[EngineDouble], object]] = {}
        """What is done to a plan when it is opened, by role."""

    def bundle(
        self, target: TableEngine, draft: TableEngine | None, *,
        backends: Sequence[str] = ("tensorrt", "tensorrt"), gammas: Sequence[int] = range(9),
        name: str = "pair", kv_lengths: Sequence[int] = (), **options: Any,
    ) -> Path:  # fmt: skip
        """Write a bundle; `options` are those of the records of its plans."""
        folder = self.folder / name
        folder.mkdir()
        shutil.copyfile(self.tokenizer, folder / "tokenizer.json")
        models: dict[str, ModelRecord | None] = {"draft": None}
        for role, toy, sized, backend in (
            ("target", target, target_profiles(gammas, PREFILL, kv_lengths), backends[0]),
            ("draft", draft, draft_profiles(PREFILL, kv_lengths), backends[1]),
        ):
            if toy is not None:
                record = record_of(
                    sized, backend=backend, version=VERSIONS.get(backend, ""), gpu="A GPU",
                    gpu_capability="8.9", confidence=role == "draft", **options,
                )  # fmt: skip
                models[role] = self._model(folder / role, toy, record)
        files = [path for path in folder.rglob("*") if path.is_file()]
        manifest = Manifest(
            format=FORMAT, name="pair", backend=backends[0], precision="fp16", batch=1,
            max_length=target.max_length, prefill=PREFILL, gammas=tuple(gammas), gamma=None,
            eos_token_ids=(), bos_token_id=None, **models,  # type: ignore[arg-type]
            versions={"kernels": LAYOUT}, device={"machine": platform.machine()}, source="0" * 64,
            files={str(path.relative_to(folder)): hash_file(path) for path in files},
        )  # fmt: skip
        (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
        return folder

    def _model(self, folder: Path, toy: TableEngine, record: EngineRecord) -> ModelRecord:
        def plan(log: Any) -> EngineDouble:
            made = EngineDouble(self.cuda, log, record, toy)
            self.changes.get(folder.name, lambda engine: None)(made)
            return made

        folder.mkdir()
        engine, data = folder / "engine.onnx", b"a graph of tables"
        if record.backend in FLAVOURS:
            engine, data = folder / PLAN, plan_bytes(record.backend, str(folder))
            (folder / FILE_NAME).write_text(record.to_json(), encoding="utf-8")
            self.libraries[record.backend].module.plans[data] = plan
        engine.write_bytes(data)
        self.toys[engine] = toy
        return ModelRecord(
            f"{folder.name}/{engine.name}", geometry_of(toy), "llama", 1000, 4000, 2, {},
            backend=record.backend,
        )  # fmt: skip

    def table(self, spec: EngineSpec) -> TableEngine:
        self.tables.append(self.toys[spec.path])
        return self.toys[spec.path]

    def hold_closed(self) -> None:
        super().hold_closed()
        assert all(table.closed for table in self.tables)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A machine whose libraries are doubles, on which nothing is left open."""
    made = Site(tmp_path)
    made.install(monkeypatch)
    cpu = replace(BACKENDS["ort-cpu"], runs={"decoder": made.table})
    monkeypatch.setitem(BACKENDS, "ort-cpu", cpu)
    yield made
    made.hold_closed()


def table_pair(
    closeness: float = 0.7, seed: int = 3, **options: Any
) -> tuple[TableEngine, TableEngine]:
    """Return the tables of a target, and of a draft that is more or less like it.

    Their vocabulary is what the tokenizer knows, and some more.
    """
    target = TableEngine(seed, vocab=270, max_length=POSITIONS, max_width=PREFILL, **options)
    return target, near(target, seed + 1, closeness)
