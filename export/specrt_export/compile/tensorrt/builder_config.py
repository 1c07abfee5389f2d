"""How much memory a build takes, told before it begins.

Measured with tensorrt-rtx 1.7.1 on random decoders, prefill to 128, plans written through a stream;
MiB. `stored` is what lies beside the graph, `plan` the weights of the plan, `peak` what the process
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

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import onnx

from specrt.engine.tensorrt.engine_record import Profile
from specrt.errors import BuildError
from specrt.system import available_bytes
from specrt.system.gpu import survey

RTX = "tensorrt-rtx"

COMPATIBILITY = {
    "ampere+": "AMPERE_PLUS",
    "same-capability": "SAME_COMPUTE_CAPABILITY",
}
"""Values of `hardware_compatible`, and TensorRT's names for them."""

_MOST_LEVEL = 5

_MOST_STREAMS = 64


@dataclass(frozen=True)
class PlanOptions:
    """The builder's settings; what is None or empty is left to the library."""

    optimization_level: int | None = None
    """0 (builds fastest) to 5; not of tensorrt-rtx, whose builder times nothing."""
    workspace_mib: int | None = None
    """The most working memory that kernels may ask for."""
    aux_streams: int | None = None
    """How many streams beside the main one a pass may use; with 0 nothing runs side by side, which
    takes less working memory."""
    hardware_compatible: str = ""
    """A key of `COMPATIBILITY`: which other GPUs the plan shall run on. Not of tensorrt-rtx."""
    capabilities: tuple[str, ...] = ()
    """Compute capabilities to build for, such as `8.9`. Only of tensorrt-rtx."""
    version_compatible: bool = False
    """Whether later versions of the library shall read the plan. Not of tensorrt-rtx."""
    weight_streaming: bool = False
    """Whether weights may stay in host memory and be copied when they are needed."""
    stripped: bool = False
    """Whether to leave the weights out, to be put back on the device by refitting."""
    candidates: int = 0
    """How many best scores of each row the graph cuts out; the graph is held to it."""

    def settings(self) -> dict[str, str]:
        """Return what was set, for the record."""
        return {
            name: ", ".join(value) if isinstance(value, tuple) else str(value)
            for name, value in asdict(self).items()
            if value != _DEFAULTS[name]
        }


_DEFAULTS = asdict(PlanOptions())


def check_options(options: PlanOptions, library: Any, gpu: bool) -> None:
    """Refuse what is out of range, and by name what the library does not offer here.

    Raises: BuildError.
    """
    _check_ranges(options)
    if library.backend == RTX:
        _check_rtx(options, gpu)
        capability_names(options.capabilities, library.module)
    elif options.capabilities:
        raise BuildError(
            f"capabilities is {', '.join(options.capabilities)}, but tensorrt builds for the GPU "
            'it runs on; use hardware_compatible = "ampere+", or the backend tensorrt-rtx'
        )


def _check_ranges(options: PlanOptions) -> None:
    level, workspace = options.optimization_level, options.workspace_mib
    if level is not None and not 0 <= level <= _MOST_LEVEL:
        raise BuildError(f"optimization_level is {level}; expected 0 to {_MOST_LEVEL}")
    if workspace is not None and not 1 <= workspace < 1 << 32:
        raise BuildError(f"workspace_mib is {workspace}; expected 1 or more")
    if options.aux_streams is not None and not 0 <= options.aux_streams <= _MOST_STREAMS:
        raise BuildError(f"aux_streams is {options.aux_streams}; expected 0 to {_MOST_STREAMS}")
    if options.hardware_compatible not in ("", *COMPATIBILITY):
        raise BuildError(
            f"hardware_compatible is {options.hardware_compatible!r}; expected "
            f"{' or '.join(COMPATIBILITY)}, or nothing for the GPU that builds"
        )


def _check_rtx(options: PlanOptions, gpu: bool) -> None:
    """Name the first option that TensorRT for RTX ignores or fails at (seen with 1.7.1)."""
    if options.optimization_level is not None:
        raise BuildError(
            "optimization_level has no effect on tensorrt-rtx, which chooses its kernels on the "
            "device; leave it out"
        )
    if options.hardware_compatible:
        raise BuildError(
            "tensorrt-rtx has no hardware_compatible; its plans serve every GPU it knows, or those "
            'listed in capabilities = ["8.9", "12.0"]'
        )
    if options.version_compatible:
        raise BuildError(
            "tensorrt-rtx cannot make version_compatible plans (its package lacks the lean "
            "runtime they carry); build again with the version the device has"
        )
    if options.stripped and not gpu:
        raise BuildError(
            "tensorrt-rtx cannot make stripped plans on a machine without a GPU; build on one "
            "that has one, or leave stripped out"
        )


