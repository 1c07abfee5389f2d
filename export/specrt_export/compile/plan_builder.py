"""Builds a plan: one way for TensorRT and for TensorRT for RTX.

How much memory a build takes, told before it begins.

Measured with tensorrt-rtx 1.7.1 on random decoders, prefill to 128, plans written through a stream;
MiB. `stored` is what lies by the graph, `plan` the weights of the plan, `peak` what the process
grew by (VmHWM less what it was), of which the mapped weights can be dropped by the system.

| graph | profiles | stored | plan | peak | of it mapped |
| --- | --- | --- | --- | --- | --- |
| 12 layers of 512, fp16 | 1 | 88 | 88 | 478 | 88 |
| 12 layers of 512, fp16 | 3 | 88 | 136 | 572 | 88 |
| 16 layers of 1024, fp16 | 1 | 424 | 424 | 1286 | 424 |
| 16 layers of 1024, fp16 | 2, 3, 5 | 424 | 664 | 1778, 1779, 1787 | 424 |
| 24 layers of 1024, fp16 | 1 | 641 | 641 | 1875 | 641 |
| 24 layers of 1024, fp16 | 3 | 641 | 977 | 2563 | 641 |
| 12 layers of 512, int8 | 3 | 48 | 48 | 395 | 48 |
| 16 layers of 1024, int8 | 1, 3, 5 | 228 | 228 | 845, 858, 859 | 228 |
| 12 layers of 512, int4 | 3 | 30 | 30 | 354 | 30 |
| 16 layers of 1024, int4 | 1, 3, 5 | 142 | 142 | 772, 858, 896 | 142 |
| codelet's target, fp16 | 5 | 30 | 46 | 431 | 30 |
| codelet's target, fp16, decomposed | 5 | 30 | 46 | 460 | 30 |
| codelet's target, int8 | 5 | 15 | 15 | 378 | 15 |
| codelet's target, int4 | 5 | 10 | 10 | 389 | 10 |
| codelet's draft, fp16 | 3 | 2 | 3 | 275 | 2 |

So a build takes 2.3 to 2.5 times the plan's weights and 260 to 370 MiB; int4 as much as if it were
stored as int8. Floats of these graphs are up to 1.57 times as many in the plan as in the graph once
one profile has width 1 and another more; lowered graphs hold theirs once, but for the joined query,
key and value of models that norm their heads. The rule below lies above all of these, less the
mapped weights.

`tensorrt` was never measured, because it builds on a GPU only: the same rule is held for the host,
and the weights of the plan and the workspace for the device, which is the least it can take.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import onnx

from specrt.engine.tensorrt.engine_record import (
    FORMAT,
    BuildSetting,
    EngineRecord,
    Profile,
    SourceShape,
)
from specrt.engine.tensorrt.library import FLAVOURS, Library, Log, Message
from specrt.errors import BuildError
from specrt.system.gpu import survey
from specrt.system.memory import available_bytes
from specrt_export.compile.monitor import (
    Progress,
    Watch,
    compiled,
    highlights,
    interruptible,
    monitor,
    printable,
    read_header,
    weight_bytes,
)
from specrt_export.compile.network import (
    CURRENT,
    Contract,
    add_profiles,
    check_graph,
    check_options,
    configure,
    contract,
    parse,
    unmasked,
)
from specrt_export.portable.external_data import atomic_file
from specrt_export.recipe.recipe_tables import PlanOptions

SUFFIX = ".timing"


class TimingCache:
    """A file of timings next to a plan, where the library times kernels at all."""

    def __init__(self, library: Any, path: Path) -> None:
        self.path = path
        self.note = ""
        """What became of it, or why there is none."""
        self._used = not library.flavour.rtx
        self._cache: Any = None
        if not self._used:
            self.note = f"none: {library.backend} times kernels on the device, not while it builds"

    def attach(self, config: Any) -> None:
        """Give a builder what an earlier build measured; a file it does not take is left aside."""
        if not self._used:
            return
        earlier = self.path.read_bytes() if self.path.is_file() else b""
        self._cache = config.create_timing_cache(earlier)
        taken = config.set_timing_cache(self._cache, False)
        self.note = "read and kept" if earlier and taken else "begun"
        if not taken:
            self._cache = config.create_timing_cache(b"")
            config.set_timing_cache(self._cache, False)
            self.note = f"begun anew, because {self.path.name} is of another version or GPU"

    def keep(self, config: Any) -> None:
        """Write what is known now.

        Raises: BuildError for what the disk refused.
        """
        cache = config.get_timing_cache() if self._used else None
        if cache is None:
            return
        with atomic_file(self.path) as file:
            file.write(memoryview(cache.serialize()))


_HEAD_BYTES = 64


_LONGEST = 400


@dataclass(frozen=True)
class Written:
    """A plan in a file."""

    size: int
    sha256: str
    head: bytes
    """Its first bytes."""


def write_plan(
    library: Library,
    builder: Any,
    network: Any,
    config: Any,
    file: BinaryIO,
    watch: Watch,
    options: PlanOptions,
) -> Written:
    """Compile a network into a file.

    Raises: what stopped the build, or BuildError with the library's reason.
    """
    sink = _Sink(file)
    with library.messages() as log:
        built = _compile(library.module, builder, network, config, sink, watch)
    watch.check()
    if not built or not sink.size:
        raise _failed(log, options)
    return Written(sink.size, sink.digest.hexdigest(), sink.head)


class _Sink:
    """Where a plan goes: a file, its hash, and its first bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest, self.size, self.head = hashlib.sha256(), 0, b""

    def write(self, data: Any) -> int:
        """Take a part of the plan."""
        self._file.write(data)
        self.digest.update(data)
        self.head = (self.head + bytes(data[:_HEAD_BYTES]))[:_HEAD_BYTES]
        self.size += len(data)
        return len(data)


