"""Engines of ONNX Runtime on a GPU, in every precision: their numbers and captured graphs.

Skipped where no GPU answers; `make gpu-check` runs them, and speculation on bundles.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrt.bundle import Geometry
from specrt.engine.ort_cuda import OrtCudaEngine, missing, unloadable
from specrt.engine.protocol import Engine
from specrt_export.compile.ort_cuda_compiler import compile_ort_cuda
from specrt_export.precision import Precision
from specrt_export.quantize import quantize

_LACKS = missing() or unloadable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_LACKS), reason=_LACKS or "runs here")]

MAX_LENGTH, MAX_WIDTH, CAPTURES = 512, 64, 9
TOLERANCES = {"fp16": 0.1, "bf16": 0.8, "int8": 0.1, "int4": 0.1}
"""Logits. On the CPU provider fp16 comes to 0.02 on codelet, whose scores spread over 28; bf16
keeps three bits less, so eight times that. int8 and int4 are multiplied with fp16 activations and
compared with the same whole numbers in fp32."""
Built = tuple[Path, Path, Path, Geometry]
"""Engine, portable graph, the folder of its weights, geometry."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, engines: Path) -> Callable[[str, str], Built]:
    """Compiles a model of codelet in some precision, once."""
    root, pair, done = tmp_path_factory.mktemp("cuda"), engines / "codelet", {}

    def build(role: str, precision: str) -> Built:
        graph, weights = pair / "portable" / f"{role}.onnx", pair / "checkpoint" / role
        if (role, precision) not in done:
            place = root / precision / role
            if precision in ("int8", "int4"):
                made = quantize(graph, weights, place / "graph", Precision.of(precision))
                graph, weights = made.graph, made.folder
            compute = "bf16" if precision == "bf16" else "fp16"
            model = compile_ort_cuda(
                graph, weights, place, MAX_LENGTH, compute=compute, captured=CAPTURES
            )
            done[role, precision] = place / "engine.onnx", graph, weights, model.geometry
        return done[role, precision]

    return build


def opened(built: Built, **options: Any) -> OrtCudaEngine:
    path, _, _, geometry = built
    return OrtCudaEngine(
        path, geometry, batch=1, max_length=MAX_LENGTH, max_width=MAX_WIDTH, **options
    )


def tokens(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, 8192, (1, count))


PASSES = ((60, 1), (1, 1), (1, 1), (5, 5), (9, 9), (5, 5), (2, 1), (64, 64), (1, 1), (9, 9))
"""(width, rows): prefills, and captured widths more than once, so that replays are among them."""


def run(engine: Engine) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Return the logits of a text that goes through in many widths."""
    text, at, found = tokens(240), 0, []
    for width, rows in PASSES:
        done = engine.forward(text[:, at : at + width], at, rows)
        assert np.ptp(done.logits) > 1, "a device that computes nothing gives zeros"
        np.testing.assert_array_equal(done.argmax, done.logits.argmax(-1))
        found.append(np.array(done.logits))
        at += width
    engine.close()
    return found


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int8", "int4"])
@pytest.mark.parametrize("role", ["draft", "target"])
def test_logits_are_those_of_the_portable_graph(
    built: Callable[[str, str], Built], role: str, precision: str
) -> None:
    from specrt_export.portable.graph import GraphRun

    model = built(role, precision)
    reference = GraphRun(model[1], model[2])
    reference.reset(batch=1, length=MAX_LENGTH)
    text, at = tokens(240), 0
    for found, (width, rows) in zip(run(opened(model)), PASSES, strict=True):
        piece = text[:, at : at + width]
        wanted, _ = reference(piece, [at], range(width - rows, width))
        np.testing.assert_allclose(found, wanted, atol=TOLERANCES[precision])
        at += width


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int4"])
def test_replays_equal_launches(built: Callable[[str, str], Built], precision: str) -> None:
    model = built("target", precision)
    captured, launched = opened(model), opened(model, capture=False)
    assert captured._captured == CAPTURES
    for one, other in zip(run(captured), run(launched), strict=True):
        np.testing.assert_array_equal(one, other)
