"""Wheels: what their library needs, the same bytes twice, the kernels of every processor."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

import wheels
from shared import REPOSITORY
from specrt.engine.ort.kernels import KERNELS
from support.kernels import instruction_sets


def test_a_library_that_needs_more_than_its_tag_says_makes_no_wheel(tmp_path: Path) -> None:
    """Such as one that was compiled for this machine."""
    if "libstdc++" not in subprocess.check_output(["readelf", "-d", KERNELS], text=True):
        pytest.skip("the library here needs no C++ library")
    wheel = tmp_path / "one.whl"
    with ZipFile(wheel, "w") as archive:
        archive.write(KERNELS, "specrt/libspecrt_kernels.so")
    with pytest.raises(SystemExit, match=r"one\.whl needs .*libstdc\+\+\.so\.6.*glibc 2\.28"):
        wheels.check_library(wheel)
    assert not wheel.exists()


@pytest.mark.nightly
def test_two_clones_make_the_same_wheel_with_all_kernels(tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="`make wheel` installs Zig, which links the library")
    if not shutil.which("x86_64-linux-gnu-g++"):
        pytest.skip("no GCC for x86-64")
    made = []
    for name, umask in (("one", 0o022), ("another", 0o077)):
        clone = tmp_path / name
        command = f"umask {umask:o}; git clone -q {REPOSITORY} {clone}"
        subprocess.run(["sh", "-c", command], check=True)
        tool = str(clone / "tools" / "wheels.py")
        subprocess.run([sys.executable, tool, "x86_64"], check=True, env={**os.environ, "TZ": name})
        made += (clone / "dist").glob("*.whl")
    first, second = (hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in made)
    assert first == second
    with ZipFile(made[0]) as archive:
        path = archive.extract("specrt/libspecrt_kernels.so", tmp_path)
        library = ctypes.CDLL(path)
        assert {
            f"specrt/engines/{name}/recipe.toml" for name in ("codelet", "itn", "qwen3-4b")
        } <= {*archive.namelist()}
    library.specrt_kernels_supported.restype = ctypes.c_char_p
    assert library.specrt_kernels_supported().decode().split() == instruction_sets()
    code = "import _ctypes, sys; _ctypes.dlclose(_ctypes.dlopen(sys.argv[1], 2))"
    subprocess.run([sys.executable, "-c", code, path], check=True)  # ends without a fault
