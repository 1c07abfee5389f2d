"""The CUDA engine on the CPU provider: bindings, copies, rollback, what is said without a GPU."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import specrt
from specrt.bench.lossless import compare
from specrt.bundle import Bundle, Geometry
from specrt.engine import ort_cuda as cuda_session
from specrt.engine.backends import open_engine
from specrt.engine.ort_cuda import OrtCudaEngine
from specrt.engine.protocol import Engine
from specrt.errors import EngineError
from specrt.generator import Generator
from specrt.speculation.pool import Models
from specrt.system import Devices, find_devices
from specrt.text import read_prompts
from specrt_export.compile.ort_cuda_compiler import compile_ort_cuda

MAX_LENGTH = 512
MAX_WIDTH = 64
CAPTURES = 9
TOLERANCE = 0.1
"""Logits. fp16 keeps eleven bits, so that the scores of codelet, up to 20, are steps of 2**-6
apart, and one pass rounds a few times a layer: 0.02 between fp16 and fp32, seen over 100 tokens."""

Built = tuple[Path, Geometry]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, engines: Path) -> dict[str, Built]:
    """Codelet's engines for ort-cuda, made without a GPU."""
    root, pair = tmp_path_factory.mktemp("halved"), engines / "codelet"
    found = {}
    for role in ("target", "draft"):
        graph, weights = pair / "portable" / f"{role}.onnx", pair / "checkpoint" / role
        made = compile_ort_cuda(graph, weights, root / role, MAX_LENGTH, captured=CAPTURES)
        found[role] = root / role / "engine.onnx", made.geometry
    return found


def opened(built: Built, **options: Any) -> OrtCudaEngine:
    path, geometry = built
    return OrtCudaEngine(
        path, geometry, batch=1, max_length=MAX_LENGTH, max_width=MAX_WIDTH,
        **{"device": "cpu", **options},
    )  # fmt: skip


@pytest.fixture
def draft(built: dict[str, Built]) -> Iterator[OrtCudaEngine]:
    engine = opened(built["draft"])
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def whole(codelet: Path) -> Iterator[Engine]:
    """Codelet's draft in fp32."""
    bundle = Bundle.open(codelet)
    record = bundle.manifest.draft
    assert record is not None
    engine = open_engine(
        "ort-cpu", bundle.file(record.engine), record.geometry, batch=1,
        max_length=bundle.manifest.max_length, max_width=bundle.manifest.max_width, threads=1,
    )  # fmt: skip
    yield engine
    engine.close()


def tokens(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, 8192, (1, count))


def test_passes_are_those_of_the_fp32_engine(draft: OrtCudaEngine, whole: Engine) -> None:
    text, at = tokens(160), 0
    for width, rows in ((60, 1), (1, 1), (5, 5), (9, 9), (64, 64), (2, 1), (1, 1)):
        piece = text[:, at : at + width]
        found, wanted = draft.forward(piece, at, rows), whole.forward(piece, at, rows)
        assert found.logits.dtype == np.float32
        assert found.argmax.shape == (1, rows)
        np.testing.assert_allclose(found.logits, wanted.logits, atol=TOLERANCE)
        np.testing.assert_array_equal(found.argmax, found.logits.argmax(-1))
        at += width


def test_going_back_leaves_nothing_behind(draft: OrtCudaEngine, built: dict[str, Built]) -> None:
    text, junk = tokens(40), tokens(40, seed=1)
    draft.forward(text[:, :20], 0)
    draft.forward(junk[:, :9], 20)
    draft.forward(junk[:, :1], 29)
    fresh = opened(built["draft"])
    fresh.forward(text[:, :20], 0)
    for at, width in ((20, 5), (25, 1), (26, 5)):
        piece = text[:, at : at + width]
        found, wanted = draft.forward(piece, at), fresh.forward(piece, at)
        np.testing.assert_array_equal(found.logits, wanted.logits)
    fresh.close()


def test_each_pair_up_to_the_captured_width_has_a_graph_of_its_own(draft: OrtCudaEngine) -> None:
    draft._captured = CAPTURES  # as on a GPU; the CPU provider takes no notice
    pairs = [(1, 1), (2, 1), (2, 2), (9, 9), (9, 1)]
    graphs = [_graph(draft.forward(tokens(w), 0, rows).options) for w, rows in pairs]
    assert -1 not in graphs
    assert 0 not in graphs  # what a run without a name captures
    assert len(set(graphs)) == len(pairs)
    assert [_graph(draft.forward(tokens(w), 0, rows).options) for w, rows in pairs] == graphs
    assert _graph(draft.forward(tokens(10), 0, 1).options) == -1


