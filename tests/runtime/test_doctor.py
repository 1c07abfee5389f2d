"""What `specrt doctor` says about GPUs, and about ONNX Runtime under its two names."""

from __future__ import annotations

import importlib.metadata

import onnxruntime
import pytest

from specrt import doctor
from specrt.cuda import Devices
from specrt.doctor import Finding
from specrt.engines import cuda_session

ONE = Devices(("A GPU",))
NONE = Devices((), "no NVIDIA driver: libcuda.so.1 is not there")


def machine_with(
    monkeypatch: pytest.MonkeyPatch, provider: bool, devices: Devices, absent: str = ""
) -> None:
    names = [cuda_session.PROVIDER] if provider else []
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)
    monkeypatch.setattr(cuda_session, "find_devices", lambda: devices)
    monkeypatch.setattr(doctor, "find_devices", lambda: devices)
    monkeypatch.setattr(cuda_session, "unloadable", lambda: absent)


def named(findings: list[Finding], name: str) -> Finding:
    return next(f for f in findings if f.name == name)


@pytest.mark.parametrize(
    ("provider", "devices", "absent", "works", "remedy"),
    [
        (True, ONE, "", True, ""),
        (False, ONE, "", False, "no CUDA provider; `pip uninstall onnxruntime`"),
        (True, NONE, "", False, "no NVIDIA driver: libcuda.so.1 is not there; install the driver"),
        (True, ONE, "libcudnn.so.9: gone", False, "libcudnn.so.9: gone; `pip uninstall"),
    ],
)
def test_ort_cuda_needs_a_provider_a_device_and_libraries(
    monkeypatch: pytest.MonkeyPatch,
    provider: bool,
    devices: Devices,
    absent: str,
    works: bool,
    remedy: str,
) -> None:
    machine_with(monkeypatch, provider, devices, absent)
    found = named(doctor.abilities(), "run ort-cuda bundles")
    assert (found.works, found.found) == (works, "yes" if works else "no")
    assert remedy in found.remedy
    assert bool(found.remedy) is not works
    # What the CPU does needs none of it.
    assert named(doctor.abilities(), "run ort-cpu bundles").works


@pytest.mark.parametrize(("devices", "said"), [(ONE, "A GPU"), (NONE, "none (no NVIDIA driver")])
def test_devices_are_part_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, devices: Devices, said: str
) -> None:
    machine_with(monkeypatch, True, devices)
    found = named(doctor.machine(), "NVIDIA GPU")
    assert found.found.startswith(said)
    assert found.works == bool(devices.names)


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"onnxruntime": "1.31.1"}, "1.31.1: runs bundles"),
        ({"onnxruntime-gpu": "1.31.1"}, "1.31.1 (onnxruntime-gpu): runs bundles"),
        ({}, "of unknown version: runs bundles"),
        (
            {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.30.0"},
            "onnxruntime 1.31.1 and onnxruntime-gpu 1.30.0 in one place: the last installed wins",
        ),
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
