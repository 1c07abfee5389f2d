"""What this machine is: processor, cores, memory and its speed, its board, its NVIDIA GPUs."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np


def trim_heap() -> None:
    """Give what was freed back to the system, where the C library can.

    glibc keeps freed memory for later allocations: of codelet's 90 MB, 20 to 100 stayed with
    the process after closing. It takes 2 ms, and moves nothing that is in use. So pages on which
    something small still lives stay: 40 kB for each time a bundle is opened, over 160 times, in
    which what is in use grew by 2 kB each, all of it the engine library's.
    """
    trim = _trim()
    if trim is not None:
        trim(ctypes.c_size_t(0))


@cache
def _trim() -> Any:
    """Return the function; looked up once: ctypes creates classes that stay until a collection."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


_CLONE = Path(__file__).parents[3]

_TARGETS = {"build": "make setup", "export": "make setup-export"}


def how_to_install(extra: str, clone: Path = _CLONE) -> str:
    """Return the command that installs an extra; in a clone a target of its Makefile."""
    if extra in _TARGETS and (clone / "Makefile").is_file() and (clone / "engines").is_dir():
        return _TARGETS[extra]
    return f'pip install "specrt[{extra}]"'


def size(count: float) -> str:
    """Return a number of bytes in GB or MB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


_MEMINFO = Path("/proc/meminfo")

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes that can be taken without swapping; None where that is not known.

    The smaller of what the kernel calls available and what the control group leaves. Page cache
    that can be dropped counts as free.
    """
    return min(_limits(meminfo, cgroup), default=None)


def _limits(meminfo: Path, cgroup: Path) -> Iterator[int]:
    for line in _text(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) << 10
    most, taken = _text(cgroup / "memory.max").strip(), _text(cgroup / "memory.current").strip()
    if most.isdigit() and taken.isdigit():
        droppable = [
            int(line.split()[1])
            for line in _text(cgroup / "memory.stat").splitlines()
            if line.startswith("inactive_file ")
        ]
        yield int(most) - int(taken) + sum(droppable)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

_LEAST_BYTES = 256 << 20

_READS = 12


