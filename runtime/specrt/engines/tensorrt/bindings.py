"""The CUDA runtime with every answer checked; it answers with codes and raises nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from specrt.cuda import survey
from specrt.errors import EngineError

BINDINGS = "cuda.bindings.runtime"
LOST = frozenset({
    "cudaErrorECCUncorrectable", "cudaErrorNvlinkUncorrectable", "cudaErrorContained",
    "cudaErrorIllegalAddress", "cudaErrorLaunchTimeout", "cudaErrorContextIsDestroyed",
    "cudaErrorAssert", "cudaErrorHardwareStackError", "cudaErrorIllegalInstruction",
    "cudaErrorMisalignedAddress", "cudaErrorInvalidAddressSpace", "cudaErrorInvalidPc",
    "cudaErrorLaunchFailure", "cudaErrorTensorMemoryLeak", "cudaErrorMpsClientTerminated",
    "cudaErrorExternalDevice", "cudaErrorUnknown",
})  # fmt: skip
"""Errors after which every call of the process fails, as the CUDA runtime documents them."""
_SIGNS = (
    "illegal memory access", "unspecified launch failure", "uncorrectable ecc", "hardware stack",
    "misaligned address", "illegal instruction", "launch timed out", "device-side assert",
    "invalid program counter", "cudaerror 700", "cudaerror 719", "cudaerror 214",
)  # fmt: skip
"""How CUDA words those errors that kernels can cause, and how TensorRT numbers them."""
_REMEDY = "the device is lost to this process: start it again"
_OLD = ("cudaErrorInsufficientDriver", "cudaErrorCallRequiresNewerDriver")
_GIB = 1 << 30


def lost(text: str) -> str:
    """Return what to add to a message of TensorRT: that the device is lost, or nothing."""
    low = text.lower()
    return f"; {_REMEDY}" if any(sign in low for sign in _SIGNS) else ""


def size(count: int) -> str:
    """Return a number of bytes for people."""
    return f"{count / _GIB:.2f} GiB" if count >= _GIB // 100 else f"{count / (1 << 20):.2f} MiB"


def install(knows: tuple[int, int]) -> str:
    """Say how to install the bindings that suit the newest CUDA a driver knows."""
    wanted = f"=={knows[0]}.*" if knows[0] else ""
    return f"`pip install 'cuda-bindings{wanted}'`"


def cuda_bindings() -> Any:
    """Import the CUDA runtime.

    Raises: EngineError naming the remedy where it is missing or broken.
    """
    try:
        return importlib.import_module(BINDINGS)
    except Exception as error:  # broken installations raise anything
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EngineError(
            f"{BINDINGS} cannot be imported ({said}); {install(survey().cuda)}"
        ) from error


class Checked:
    """Calls of the CUDA runtime; what they answer begins with a code."""

    def __init__(self, runtime: Any, knows: tuple[int, int]) -> None:
        self._runtime, self._knows = runtime, knows

    def ask(self, doing: str, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what a call answers.

        Raises: EngineError saying what was being done and what the runtime said.
        """
        values: list[Any]
        code, *values = call(*arguments)
        if code:
            raise self.error(doing, code)
        return values

    def attempt(self, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what a call answers, nothing where it fails; never raises."""
        try:
            code, *values = call(*arguments)
        except Exception:  # closing goes on, whatever the bindings raise
            return []
        return [] if code else values

    def reserve(self, purpose: str, count: int, call: Callable[..., Any], *arguments: Any) -> int:
        """Return the address of new memory.

        Raises: EngineError with the bytes needed and free where there is not enough.
        """
        values: list[Any]
        code, *values = call(*arguments)
        if not code:
            return int(values[0])
        if code != self._runtime.cudaError_t.cudaErrorMemoryAllocation:
            raise self.error(f"allocate {purpose}", code)
        self.attempt(self._runtime.cudaGetLastError)  # it does not stick; nobody shall see it again
        free = "less is free"
        if memory := self.attempt(self._runtime.cudaMemGetInfo):
            free = f"{size(memory[0])} of {size(memory[1])} are free"
        raise EngineError(
            f"cannot allocate {purpose}: {size(count)} are needed and {free} on the GPU; close "
            "what else uses it, or build with a smaller max_length, batch or precision"
        )

    def error(self, doing: str, code: Any) -> EngineError:
        """Return what a code means, and what to do."""
        name = _text(self._runtime.cudaGetErrorName(code))
        said = f"cannot {doing}: {name} ({_text(self._runtime.cudaGetErrorString(code))})"
        if name in LOST:
            return EngineError(f"{said}; {_REMEDY}")
        if name in _OLD:
            knows = ".".join(map(str, self._knows))
            return EngineError(f"{said}; the driver knows CUDA {knows}: {install(self._knows)}")
        return EngineError(f"{said}; `specrt doctor` tells what this machine has")


def _text(answer: Any) -> str:
    raw = answer[1]
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)
