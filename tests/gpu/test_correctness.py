"""Each check passes on engines that work, and fails on those broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gpu_double import GpuDouble
from gpucheck import correctness, speed
from gpucheck.evidence import CheckError, Evidence
from gpucheck.settings import RunSettings
from gpucheck.workbench import Workbench

from specrt.engine.ort_cuda import OrtCudaEngine
from support.tensorrt_double import double_of

Damage = Callable[[Any], None]


def wrong_scores(engine: Any) -> None:
    plan = double_of(engine)
    run = plan.run

    def broken(addresses: Any, width: int, rows: int) -> None:
        run(addresses, width, rows)
        logits = plan.array(addresses["logits"], np.float32, (1, rows, plan.geometry.vocab_size))
        logits += np.linspace(0, 1, plan.geometry.vocab_size, dtype=np.float32) * (width > 1)

    plan.run = broken  # type: ignore[method-assign]


def stale_keys(engine: Any) -> None:
    """The second token of a pass is not written where something was before."""
    plan = double_of(engine)
    update = plan.update

    def broken(at: Any, fed: Any, start: Any) -> Any:
        cache = plan.cache(at["key.0"])[0, 0, :, 0]
        if fed.shape[1] > 1 and cache[start[0] + 1] > 0:
            fed[0, 1] = int(cache[start[0] + 1]) - 1
        return update(at, fed, start)

    plan.update = broken  # type: ignore[method-assign]


def never_refuses(engine: Any) -> None:
    forward = engine.forward
    engine.forward = lambda tokens, start, rows=None: forward(
        tokens, min(max(start, 0), engine.max_length - np.shape(tokens)[1]), rows
    )


def not_capturable(engine: Any) -> None:
    double_of(engine).capturable = False


def replays_differ(engine: Any) -> None:
    if engine._captures:
        wrong_scores(engine)


def computes_nothing(engine: Any) -> None:
    double_of(engine).run = lambda addresses, width, rows: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("damage", "failing"),
    [
        (wrong_scores, "limit"), (stale_keys, "rollback"), (never_refuses, "limit"),
        (not_capturable, "captures"),
        (replays_differ, "replays"), (computes_nothing, "replays"),
    ],
)  # fmt: skip
def test_a_broken_engine_fails_its_check_and_the_others_are_run(
    double: GpuDouble, damage: Damage, failing: str
) -> None:
    evidence = Evidence()
    double.damage = damage
    with pytest.raises(CheckError):
        correctness.engine(double, "tensorrt-rtx", evidence)
    assert len(evidence.facts) == 5
    failed = {name for name, facts in evidence.facts.items() if not facts["passed"]}
    assert failing in failed
    assert all(evidence.facts[name]["reason"] for name in failed)


def test_rounds_that_differ_from_their_passes_are_a_failure(double: GpuDouble) -> None:
    def late(engine: Any) -> None:
        forward = engine.forward
        if engine.model.record.confidence:  # the draft
            engine.forward = lambda tokens, start, rows: forward(tokens, max(0, start - 1), rows)

    double.damage = late
    with pytest.raises(CheckError, match="a round drafted"):
        correctness.rounds(double, "tensorrt-rtx", Evidence())


def test_text_that_parts_from_plain_decoding_is_a_failure(double: GpuDouble) -> None:
    def wrong(engine: Any) -> None:
        forward = engine.forward

        def broken(tokens: Any, start: Any, rows: int | None = None) -> Any:
            output = forward(tokens, start, rows)
            if np.shape(tokens)[1] in (2, 5):
                output.argmax[:] = (output.argmax + 1) % 256
                output.logits[:] = np.roll(output.logits, 1, -1)
            return output

        engine.forward = broken

    double.damage = wrong
    for step in (correctness.verify, partial(speed.speed, size="1B", precision="fp16")):
        with pytest.raises(CheckError):
            step(double, "ort-cuda", Evidence())


@pytest.mark.export
@pytest.mark.nightly
def test_a_grown_target_still_says_what_codelet_does(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="its graph is exported")
    from gpucheck.settings import add_source

    add_source()
    from growth import shape

    monkeypatch.setitem(shape.PRESETS, "1B", shape.Shape(384, 9, 6, 2, 64, 1024))
    bench, evidence = Workbench(settings), Evidence()
    bench.export_grown("1B", evidence)
    bench.grow("1B", evidence)
    assert evidence.facts["distinct_bytes"] == 2 * 384 * (384 + 1024), "what the new layer writes"
    bench.build_target("1B", "fp16", "ort-cuda", evidence)
    again = Evidence()
    bench.build_target("1B", "fp16", "ort-cuda", again)
    assert again.facts == {"reused": True}
    built = bench.target("1B", "fp16", "ort-cuda")
    engine = OrtCudaEngine(
        built.path, built.geometry, batch=1, max_length=2048, max_width=256, device="cpu"
    )
    tolerance = correctness.GROWN["fp16"]
    correctness.check_logits(engine, bench.reference("target"), tolerance, evidence)
