"""What a recipe may ask of TensorRT's builder, and what each library offers of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specrt.errors import BuildError

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
