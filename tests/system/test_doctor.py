"""What `specrt doctor` says about GPUs, Jetsons, and engine libraries under all their names."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import onnxruntime
import pytest

from specrt.engine import ort_cuda as cuda_session
from specrt.engine.tensorrt import library as ability
from specrt.engine.tensorrt.library import form_of
from specrt.system import Devices, Gpu, Jetson, Survey, doctor, power_mode, read_jetson
from specrt.system.doctor import Check, fits

ONE = Devices(("A GPU",))
NONE = Devices((), "no NVIDIA driver: libcuda.so.1 is not there")


def machine_with(
    monkeypatch: pytest.MonkeyPatch, provider: bool, devices: Devices, absent: str = ""
) -> None:
    names = [cuda_session.PROVIDER] if provider else []
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)
    monkeypatch.setattr(cuda_session, "find_devices", lambda: devices)
    gpus = tuple(Gpu(at, name, "8.7", 8 << 30, True) for at, name in enumerate(devices.names))
    found = Survey(gpus, devices.problem, (12, 6), "540.4.0")
    monkeypatch.setattr(doctor, "survey", lambda: found)
    monkeypatch.setattr(cuda_session, "unloadable", lambda: absent)


def named(findings: list[Check], name: str) -> Check:
    return next(f for f in findings if f.name == name)


@pytest.mark.parametrize(
    ("provider", "devices", "absent", "remedy"),
    [
        (True, ONE, "", ""),
        (False, ONE, "", "no CUDA provider; `pip uninstall onnxruntime`"),
        (True, NONE, "", "no NVIDIA driver: libcuda.so.1 is not there; install the driver"),
        (True, ONE, "libcudnn.so.9: gone", "libcudnn.so.9: gone; `pip uninstall"),
    ],
)
def test_ort_cuda_needs_a_provider_a_device_and_libraries(
    monkeypatch: pytest.MonkeyPatch, provider: bool, devices: Devices, absent: str, remedy: str
) -> None:
    machine_with(monkeypatch, provider, devices, absent)
    found = named(doctor.abilities(), "run ort-cuda bundles")
    assert (found.works, bool(found.remedy)) == (not remedy, bool(remedy))
    assert remedy in found.remedy
    assert named(doctor.abilities(), "run ort-cpu bundles").works


BOTH = "onnxruntime 1.31.1 and onnxruntime-gpu 1.30.0 in one place: the last installed wins"


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"onnxruntime": "1.31.1"}, "1.31.1: runs bundles"),
        ({"onnxruntime-gpu": "1.31.1"}, "1.31.1 (onnxruntime-gpu): runs bundles"),
        ({}, "of unknown version: runs bundles"),
        ({"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.30.0"}, BOTH),
    ],
)
def test_onnx_runtime_is_known_by_both_names(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], said: str
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if not name.startswith("onnxruntime"):
            return real(name)
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = named(doctor.libraries(), "onnxruntime")
    assert found.works
    assert found.found.startswith(said)


def test_a_gpu_is_told_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, True, ONE)
    monkeypatch.setattr(doctor, "read_jetson", lambda: None)
    findings = doctor.machine()
    gpu = named(findings, "NVIDIA GPU")
    assert gpu.works
    assert gpu.found == "A GPU, capability 8.7, 8.0 GiB shared with the processor"
    assert named(findings, "CUDA").found == "12.6, driver 540.4.0"
    assert named(findings, "largest models").found == "; ".join(fits(8 << 30))
    assert not {"Jetson", "lowering"} & {f.name for f in findings}
    machine_with(monkeypatch, True, NONE)
    gpu_less = named(doctor.machine(), "NVIDIA GPU")
    assert not gpu_less.works
    assert gpu_less.found.startswith("none (no NVIDIA driver")


def test_what_fits_does_fit() -> None:
    """Weights, keys and values of 2048 positions and a GiB leave a fifth free, and hardly more."""
    assert fits(1 << 30) == ["nothing: at least 1.6 GiB are needed before any weights"]
    for gib in (2, 8, 64, 141):
        said = fits(gib << 30)
        assert [line.split()[0] for line in said] == ["fp16", "int8", "int4"]
        for line, each in zip(said, (2.0, 1.01, 0.52), strict=True):
            parameters = float(re.findall(r"up to ([\d.]+) B", line)[0]) * 1e9
            used = parameters * each + (1 << 30) + (1 << 28)
            assert abs(used - 0.8 * (gib << 30)) <= 0.051e9 * each


@pytest.mark.parametrize(
    ("lacks", "devices", "expected"),
    [
        ({}, ONE, "tensorrt"),
        ({"tensorrt"}, ONE, "tensorrt-rtx"),
        ({"tensorrt", "tensorrt-rtx"}, ONE, "ort-cuda"),
        ({"tensorrt", "tensorrt-rtx"}, NONE, "ort-cpu"),
    ],
)
def test_the_best_backend_is_one_that_runs(
    monkeypatch: pytest.MonkeyPatch, lacks: set[str], devices: Devices, expected: str
) -> None:
    machine_with(monkeypatch, True, devices)
    monkeypatch.setattr(ability, "lacks_to_run", lambda name: "x" if name in lacks else "")
    assert doctor.best_backend() == expected


def test_abilities_with_tensorrt_have_their_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(monkeypatch, True, ONE)
    monkeypatch.setattr(ability, "lacks_to_run", lambda name: f"run {name}")
    monkeypatch.setattr(ability, "lacks_to_build", lambda name: "" if "rtx" in name else "no")
    found = {f.name: f.remedy for f in doctor.abilities() if "tensorrt" in f.name}
    assert found == {
        "run tensorrt bundles": "run tensorrt",
        "run tensorrt-rtx bundles": "run tensorrt-rtx",
        "build tensorrt plans": "no",
        "build tensorrt-rtx plans": "",
    }


def test_modules_that_are_missing_are_told_with_their_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(name: str) -> None:
        raise ModuleNotFoundError(name)

    real = importlib.util.find_spec
    machine_with(monkeypatch, True, ONE)
    monkeypatch.setattr(ability, "lacks_to_build", lambda name: "")
    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert all(f.found.startswith("missing") for f in doctor.libraries())
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnx" else real(name)
    )
    without_onnx = named(doctor.abilities(), "build tensorrt-rtx plans")
    assert (without_onnx.works, without_onnx.remedy) == (False, 'pip install "specrt[build]"')


def jetson_tree(
    root: Path, release: str = "", model: str = "", mode: str = "", modes: str = ""
) -> Path:
    files = {
        "etc/nv_tegra_release": release,
        "proc/device-tree/model": model,
        "var/lib/nvpmodel/status": mode,
        "etc/nvpmodel.conf": modes,
    }
    for name, text in files.items():
        if text:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(text.encode())
    return root


def l4t(release: str) -> str:
    major, _, revision = release.partition(".")
    return f"# R{major} (release), REVISION: {revision}, GCID: 38968081, BOARD: generic, EABI: x\n"


@pytest.mark.parametrize(
    ("release", "jetpack", "tensorrt", "form"),
    [
        ("35.4.1", "5", "8.5", ""),
        ("36.3.0", "6.0", "8.6", ""),
        ("36.4.0", "6.1", "10.3", "decomposed"),
        ("36.4.9", "6", "10.3", "decomposed"),
        ("38.2.1", "7.0", "10.13", "decomposed"),
        ("39.2.0", "7.2", "10.16", "native"),
        ("99.1.0", "", "", ""),
    ],
)
def test_a_jetson_is_known_by_its_release(
    tmp_path: Path, release: str, jetpack: str, tensorrt: str, form: str
) -> None:
    found = read_jetson(jetson_tree(tmp_path, l4t(release), "NVIDIA Jetson AGX\0"))
    assert found is not None
    assert (found.model, found.release) == ("NVIDIA Jetson AGX", release)
    assert (found.jetpack, found.tensorrt) == (jetpack, tensorrt)
    assert (form_of(tensorrt) or "") == form


def test_other_machines_are_no_jetsons(tmp_path: Path) -> None:
    assert read_jetson(tmp_path) is None
    assert read_jetson(jetson_tree(tmp_path, model="Raspberry Pi 5\0")) is None
    bare = read_jetson(jetson_tree(tmp_path, "not what is expected", "NVIDIA Jetson Orin\0"))
    assert bare == Jetson("NVIDIA Jetson Orin", "", "", "", "")


MODES = "< POWER_MODEL ID=0 NAME=15W >\nCPU 1\n<POWER_MODEL ID=2 NAME=MAXN_SUPER>\n"


@pytest.mark.parametrize(
    ("mode", "modes", "said"),
    [
        ("pmode:0002 fmode:quiet\n", MODES, "MAXN_SUPER"),
        ("pmode:0007", MODES, "mode 7"),
        ("pmode:0002", "", "mode 2"),
        ("nothing", MODES, ""),
        ("", "", ""),
    ],
)
def test_power_modes_have_names(tmp_path: Path, mode: str, modes: str, said: str) -> None:
    assert power_mode(jetson_tree(tmp_path, mode=mode, modes=modes)) == said


@pytest.mark.parametrize(
    ("release", "installed", "works", "said"),
    [
        ("36.4.3", {}, True, "decomposed, for TensorRT 10.3"),
        ("36.4.3", {"tensorrt": "10.16.1"}, True, "native, for TensorRT 10.16.1"),
        ("35.4.1", {}, False, "none, for TensorRT 8.5"),
    ],
)
def test_doctor_says_which_lowering_a_jetson_gets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    release: str, installed: dict[str, str], works: bool, said: str,
) -> None:  # fmt: skip
    machine_with(monkeypatch, True, ONE)
    tree = jetson_tree(tmp_path, l4t(release), "NVIDIA Jetson Orin", "pmode:0000", MODES)
    found = read_jetson(tree)
    monkeypatch.setattr(doctor, "read_jetson", lambda: found)
    monkeypatch.setattr(doctor, "installed", lambda names: installed)
    findings = doctor.machine()
    board = r"NVIDIA Jetson Orin, JetPack [\d.]+ \(Jetson Linux [\d.]+\) with TensorRT.*mode 15W$"
    assert re.match(board, named(findings, "Jetson").found)
    lowering = named(findings, "lowering")
    assert said in lowering.found
    assert (lowering.works, bool(lowering.remedy)) == (works, not works)
