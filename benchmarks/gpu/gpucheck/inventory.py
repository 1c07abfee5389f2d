"""What this machine is: GPU, driver, packages, board; and whether a backend's library is there."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict
from importlib import metadata
from typing import Any

from gpucheck.evidence import Evidence, Facts
from gpucheck.settings import ROOT
from specrt.engine.tensorrt.library import FLAVOURS, lacks_to_build, lacks_to_run, open_library
from specrt.errors import SpecrtError
from specrt.system.gpu import survey
from specrt.system.machine import read_jetson

DISTRIBUTIONS = (
    "specrt", "onnxruntime", "onnxruntime-gpu", "onnx", "numpy", "torch", "transformers",
    "cuda-bindings", "tensorrt", "tensorrt-rtx-cu13",
)  # fmt: skip
TENSORRT = tuple(FLAVOURS)


def collect(bench: Any, backend: str, evidence: Evidence) -> None:
    """Add all that can be known of the machine, the driver last; what cannot says why."""
    evidence.add(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions={name: _version(name) for name in DISTRIBUTIONS if _version(name)},
    )
    for name, source in {"commit": _commit, "jetson": _board}.items():
        try:
            fact: Any = source()
        except Exception as error:  # one that is not known keeps no other from being so
            fact = f"unknown: {type(error).__name__}: {error}"
        evidence.add({name: fact})
    found = survey()
    evidence.add(
        problem=found.problem,
        gpus=[asdict(gpu) for gpu in found.gpus],
        driver=found.driver,
        driver_cuda=".".join(map(str, found.cuda)),
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return done.stdout.strip()


def _board() -> Facts | None:
    board = read_jetson()
    return asdict(board) if board else None


def library_facts(backend: str) -> Facts:
    """Return what is known of a backend's library, with what it `lacks` to run here.

    A list of compute capabilities does not decide: plans are tried.
    """
    if backend == "ort-cuda":
        import onnxruntime

        from specrt.engine.ort.cuda_engine import missing, unloadable

        providers = list(onnxruntime.get_available_providers())
        lacks = missing() or unloadable()
        return {"version": onnxruntime.__version__, "providers": providers, "lacks": lacks}
    try:
        library = open_library(backend)
    except SpecrtError as error:
        return {"lacks": str(error)}
    return {
        "version": library.version,
        "capabilities": list(library.capabilities),
        "lacks_to_run": lacks_to_run(backend, survey()),
        "lacks_to_build": lacks_to_build(backend, survey()),
    }
