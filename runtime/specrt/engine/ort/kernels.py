"""The CPU kernels: a library that is compiled where specrt is installed, if a compiler is there."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from reprlib import repr as short

import numpy as np
from numpy.typing import NDArray

from specrt.errors import BundleError

KERNELS = Path(__file__).parents[2] / "libspecrt_kernels.so"

SWITCH = "SPECRT_KERNELS"
"""The environment variable that names an instruction set to use instead of the best one."""

LAYOUT = "strips of 4 tiles of 16, norms in products, cross attention"
"""Changes when graphs or weights are made otherwise: a library compiled before is refused then, and
so are bundles that `_EARLIER` does not name."""

_EARLIER = "strips of 4 tiles of 16, norms in products"
"""The layout of before there was cross attention; what was made for it is read as it is."""

LINE = 16
"""Floats of a line of a cache."""

CONTRIB = "onnxruntime"
"""The layout of graphs of ONNX Runtime's own operators, made where the library is missing."""

_COMPILER = (
    "a C++17 compiler (Debian, Ubuntu: `apt install g++`; Fedora: `dnf install gcc-c++`; macOS: "
    "`xcode-select --install`)"
)


def missing_kernels() -> str:
    """Return that the library is missing, and the remedy; empty where it is there."""
    if KERNELS.is_file():
        return ""
    return (
        "specrt's CPU kernels are missing, because no compiler was found when it was installed; "
        + install_kernels()
    )


def install_kernels() -> str:
    """Return how the library is compiled again; pip may have kept a wheel without it."""
    return f"install {_COMPILER}, then {_compile_again()}"


def _compile_again() -> str:
    clone = (Path(__file__).parents[4] / "Makefile").is_file()
    pip = "pip install --force-reinstall --no-deps --no-cache-dir specrt"
    return f"run `{'make -B setup' if clone else pip}`"


def instruction_sets() -> tuple[str, list[str]]:
    """Return the instruction set in use, and all that this processor has, best first.

    The first is empty where `SPECRT_KERNELS` names none of them.
    Raises: OSError where the library cannot be loaded.
    """
    library = ctypes.CDLL(str(KERNELS))
    texts = []
    for function in (library.specrt_kernels, library.specrt_kernels_supported):
        function.restype = ctypes.c_char_p
        texts.append((function() or b"").decode())
    return texts[0], texts[1].split()


def kernels_layout() -> str:
    """Return the layout that the library reads: `LAYOUT`, where this version was compiled.

    Empty where it is so old that it does not say. Raises: OSError where it cannot be loaded.
    """
    function = getattr(ctypes.CDLL(str(KERNELS)), "specrt_kernels_layout", None)
    if function is None:
        return ""
    function.restype = ctypes.c_char_p
    return bytes(function()).decode()


def check_kernels(bundle: Path, versions: Mapping[str, str]) -> None:
    """Refuse a bundle whose engines are of another layout, or need the library where it is missing.

    Raises: BundleError with the remedy.
    """
    built, lacks = versions.get("kernels"), missing_kernels()
    made_for_kernels = built in (LAYOUT, _EARLIER)
    if not made_for_kernels and built != CONTRIB:
        was = "before there were CPU kernels" if built is None else f"for kernels of {short(built)}"
        raise BundleError(
            f"{bundle} was built {was}, and this specrt reads {LAYOUT!r} and {CONTRIB!r}; build it "
            "again with `specrt build RECIPE`"
        )
    if made_for_kernels and not lacks and kernels_layout() != LAYOUT:
        raise BundleError(
            f"specrt's CPU kernels were compiled for {kernels_layout()!r}, and this version of "
            f"specrt has {LAYOUT!r}; {_compile_again()}"
        )
    if made_for_kernels and lacks:
        raise BundleError(
            f"{bundle} was built for specrt's CPU kernels: {lacks}. Or build it again here, for "
            "slower ones, with `specrt build RECIPE`"
        )


def kernels_notice(versions: Mapping[str, str]) -> str:
    """Return why a bundle runs without the kernels, and the remedy; empty where it runs on them."""
    if versions.get("kernels") != CONTRIB:
        return ""
    lacks, again = missing_kernels(), "build the bundle again with `specrt build RECIPE`"
    if lacks:
        return f"this bundle runs on slower kernels: {lacks}, and {again}"
    return f"this bundle was built without specrt's CPU kernels, which are here now; {again}"


def aligned_zeros(shape: Sequence[int]) -> NDArray[np.float32]:
    """Return zeros that begin with a line of a cache.

    A vector that lies in two lines is read twice, and attention takes 1.3 times as long.
    """
    size = prod(shape)
    zeros = np.zeros(size + LINE, np.float32)
    first = -(zeros.ctypes.data // zeros.itemsize) % LINE
    return zeros[first : first + size].reshape(shape)