def _graph(options: Any) -> int:
    return int(options.get_run_config_entry("gpu_graph_id"))


@pytest.mark.parametrize(
    ("width", "start", "message"),
    [
        (MAX_WIDTH + 1, 0, "a pass of 65 tokens was asked"),
        (5, MAX_LENGTH - 4, f"positions {MAX_LENGTH - 4} to {MAX_LENGTH} of a KV buffer"),
        (1, -1, "positions -1 to -1"),
    ],
)
def test_passes_out_of_bounds_are_refused(
    draft: OrtCudaEngine, width: int, start: int, message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        draft.forward(tokens(width), start)


def test_an_engine_of_another_shape_is_refused(built: dict[str, Built]) -> None:
    path, geometry = built["draft"]
    with pytest.raises(EngineError, match=r"key\.0 has shape .*512.* and the manifest says .*256"):
        OrtCudaEngine(path, geometry, batch=1, max_length=256, max_width=8, device="cpu")
    with pytest.raises(EngineError, match=r"key\.2 has shape None, and the manifest says"):
        opened((path, replace(geometry, layers=3)))


def test_a_damaged_engine_is_refused(tmp_path: Path, built: dict[str, Built]) -> None:
    (tmp_path / "engine.onnx").write_bytes(b"not a graph")
    with pytest.raises(
        EngineError, match=r"cannot open .* on cpu: .*specrt doctor.*build the bundle again"
    ):
        opened((tmp_path / "engine.onnx", built["draft"][1]))


@pytest.fixture(scope="module")
def pairs(built: dict[str, Built], codelet: Path) -> Iterator[dict[str, Generator]]:
    """Codelet with both engines in fp16, and with its target in fp16 beside a draft in fp32."""
    target = opened(built["target"])
    with specrt.load(codelet, threads=1) as other:
        drafts = {"both": opened(built["draft"]), "mixed": other.models.draft}
        yield {
            name: Generator(Models(target, draft, (0, 1, 2, 4, 8), gamma=2), other.tokenizer)
            for name, draft in drafts.items()
        }


@pytest.mark.parametrize("name", ["both", "mixed"])
def test_speculation_is_lossless_within_the_tolerance(
    pairs: dict[str, Generator], code_prompts: Path, name: str
) -> None:
    prompts = [prompt.text for prompt in read_prompts(code_prompts)][:2]
    report = list(compare(pairs[name], prompts, [1, 4, 8], 48, TOLERANCE))[-1]
    assert report.tokens == 2 * 3 * 48
    assert report.unexplained == 0, report


def drivers(**answers: int) -> type:
    """Return a driver library whose calls answer some codes."""

    class Driver:
        def __init__(self, name: str) -> None:
            pass

        def cuInit(self, flags: int) -> int:  # noqa: N802
            return answers.get("init", 0)

        def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
            count._obj.value = answers.get("count", 0)
            return 0

        def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
            return 0

        def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:  # noqa: N802
            name.value = b"A GPU"
            return 0

        def cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802
            text._obj.value = b"no CUDA-capable device is detected"
            return 0

    return Driver


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ({"init": 100}, Devices((), "the NVIDIA driver answers: no CUDA-capable device is "
                                    "detected")),
        ({"count": 0}, Devices((), "the NVIDIA driver knows no device")),
        ({"count": 2}, Devices(("A GPU", "A GPU"))),
    ],
)  # fmt: skip
def test_devices_are_those_the_driver_names(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, int], found: Devices
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", drivers(**answers))
    assert find_devices() == found


def test_a_machine_without_a_driver_has_no_devices() -> None:
    assert find_devices("libthere-is-none.so") == Devices(
        (), "no NVIDIA driver: libthere-is-none.so is not there"
    )


