"""The CUDA engine of ONNX Runtime: its graphs, its losslessness, what is said without a GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest

from engine.conftest import CAPTURES, MAX_LENGTH, MAX_WIDTH, Opener
from specrt.bench.lossless import compare
from specrt.bundle import Geometry
from specrt.engine import ort_cuda
from specrt.engine.ort_cuda import OrtCudaEngine
from specrt.errors import EngineError
from specrt.generator import Generator
from specrt.speculation.pool import Models
from specrt.system import Devices
from specrt.text import read_prompts

TOLERANCE = 0.1
"""Logits: 0.02 between fp16 and fp32 on codelet, seen over 100 tokens."""


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
    opener: Opener, compiled: Callable[[str], Path], geometry: Geometry, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=r"key\.0 has shape .*96.* and the manifest says .*48"):
        opener("cuda", max_length=48)
    limits = {"batch": 1, "max_length": MAX_LENGTH, "max_width": MAX_WIDTH, "device": "cpu"}
    with pytest.raises(EngineError, match=r"key\.2 has shape None, and the manifest says"):
        OrtCudaEngine(compiled("cuda"), replace(geometry, layers=3), **limits)
    (tmp_path / "engine.onnx").write_bytes(b"not a graph")
    with pytest.raises(
        EngineError, match=r"cannot open .* on cpu: .*specrt doctor.*build the bundle again"
    ):
        OrtCudaEngine(tmp_path / "engine.onnx", geometry, **limits)


def test_speculation_is_lossless_within_the_tolerance(
    generator: Generator, opener: Opener, code_prompts: Path
) -> None:
    """Codelet's draft in fp16 as the target of the same in fp32."""
    draft = generator.models.draft
    pair = Generator(Models(opener("cuda"), draft, (0, 4), gamma=4), generator.tokenizer)
    prompts = [prompt.text[:60] for prompt in read_prompts(code_prompts)][:2]
    report = list(compare(pair, prompts, [4], 32, TOLERANCE))[-1]
    assert report.tokens == 2 * 32
    assert report.unexplained == 0, report


def with_cuda(monkeypatch: pytest.MonkeyPatch, devices: Devices) -> None:
    """Let ONNX Runtime have the provider, and the machine some devices."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [ort_cuda.PROVIDER])
    monkeypatch.setattr(ort_cuda, "find_devices", lambda: devices)


@pytest.mark.parametrize(
    ("devices", "provider", "device_id", "message"),
    [
        (Devices(("A GPU",)), "CPUExecutionProvider", 0, "no CUDA provider; .*onnxruntime-gpu"),
        (Devices((), "no driver: x"), ort_cuda.PROVIDER, 0, "only: no driver: x; install the dri"),
        (Devices(("A GPU",)), ort_cuda.PROVIDER, 1, "device 1 was asked for, and there are 1"),
    ],
)
def test_without_what_it_needs_nothing_is_opened(
    monkeypatch: pytest.MonkeyPatch, opener: Opener,
    devices: Devices, provider: str, device_id: int, message: str,
) -> None:  # fmt: skip
    with_cuda(monkeypatch, devices)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [provider])
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    with pytest.raises(EngineError, match=message):
        opener("cuda", device="cuda", device_id=device_id)


def test_falling_back_to_the_cpu_is_an_error(
    monkeypatch: pytest.MonkeyPatch, opener: Opener
) -> None:
    """ONNX Runtime does so without saying so."""
    asked: dict[str, Any] = {}

    def fallen(path: str, options: Any, **given: Any) -> Any:
        asked.update(given, options=options)
        return SimpleNamespace(get_providers=lambda: ["CPUExecutionProvider"])

    with_cuda(monkeypatch, Devices(("A GPU", "Another")))
    monkeypatch.setattr(onnxruntime, "InferenceSession", fallen)
    monkeypatch.setattr(ort_cuda, "unloadable", lambda: "libcublasLt.so.13: not found")
    with pytest.raises(EngineError, match=r"does not start: libcublasLt\.so\.13: not found; .*pip"):
        opener("cuda", device="cuda", device_id=1)
    ((provider, options),) = asked["providers"]
    assert (provider, options["device_id"]) == (ort_cuda.PROVIDER, "1")
    session = asked["options"]
    assert session.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (0, b"a warning\n", ""),
        (1, b"Traceback\nOSError: libx.so: not found\n", "libx.so: not found"),
        (-11, b"", "the probe ended with status -11"),
    ],
)
def test_what_the_probe_said_is_told(
    monkeypatch: pytest.MonkeyPatch, status: int, said: bytes, told: str
) -> None:
    done = subprocess.CompletedProcess[bytes]([], status, b"", said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert ort_cuda.unloadable() == told
