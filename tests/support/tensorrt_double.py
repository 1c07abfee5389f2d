"""TensorRT in NumPy: plans that look scores up in tables, run by the runtime's own plan and device.

What TensorRT would forgive or punish in silence fails here with an AssertionError: addresses that
are missing or not aligned, work enqueued without shapes, a context captured before it was run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.bundle import Geometry
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.protocol import Drafted
from specrt.engine.tensorrt.device import ALIGNMENT
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.engine_record import HIDDEN, KV_LENGTH, EngineRecord, Profile
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.engine.tensorrt.library import FLAVOURS, NATIVE, Library, describe
from specrt.engine.tensorrt.passes import CANDIDATES, KV_TYPES, cache_names, expected
from specrt.engine.tensorrt.plan import TYPES, TrtPlan
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.speculation.drafters import ModelDrafter
from specrt.speculation.gamma import GammaPolicy
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import Drafter, Round, run_rounds, speculate
from specrt.speculation.target import EngineTarget
from specrt_export.compile.network import profiles
from support.cuda_double import POISON, CudaDouble, DoubleDevice
from support.toy import TableEngine

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
        for name in cache_names(self.geometry):
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
        shape = (self.batch, g.kv_heads, self.max_length, g.head_dim)
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
    return Geometry(2, 4, 2, 3, toy.geometry.vocab_size, toy.max_length, (0, 0))


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
