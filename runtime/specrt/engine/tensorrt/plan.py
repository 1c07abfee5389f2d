"""A compiled plan and its contexts over either TensorRT library, with every status checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrt.engine.ort.onnx_file import files_of
from specrt.engine.tensorrt.device import CudaDevice, lost, size
from specrt.engine.tensorrt.library import FLAVOURS, KernelCache, Library
from specrt.errors import EngineError
from specrt.held_file import HeldFile, hold_folder

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1}
"""Element types of the tensors of a plan, by the names used here."""


@dataclass(frozen=True)
class Tensor:
    """One input or output of a plan."""

    shape: tuple[int, ...]
    """-1 where it is given with each pass."""
    type: str
    """A key of `ITEM_BYTES`."""
    is_input: bool


GRAPH = ".onnx"
"""Ends the name of the graph next to a stripped plan, whose weights lie next to it in turn."""


@dataclass(frozen=True)
class Wants:
    """What a plan was built to be opened with."""

    streaming: bool = False
    """Weights stay in host memory, as far as the device has no room for them."""
    stripped: bool = False
    """Weights are not in the plan."""
    host_code: bool = False
    """The plan brings a runtime of its own, for later versions of the library."""


WHOLE = Wants()
"""A plan that holds all it needs."""


def supply(
    engine: Any, path: Path, library: Library, wants: Wants,
    files: Mapping[str, HeldFile] | None = None,
) -> None:  # fmt: skip
    """Give a deserialized plan its weights; to be done before it has contexts.

    Raises: EngineError where the library refuses, BundleError where a file is another one by now.
    """
    if wants.stripped:
        files = hold_folder(path.parent) if files is None else files
        graph = path.with_suffix(GRAPH)
        if graph.name not in files:
            raise EngineError(
                f"{graph} is missing, and the plan next to it holds no weights, or the manifest "
                "does not list it: build the bundle again"
            )
        read = {graph.name, *files_of(graph, files)}
        _refit(engine, graph, library)
        for name in read:
            files[name].require_same()
    if wants.streaming:
        _stream(engine, path, library)


def _stream(engine: Any, path: Path, library: Library) -> None:
    """Keep as many weights on the device as fit; what is refused leaves the budget as it was."""
    with library.messages() as log:
        budget = engine.get_weight_streaming_automatic_budget()
        engine.weight_streaming_budget_v2 = budget
        taken = engine.weight_streaming_budget_v2
    if taken != budget:
        reason = log.first_error or "no reason given"
        raise EngineError(
            f"{library.title} cannot stream the weights of {path} with {budget} bytes of them on "
            f"the GPU: {reason}; close what else uses it, or build without weight_streaming"
        )


def _refit(engine: Any, graph: Path, library: Library) -> None:
    module = library.module
    with library.messages() as log:
        refitter = module.Refitter(engine, library.logger)
        parser = module.OnnxParserRefitter(refitter, library.logger)
        done = parser.refit_from_file(str(graph)) and refitter.refit_cuda_engine()
    if not done:
        raise EngineError(
            f"{library.title} cannot fill the plan from {graph}: "
            f"{log.first_error or 'no reason given'}; build the bundle again"
        )


TYPES = {
    "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16",
    "INT64": "int64", "INT32": "int32", "BOOL": "bool",
}  # fmt: skip
"""TensorRT's names of the element types that inputs and outputs may have here."""

REASONS = {
    "VERSION_MISMATCH": "it was built by another version of the library",
    "UNSUPPORTED_CC": "it was not built for this GPU's compute capability",
    "OLD_CUDA_DRIVER": "the CUDA driver is too old",
    "OLD_CUDA_RUNTIME": "the CUDA runtime is too old",
    "INSUFFICIENT_GPU_MEMORY": "the GPU has too little memory",
    "MALFORMED_ENGINE": "the file is damaged",
    "CUDA_ERROR": "the CUDA driver or runtime does not work",
}
"""What TensorRT for RTX says is wrong with a plan."""

NO_SUCH_GPU = "does not support this compute capability"
"""What TensorRT for RTX says on a GPU for which no plan is right, such as H100 and H200."""

_HEADER = 64

_RTX_SIZE = slice(16, 24)
"""Where a plan of TensorRT for RTX keeps its own length; seen in plans of 1.7.1."""


