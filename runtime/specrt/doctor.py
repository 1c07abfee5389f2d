"""What this machine can run and build, and what is missing for more."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specrt.bundle import ONNXRUNTIME, installed
from specrt.engine.backends import BACKENDS
from specrt.engine.ort.kernels import SWITCH, install_kernels, instruction_sets, missing_kernels
from specrt.engine.tensorrt.library import form_of
from specrt.errors import BuildError, how_to_install
from specrt.system.gpu import Survey, survey
from specrt.system.machine import Jetson, read_jetson, vector_units
from specrt.system.memory import size


@dataclass(frozen=True)
class Check:
    """One finding, and the remedy where something is missing."""

    name: str
    found: str
    works: bool
    remedy: str = ""


_EXPORT, _BUILD = how_to_install("export"), how_to_install("build")

_ALIGN, _SERVE = how_to_install("align"), how_to_install("serve")

_STRUCTURED = how_to_install("structured")

EXPORTERS = ("torch", "transformers", "onnxscript", "onnx_ir", "optimum", "requests")
"""What turns a checkpoint into a graph."""


def missing_exporter() -> str | None:
    """Return the first library that turning a checkpoint into a graph lacks; None imports it."""
    return next((name for name in EXPORTERS if not _is_there(name)), None)


def check_exporter() -> None:
    """Refuse to build from a checkpoint, before one is fetched, where nothing can export it.

    Raises: BuildError.
    """
    absent = missing_exporter()
    if absent is not None:
        raise BuildError(
            f"building from a checkpoint needs {absent}; install it with "
            f"`{how_to_install('export')}`, or name in a recipe the `graph` that `specrt export "
            "CHECKPOINT --config-only` writes on another machine"
        )


_LIBRARIES = (
    ("onnxruntime", "runs bundles", "pip install specrt"),
    ("tokenizers", "reads and writes text", "pip install specrt"),
    ("jinja2", "renders chat templates", "pip install specrt"),
    ("onnx", "builds bundles from portable graphs", _BUILD),
    ("torch", "exports checkpoints", _EXPORT),
    ("transformers", "exports checkpoints", _EXPORT),
    ("onnxscript", "exports checkpoints", _EXPORT),
    ("onnx_ir", "exports checkpoints", _EXPORT),
    ("huggingface_hub", "fetches checkpoints by name", _EXPORT),
    ("matplotlib", "draws how a draft was trained", _ALIGN),
    ("llguidance", "keeps texts to schemas and grammars", _STRUCTURED),
    ("fastapi", "serves bundles over HTTP", _SERVE),
    ("uvicorn", "serves bundles over HTTP", _SERVE),
)

_NVIDIA = (
    ("tensorrt", "runs and builds tensorrt bundles", "comes with JetPack or NVIDIA's containers"),
    ("tensorrt_rtx", "runs and builds tensorrt-rtx bundles", "pip install tensorrt-rtx"),
    ("cuda.bindings", "lets TensorRT bundles use a GPU", "pip install cuda-bindings"),
)

_NAMED = {
    "onnxruntime": ONNXRUNTIME,
    "cuda.bindings": ("cuda-bindings",),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt_rtx": ("tensorrt-rtx", "tensorrt_rtx"),
}
"""Modules that packages of other names, or more than one, bring."""

_POSITIONS = 2048

_KV_BYTES = 2 * 32 * 8 * 128 * 2 * _POSITIONS
"""Keys and values of 32 layers with 8 heads of 128 in fp16, as models of 7 to 8 B have them."""

_OWN_BYTES = 1 << 30
"""For CUDA, TensorRT and working memory."""

_PARAMETER_BYTES = {"fp16": 2.0, "int8": 1.01, "int4": 0.52}
"""With the scales; int4 in blocks of 128."""


def machine() -> list[Check]:
    """Return what is known about the machine itself."""
    cores = len(os.sched_getaffinity(0))
    return [
        Check("Python", platform.python_version(), sys.version_info >= (3, 10)),
        Check("system", f"{platform.system()} {platform.machine()}", True),
        Check("cores", f"{cores} of {os.cpu_count()} usable", True),
        Check("memory", _memory(), True),
        Check("vector units", vector_units() or "none known", True),
        *_devices(survey(), read_jetson()),
    ]


def libraries() -> list[Check]:
    """Return which libraries and tools are installed, without importing the heavy ones.

    Those for NVIDIA's GPUs are told of where there is one, or they are installed.
    """
    nvidia = [_library(*row) for row in _NVIDIA]
    shown = nvidia if survey().gpus else [check for check in nvidia if check.works]
    return [_kernels(), *(_library(*row) for row in _LIBRARIES), *map(_tool, BUILD_TOOLS), *shown]


class BuildTool(NamedTuple):
    """A program that compiling libspecrt takes: one of several, or what a variable names."""

    name: str
    programs: tuple[str, ...]
    variable: str
    remedy: str

    def find(self) -> str | None:
        """Return what there is of it; None where it is missing."""
        return os.environ.get(self.variable) or next(filter(shutil.which, self.programs), None)


BUILD_TOOLS = (
    BuildTool("cmake", ("cmake",), "", "pip install cmake"),
    BuildTool("C++ compiler", ("c++", "g++", "clang++"), "CXX", "apt install g++"),
    BuildTool("build tool", ("make", "gmake", "ninja"), "CMAKE_GENERATOR", "apt install make"),
)


def _tool(tool: BuildTool) -> Check:
    found = tool.find()
    text = f"{found or 'missing'}: compiles libspecrt"
    return Check(tool.name, text, found is not None, tool.remedy)


def abilities() -> list[Check]:
    """Return what can be done here; without a GPU one line stands for all that takes one."""
    checks = {check.name: check for check in libraries()}
    have = {name for name, check in checks.items() if check.works}
    texts = "" if {"onnxruntime", "tokenizers"} <= have else "pip install specrt"
    builds = texts or ("" if "onnx" in have else _BUILD)
    exports = texts or (_EXPORT if builds or missing_exporter() else "")
    tools = (checks[tool.name] for tool in BUILD_TOOLS)
    remedies = {f"run {name} bundles": texts or one.missing() for name, one in BACKENDS.items()}
    remedies["constrain texts"] = "" if "llguidance" in have else _STRUCTURED
    remedies["serve over HTTP"] = "" if {"fastapi", "uvicorn"} <= have else _SERVE
    remedies["build from portable graphs"] = builds
    remedies["export checkpoints"] = exports
    trains = exports or "matplotlib" not in have
    remedies["train drafts"] = texts or (_ALIGN if trains else "")
    remedies["build libspecrt"] = "; ".join(tool.remedy for tool in tools if not tool.works)
    for name, one in BACKENDS.items():
        if one.missing_to_build is not None:
            remedies[f"build {name} plans"] = one.missing_to_build() or builds
    if not survey().gpus:
        gpu = [name for name, one in BACKENDS.items() if not one.host_memory]
        remedies = {
            name: remedy for name, remedy in remedies.items()
            if not remedy or not any(f" {one} " in name for one in gpu)
        }  # fmt: skip
        remedies["run bundles on a GPU"] = f"{', '.join(gpu)} need an NVIDIA GPU and its driver"
    return [
        Check(name, "no" if remedy else "yes", not remedy, remedy)
        for name, remedy in remedies.items()
    ]


def best_backend() -> str:
    """Return the fastest backend that this machine can run."""
    return next(
        (name for name, one in BACKENDS.items() if not one.missing()), next(reversed(BACKENDS))
    )


def fits(memory_bytes: int) -> list[str]:
    """Return the largest models, target and draft together, that fit in memory, by precision.

    Of the memory, a fifth stays free; from the rest go 1 GiB for CUDA, TensorRT and working memory
    and 0.25 GiB for the keys and values of 2048 positions, batch 1, of a model of 7 to 8 B.
    """
    left = memory_bytes * 4 // 5 - _OWN_BYTES - _KV_BYTES
    if left <= 0:
        needed = (_OWN_BYTES + _KV_BYTES) * 5 / 4
        return [f"nothing: at least {size(needed)} are needed before any weights"]
    return [
        f"{name} up to {left / each / 1e9:.1f} B parameters with {_POSITIONS} positions"
        for name, each in _PARAMETER_BYTES.items()
    ]


def _devices(devices: Survey, jetson: Jetson | None) -> list[Check]:
    if not devices.gpus:
        remedy = "only ort-cuda and TensorRT bundles need one"
        none = Check("NVIDIA GPU", f"none ({devices.problem})", False, remedy)
        return [*_board(jetson), none]
    gpus = [
        f"{gpu.name}, capability {gpu.capability or 'unknown'}, "
        f"{size(gpu.memory_bytes)}{' shared with the processor' * gpu.integrated}"
        for gpu in devices.gpus
    ]
    cuda = f"{devices.cuda[0]}.{devices.cuda[1]}, driver {devices.driver or 'of unknown version'}"
    return [
        *_board(jetson),
        Check("NVIDIA GPU", "; ".join(gpus), True),
        Check("CUDA", cuda, True),
        Check("largest models", "; ".join(fits(devices.gpus[0].memory_bytes)), True),
    ]


def _board(jetson: Jetson | None) -> list[Check]:
    """Return what is known of a Jetson; nothing of other machines."""
    if jetson is None:
        return []
    bundled = f"TensorRT {jetson.tensorrt}" if jetson.tensorrt else "a TensorRT not known here"
    linux = f"JetPack {jetson.jetpack or 'unknown'} (Jetson Linux {jetson.release or 'unknown'})"
    mode = f", power mode {jetson.power_mode}" if jetson.power_mode else ""
    here = next(iter(installed(_NAMED["tensorrt"]).values()), "")
    library = here or jetson.tensorrt
    works = not library or form_of(library) is not None
    form = (form_of(library) or "none") if library else "unknown"
    remedy = "" if works else "specrt needs TensorRT 10.3: install JetPack 6.1 or later"
    return [
        Check("Jetson", f"{jetson.model}, {linux} with {bundled}{mode}", True),
        Check("lowering", f"{form}, for TensorRT {library}", works, remedy),
    ]


def _kernels() -> Check:
    """Return which CPU kernels run, and which others could."""
    name, lacks = "CPU kernels", missing_kernels()
    if lacks:
        return Check(name, "missing: make ort-cpu bundles fast", False, lacks)
    try:
        used, supported = instruction_sets()
    except OSError as error:
        return Check(name, f"broken ({error})", False, install_kernels())
    forced = os.environ.get(SWITCH)
    others = ", ".join(one for one in supported if one != used)
    if not used:
        remedy = f"unset {SWITCH}, or name one of these: {', '.join(supported)}"
        return Check(name, f"none: {SWITCH} is {forced!r}", False, remedy)
    how = f", forced by {SWITCH}" if forced else ""
    rest = f"; {SWITCH} may name {others}" if others else ""
    return Check(name, f"{used}{how}{rest}", True)


def _library(name: str, purpose: str, remedy: str) -> Check:
    if not _is_there(name):
        return Check(name, f"missing: {purpose}", False, remedy)
    versions = installed(_NAMED.get(name, (name,)))
    if name != "onnxruntime":
        versions = dict(list(versions.items())[:1])
    if len(versions) > 1:
        both = " and ".join(f"{label} {number}" for label, number in versions.items())
        conflict = f"{both} in one place: the last installed wins; uninstall both, then install one"
        return Check(name, conflict, True)
    label, number = next(iter(versions.items()), (name, "of unknown version"))
    kind = f" ({label})" if name == "onnxruntime" != label else ""
    return Check(name, f"{number}{kind}: {purpose}", True)


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # of the package a module is in
        return False


def _memory() -> str:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        held = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}
        return f"{size(held['MemAvailable'])} of {size(held['MemTotal'])} free"
    except (OSError, KeyError, ValueError, IndexError):
        return "unknown"
