"""Passes of a TensorRT engine over the NumPy double: every one is what a plain table answers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.numpy_device import NumpyDevice
from engine.tensorrt_double import (
    GAMMAS,
    PREFILL,
    NumpyPlan,
    draft_profiles,
    geometry_of,
    opened,
    record_of,
    target_profiles,
)
from runtime.toy import TableEngine
from specrt.engine.tensorrt.device import Block
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.errors import EngineError

LENGTH = 64
WIDEST_ROWS = GAMMAS[-1] + 1
FORMS = ("native", "decomposed")


class Step(NamedTuple):
    """One pass: where it starts is a share of what was written."""

    back: float
    width: int
    rows: int
    seed: int


@st.composite
def steps(draw: st.DrawFn) -> Step:
    width = draw(st.sampled_from([1, 1, 1, 2, 3, 5, 5, 9, 16]) | st.integers(1, PREFILL))
    rows = draw(st.sampled_from([1, min(width, WIDEST_ROWS)]) | st.integers(1, width))
    back = draw(st.just(0.0) | st.floats(0, 1))
    return Step(back, width, min(rows, WIDEST_ROWS), draw(st.integers(0, 99)))


class Plain:
    """What an engine must answer, from the tokens alone."""

    def __init__(self, toy: TableEngine) -> None:
        self.toy = toy
        self.held = [[0] * toy.max_length for _ in range(toy.batch)]
        self.length = 0

    def start(self, step: Step) -> int:
        start = self.length - round(step.back * self.length)
        return min(start, self.toy.max_length - step.width)

    def forward(self, tokens: NDArray[np.int64], start: int, rows: int) -> NDArray[np.float32]:
        width = tokens.shape[1]
        for held, fed in zip(self.held, tokens.tolist(), strict=True):
            held[start : start + width] = fed
        self.length = start + width
        ends = range(start + width - rows + 1, start + width + 1)
        return np.array([[self.toy.row(np.array(h[:end])) for end in ends] for h in self.held])


def check(engine: TensorRtEngine, plain: Plain, step: Step) -> None:
    start, rng = plain.start(step), np.random.default_rng(step.seed)
    tokens = rng.integers(0, engine.geometry.vocab_size, (engine.batch, step.width))
    wanted = plain.forward(tokens, start, step.rows)
    found = engine.forward(tokens, start, step.rows)
    assert found.argmax.dtype == np.int64
    np.testing.assert_array_equal(found.argmax, wanted.argmax(-1))
    record = engine.model.record
    assert (found.confidence is not None) == record.confidence
    if found.confidence is not None:
        sure = 1 / np.exp(wanted - wanted.max(-1, keepdims=True)).sum(-1)
        np.testing.assert_allclose(found.confidence, sure, rtol=1e-5)
    assert (found.candidates is not None) == bool(record.candidates)
    if found.candidates is not None:
        best = -np.sort(-wanted, -1)[..., : record.candidates]
        np.testing.assert_array_equal(found.candidates.values, best)
        at = np.take_along_axis(wanted, found.candidates.ids, -1)
        np.testing.assert_array_equal(at, best)
    if step.seed % 3 == 0:
        np.testing.assert_array_equal(found.logits, wanted)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"form": "decomposed"},
    {"confidence": True, "candidates": 5},
    {"form": "decomposed", "confidence": True, "compute": "bf16"},
    {"compute": "fp32", "candidates": 3},
    {"capture": False},
    {"capture": False, "form": "decomposed"},
]


@pytest.mark.parametrize("integrated", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(deadline=None, max_examples=15)
@given(walk=st.lists(steps(), min_size=1, max_size=14))
def test_any_passes_answer_as_the_tokens_alone_would(
    integrated: bool, batch: int, options: dict[str, Any], walk: list[Step]
) -> None:
    device = NumpyDevice(integrated=integrated)
    toy = TableEngine(5, batch=batch, max_length=LENGTH)
    engine, plain = opened(device, toy, **options), Plain(toy)
    for step in walk:
        check(engine, plain, step)
    engine.close()
    assert device.live == []


def test_each_row_of_a_batch_has_its_own_start() -> None:
    toy = TableEngine(5, batch=2, max_length=LENGTH)
    engine = opened(NumpyDevice(), toy)
    text = np.random.default_rng(0).integers(0, 29, (2, 9))
    engine.forward(text, 0, 1)
    for width in (1, 3):  # captured on the first run, launched on the second
        for _ in range(2):
            fed = text[:, :width]
            found = engine.forward(fed, [4, 9])
            for b, start in enumerate((4, 9)):
                seen = np.concatenate([text[b, :start], fed[b]])
                np.testing.assert_array_equal(found.logits[b, -1], toy.row(seen))
            engine.forward(text, 0, 1)


# What a pass costs


def calls_of(
    device: NumpyDevice, engine: TensorRtEngine, width: int, start: int, rows: int
) -> dict[str, int]:
    before = dict(device.calls)
    engine.forward([[4] * width], start, rows)
    return {k: n - before.get(k, 0) for k, n in device.calls.items() if n != before.get(k, 0)}


@pytest.mark.parametrize("form", FORMS)
def test_a_captured_pass_is_one_launch_and_one_wait(form: str) -> None:
    device = NumpyDevice()
    engine = opened(device, TableEngine(5, max_length=LENGTH), form=form)
    engine.forward([[1, 2, 3]], 0, 1)
    for width, rows in ((1, 1), (5, 5)):
        for _ in range(2):  # both parities of the decomposed form
            engine.forward([[4] * width], 3, rows)
        contexts = device.calls["context"]
        for start in (3, 4):
            asked = calls_of(device, engine, width, start, rows)
            assert asked == {"launch": 1, "wait": 1}
        assert device.calls["context"] == contexts


def test_working_memory_can_be_shared_and_must_be_enough() -> None:
    device, toy = NumpyDevice(), TableEngine(5, max_length=LENGTH)
    block = Block(device.allocate(5000, "working memory of both"), 5000)
    pair = [opened(device, toy, scratch=block), opened(device, toy, scratch=block)]
    for engine in pair:
        assert "working memory" not in engine.memory_bytes
        engine.forward([[1, 2, 3]], 0)
        engine.close()
    assert device.live == ["working memory of both"]
    with pytest.raises(EngineError, match=r"needs 3500 bytes of working memory and was given 10"):
        opened(device, toy, scratch=Block(block.address, 10))
    assert device.live == ["working memory of both"]


# What is refused


@pytest.mark.parametrize(
    ("width", "start", "message"),
    [
        (PREFILL + 1, 0, "a pass of 17 tokens was asked"),
        (5, LENGTH - 4, f"positions {LENGTH - 4} to {LENGTH} of a KV buffer"),
        (1, -1, "positions -1 to -1"),
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_passes_out_of_bounds_are_refused_before_anything_is_written(
    width: int, start: int, message: str, batch: int
) -> None:
    device = NumpyDevice()
    engine = opened(device, TableEngine(5, batch=batch, max_length=LENGTH))
    calls = dict(device.calls)
    starts = [start] * batch
    with pytest.raises(EngineError, match=message):
        engine.forward(np.ones((batch, width), np.int64), starts)
    assert dict(device.calls) == calls
    engine.forward(np.ones((batch, 1), np.int64), 0)


@pytest.mark.parametrize("starts", [(0, LENGTH - 4), (-1, 0), (LENGTH - 4, 0), (0, -1)])
def test_one_row_of_a_batch_out_of_bounds_is_enough(starts: tuple[int, int]) -> None:
    engine = opened(NumpyDevice(), TableEngine(5, batch=2, max_length=LENGTH))
    with pytest.raises(EngineError, match=r"a pass would write positions"):
        engine.forward(np.ones((2, 5), np.int64), starts)


@pytest.mark.parametrize(
    ("width", "rows", "message"),
    [
        (16, 16, r"width 16 with 16 scored rows \(gamma 15; the nearest built: 4 and 8\)"),
        (16, 11, r"width 16 with 11 scored rows; there are 'prefill' of width 1 to 16 and rows "
                 r"1 to 9, 'decode' of width 1 and rows 1, 'verify 1'.*build the bundle with"),
        (3, 4, r"width 3 with 4 scored rows"),
    ],
)  # fmt: skip
def test_a_pass_without_a_profile_names_those_there_are(
    width: int, rows: int, message: str
) -> None:
    engine = opened(NumpyDevice(), TableEngine(5, max_length=LENGTH))
    with pytest.raises(EngineError, match=message):
        engine.forward([[1] * width], 0, rows)
    engine.forward([[1]], 0)


def test_a_draft_scores_one_row() -> None:
    engine = opened(NumpyDevice(), TableEngine(5, max_length=LENGTH), draft_profiles(PREFILL))
    engine.forward([[1, 2]], 0, 1)
    with pytest.raises(EngineError, match=r"width 5 with 5 scored rows; there are .*'catch-up'"):
        engine.forward([[1] * 5], 0)


def apart(message: str, build: Any = None, length: int = LENGTH, **changed: Any) -> None:
    """Open a plan that is not what is said of it, and see that it is refused and closed."""
    device, toy = NumpyDevice(), TableEngine(5, max_length=LENGTH)
    said = {"confidence": True, "candidates": 4}
    record = record_of(target_profiles((2,), PREFILL), **said)
    plan = NumpyPlan(device, record, toy, geometry_of(toy))
    if build is not None:
        build(plan)
    told = record_of(target_profiles((2,), PREFILL), **{**said, **changed})
    with pytest.raises(EngineError, match=message) as caught:
        TensorRtEngine(
            plan, device, told, geometry_of(toy), batch=1, max_length=length, max_width=PREFILL
        )
    assert "build the bundle again" in str(caught.value)
    assert plan.closed == 1
    assert device.live == []


def without_a_value(plan: NumpyPlan) -> None:
    plan.tensors = {name: t for name, t in plan.tensors.items() if name != "value.1"}


def test_a_plan_of_another_model_is_refused() -> None:
    apart(r"key\.0 as input \[1, 2, 64, 3\] of float16, .* say input \[1, 2, 32, 3\]", length=32)
    apart(r"key\.0 as input .* of float16, .* of float32", compute="fp32")
    apart(r"computes in fp8", compute="fp8")
    apart(r"form ring", form="ring")
    apart(r"has a tensor confidence", confidence=False)
    apart(r"candidates\.values as output \[1, -1, 4\]", candidates=8)
    apart(r"no tensor value\.1", without_a_value)
    apart(
        r"writes present_key\.1 into key\.0",
        lambda plan: plan.renamed.update({"present_key.1": "key.0"}),
    )


def test_a_plan_that_does_not_say_its_aliases_is_taken() -> None:
    device, toy = NumpyDevice(), TableEngine(5, max_length=LENGTH)
    record = record_of(target_profiles((2,), PREFILL))
    plan = NumpyPlan(device, record, toy, geometry_of(toy))
    plan.renamed = {name: "" for name in plan.tensors if name.startswith("present_")}
    TensorRtEngine(
        plan, device, record, geometry_of(toy), batch=1, max_length=LENGTH, max_width=PREFILL
    ).close()