def open_plan(
    path: Path, library: Library, device: CudaDevice, wants: Wants = WHOLE,
    files: Mapping[str, HeldFile] | None = None,
) -> TrtPlan:  # fmt: skip
    """Deserialize a plan, and give it its weights.

    `files` are those of its folder that it may read; all of them when None.
    Raises: EngineError saying why it cannot run here, and what to do.
    """
    again = f"build it again here: `specrt build RECIPE --backend {library.backend}`"
    try:
        files = hold_folder(path.parent) if files is None else files
        if path.name not in files:
            raise FileNotFoundError(2, "it is missing, or not in the manifest's list")
        data = files[path.name].data
        check_header(path, data[:_HEADER], len(data), library, again)
        runtime, engine = _deserialized(path, data, library, device, again, wants)
        files[path.name].release()
        supply(engine, path, library, wants, files)
        return TrtPlan(path, library, device, runtime, engine)
    except OSError as error:
        raise EngineError(f"{path} cannot be read ({error}); {again}") from error


def check_header(path: Path, head: bytes, length: int, library: Library, again: str) -> None:
    """Refuse a file that is not a plan of this library, before TensorRT sees it."""
    mark = head[:4]
    if mark not in library.flavour.magics:
        for other in FLAVOURS.values():
            if mark in other.magics:
                raise EngineError(
                    f"{path} is a plan of {other.title}; backend {library.backend} runs those of "
                    f"{library.flavour.title}: open it with backend {other.backend}, or {again}"
                )
        begins = f"begins with {mark!r}" if mark else "is empty"
        raise EngineError(f"{path} is damaged or no TensorRT plan: it {begins}; {again}")
    stated = int.from_bytes(head[_RTX_SIZE], "little")
    if library.flavour.rtx and len(head) >= _RTX_SIZE.stop and length < stated:
        raise EngineError(f"{path} is damaged: {length} bytes of {stated} are there; {again}")


def _deserialized(
    path: Path, data: Any, library: Library, device: CudaDevice, again: str, wants: Wants
) -> tuple[Any, Any]:
    device.make_current()
    runtime = library.runtime()
    if wants.host_code:
        runtime.engine_host_code_allowed = True
    with library.messages() as log:
        engine = runtime.deserialize_cuda_engine(data)
    if engine is not None:
        return runtime, engine
    reason = log.first_error or "no reason given"
    why = _invalidity(library, runtime, data)
    if "memory" in reason.lower() and (
        "out of" in reason.lower() or "insufficient" in reason.lower()
    ):
        free, total = device.available()
        why = f"a plan of {size(len(data))}, and {size(free)} of {size(total)} are free on the GPU"
    remedy = "build it for tensorrt or ort-cuda" if NO_SUCH_GPU in reason else again
    raise EngineError(
        f"{library.title} cannot open {path} on this GPU: {reason}{f' ({why})' if why else ''}"
        + (lost(reason) or f"; {remedy}")
    )


def _invalidity(library: Library, runtime: Any, data: Any) -> str:
    """Say what TensorRT for RTX finds wrong with a plan; empty where it does not tell."""
    if not library.tells_validity:
        return ""
    _, flags = runtime.get_engine_validity(data)
    known = library.module.EngineInvalidityDiagnostics.__members__
    reasons = [REASONS.get(name, name) for name, bit in known.items() if int(flags) & int(bit)]
    return ", ".join(reasons)


