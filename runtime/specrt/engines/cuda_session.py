"""Open an ONNX Runtime session on a GPU, or say what is missing for it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import onnxruntime as ort

from specrt.cuda import find_devices
from specrt.engines.ort import shared_pool
from specrt.errors import EngineError

PROVIDER = "CUDAExecutionProvider"
INSTALL = "`pip uninstall onnxruntime`, then `pip install 'onnxruntime-gpu[cuda,cudnn]'`"
"""Both packages are the one module `onnxruntime`, and the one installed last wins."""


def open_session(path: Path, device: str, device_id: int, captures: bool) -> Any:
    """Open a saved graph on a device.

    Raises: EngineError when there is no such device, a library is missing, or the graph is
        refused.
    """
    if device == "cuda":
        _check_device(path, device_id)
    try:
        session = ort.InferenceSession(
            str(path),
            _options(device),
            providers=[_provider(device, device_id, captures)],
            enable_fallback=0,
        )
    except Exception as error:  # the library raises its own pybind types
        if device == "cuda" and (absent := unloadable()):
            raise EngineError(_not_started(path, absent)) from error
        reason = str(error).splitlines()[0]
        raise EngineError(
            f"ONNX Runtime {ort.__version__} cannot open {path} on {device}: {reason}; ask "
            "`specrt doctor` what is missing, or build the bundle again with this version"
        ) from error
    if device == "cuda" and PROVIDER not in session.get_providers():
        raise EngineError(_not_started(path, unloadable() or "its reason is above"))
    return session


def _not_started(path: Path, reason: str) -> str:
    return (
        f"{path} needs the CUDA provider of ONNX Runtime {ort.__version__}, which does not start: "
        f"{reason}; {INSTALL}"
    )


def missing(device_id: int = 0) -> str:
    """Say what this machine lacks to run on a GPU; empty where nothing is known to be missing."""
    devices = find_devices()
    if devices.problem:
        return f"{devices.problem}; install the driver, or build for ort-cpu"
    if PROVIDER not in ort.get_available_providers():
        return f"onnxruntime {ort.__version__} has no CUDA provider; {INSTALL}"
    if device_id >= len(devices.names):
        return f"device {device_id} was asked for, and there are {len(devices.names)}"
    return ""


_PROBE = """
import contextlib, ctypes, io, pathlib, onnxruntime
with contextlib.redirect_stdout(io.StringIO()):
    getattr(onnxruntime, "preload_dlls", int)()
folder = pathlib.Path(onnxruntime.__file__).parent / "capi"
ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
"""
_PROBE_PATIENCE_S = 60.0


def unloadable() -> str:
    """Say which library the CUDA provider does not find, or how it fails; empty where it loads.

    In a process of its own: ONNX Runtime itself must be the first to load its provider.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, timeout=_PROBE_PATIENCE_S,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not done.returncode:
        return ""
    said = done.stderr.decode(errors="replace").strip().splitlines()
    silent = f"the probe ended with status {done.returncode}"
    return said[-1].removeprefix("OSError: ") if said else silent


def _check_device(path: Path, device_id: int) -> None:
    lacks = missing(device_id)
    if lacks:
        raise EngineError(f"{path} runs on an NVIDIA GPU only: {lacks}")
    if hasattr(ort, "preload_dlls"):
        with redirect_stdout(StringIO()):  # it prints each place where it finds nothing
            ort.preload_dlls()


def _options(device: str) -> Any:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.use_per_session_threads = not shared_pool  # beside a shared pool others are refused
    if device == "cuda":
        options.intra_op_num_threads = 1
        # A node without a CUDA kernel would be slow, and cannot be captured: better an error.
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    else:
        # Only checks run here, beside other work: waiting threads must not take its cores.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _provider(device: str, device_id: int, captures: bool) -> Any:
    if device != "cuda":
        return "CPUExecutionProvider"
    return PROVIDER, {"device_id": str(device_id), "enable_cuda_graph": str(int(captures))}
