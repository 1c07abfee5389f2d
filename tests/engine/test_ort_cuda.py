"""The CUDA engine of ONNX Runtime: its graphs, its losslessness, what is said without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from engine.conftest import CAPTURES, MAX_LENGTH, MAX_WIDTH, Opener
from specrt.bundle import Geometry
from specrt.engine import ort_cuda
from specrt.engine.ort_cuda import PROVIDER, OrtCudaEngine
from specrt.errors import EngineError
from specrt.system import Devices


def test_each_pair_up_to_the_captured_width_has_a_graph_of_its_own(opener: Opener) -> None:
    draft = opener("cuda")
    draft._captured = CAPTURES  # as on a GPU; the CPU provider takes no notice

    def graph(width: int, rows: int) -> int:
        options = draft.forward(np.ones((1, width)), 0, rows).options
        return int(options.get_run_config_entry("gpu_graph_id"))

    pairs = [(1, 1), (2, 1), (2, 2), (9, 9), (9, 1)]
    graphs = [graph(*pair) for pair in pairs]
    assert not {-1, 0} & set(graphs)  # 0 is what a run without a name captures
    assert len(set(graphs)) == len(pairs)
    assert [graph(*pair) for pair in pairs] == graphs
    assert graph(10, 1) == -1


def test_an_engine_of_another_shape_or_damaged_is_refused(
    opener: Opener, geometry: Geometry, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=r"key\.0 has shape .*96.* and the manifest says .*48"):
        opener("cuda", max_length=48)
    limits = {"batch": 1, "max_length": MAX_LENGTH, "max_width": MAX_WIDTH, "device": "cpu"}
    (tmp_path / "engine.onnx").write_bytes(b"not a graph")
    with pytest.raises(EngineError, match=r"no sound graph .*build the bundle again"):
        OrtCudaEngine(tmp_path / "engine.onnx", geometry, **limits)


GPUS = Devices(("A GPU", "Another"))


@pytest.mark.parametrize(
    ("devices", "provider", "device_id", "message"),
    [
        (GPUS, "CPUExecutionProvider", 0, "no CUDA provider; .*onnxruntime-gpu"),
        (Devices((), "no driver: x"), PROVIDER, 0, "only: no driver: x; install the driver"),
        (GPUS, PROVIDER, 2, "device 2 was asked for, and there are 2"),
        (GPUS, PROVIDER, 1, r"does not start: libcublasLt\.so\.13: not found; .*pip"),
    ],
)
def test_without_what_it_needs_nothing_is_opened_and_none_falls_back_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, opener: Opener,
    devices: Devices, provider: str, device_id: int, message: str,
) -> None:  # fmt: skip
    """ONNX Runtime itself falls back to the CPU without saying so."""
    asked: list[Any] = []

    def fallen(path: str, options: Any, *, providers: Any, **_: Any) -> Any:
        asked.extend([options, *providers])
        return SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])

    said = b"Traceback\nOSError: libcublasLt.so.13: not found\n"
    probe = subprocess.CompletedProcess[bytes]([], 1, b"", said)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [provider])
    monkeypatch.setattr(ort_cuda, "find_devices", lambda: devices)
    monkeypatch.setattr(onnxruntime, "InferenceSession", fallen)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: probe)
    with pytest.raises(EngineError, match=message):
        opener("cuda", device="cuda", device_id=device_id)
    assert bool(asked) is (device_id == 1)
    if asked:
        options, (name, given) = asked
        assert (name, given["device_id"]) == (PROVIDER, "1")
        assert options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"
