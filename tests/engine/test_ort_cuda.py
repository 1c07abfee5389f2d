"""The CUDA engine of ONNX Runtime: its graphs, its losslessness, what is said without a GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from engine.conftest import MAX_LENGTH, MAX_WIDTH, Opener
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort import cuda_engine
from specrt.engine.ort.cuda_engine import PROVIDER, OrtCudaEngine
from specrt.errors import EngineError
from specrt.geometry import Geometry
from specrt.system.gpu import Devices


class Capturing:
    """A session of the CPU provider that fails where it is told to capture, as the GPU's may."""

    def __init__(self, session: Any, fails: Callable[[int], bool]) -> None:
        self._session, self._fails = session, fails
        self.tried: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        graph = int(options.get_run_config_entry("gpu_graph_id"))
        self.tried.append(graph)
        if self._fails(graph):
            raise RuntimeError("CUDA failure 901: operation failed due to capture\nand more")
        self._session.run_with_iobinding(binding, options)


def test_a_capture_that_fails_leaves_the_pass_as_it_is(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs kernel by kernel, is tried once, and is told; a failure after that is an error."""
    broken, real = set[int](), onnxruntime.InferenceSession
    sessions: list[Capturing] = []

    def opened(*given: Any, **named: Any) -> Capturing:
        sessions.append(Capturing(real(*given, **named), broken.__contains__))
        return sessions[-1]

    text, plain = np.arange(40)[None] % 9, opener("cuda", capture=False)
    assert plain.cuda_graphs is None
    monkeypatch.setattr(onnxruntime, "InferenceSession", opened)
    engine = opener("cuda")
    broken.add(2)  # the second pass that is bound
    for at, width in ((0, 20), (20, 3), (23, 5), (28, 3), (31, 5), (36, 1)):
        piece = text[:, at : at + width]
        found, wanted = engine.forward(piece, at), plain.forward(piece, at)
        np.testing.assert_array_equal(found.logits, wanted.logits)
    assert sessions[0].tried == [-1, 2, -1, 3, -1, 3, 4]
    (refusal,) = engine.cuda_graphs.refusals
    assert engine.cuda_graphs.captured == 2
    assert "width 3 with 3 scored rows run kernel by kernel: CUDA failure 901" in refusal
    assert "and more" not in refusal
    assert engine.captures(3, 3)
    assert not engine.captures(20, 1)
    broken |= {-1, 3}
    for width in (5, 3, 2):
        if width == 2:
            broken.add(5)
        with pytest.raises(EngineError, match=f"failed in a pass of width {width} .*901"):
            engine.forward(text[:, :width], 0)


def test_a_graph_that_onnx_runtime_does_not_capture_is_opened_all_the_same(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = cuda_engine.open_session, list[bool]()

    def refusing(path: Any, files: Any, device: str, device_id: int, captures: bool) -> Any:
        asked.append(captures)
        if captures:
            raise EngineError("This session cannot use the graph capture feature as requested")
        return real(path, files, device, device_id, captures)

    monkeypatch.setattr(cuda_engine, "open_session", refusing)
    engine = opener("cuda")
    engine.forward([[1, 2]], 0)
    assert asked == [True, False]
    assert engine.cuda_graphs.captured == 0
    assert "all passes run kernel by kernel" in engine.cuda_graphs.refusals[0]
    assert engine.captures(1, 1), "it was to be"


def test_an_engine_of_another_shape_or_damaged_is_refused(
    opener: Opener, geometry: Geometry, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=r"key\.0 has shape .*96.* and the manifest says .*48"):
        opener("cuda", max_length=48)
    (tmp_path / "engine.onnx").write_bytes(b"not a graph")
    with pytest.raises(EngineError, match=r"not a sound graph .*build the bundle again"):
        OrtCudaEngine(
            EngineSpec("ort-cuda", tmp_path / "engine.onnx", geometry, 1, MAX_LENGTH, MAX_WIDTH),
            "cpu",
        )


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
    opener("cuda")  # compiles, with the library as it is
    asked: list[Any] = []

    def fallen(path: str, options: Any, *, providers: Any, **_: Any) -> Any:
        asked.extend([options, *providers])
        return SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])

    said = b"Traceback\nOSError: libcublasLt.so.13: not found\n"
    probe = subprocess.CompletedProcess[bytes]([], 1, b"", said)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [provider])
    monkeypatch.setattr(cuda_engine, "find_devices", lambda: devices)
    monkeypatch.setattr(onnxruntime, "InferenceSession", fallen)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: probe)
    with pytest.raises(EngineError, match=message):
        opener("cuda", device="cuda", device_id=device_id)
    assert bool(asked) is (device_id == 1)
    if asked:
        options, (name, given) = asked
        assert (name, given["device_id"]) == (PROVIDER, "1")
        assert options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"