@dataclass(frozen=True)
class Bandwidth:
    """The fastest of some reads of an array much larger than the last cache.

    A floor: NumPy's loop on as many threads may not reach what the memory can give.
    """

    bytes_per_second: float
    array_bytes: int
    threads: int
    reads: int

    def __str__(self) -> str:
        """Return a sentence on what was measured, and how."""
        return (
            f"{self.bytes_per_second / 1e9:.1f} GB/s of memory read, at least: the fastest of "
            f"{self.reads} reads of {size(self.array_bytes)} in NumPy by {self.threads} "
            f"thread{'s' if self.threads > 1 else ''}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {**asdict(self), "bytes_per_second": round(self.bytes_per_second)}


def measure_bandwidth(
    threads: int, array_bytes: int | None = None, reads: int = _READS
) -> Bandwidth:
    """Read an array some times over, each thread a part of it, and keep the fastest time.

    The fastest, because whatever else runs can only slow a read down. A reduction by bitwise or
    does least to each word that it reads, and NumPy lets other threads run meanwhile.
    """
    words = (array_bytes or _array_bytes()) // 8
    parts = np.array_split(np.ones(words, np.uint64), threads)  # written, so that pages exist
    with ThreadPoolExecutor(threads) as pool:
        times = []
        for _ in range(reads):
            began = perf_counter_ns()
            list(pool.map(np.bitwise_or.reduce, parts))
            times.append(perf_counter_ns() - began)
    return Bandwidth(words * 8 / (min(times) / 1e9), words * 8, threads, reads)


def _array_bytes() -> int:
    """Return four times the last cache, within an eighth of what memory is free."""
    free = available_bytes()
    wanted = max(_LEAST_BYTES, 4 * last_cache_bytes())
    return wanted if free is None else max(1 << 20, min(wanted, free // 8))


def last_cache_bytes(caches: Path = _CACHES) -> int:
    """Return the size of the largest cache a core reads through; 0 where the system hides it."""
    units = {"K": 10, "M": 20, "G": 30}
    largest = 0
    for file in caches.glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        if text[:-1].isdigit() and text[-1] in units:
            largest = max(largest, int(text[:-1]) << units[text[-1]])
    return largest


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
        """Return in which way another machine differs, this one first; None where it does not."""
        for field in fields(self):
            mine, its = getattr(self, field.name), getattr(other, field.name)
            if mine != its:
                return f"{field.name.replace('_', ' ')} {mine or 'none'}, not {its or 'none'}"
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


DRIVER = "libcuda.so.1"

_NAME_BYTES = 256

_INTEGRATED, _MAJOR, _MINOR = 18, 75, 76
"""CU_DEVICE_ATTRIBUTE_INTEGRATED, _COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h."""


@dataclass(frozen=True)
class Devices:
    """The NVIDIA devices of this machine by name, and why there are none where there are none."""

    names: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA device; what is not known is 0 or empty."""

    id: int
    name: str
    capability: str = ""
    """The compute capability, as in `8.7`."""
    memory_bytes: int = 0
    integrated: bool = False
    """Whether it shares its memory with the processor, as on a Jetson."""


@dataclass(frozen=True)
class Survey:
    """The devices and versions of the driver, or why there are none."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""
    cuda: tuple[int, int] = (0, 0)
    """The newest CUDA the driver knows."""
    driver: str = ""
    """The version of the driver, as in `580.65.06`."""

    def lacks(self, device_id: int = 0) -> str:
        """Return why a device cannot be used; empty where it is there."""
        if self.problem:
            return self.problem
        if not 0 <= device_id < len(self.gpus):
            count = len(self.gpus)
            known = "devices 0 to " + str(count - 1) if count > 1 else "device 0 alone"
            return f"device {device_id} was asked for, and there is {known}"
        return ""


def find_devices(driver: str = DRIVER) -> Devices:
    """Ask the driver for its devices; the engine libraries only log why they found none."""
    devices = survey(driver)
    return Devices(tuple(gpu.name for gpu in devices.gpus), devices.problem)


def survey(driver: str = DRIVER, proc: Path = _PROC) -> Survey:
    """Ask the driver for its devices and what they are."""
    try:
        library = ctypes.CDLL(driver)
    except OSError:
        return Survey(problem=f"no NVIDIA driver: {driver} is not there")
    count = ctypes.c_int()
    code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    problem, gpus = "", tuple[Gpu, ...]()
    if code:
        problem = f"the NVIDIA driver answers: {_driver_reason(library, code)}"
    elif not count.value:
        problem = "the NVIDIA driver knows no device"
    else:
        gpus = tuple(_describe_gpu(library, index) for index in range(count.value))
    return Survey(gpus, problem, _newest_cuda(library), driver_version(proc))


def driver_version(proc: Path = _PROC) -> str:
    """Return the version of the kernel's NVIDIA driver; empty where there is none."""
    try:
        text = (proc / "driver" / "nvidia" / "version").read_text("utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)\b", text)
    return match.group(1) if match else ""


def _driver_reason(library: Any, code: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorString(code, ctypes.byref(text))
    return (text.value or b"").decode(errors="replace") or f"error {code}"


def _newest_cuda(library: Any) -> tuple[int, int]:
    version = ctypes.c_int()
    if _driver_call(library, "cuDriverGetVersion", ctypes.byref(version)):
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10


def _describe_gpu(library: Any, index: int) -> Gpu:
    device, name, memory = (
        ctypes.c_int(),
        ctypes.create_string_buffer(_NAME_BYTES),
        ctypes.c_size_t(),
    )
    if library.cuDeviceGet(ctypes.byref(device), index):
        return Gpu(index, "unknown")
    library.cuDeviceGetName(name, _NAME_BYTES, device)
    _driver_call(library, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    major, minor, shared = (
        _device_attribute(library, device, which) for which in (_MAJOR, _MINOR, _INTEGRATED)
    )
    return Gpu(
        id=index,
        name=name.value.decode(errors="replace") or "unknown",
        capability=f"{major}.{minor}" if major else "",
        memory_bytes=memory.value,
        integrated=bool(shared),
    )


def _device_attribute(library: Any, device: Any, which: int) -> int:
    value = ctypes.c_int()
    code = _driver_call(library, "cuDeviceGetAttribute", ctypes.byref(value), which, device)
    return 0 if code else value.value


def _driver_call(library: Any, name: str, *arguments: Any) -> int:
    """Call a function of the driver; a library without it answers as one that failed."""
    function = getattr(library, name, None)
    return -1 if function is None else int(function(*arguments))