def with_cuda(monkeypatch: pytest.MonkeyPatch, devices: Devices) -> None:
    """Let ONNX Runtime have the provider, and the machine some devices."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [cuda_session.PROVIDER])
    monkeypatch.setattr(cuda_session, "find_devices", lambda: devices)


def test_without_the_provider_the_remedy_is_a_package(
    monkeypatch: pytest.MonkeyPatch, built: dict[str, Built]
) -> None:
    with_cuda(monkeypatch, Devices(("A GPU",)))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(EngineError, match=r"no CUDA provider; .*onnxruntime-gpu"):
        opened(built["draft"], device="cuda")


@pytest.mark.parametrize(
    ("devices", "device_id", "message"),
    [
        (Devices((), "no NVIDIA driver: x"), 0, "GPU only: no NVIDIA driver: x; install the dri"),
        (Devices(("A GPU",)), 1, "device 1 was asked for, and there are 1"),
    ],
)
def test_without_a_device_nothing_is_opened(
    monkeypatch: pytest.MonkeyPatch,
    built: dict[str, Built],
    devices: Devices,
    device_id: int,
    message: str,
) -> None:
    with_cuda(monkeypatch, devices)
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    with pytest.raises(EngineError, match=message):
        opened(built["draft"], device="cuda", device_id=device_id)


class Fallen:
    """A session that fell back to the CPU, as ONNX Runtime's does without saying so."""

    asked: dict[str, Any]

    def __init__(self, path: str, options: Any, **asked: Any) -> None:
        Fallen.asked = {**asked, "options": options}

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]


def test_falling_back_to_the_cpu_is_an_error(
    monkeypatch: pytest.MonkeyPatch, built: dict[str, Built]
) -> None:
    with_cuda(monkeypatch, Devices(("A GPU", "Another")))
    monkeypatch.setattr(onnxruntime, "InferenceSession", Fallen)
    monkeypatch.setattr(cuda_session, "unloadable", lambda: "libcublasLt.so.13: not found")
    with pytest.raises(EngineError, match=r"does not start: libcublasLt\.so\.13: not found; .*pip"):
        opened(built["draft"], device="cuda", device_id=1)
    assert Fallen.asked["providers"] == [
        (cuda_session.PROVIDER, {"device_id": "1", "enable_cuda_graph": "1"})
    ]
    options = Fallen.asked["options"]
    assert options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"
    assert Fallen.asked["enable_fallback"] == 0


@pytest.mark.skipif(not cuda_session.missing(), reason="nothing is missing here")
def test_the_probe_names_the_library_that_is_missing() -> None:
    assert "libonnxruntime_providers_" in cuda_session.unloadable()


@pytest.mark.parametrize(
    ("status", "said", "told"),
    [
        (0, b"a warning\n", ""),
        (1, b"Traceback\nOSError: libx.so: not found\n", "libx.so: not found"),
        (-11, b"", "the probe ended with status -11"),
    ],
)
def test_a_probe_that_dies_without_a_word_is_no_probe_that_loads(
    monkeypatch: pytest.MonkeyPatch, status: int, said: bytes, told: str
) -> None:
    done = subprocess.CompletedProcess[bytes]([], status, b"", said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert cuda_session.unloadable() == told


def test_bf16_buffers_begin_empty(
    engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = engines / "codelet"
    graph, weights = pair / "portable" / "draft.onnx", pair / "checkpoint" / "draft"
    made = compile_ort_cuda(graph, weights, tmp_path, MAX_LENGTH, compute="bf16")
    model = onnx.load(tmp_path / "engine.onnx", load_external_data=False)
    # The CPU provider has no bf16 kernels: what is opened is a graph of the same inputs only.
    identity = [
        onnx.helper.make_node("Identity", [i.name], [f"present_{i.name}"])
        for i in model.graph.input
        if i.name.startswith(("key.", "value."))
    ]
    bare = onnx.helper.make_graph(
        identity, "bare", list(model.graph.input),
        [o for o in model.graph.output if o.name.startswith("present_")],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", 21)]
    path = tmp_path / "bare.onnx"
    onnx.save(onnx.helper.make_model(bare, opset_imports=opsets, ir_version=10), path)
    engine = opened((path, made.geometry))
    for cache in engine._caches.values():
        assert cache.data_type() == "tensor(bfloat16)"
        place = (ctypes.c_uint8 * cache.tensor_size_in_bytes()).from_address(cache.data_ptr())
        assert not np.frombuffer(place, np.uint8).any()
    engine.close()
