"""What this machine can run and build, and what is missing for more."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from specrt.cuda import find_devices
from specrt.libraries import ONNXRUNTIME, installed
from specrt.machine import vector_units


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what was found, and the remedy where it is missing."""

    name: str
    found: str
    works: bool
    remedy: str = ""


_EXPORT = 'pip install "specrt[export]"'
_LIBRARIES = (
    ("onnxruntime", "runs bundles", "pip install specrt"),
    ("tokenizers", "reads and writes text", "pip install specrt"),
    ("jinja2", "renders chat templates", "pip install specrt"),
    ("onnx", "builds bundles from portable graphs", 'pip install "specrt[build]"'),
    ("torch", "exports checkpoints", _EXPORT),
    ("transformers", "exports checkpoints", _EXPORT),
    ("onnxscript", "exports checkpoints", _EXPORT),
    ("onnx_ir", "exports checkpoints", _EXPORT),
    ("huggingface_hub", "fetches checkpoints by name", _EXPORT),
)


def machine() -> list[Finding]:
    """Return what is known about the machine itself."""
    cores = len(os.sched_getaffinity(0))
    return [
        Finding("Python", platform.python_version(), sys.version_info >= (3, 10)),
        Finding("system", f"{platform.system()} {platform.machine()}", True),
        Finding("cores", f"{cores} of {os.cpu_count()} usable", True),
        Finding("memory", _memory(), True),
        Finding("vector units", vector_units() or "none known", True),
        _devices(),
    ]


def libraries() -> list[Finding]:
    """Return which libraries are installed, without importing the heavy ones."""
    return [_library(*row) for row in _LIBRARIES]


def abilities() -> list[Finding]:
    """Return what can be done here."""
    have = {f.name for f in libraries() if f.works}
    runs = {"onnxruntime", "tokenizers"} <= have
    builds = runs and "onnx" in have
    exports = builds and {"torch", "transformers", "onnxscript", "onnx_ir"} <= have
    return [
        Finding("run ort-cpu bundles", _yes(runs), runs, "pip install specrt"),
        _runs_ort_cuda(runs),
        Finding("build from portable graphs", _yes(builds), builds, 'pip install "specrt[build]"'),
        Finding("export checkpoints", _yes(exports), exports, _EXPORT),
    ]


def best_backend() -> str:
    """Return the fastest backend that this machine can run."""
    return "ort-cpu" if _lacks_for_cuda() else "ort-cuda"


def _devices() -> Finding:
    found = find_devices()
    names = ", ".join(found.names) or f"none ({found.problem})"
    return Finding("NVIDIA GPU", names, bool(found.names), "only ort-cuda bundles need one")


def _runs_ort_cuda(runs: bool) -> Finding:
    name, lacks = "run ort-cuda bundles", "" if runs else "pip install specrt"
    if runs:
        lacks = _lacks_for_cuda()
    return Finding(name, _yes(not lacks), not lacks, lacks)


def _lacks_for_cuda() -> str:
    """Say what an ort-cuda bundle would miss here; the provider's libraries are tried last."""
    try:
        from specrt.engines.cuda_session import INSTALL, missing, unloadable
    except Exception as error:  # a broken installation of the library raises anything
        return f"onnxruntime cannot be imported ({error}); install it again"
    lacks = missing()
    if lacks:
        return lacks
    absent = unloadable()
    return f"{absent}; {INSTALL}" if absent else ""


def _yes(able: bool) -> str:
    return "yes" if able else "no"


def _library(name: str, purpose: str, remedy: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, f"missing: {purpose}", False, remedy)
    found = installed(ONNXRUNTIME if name == "onnxruntime" else (name,))
    if len(found) > 1:
        both = " and ".join(f"{label} {number}" for label, number in found.items())
        said = f"{both} in one place: the last installed wins; uninstall both, then install one"
        return Finding(name, said, True)
    label, number = next(iter(found.items()), (name, "of unknown version"))
    kind = "" if label == name else f" ({label})"
    return Finding(name, f"{number}{kind}: {purpose}", True)


def _memory() -> str:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return (
            f"{kib['MemAvailable'] / (1 << 20):.1f} of {kib['MemTotal'] / (1 << 20):.1f} GiB free"
        )
    except (OSError, KeyError, ValueError, IndexError):
        return "unknown"