def _compile(
    module: Any, builder: Any, network: Any, config: Any, sink: _Sink, watch: Watch
) -> bool:
    """Compile into a sink: through a stream where there is one, which saves a copy of the plan."""
    if not hasattr(builder, "build_serialized_network_to_stream"):
        plan = builder.build_serialized_network(network, config)
        if plan is None or watch.stopping():
            return False
        return sink.write(memoryview(plan)) > 0

    class Writer(module.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            module.IStreamWriter.__init__(self)

        def write(self, data: Any) -> int:
            # An exception must not pass through the library; 0 makes it give up.
            try:
                return 0 if watch.stopping() else sink.write(data)
            except OSError as error:
                watch.error = watch.error or error
                return 0

    writer = Writer()
    return bool(builder.build_serialized_network_to_stream(network, config, writer))


def _failed(log: Log, options: PlanOptions) -> BuildError:
    """Return the error for a build that the library gave up, with its own reason."""
    # A CPU-only build says several times that there is no driver, which is not why it failed.
    errors = [message.text for message in log.messages if message.is_error]
    telling = [text for text in errors if "cudaError 35" not in text] or errors
    reason = printable(telling[0], _LONGEST) if telling else "no reason given"
    remedy = "lower the graph again, or try another version of the library"
    if "workspace" in reason:
        given = options.workspace_mib
        remedy = f"workspace_mib is {given}; give more, or leave it out"
    elif "memory" in reason.lower():
        remedy = "free memory, or choose a smaller precision"
    return BuildError(f"TensorRT could not build the plan: {reason}; {remedy}")


@dataclass(frozen=True)
class PlanReport:
    """A plan that was built."""

    record: EngineRecord
    """What goes into `engine.json`."""
    needed: Need
    """The memory it was expected to take."""
    seconds: float
    timing_cache: str
    """What became of the timing cache, or why there is none."""


def build_plan(
    graph: Path,
    out: Path,
    library: Library,
    profiles: Sequence[Profile],
    options: PlanOptions,
    progress: Progress,
    *,
    form: str = "native",
    cancelled: Callable[[], bool] = lambda: False,
    room: Room | None = None,
    timing_cache: Path | None = None,
    source: SourceShape | None = None,
    compute: str = "",
) -> PlanReport:
    """Build the plan of a lowered graph whose weights lie next to it.

    `form` is that of the graph, as in `EngineRecord`. `room` is this machine's memory unless given.
    The timing cache lies next to the plan unless told otherwise. `source` are the sizes of what an
    encoder-decoder attends to; `compute` is what an encoder computes in, which does not tell.
    Raises: BuildError, `CancelledError` among them; KeyboardInterrupt after Ctrl-C, at the end of a
    step. `out` is then as it was.
    """
    began = time.monotonic()
    check_options(options, library, gpu=not survey().problem)
    model = _read(graph)
    attentions = check_graph(model), unmasked(model)
    weights = weights_of(model.graph.initializer)
    needed = need(
        weights, profiles, options, library.backend, activation_bytes(model.graph, profiles)
    )
    warning = memory_warning(needed, room or find_room(), library.backend)
    if warning:
        progress(f"warning: {warning}", 0.0)
    watch = Watch(progress, tuple(profile.name for profile in profiles), cancelled)
    cache = TimingCache(library, timing_cache or out.with_suffix(SUFFIX))
    job = _Job(graph, library, tuple(profiles), options, form, watch, cache, source, compute)
    with interruptible(watch):
        record = job.run(out, attentions)
    progress("plan built", 1.0)
    return PlanReport(record, needed, time.monotonic() - began, cache.note)


def _read(graph: Path) -> onnx.ModelProto:
    try:
        return onnx.load(graph, load_external_data=False)
    except Exception as error:  # the library passes on whatever its parser raises
        raise BuildError(
            f"{graph} is not an ONNX graph ({type(error).__name__}); make it again with "
            "`specrt build RECIPE`"
        ) from error


@dataclass(frozen=True)
class _Job:
    """One build: what takes long runs here, and Ctrl-C stops it."""

    graph: Path
    library: Library
    profiles: tuple[Profile, ...]
    options: PlanOptions
    form: str
    watch: Watch
    cache: TimingCache
    source: SourceShape | None
    compute: str

    def run(self, out: Path, attentions: tuple[int, int]) -> EngineRecord:
        """Parse, check, compile and write; return what was made."""
        with self.library.messages() as log:
            module = self.library.module
            builder = module.Builder(self.library.logger)
            network = builder.create_network(_network_flags(module))
            offered = self._parse(network, attentions)
            config = builder.create_builder_config()
            configure(config, module, self.options)
            add_profiles(builder, config, offered, self.profiles)
            reporter = monitor(module, self.watch)  # kept here: the builder does not
            config.progress_monitor = reporter
            self.cache.attach(config)
            with atomic_file(out) as file:
                written = write_plan(
                    self.library, builder, network, config, file, self.watch, self.options
                )
                self.watch.check()
            self.cache.keep(config)
        return self._record(offered, log.messages, written)

    def _parse(self, network: Any, attentions: tuple[int, int]) -> Contract:
        self.watch.start("parse", 1)
        parse(self.library, network, self.graph)
        self.watch.finish("parse")
        self.watch.check()
        offered = contract(network, self.form, *attentions)
        if offered.candidates != self.options.candidates:
            raise BuildError(
                f"{self.graph} cuts out {offered.candidates} candidates a row; the recipe says "
                f"{self.options.candidates}: lower it again"
            )
        if offered.reads_prefix != any(profile.kv_length for profile in self.profiles):
            reads = "the KV length of each pass" if offered.reads_prefix else "whole KV buffers"
            raise BuildError(f"{self.graph} takes {reads}, and the profiles do not: lower it again")
        return offered

    def _record(self, offered: Contract, messages: list[Message], written: Written) -> EngineRecord:
        settings = self.options.settings().items()
        gpus = survey()
        # What tensorrt-rtx builds is for the GPU of the machine that builds it only where asked to.
        own = not self.library.flavour.rtx or CURRENT in self.options.capabilities
        used = gpus.gpus[:1] if own else ()
        return EngineRecord(
            format=FORMAT,
            backend=self.library.backend,
            version=self.library.version,
            form=self.form,
            compute=offered.compute or self.compute,
            profiles=self.profiles,
            candidates=offered.candidates,
            confidence=offered.confidence,
            scored=offered.scored,
            feature=offered.feature,
            hidden=0 if offered.part else offered.hidden,
            part=offered.part,
            source=self.source,
            plan_bytes=written.size,
            sha256=written.sha256,
            weight_bytes=weight_bytes(messages),
            compiled=compiled(messages, self.profiles),
            capabilities=read_header(written.head).capabilities,
            gpu=used[0].name if used else "",
            gpu_capability=used[0].capability if used else "",
            driver=gpus.driver if used else "",
            settings=tuple(BuildSetting(name, value) for name, value in settings),
            messages=highlights(messages),
        )


def _network_flags(module: Any) -> int:
    """Return the flags of a strongly typed network; later versions know no other."""
    kind = getattr(module, "NetworkDefinitionCreationFlag", None)
    flag = getattr(kind, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


_MIB = 1 << 20


_FIXED_BYTES = 400 * _MIB


_PER_PLAN_BYTE = 2.6


_PER_PROFILE_BYTES = 10 * _MIB
"""Seen with codelet's target: 2 MiB for each of 7 gammas more, 10 for each of 18 of three lengths
of KV buffers; nothing for a prefill of 256 instead of 32."""


_TWO_LAYOUTS = 1.6


_FLOATS: dict[int, int] = {
    onnx.TensorProto.FLOAT: 4,
    onnx.TensorProto.FLOAT16: 2,
    onnx.TensorProto.BFLOAT16: 2,
}


_CODES = (onnx.TensorProto.INT8, onnx.TensorProto.FLOAT8E4M3FN)


_INT4_GROWS = 2.0


@dataclass(frozen=True)
class Weights:
    """Bytes of the initializers of a graph, by what a builder makes of them."""

    floats: int
    codes: int
    """int8 and fp8."""
    halves: int
    """int4."""

    @property
    def stored(self) -> int:
        """Bytes next to the graph."""
        return self.floats + self.codes + self.halves


@dataclass(frozen=True)
class Need:
    """The memory that a build takes."""

    host_bytes: int
    device_bytes: int
    """0 where no GPU takes part."""


def weights_of(tensors: Iterable[onnx.TensorProto]) -> Weights:
    """Add up initializers by their types; scales and tables count as floats."""
    floats = codes = halves = 0
    for tensor in tensors:
        items = prod(tensor.dims)
        if tensor.data_type in _FLOATS:
            floats += items * _FLOATS[tensor.data_type]
        elif tensor.data_type == onnx.TensorProto.INT4:
            halves += (items + 1) // 2
        elif tensor.data_type in _CODES:
            codes += items
    return Weights(floats, codes, halves)


_MOST_HEADS = 64
"""Of an encoder: more than any has."""


def activation_bytes(graph: onnx.GraphProto, profiles: Sequence[Profile]) -> int:
    """Bound what the widest pass of a graph keeps at once; a GPU that times kernels runs it.

    The products of a layer and the scores of attention over the whole KV buffers, and the logits
    of the most rows that are scored. Of what conditions a decoder: all products, and the scores of
    a source to itself.
    """
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in [*graph.input, *graph.output]
    }
    keys = [shape for name, shape in shapes.items() if name.startswith("key.")]
    if not keys:
        most = max(profile.width.most for profile in profiles)
        widths = {max(t.dims) for t in graph.initializer if len(t.dims) == 2}
        attends = any(node.op_type in ("Attention", "Softmax") for node in graph.node)
        return int(4 * most * (3 * max(widths, default=0) + attends * _MOST_HEADS * most))
    batch, _, length, head = min(keys, key=lambda shape: shape[-1])
    vocabulary = shapes["logits"][-1]
    sides = [side for t in graph.initializer if len(t.dims) == 2 for side in t.dims]
    inner = max((side for side in sides if side != vocabulary), default=0)
    hidden = next((min(t.dims) for t in graph.initializer if vocabulary in t.dims[:2]), inner)
    width = max(profile.width.most for profile in profiles)
    rows = max(profile.rows.most for profile in profiles)
    scores = hidden // head * length
    return int(4 * batch * (width * (3 * inner + scores) + rows * vocabulary))


def need(
    weights: Weights, profiles: Sequence[Profile], options: PlanOptions, backend: str,
    activations: int = 0,
) -> Need:  # fmt: skip
    """Estimate what a build takes at its peak, besides what the process holds already.

    `activations` are those of the widest pass, which only a GPU that takes part in the build runs.
    """
    single = {profile.width.most == 1 for profile in profiles}
    layouts = _TWO_LAYOUTS if len(single) > 1 else 1.0
    plan = int(weights.floats * layouts) + weights.codes + weights.halves
    in_memory = plan + int(weights.halves * (_INT4_GROWS - 1))
    host = _FIXED_BYTES + int(_PER_PLAN_BYTE * in_memory) - weights.stored
    host += _PER_PROFILE_BYTES * len(profiles)
    if FLAVOURS[backend].rtx:
        return Need(host, 0)
    return Need(host, plan + activations + (options.workspace_mib or 0) * _MIB)


@dataclass(frozen=True)
class Room:
    """The memory of a machine; None where it is unknown."""

    host_bytes: int | None
    """What may still be taken."""
    device_bytes: int | None = None
    """What the GPU has."""
    shared: bool = False
    """Whether the GPU takes its memory from the host's, as on a Jetson."""


def find_room() -> Room:
    """Return the memory of this machine."""
    gpus = survey().gpus
    if not gpus:
        return Room(available_bytes())
    return Room(available_bytes(), gpus[0].memory_bytes or None, gpus[0].integrated)


def memory_warning(needed: Need, room: Room, backend: str) -> str:
    """Say that a machine may lack the memory of a build; empty where it has enough.

    A warning, because the rule was measured on small models and never on `tensorrt`.
    """
    host, device = needed.host_bytes, needed.device_bytes
    if room.shared:
        host, device = host + device, 0
    for kind, size, free in (
        ("memory", host, room.host_bytes), ("GPU memory", device, room.device_bytes)
    ):  # fmt: skip
        if free is not None and size > free:
            elsewhere = "build on a machine with more memory"
            if FLAVOURS[backend].rtx:
                elsewhere += " (tensorrt-rtx needs no GPU to build) and copy the bundle"
            return (
                f"building this plan may take {_mib(size)} of {kind}, and {_mib(free)} is free; "
                f"if it fails, take a smaller precision, or {elsewhere}"
            )
    return ""


def _mib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / _MIB:.0f} MiB"
