"""What this machine is: processor, vector units, cores, board, and NVIDIA GPUs by name."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, fields
from pathlib import Path

_ROOT = Path("/")

_JETPACKS = {
    "35": ("5", "8.5"),
    "36.2": ("6.0 DP", "8.6"),
    "36.3": ("6.0", "8.6"),
    "36.4.0": ("6.1", "10.3"),
    "36.4.3": ("6.2", "10.3"),
    "36.4.4": ("6.2.1", "10.3"),
    "36.5.0": ("6.2.2", "10.3"),
    "36.5.2": ("6.2.3", "10.3"),
    "36": ("6", "10.3"),
    "38.2": ("7.0", "10.13"),
    "38.4": ("7.1", "10.13"),
    "38": ("7", "10.13"),
    "39.2.0": ("7.2", "10.16"),
    "39.2.1": ("7.2.1", "10.16"),
    "39": ("7", "10.16"),
}
"""JetPack and its TensorRT by release of Jetson Linux; the longest that fits counts.

Source: NVIDIA's JetPack archive; TensorRT of 7.2 as seen on boards.
"""


@dataclass(frozen=True)
class Jetson:
    """A Jetson; what is not known is empty."""

    model: str
    release: str
    """Of Jetson Linux, as in `36.4.3`."""
    jetpack: str
    tensorrt: str
    """The version that this JetPack brings, as in `10.3`."""
    power_mode: str


def read_jetson(root: Path = _ROOT) -> Jetson | None:
    """Return what this Jetson is; None on any other machine."""
    model = _file_text(root / "proc" / "device-tree" / "model")
    release = _release(_file_text(root / "etc" / "nv_tegra_release"))
    if not release and "jetson" not in model.lower():
        return None
    jetpack, tensorrt = _jetpack(release)
    return Jetson(model or "Jetson", release, jetpack, tensorrt, power_mode(root))


def power_mode(root: Path = _ROOT) -> str:
    """Return the power mode by name, by number where no name is known, empty where none is set."""
    match = re.search(r"pmode:(\d+)", _file_text(root / "var" / "lib" / "nvpmodel" / "status"))
    if match is None:
        return ""
    number = int(match[1])
    named = r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>"
    names = dict(re.findall(named, _file_text(root / "etc" / "nvpmodel.conf")))
    return str(names.get(str(number), f"mode {number}"))


def _release(text: str) -> str:
    match = re.search(r"R(\d+)\s*\(release\),\s*REVISION:\s*(\d+(?:\.\d+)*)", text)
    return f"{match[1]}.{match[2]}" if match else ""


def _jetpack(release: str) -> tuple[str, str]:
    parts = [*release.split("."), "0", "0"][:3] if release else []
    for length in range(len(parts), 0, -1):
        known = _JETPACKS.get(".".join(parts[:length]))
        if known:
            return known
    return "", ""


def _file_text(path: Path) -> str:
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
    return "".join(c if c.isprintable() or c.isspace() else "" for c in text).strip()


_PROC = Path("/proc")

_VECTOR_UNITS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile",
    "asimd", "asimddp", "i8mm", "sve", "sve2",
)  # fmt: skip

_NAMES = (("model name",), ("cpu family", "model"), ("CPU implementer", "CPU part"))
"""What x86 and ARM call their processors; each group is left out where it is not told."""

_LONGEST = 255

_CONDITIONS = {"cores": "on {mine} cores, not {its} cores", "library": "with {mine}, not {its}"}
"""What changes on one machine."""


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
        """Return where or how this one measures and the other does not; None where they agree."""
        for field in fields(self):
            mine, its = (getattr(one, field.name) or "none" for one in (self, other))
            if mine != its:
                words = _CONDITIONS.get(field.name, "on another machine ({name} {mine}, not {its})")
                return words.format(name=field.name.replace("_", " "), mine=mine, its=its)
        return None


def this_machine(library: str, proc: Path = _PROC) -> Machine:
    """Return what this machine is, with the engine library and its version given."""
    cpu = _processor(proc / "cpuinfo")
    return Machine(
        cpu=_plain(_name(cpu)),
        vector_units=_units(cpu),
        cores=len(os.sched_getaffinity(0)),
        accelerator=_plain(_accelerator(proc)),
        library=_plain(library),
    )


def vector_units(proc: Path = _PROC) -> str:
    """Return the vector units that engines can make use of, separated by commas."""
    return _units(_processor(proc / "cpuinfo"))


def _units(cpu: dict[str, str]) -> str:
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    return ", ".join(unit for unit in _VECTOR_UNITS if unit in flags)


def _processor(cpuinfo: Path) -> dict[str, str]:
    """Return what the system says of its first processor."""
    first = _line_of(cpuinfo).split("\n\n", 1)[0]
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
        lines = _line_of(record).splitlines()
        named += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    board = (_line_of(proc / "device-tree" / "model"), power_mode(proc.parent))
    return ", ".join(named or filter(None, board))


def _line_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _plain(text: str) -> str:
    """Return a text as a record keeps it: one line of printable characters."""
    return "".join(c for c in text if c.isprintable()).strip()[:_LONGEST]
