"""What a measured time depends on: the processor, the cores that may be used, the library."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, fields
from pathlib import Path

from specrt.errors import EngineError
from specrt.jetson import power_mode
from specrt.libraries import ONNXRUNTIME, version

_PROC = Path("/proc")
_VECTOR_UNITS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile",
    "asimd", "asimddp", "i8mm", "sve", "sve2",
)  # fmt: skip
_NAMES = (("model name",), ("cpu family", "model"), ("CPU implementer", "CPU part"))
"""What x86 and ARM call their processors; each group is left out where it is not told."""
_LONGEST = 255


@dataclass(frozen=True)
class Machine:
    """Where something was measured. Times taken on another machine say nothing about this one."""

    cpu: str
    vector_units: str
    cores: int
    """Those this process may use."""
    accelerator: str
    """The GPU, or the board it is part of; empty where none is known."""
    library: str
    """The engine library and its version."""

    def difference(self, other: Machine) -> str | None:
        """Say in which way another machine differs, this one first; None where it does not."""
        for field in fields(self):
            mine, its = getattr(self, field.name), getattr(other, field.name)
            if mine != its:
                return f"{field.name.replace('_', ' ')} {mine or 'none'}, not {its or 'none'}"
        return None


def this_machine(backend: str, proc: Path = _PROC) -> Machine:
    """Return what this machine is for the engines of a backend."""
    cpu = _processor(proc / "cpuinfo")
    return Machine(
        cpu=_plain(_name(cpu)),
        vector_units=_units(cpu),
        cores=len(os.sched_getaffinity(0)),
        accelerator=_plain(_accelerator(proc)),
        library=_plain(_library(backend)),
    )


def vector_units(proc: Path = _PROC) -> str:
    """Return the vector units that engines can make use of, separated by commas."""
    return _units(_processor(proc / "cpuinfo"))


def _units(cpu: dict[str, str]) -> str:
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    return ", ".join(unit for unit in _VECTOR_UNITS if unit in flags)


def _processor(cpuinfo: Path) -> dict[str, str]:
    """Return what the system says of its first processor."""
    first = _text(cpuinfo).split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _name(cpu: dict[str, str]) -> str:
    known = [
        " ".join(f"{name} {cpu[name]}" if len(group) > 1 else cpu[name] for name in group)
        for group in _NAMES
        if all(name in cpu for name in group)
    ]
    return ", ".join(known) or platform.machine()


def _accelerator(proc: Path) -> str:
    """Return the GPUs by name; on a board such as a Jetson, the board and its power mode."""
    named = []
    for record in sorted(proc.glob("driver/nvidia/gpus/*/information")):
        lines = _text(record).splitlines()
        named += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    board = (_text(proc / "device-tree" / "model"), power_mode(proc.parent))
    return ", ".join(named or filter(None, board))


def _library(backend: str) -> str:
    """Return the library of a backend and its version."""
    if not backend.startswith("ort-"):
        return f"{backend} {_tensorrt(backend) or 'of unknown version'}"
    names = ONNXRUNTIME
    return f"{names[0]} {version(names) or 'of unknown version'}"


def _tensorrt(backend: str) -> str:
    """Ask the library itself: on a Jetson it is part of the system, and no package tells."""
    from specrt.engines.tensorrt.library import open_library

    try:
        return open_library(backend).version
    except EngineError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _plain(text: str) -> str:
    """Return a text as a record keeps it: one line of printable characters."""
    return "".join(c for c in text if c.isprintable()).strip()[:_LONGEST]
