"""What every engine does: its answers are those of the tokens alone, and it refuses what it must.

The same cases for each; the engines for GPUs run on the CPU provider and on doubles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from engine.conftest import Opener, alone
from specrt.engine.protocol import Engine
from specrt.errors import EngineError
from support.gpu_double import (
    GAMMAS,
    PREFILL,
    DoubleDevice,
    draft_profiles,
    opened,
    target_profiles,
)
from support.toy import TableEngine

Scores = NDArray[np.float32]
LENGTH = 64
ONNX: dict[str, tuple[str, str, float]] = {
    "ort-cpu": ("fp32 1", "fp32 1 contrib", 1e-4),
    "ort-cpu rows": ("fp32 3", "fp32 1", 1e-4),
    "ort-cpu quantized rows": ("int4 3", "int4 1", 1e-6),
    "ort-cpu contrib rows": ("fp32 3 contrib", "fp32 1", 1e-4),
    "ort-cpu contrib quantized rows": ("int8 3 contrib", "int8 1 contrib", 1e-6),
    "ort-cuda": ("cuda", "fp32 1", 0.1),
}
"""Compiled model, the one it is held to, and tolerance of its logits. The scores of codelet, up to
20, are steps of 2**-6 in fp16, which rounds a few times a layer: 0.02 between fp16 and fp32, seen
over 100 tokens."""
TENSORRT: dict[str, dict[str, Any]] = {
    "tensorrt": {},
    "tensorrt decomposed": {"form": "decomposed", "batch": 2, "candidates": 3, "compute": "bf16"},
    "tensorrt candidates": {"candidates": 5, "confidence": True, "batch": 3},
    "tensorrt draft": {"built": draft_profiles(PREFILL), "confidence": True},
    "tensorrt KV lengths": {"built": target_profiles(GAMMAS, PREFILL, (9, 30, LENGTH)), "batch": 2},
    "tensorrt integrated": {"integrated": True, "confidence": True},
}


@dataclass
class Subject:
    """An engine, and what it must answer after each token of a text, [S, V]."""

    engine: Engine
    scores: Callable[[Sequence[int]], Scores]
    tolerance: float

    @property
    def most_rows(self) -> int:
        return int(self.engine.max_rows)

    def tokens(self, seed: int, width: int) -> NDArray[np.int64]:
        vocabulary = self.engine.geometry.vocab_size
        rng = np.random.default_rng(seed)
        return rng.integers(0, vocabulary, (self.engine.batch, width))


@pytest.fixture(params=[*ONNX, *TENSORRT])
def subject(request: pytest.FixtureRequest, opener: Opener) -> Any:
    name = request.param
    if name in ONNX:
        compiled, reference, tolerance = ONNX[name]
        yield Subject(opener(compiled), partial(alone, opener(reference)), tolerance)
        return
    options = dict(TENSORRT[name])
    table = TableEngine(5, batch=options.pop("batch", 1), max_length=LENGTH)
    device = DoubleDevice(integrated=options.pop("integrated", False))
    engine = opened(device, table, **options)

    def scores(text: Sequence[int]) -> Scores:
        return np.array([table.row(np.array(text[: n + 1])) for n in range(len(text))])

    yield Subject(engine, scores, 0)
    engine.close()
    assert device.live == []


def check(subject: Subject, output: Any, wanted: Scores) -> None:
    """Compare all that an output tells with scores [B, R, V]."""
    assert (output.argmax.dtype, output.logits.dtype) == (np.int64, np.float32)
    np.testing.assert_allclose(output.logits, wanted, rtol=0, atol=subject.tolerance)
    np.testing.assert_array_equal(output.argmax, output.logits.argmax(-1))
    if output.confidence is not None:
        sure = 1 / np.exp(wanted - wanted.max(-1, keepdims=True)).sum(-1)
        np.testing.assert_allclose(output.confidence, sure, rtol=1e-3)
    if output.candidates is not None:
        values, ids = output.candidates
        best = -np.sort(-wanted, -1)[..., : values.shape[-1]]
        np.testing.assert_array_equal(values, best)
        np.testing.assert_array_equal(np.take_along_axis(wanted, ids, -1), best)


def test_any_passes_answer_as_their_tokens_alone_would(subject: Subject) -> None:
    """Passes of all widths and rows, each row from a start of its own, on stale keys and to the
    last position."""
    engine, rng = subject.engine, np.random.default_rng(7)
    held: list[list[int]] = [[] for _ in range(engine.batch)]
    widths = [1, 1, 2, 3, 5, 9, engine.max_width, engine.max_width]
    ended = 0
    for number in range(28):
        width = int(rng.choice(widths))
        starts = [
            min(rng.integers(len(text) // 2, len(text) + 1) if rng.random() < 0.15 else len(text),
                engine.max_length - width)
            for text in held
        ]  # fmt: skip
        rows = int(rng.choice([1, min(width, subject.most_rows)]))
        fed = subject.tokens(number, width)
        held = [[*t[:s], *new] for t, s, new in zip(held, starts, fed.tolist(), strict=True)]
        output = engine.forward(fed, starts, rows)
        check(subject, output, np.array([subject.scores(text)[-rows:] for text in held]))
        ended = max(ended, *map(len, held))
    assert ended == engine.max_length


def bad_passes(subject: Subject) -> list[tuple[ArrayLike, Any, int | None, str]]:
    """Return passes that no engine takes: tokens, start, rows and what is said of them."""
    engine = subject.engine
    batch, widest, length = engine.batch, engine.max_width, engine.max_length

    def tokens(width: int, rows: int = batch) -> NDArray[np.int64]:
        return np.ones((rows, width), np.int64)

    one_late = [0] * (batch - 1) + [length - 4]
    passes: list[tuple[ArrayLike, Any, int | None, str]] = [
        (tokens(widest + 1), 0, 1, f"a pass of {widest + 1} tokens .* 1 to {widest}; rebuild"),
        (tokens(0), 0, None, "a pass of 0 tokens"),
        (tokens(5), one_late, None, f"to {length} of a KV buffer that has 0 to {length - 1}"),
        (tokens(1), [0] * (batch - 1) + [-1], None, "would write positions -1 to"),
        (tokens(2, batch + 1), 0, None, rf"expected \[{batch}, width\]"),
        (tokens(3), 0, 4, "4 positions .* expected 1 to 3"),
    ]
    if subject.tolerance > 1e-6:  # of ONNX Runtime, which fails in the midst of it
        passes.append((tokens(1) * 8192, 6, None, "ONNX Runtime failed in a pass .*: "))
    return passes


@pytest.mark.filterwarnings("default")
def test_a_pass_that_cannot_be_is_refused_and_changes_nothing(subject: Subject) -> None:
    engine = subject.engine
    fed = subject.tokens(1, 6)
    engine.forward(fed, 0, 1)
    for tokens, start, rows, message in bad_passes(subject):
        with pytest.raises(EngineError, match=message):
            engine.forward(tokens, start, rows)
        output = engine.forward(fed[:, 4:], 4, 1)
        check(subject, output, np.array([subject.scores(text)[-1:] for text in fed.tolist()]))


def test_a_closed_engine_refuses_every_pass(subject: Subject) -> None:
    engine, fed = subject.engine, subject.tokens(2, 3)
    kept = engine.forward(fed, 0, 1).argmax
    before = kept.copy()
    engine.close()
    engine.close()
    for width in (1, 3):
        with pytest.raises(EngineError, match="closed; open the bundle again"):
            engine.forward(fed[:, :width], 0)
    np.testing.assert_array_equal(kept, before)  # what was read stays