class TrtContext:
    """One way to run a plan, in one profile; shapes and addresses stay until they are set again.

    Raises: EngineError from every method, saying what was being done and what TensorRT reports.
    """

    def __init__(
        self,
        context: Any,
        library: Library,
        device: CudaDevice,
        name: str,
        ranges: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._context, self._library, self._device = context, library, device
        self._name, self._ranges = name, ranges
        self._run, self._stream = context.execute_async_v3, device.stream

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Give the shape of an input."""
        if not self._context.set_input_shape(name, shape):
            takes = f" (it takes {self._ranges[name]})" if name in self._ranges else ""
            self._refused(f"does not take shape {shape} for input {name}{takes}")

    def set_address(self, name: str, address: int) -> None:
        """Say where an input or output lies on the device."""
        if not self._context.set_tensor_address(name, address):
            self._refused(f"does not take address {address:#x} for {name}")

    def capturable(self) -> bool:
        """Tell whether the next run may be captured into a graph, as far as the library tells."""
        if not self._library.tells_capturable:
            return True
        return bool(self._context.is_stream_capturable(self._stream))

    def enqueue(self) -> None:
        """Put one run on the device's stream."""
        self._device.make_current()
        if not self._run(self._stream):
            self._refused("does not run")

    def choose(self, profile: int) -> None:
        """Take a profile; what is set afterwards is checked against it."""
        if not self._context.set_optimization_profile_async(profile, self._stream):
            self._refused("cannot be chosen")

    def close(self) -> None:
        """Give the context back; never raises."""
        self._context = self._run = None

    def _refused(self, what: str) -> None:
        reason = self._library.journal.drain() or "no reason given"
        raise EngineError(f"{self._name} {what}: {reason}{lost(reason)}")


class TrtPlan:
    """A deserialized plan."""

    def __init__(
        self, path: Path, library: Library, device: CudaDevice, runtime: Any, engine: Any
    ) -> None:
        self._path, self._library, self._device = path, library, device
        self._runtime, self._engine = runtime, engine
        self._contexts: list[TrtContext] = []
        self._configs: list[Any] = []  # contexts do not say whether they keep theirs
        self._kernels = KernelCache(path)
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self.tensors: Mapping[str, Tensor] = {name: self._tensor(name) for name in names}

    @property
    def profiles(self) -> int:
        """How many profiles there are."""
        return int(self._engine.num_optimization_profiles)

    def ranges(self, profile: int) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Return the least, best and largest shape of each input in a profile."""
        shape = self._engine.get_tensor_profile_shape
        return {
            name: tuple(tuple(one) for one in shape(name, profile))
            for name, tensor in self.tensors.items()
            if tensor.is_input
        }

    @property
    def scratch_bytes(self) -> int:
        """The bytes of working memory that every context is given.

        A profile may need less, but the library wants no less than the engine's own size.
        """
        return int(self._engine.device_memory_size_v2)

    def aliases(self, output: str) -> str:
        """Return the input that an output is written into, as the plan says; empty for none."""
        if not self._library.tells_aliases:
            return ""
        return self._engine.get_aliased_input_tensor(output) or ""

    def context(self, profile: int, scratch: int) -> TrtContext:
        """Return a context of one profile with working memory at an address.

        Contexts that never run at once may share working memory.
        """
        name = f"profile {profile} of {self._path}"
        if not 0 <= profile < self.profiles:
            raise EngineError(f"{name} is not there; it has {self.profiles}: build it again")
        self._device.make_current()
        ranges = self.ranges(profile)
        with self._library.messages() as log:
            handle = self._create_context(ranges)
        if handle is None:
            reason = log.first_error or "no reason given"
            raise EngineError(f"{name} gets no context: {reason}{lost(reason)}")
        context = TrtContext(handle, self._library, self._device, name, ranges)
        context.choose(profile)
        if needed := self.scratch_bytes:
            handle.set_device_memory(scratch, needed)
        self._contexts.append(context)
        return context

    def close(self) -> None:
        """Give the plan back, after its contexts; never raises."""
        for context in self._contexts:
            context.close()
        self._contexts.clear()
        self._kernels.save()
        self._configs.clear()
        self._engine = None
        self._runtime = None

    def _create_context(self, ranges: Mapping[str, Any]) -> Any:
        """Return a context of the library whose working memory is allocated here.

        TensorRT for RTX makes kernels for a shape when it meets it. Where all shapes are fixed
        that is done at once, so that a captured graph holds the final ones; where the width
        varies, a pass must not wait for a compiler, nor round otherwise once one is done.
        """
        module, engine = self._library.module, self._engine
        ours = module.ExecutionContextAllocationStrategy.USER_MANAGED
        if not self._library.has_runtime_config:
            return engine.create_execution_context(ours)
        fixed = all(least == most for least, _, most in ranges.values())
        choices = module.DynamicShapesKernelSpecializationStrategy
        config = engine.create_runtime_config()
        self._configs.append(config)
        config.set_execution_context_allocation_strategy(ours)
        config.dynamic_shapes_kernel_specialization_strategy = (
            choices.EAGER if fixed else choices.NONE
        )
        config.cuda_graph_strategy = module.CudaGraphStrategy.DISABLED  # we capture
        self._kernels.attach(config)
        return engine.create_execution_context(config)

    def _tensor(self, name: str) -> Tensor:
        module, engine = self._library.module, self._engine
        kind = engine.get_tensor_dtype(name).name
        if kind not in TYPES:
            known = ", ".join(TYPES)
            raise EngineError(f"{self._path}: tensor {name} is {kind}; expected one of {known}")
        if engine.get_tensor_location(name) != module.TensorLocation.DEVICE:
            raise EngineError(
                f"{self._path}: tensor {name} decides about shapes and is wanted in host memory; "
                "no graph of specrt has such a tensor: build it again"
            )
        is_input = engine.get_tensor_mode(name) == module.TensorIOMode.INPUT
        return Tensor(tuple(engine.get_tensor_shape(name)), TYPES[kind], is_input)
