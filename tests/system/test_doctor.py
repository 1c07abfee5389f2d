"""What `specrt doctor` finds on machines with and without GPUs, libraries and Jetson's files."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from specrt import doctor
from specrt.doctor import Check, fits
from specrt.engine.ort import cuda_engine
from specrt.engine.tensorrt import library
from specrt.errors import how_to_install
from specrt.system.gpu import Devices, Gpu, Survey
from specrt.system.machine import read_jetson

NO_DRIVER = "no NVIDIA driver: libcuda.so.1 is not there"
TEGRA = "# R{} (release), REVISION: {}, GCID: 38968081, BOARD: generic, EABI: x\n"
MODES = "< POWER_MODEL ID=0 NAME=15W >\nCPU 1\n<POWER_MODEL ID=2 NAME=MAXN_SUPER>\n"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Check]]:
    """Make this another machine; give the findings by name."""

    def make(
        *, provider: bool = True, gpu: bool = True, unloadable: str = "", lacks: Sequence[str] = (),
        absent: str = "", packages: Mapping[str, str] = {}, board: str = "", release: str = "",
        mode: str = "", tools: Sequence[str] = (),
    ) -> dict[str, Check]:  # fmt: skip
        gpus = (Gpu(0, "A GPU", "8.7", 8 << 30, True),) if gpu else ()
        problem = "" if gpu else NO_DRIVER
        major, _, revision = release.partition(".")
        for name, text in {
            "etc/nv_tegra_release": TEGRA.format(major, revision) if release else "",
            "etc/nvpmodel.conf": MODES,
            "proc/device-tree/model": f"{board}\0",
            "var/lib/nvpmodel/status": mode,
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        find_spec = importlib.util.find_spec

        def find(name: str) -> Any:
            if name == absent:
                raise ModuleNotFoundError(name)
            return find_spec(name)

        def lacking(name: str) -> str:
            return f"install {name}" if name in lacks else ""

        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(shutil, "which", lambda name: name if name in tools else None)
        providers = [cuda_engine.PROVIDER] if provider else []
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
        devices = Devices(tuple(gpu.name for gpu in gpus), problem)
        monkeypatch.setattr(cuda_engine, "find_devices", lambda: devices)
        monkeypatch.setattr(cuda_engine, "unloadable", lambda: unloadable)
        monkeypatch.setattr(library, "lacks_to_run", lacking)
        monkeypatch.setattr(library, "lacks_to_build", lacking)
        monkeypatch.setattr(importlib.util, "find_spec", find)
        monkeypatch.setattr(doctor, "survey", lambda: Survey(gpus, problem, (12, 6), "540.4.0"))
        monkeypatch.setattr(doctor, "read_jetson", lambda: read_jetson(tmp_path))
        monkeypatch.setattr(
            doctor, "installed", lambda names: {n: packages[n] for n in names if n in packages}
        )
        findings = [*doctor.machine(), *doctor.libraries(), *doctor.abilities()]
        return {check.name: check for check in findings}

    return make


BOTH = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.30.0"}
RUN_CUDA, RUN_RTX = "run ort-cuda bundles", "run tensorrt-rtx bundles"
OLD_JETSON = {"board": "NVIDIA Jetson AGX", "release": "35.4.1"}
JETSON = {"board": "NVIDIA Jetson Orin", "release": "36.4.9"}
NEW_TENSORRT = {**JETSON, "packages": {"tensorrt": "10.16.1"}}
OF_103 = "JetPack 6 (Jetson Linux 36.4.9) with TensorRT 10.3"
UNKNOWN = "JetPack unknown (Jetson Linux unknown) with a TensorRT not known here"
CHECKS: list[tuple[dict[str, Any], str, str, str]] = [
    ({}, RUN_CUDA, "yes", ""),
    ({"provider": False}, RUN_CUDA, "no", "no CUDA provider; `pip uninstall onnxruntime`"),
    ({"gpu": False}, "run bundles on a GPU", "no", "ort-cuda need an NVIDIA GPU and its driver"),
    ({"absent": "fastapi"}, "serve over HTTP", "no", "make setup-serve"),
    ({"absent": "fastapi"}, "fastapi", "missing: serves", "make setup-serve"),
    ({"absent": "llguidance"}, "constrain texts", "no", "make setup"),
    ({"absent": "onnx"}, "export checkpoints", "no", "make setup-export"),
    ({"absent": "onnx"}, "train drafts", "no", "make setup-align"),
    ({"absent": "optimum"}, "export checkpoints", "no", "make setup-export"),
    ({"absent": "matplotlib"}, "train drafts", "no", "make setup-align"),
    ({"tools": ["make", "c++"]}, "build libspecrt", "no", "pip install cmake"),
    ({"tools": ["cmake", "make"]}, "C++ compiler", "missing", "apt install g++"),
    ({"tools": ["cmake", "ninja", "g++"]}, "build libspecrt", "yes", ""),
    ({"unloadable": "libcudnn.so.9: gone"}, RUN_CUDA, "no", "libcudnn.so.9: gone; `pip uninstall"),
    ({"gpu": False, "provider": False}, "run ort-cpu bundles", "yes", ""),
    ({"lacks": ["tensorrt"]}, RUN_RTX, "yes", ""),
    ({"lacks": ["tensorrt-rtx"]}, RUN_RTX, "no", "install tensorrt-rtx"),
    ({"lacks": ["tensorrt-rtx"]}, "build tensorrt-rtx plans", "no", "install tensorrt-rtx"),
    ({"absent": "onnx"}, "build tensorrt-rtx plans", "no", "make setup"),
    ({"absent": "cuda.bindings"}, "cuda.bindings", "missing", "pip install cuda-bindings"),
    ({}, "onnxruntime", "of unknown version: runs bundles", ""),
    ({"packages": {"onnxruntime-gpu": "1.3"}}, "onnxruntime", "1.3 (onnxruntime-gpu): runs", ""),
    ({"packages": BOTH}, "onnxruntime", "1.31.1 and onnxruntime-gpu 1.30.0 in one place", ""),
    ({}, "NVIDIA GPU", "A GPU, capability 8.7, 8.59 GB shared with the processor", ""),
    ({}, "CUDA", "12.6, driver 540.4.0", ""),
    ({}, "largest models", "; ".join(fits(8 << 30)), ""),
    ({"gpu": False}, "NVIDIA GPU", f"none ({NO_DRIVER})", "only ort-cuda and TensorRT bundles"),
    (OLD_JETSON, "Jetson", "JetPack 5 (Jetson Linux 35.4.1) with TensorRT 8.5", ""),
    (OLD_JETSON, "lowering", "none, for TensorRT 8.5", "install JetPack 6.1 or later"),
    (JETSON, "Jetson", f"NVIDIA Jetson Orin, {OF_103}", ""),
    (JETSON, "lowering", "decomposed, for TensorRT 10.3", ""),
    (NEW_TENSORRT, "lowering", "native, for TensorRT 10.16.1", ""),
    ({"board": "NVIDIA Jetson X"}, "Jetson", f"NVIDIA Jetson X, {UNKNOWN}", ""),
    ({"board": "NVIDIA Jetson X"}, "lowering", "unknown, for TensorRT ", ""),
    ({**JETSON, "mode": "pmode:0002 fmode:quiet\n"}, "Jetson", "power mode MAXN_SUPER", ""),
]  # fmt: skip


@pytest.mark.parametrize(("made", "name", "found", "remedy"), CHECKS)
def test_a_finding_says_what_is_there_or_how_to_get_it(
    machine: Callable[..., dict[str, Check]], made: dict[str, Any], name: str, found: str,
    remedy: str,
) -> None:  # fmt: skip
    check = machine(**made)[name]
    assert found in check.found
    assert (check.works, bool(check.remedy)) == (not remedy, bool(remedy))
    assert remedy in check.remedy


def test_a_clone_installs_by_its_makefile(tmp_path: Path) -> None:
    assert how_to_install("export", tmp_path) == 'pip install "specrt[export]"'
    assert how_to_install("export") == "make setup-export"


def test_the_best_backend_is_one_that_runs(machine: Callable[..., dict[str, Check]]) -> None:
    both = ["tensorrt", "tensorrt-rtx"]
    for made, expected in (
        ({}, "tensorrt"),
        ({"lacks": ["tensorrt"]}, "tensorrt-rtx"),
        ({"lacks": both}, "ort-cuda"),
        ({"lacks": both, "gpu": False}, "ort-cpu"),
    ):
        assert "Jetson" not in machine(**made, board="Raspberry Pi 5")
        assert doctor.best_backend() == expected


def test_what_fits_does_fit() -> None:
    """Weights, keys and values of 2048 positions and a GiB leave a fifth free, and hardly more."""
    assert fits(1 << 30) == ["nothing: at least 1.68 GB are needed before any weights"]
    for gib in (2, 141):
        said = fits(gib << 30)
        assert [line.split()[0] for line in said] == ["fp16", "int8", "int4"]
        for line, each in zip(said, (2.0, 1.01, 0.52), strict=True):
            parameters = float(re.findall(r"up to ([\d.]+) B", line)[0]) * 1e9
            used = parameters * each + (1 << 30) + (1 << 28)
            assert abs(used - 0.8 * (gib << 30)) <= 0.051e9 * each
