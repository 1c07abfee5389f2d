"""The backends that models are built for, and what a recipe may ask of each."""

from __future__ import annotations

from dataclasses import dataclass

from specrt.bundle import MOST_ROWS
from specrt_export.precision import PRECISIONS, STORED


@dataclass(frozen=True)
class CompilerSpec:
    """What a recipe may ask of one backend, and the class that compiles for it."""

    compiler: str
    """A `specrt_export.compile.compiler.Compiler`, as `module:class`; a build imports it."""
    precisions: tuple[str, ...] = PRECISIONS
    most_rows: int = MOST_ROWS
    """Rows of text that an engine may hold."""
    row_scales: bool = False
    """Whether int8 and fp8 weights share one scale for each row, whatever the block."""
    pads_tail: bool = False
    """Whether passes near the length limit are prefill passes, which must then be wide enough."""
    disk_factor: float = 1.0
    """Disk space that a build takes, over the weights in their new precision."""
    on_cpu: bool = False
    """Whether engines run in the host's memory; activations, keys and values are fp32 there."""
    states: bool = True
    """Whether it runs layers with recurrent states."""
    float_factor: float = 1.0
    """Floats in an engine over those in the graph it is made of, at most."""


_PLANS = CompilerSpec(
    "specrt_export.compile.tensorrt_compiler:TensorRtCompiler", row_scales=True, pads_tail=True,
    # A plan is made of a lowered graph with weights of its own, and holds some of them twice.
    disk_factor=2.5, float_factor=1.57,
)  # fmt: skip

COMPILERS: dict[str, CompilerSpec] = {
    "ort-cpu": CompilerSpec(
        "specrt_export.compile.ort_cpu_compiler:OrtCpuCompiler",
        (*(p for p in PRECISIONS if p != "fp8"), STORED),
        on_cpu=True,
    ),
    "ort-cuda": CompilerSpec(
        "specrt_export.compile.ort_cuda_compiler:OrtCudaCompiler",
        tuple(p for p in PRECISIONS if p not in ("fp32", "fp8")),
        most_rows=1,  # its attention takes several tokens at once for one row only
        states=False,
    ),
    "tensorrt": _PLANS,
    "tensorrt-rtx": _PLANS,
}
"""The backends there are; the first is built for unless a recipe says otherwise."""