def capability_names(capabilities: tuple[str, ...], module: Any) -> list[str]:
    """Return the library's names of compute capabilities: `SM89` for `8.9`.

    Raises: BuildError for one it does not build for, with the list of those it does.
    """
    known = {
        f"{name[2:-1]}.{name[-1]}": name
        for name in dir(getattr(module, "ComputeCapability", None))
        if name.startswith("SM") and name[2:].isdigit()
    }
    for capability in capabilities:
        if capability not in known:
            listed = ", ".join(sorted(known, key=float))
            raise BuildError(
                f"tensorrt-rtx builds no plans for compute capability {capability!r}; it knows "
                f"{listed}; for other GPUs use the backend tensorrt"
            )
    return [known[capability] for capability in dict.fromkeys(capabilities)]


def configure(config: Any, module: Any, options: PlanOptions) -> None:
    """Set a builder's configuration; call `check_options` before.

    Raises: BuildError for a flag that this version of the library does not have.
    """
    config.profiling_verbosity = module.ProfilingVerbosity.DETAILED
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.workspace_mib is not None:
        pool = module.MemoryPoolType.WORKSPACE
        config.set_memory_pool_limit(pool, options.workspace_mib << 20)
    if options.aux_streams is not None:
        config.max_aux_streams = options.aux_streams
    if options.hardware_compatible:
        level = COMPATIBILITY[options.hardware_compatible]
        config.hardware_compatibility_level = _named(
            module, "HardwareCompatibilityLevel", level, "hardware_compatible"
        )
    for name in ("version_compatible", "weight_streaming", "stripped"):
        if getattr(options, name):
            flag = "STRIP_PLAN" if name == "stripped" else name.upper()
            config.set_flag(_named(module, "BuilderFlag", flag, name))
    names = capability_names(options.capabilities, module)
    if names:
        config.num_compute_capabilities = len(names)
    for index, name in enumerate(names):
        config.set_compute_capability(getattr(module.ComputeCapability, name), index)


def _named(module: Any, kind: str, name: str, option: str) -> Any:
    found = getattr(getattr(module, kind, None), name, None)
    if found is None:
        raise BuildError(
            f"{option} is not offered by version {getattr(module, '__version__', 'unknown')} of "
            "this library; leave it out, or build with a newer one"
        )
    return found


_MIB = 1 << 20

_FIXED_BYTES = 400 * _MIB

_PER_PLAN_BYTE = 2.6

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
        """Bytes beside the graph."""
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


def need(weights: Weights, profiles: Sequence[Profile], options: PlanOptions, backend: str) -> Need:
    """Estimate what a build takes at its peak, besides what the process holds already."""
    single = {profile.width.most == 1 for profile in profiles}
    layouts = _TWO_LAYOUTS if len(single) > 1 else 1.0
    plan = int(weights.floats * layouts) + weights.codes + weights.halves
    held = plan + int(weights.halves * (_INT4_GROWS - 1))
    host = _FIXED_BYTES + int(_PER_PLAN_BYTE * held) - weights.stored
    if backend == RTX:
        return Need(host, 0)
    return Need(host, plan + (options.workspace_mib or 0) * _MIB)


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


def check_memory(
    needed: Need,
    weights: Weights,
    profiles: Sequence[Profile],
    backend: str,
    room: Room,
) -> None:
    """Refuse a build that a machine has no memory for.

    Raises: BuildError saying what is needed, what is free, and what would fit.
    """
    host, device = needed.host_bytes, needed.device_bytes
    if room.shared:
        host, device = host + device, 0
    if room.host_bytes is not None and host > room.host_bytes:
        raise _refused("memory", host, room.host_bytes, weights, profiles, backend)
    if room.device_bytes is not None and device > room.device_bytes:
        raise _refused("GPU memory", device, room.device_bytes, weights, profiles, backend)


def _refused(
    kind: str,
    needed: int,
    free: int,
    weights: Weights,
    profiles: Sequence[Profile],
    backend: str,
) -> BuildError:
    return BuildError(
        f"building this plan takes about {_mib(needed)} of {kind}, and {_mib(free)} is free; "
        f"{_fitting(free, weights, profiles, backend)}"
    )


def _fitting(free: int, weights: Weights, profiles: Sequence[Profile], backend: str) -> str:
    """Say which smaller precisions fit, and what else helps."""
    smaller = {}
    if weights.floats > weights.codes + weights.halves:
        wide = Weights(0, weights.floats // 2, 0)
        smaller = {"int8": wide, "int4": Weights(0, 0, weights.floats // 4)}
    elif weights.codes > weights.halves:
        smaller = {"int4": Weights(weights.floats, 0, weights.codes // 2)}
    fits = [
        name
        for name, made in smaller.items()
        if need(made, profiles, PlanOptions(), backend).host_bytes <= free
    ]
    ways = [f"precision {' or '.join(fits)} would fit"] if fits else []
    alone = [profile for profile in profiles if profile.width.most > 1]
    if need(weights, alone, PlanOptions(), backend).host_bytes <= free:
        ways.append("so would a plan without a profile of width 1")
    elsewhere = "build on a machine with more memory"
    if backend == RTX:
        elsewhere += " (tensorrt-rtx needs no GPU to build) and copy the bundle"
    return "; ".join([*ways, f"or {elsewhere}" if ways else elsewhere])


def _mib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / _MIB:.0f} MiB"
