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
from dataclasses import dataclass
from math import prod

import onnx

from specrt.cuda import survey
from specrt.engines.tensorrt.record import Profile
from specrt.errors import BuildError
from specrt.memory import available_bytes
from specrt_export.compile.tensorrt.options import RTX, PlanOptions

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
