"""What a plan was built with and for, and what differs on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from specrt.cuda import Survey, survey
from specrt.engines.tensorrt.library import ELSEWHERE, FLAVOURS, Library, parse_version
from specrt.errors import EngineError

AMPERE_PLUS, SAME_CAPABILITY = "ampere+", "same-capability"
"""Hardware compatibility that can be asked of TensorRT."""
RTX_FIRST = (8, 0)
"""Plans of TensorRT for RTX with no capability asked for run from here on."""


@dataclass(frozen=True)
class DeviceRecord:
    """The library and the GPU of a machine; of a plan, those it was built with and for."""

    backend: str
    version: str
    gpu: str = ""
    """By name; empty where a plan was built without one."""
    capabilities: tuple[str, ...] = ()
    """Of a machine its GPU's, as in `8.7`. Of a plan those it was asked to be for, if any."""
    driver: str = ""
    hardware: str = ""
    """The hardware compatibility asked for; empty for this GPU only."""
    newer_versions: bool = False
    """Whether later versions of the library were asked to run it."""

    @property
    def library(self) -> str:
        """The library and its version, for people."""
        flavour = FLAVOURS.get(self.backend)
        return f"{flavour.title if flavour else self.backend} {self.version}"


def this_device(library: Library, device_id: int = 0, found: Survey | None = None) -> DeviceRecord:
    """Return the record of this machine and one of its GPUs.

    Raises: EngineError where there is no such GPU.
    """
    found = survey() if found is None else found
    if lacks := found.lacks(device_id):
        raise EngineError(f"{library.title} runs on an NVIDIA GPU only: {lacks}; {ELSEWHERE}")
    gpu = found.gpus[device_id]
    known = (gpu.capability,) if gpu.capability else ()
    return DeviceRecord(library.backend, library.version, gpu.name, known, found.driver)


def difference(built: DeviceRecord, here: DeviceRecord) -> str:
    """Say what keeps a plan from running here and how to rebuild it; empty where nothing does.

    TensorRT: the version must be the same in all its numbers, or later where that was asked for;
    the capability and the GPU model must be the same, unless hardware compatibility was asked for.
    TensorRT for RTX: no plan runs in another release, a newer one included; the capability must be
    among those asked for, or be 8.0 or later where none was.
    The driver is reported by `remark` only.
    Source: "Engine Compatibility" and "CPU-Only AOT" in NVIDIA's documentation of TensorRT 11.1
    and TensorRT for RTX 1.7, and "TensorRT Release Properties".
    """
    if built.backend != here.backend:
        differs = [f"it is a plan of {built.library}, and {here.library} was asked to run it"]
    else:
        differs = [*_version(built, here), *_gpu(built, here)]
    if not differs:
        return ""
    return (
        f"{'; '.join(differs)}: build it here with `specrt build RECIPE --backend {here.backend}`"
    )


def remark(built: DeviceRecord, here: DeviceRecord) -> str:
    """Say what differs and does not matter for running; empty where nothing does."""
    differs = []
    if built.driver and here.driver and built.driver != here.driver:
        differs.append(f"built with driver {built.driver}, here is {here.driver}")
    if built.gpu and here.gpu and built.gpu != here.gpu:
        differs.append(f"kernels were chosen on {built.gpu}, here is {here.gpu}")
    return "; ".join(differs)


def _version(built: DeviceRecord, here: DeviceRecord) -> list[str]:
    theirs, ours = parse_version(built.version), parse_version(here.version)
    if not (theirs[3] and ours[3]) or built.backend == "tensorrt-rtx":
        theirs, ours = (*theirs[:3], 0), (*ours[:3], 0)  # JetPack tells no build number
    if theirs == ours or (built.newer_versions and ours > theirs):
        return []
    return [f"it was built by {built.library}, and here is {here.version}"]


def _gpu(built: DeviceRecord, here: DeviceRecord) -> list[str]:
    if not here.capabilities:
        return []
    (ours,) = here.capabilities
    if built.backend == "tensorrt-rtx" or built.hardware == AMPERE_PLUS:
        wanted = built.capabilities if built.backend == "tensorrt-rtx" else ()
        if ours in wanted or (not wanted and _number(ours) >= RTX_FIRST):
            return []
        which = ", ".join(wanted) or "8.0 and later"
        return [f"it is for compute capability {which}, and {here.gpu} has {ours}"]
    if built.capabilities and ours not in built.capabilities:
        return [
            f"it was built on {built.gpu} of compute capability {', '.join(built.capabilities)}, "
            f"and {here.gpu} has {ours}"
        ]
    if built.gpu and built.gpu != here.gpu and built.hardware != SAME_CAPABILITY:
        return [f"it was built on {built.gpu}, and here is {here.gpu}"]
    return []


def _number(capability: str) -> tuple[int, ...]:
    return parse_version(capability)[:2]
