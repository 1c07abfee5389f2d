"""What this machine is: GPU, driver, libraries, board."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict
from importlib import metadata
from typing import Any

from gpucheck.place import ROOT, Place
from gpucheck.step import Facts, NotRunError
from specrt.engine.tensorrt.engine_record import this_device
from specrt.engine.tensorrt.library import (
    FLAVOURS,
    is_installed,
    lacks_to_build,
    lacks_to_run,
    open_library,
)
from specrt.errors import SpecrtError
from specrt.system import read_jetson
from specrt.system.gpu import Survey

DISTRIBUTIONS = (
    "specrt", "onnxruntime", "onnxruntime-gpu", "onnx", "numpy", "torch", "transformers",
    "cuda-bindings", "tensorrt", "tensorrt-rtx",
)  # fmt: skip
TENSORRT = tuple(FLAVOURS)
BACKENDS = (*TENSORRT, "ort-cuda")


def environment(place: Place, backend: str = "") -> Facts:
    """Return all that is known of the machine; every part of it may be missing."""
    found, jetson = place.found, read_jetson()
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "gpus": [asdict(gpu) for gpu in found.gpus],
        "problem": found.problem,
        "driver": found.driver,
        "driver_cuda": ".".join(map(str, found.cuda)),
        "tensorrt": {name: _flavour(name, found) for name in TENSORRT},
        "onnxruntime_providers": _providers(),
        "versions": {name: _version(name) for name in DISTRIBUTIONS if _version(name)},
        "jetson": asdict(jetson) if jetson else None,
        "commit": _commit(),
    }


def _flavour(backend: str, found: Survey) -> dict[str, Any]:
    if not is_installed(backend):
        return {"installed": False}
    try:
        library = open_library(backend)
    except SpecrtError as error:
        return {"installed": True, "problem": str(error)}
    return {
        "installed": True,
        "version": library.version,
        "capabilities": list(library.capabilities),
        "lacks_to_run": lacks_to_run(backend, found),
        "lacks_to_build": lacks_to_build(backend, found),
    }


def _providers() -> list[str]:
    try:
        import onnxruntime

        return list(onnxruntime.get_available_providers())
    except Exception as error:  # a broken installation raises anything
        return [f"none: {error}"]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if not done.returncode else ""


def no_gpu(found: Survey) -> str:
    """Say that no GPU answers, and why."""
    return f"no GPU ({found.problem})"


def why_not(backend: str, found: Survey) -> str:
    """Say why a backend cannot run here; empty where it may.

    A list of compute capabilities that a library gives is not believed: the plans are tried.
    """
    if found.problem:
        return no_gpu(found)
    if backend == "ort-cuda":
        from specrt.engine.ort_cuda import missing, unloadable

        return missing() or unloadable() or ""
    try:
        library = open_library(backend)
        this_device(library, found=found)
        from specrt.engine.tensorrt.cuda import cuda_bindings

        cuda_bindings()
    except SpecrtError as error:
        return str(error)
    return ""


def require(backend: str, found: Survey) -> None:
    """Raise NotRunError where a backend cannot run here."""
    if lacks := why_not(backend, found):
        raise NotRunError(lacks)


def backends(place: Place, backend: str = "") -> Facts:
    """Return for each backend that it may run here, or why it cannot."""
    return {name: why_not(name, place.found) or "may run" for name in BACKENDS}
