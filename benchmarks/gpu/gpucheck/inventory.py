"""What this machine is: GPU, driver, libraries, board, and which backends may run here."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from typing import Any

from gpucheck.evidence import Evidence
from gpucheck.settings import ROOT
from specrt.engine.tensorrt.engine_record import this_device
from specrt.engine.tensorrt.library import (
    FLAVOURS,
    is_installed,
    lacks_to_build,
    lacks_to_run,
    open_library,
)
from specrt.errors import SpecrtError
from specrt.system import Survey, read_jetson, survey

DISTRIBUTIONS = (
    "specrt", "onnxruntime", "onnxruntime-gpu", "onnx", "numpy", "torch", "transformers",
    "cuda-bindings", "tensorrt", "tensorrt-rtx",
)  # fmt: skip
TENSORRT = tuple(FLAVOURS)
BACKENDS = ("ort-cuda", *TENSORRT)


class Machine:
    """What can be known without an engine library."""

    def survey(self) -> Survey:
        """Return what the driver tells of this machine."""
        return survey()

    def lacks(self, backend: str) -> str:
        """Return why a backend cannot run here; empty where it may.

        A library's list of compute capabilities does not decide: plans are tried.
        """
        gpus = self.survey()
        if gpus.problem:
            return f"no GPU ({gpus.problem})"
        try:
            return _lacks(backend, gpus)
        except SpecrtError as error:
            return str(error)
        except Exception as error:  # a broken installation raises anything
            return f"{type(error).__name__}: {error}"


def collect(machine: Machine, backend: str, evidence: Evidence) -> None:
    """Add all that can be known of the machine; what cannot is a fact with its reason."""
    gpus = machine.survey()
    evidence.add(
        problem=gpus.problem,
        gpus=[asdict(gpu) for gpu in gpus.gpus],
        driver=gpus.driver,
        driver_cuda=".".join(map(str, gpus.cuda)),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions={name: _version(name) for name in DISTRIBUTIONS if _version(name)},
    )
    sources: dict[str, Callable[[], Any]] = {
        "commit": _commit,
        "jetson": lambda: asdict(board) if (board := read_jetson()) else None,
        "onnxruntime_providers": _providers,
        **{name: lambda name=name: _tensorrt(name, gpus) for name in TENSORRT},
    }
    for name, source in sources.items():
        try:
            fact = source()
        except Exception as error:  # a broken installation raises anything
            fact = f"unknown: {type(error).__name__}: {error}"
        evidence.add({name: fact})
    backends = evidence.part("backends")
    for name in BACKENDS:
        backends.add({name: machine.lacks(name)})


def _lacks(backend: str, gpus: Survey) -> str:
    if backend == "ort-cuda":
        from specrt.engine.ort_cuda import missing, unloadable

        return missing() or unloadable() or ""
    from specrt.engine.tensorrt.device import cuda_bindings

    this_device(open_library(backend), devices=gpus)
    cuda_bindings()
    return ""


def _tensorrt(backend: str, gpus: Survey) -> dict[str, Any]:
    if not is_installed(backend):
        return {"installed": False}
    library = open_library(backend)
    return {
        "installed": True,
        "version": library.version,
        "capabilities": list(library.capabilities),
        "lacks_to_run": lacks_to_run(backend, gpus),
        "lacks_to_build": lacks_to_build(backend, gpus),
    }


def _providers() -> list[str]:
    import onnxruntime

    return list(onnxruntime.get_available_providers())


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return done.stdout.strip()
