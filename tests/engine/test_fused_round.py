"""A round as one graph: the same as its passes one by one, for every gamma, over many rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.engine.protocol import Drafted
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.errors import EngineError
from support.cuda_double import DoubleDevice
from support.tensorrt_double import GAMMAS, PREFILL, draft_profiles, opened, target_profiles
from support.toy import TableEngine, near

LENGTH = 160
PROMPT = [3, 1, 4, 1, 5]


@dataclass
class Pair:
    """Both engines on one device, and their rounds."""

    device: DoubleDevice
    target: TensorRtEngine
    draft: TensorRtEngine
    rounds: CapturedRounds

    def close(self) -> None:
        self.target.close()
        self.draft.close()
        assert self.device.live == []


def paired(
    toy: TableEngine, other: TableEngine, *, device: DoubleDevice | None = None,
    capture: bool = True, draft_options: dict[str, Any] | None = None, **options: Any,
) -> Pair:  # fmt: skip
    device = device or DoubleDevice()
    target = opened(device, toy, capture=capture, **options)
    said = {"confidence": True, **options, **(draft_options or {})}
    draft = opened(device, other, draft_profiles(PREFILL), capture=capture, **said)
    return Pair(device, target, draft, CapturedRounds(target, draft, capture=capture))


def one_by_one(
    pair: Pair, pending: list[int], draft_start: int, last: int, target_start: int, gamma: int
) -> tuple[Drafted, Any]:
    """Run a round in single passes."""
    tokens: list[int] = []
    confidences: list[float] = []
    start = draft_start
    for _ in range(gamma):
        output = pair.draft.forward([pending], start, 1)
        start += len(pending)
        tokens.append(output.argmax.item())
        confidences.append(1.0 if output.confidence is None else output.confidence.item())
        pending = [tokens[-1]]
    return Drafted(tokens, confidences), pair.target.forward([[last, *tokens]], target_start)


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(found.argmax, wanted.argmax)
    np.testing.assert_array_equal(found.logits, wanted.logits)
    for name in ("confidence", "candidates"):
        mine, theirs = getattr(found, name), getattr(wanted, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


OPTIONS: list[dict[str, Any]] = [
    {"candidates": 4, "confidence": True},
    {"draft_options": {"confidence": False, "candidates": 7}, "device": {"integrated": True}},
    {"capture": False, "compute": "bf16"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["candidates", "integrated", "uncaptured"])
@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_a_round_is_its_passes_one_by_one(options: dict[str, Any], data: st.DataObject) -> None:
    """Whatever is accepted, whatever the gamma, with single passes and prompts in between."""
    toy = TableEngine(7, max_length=LENGTH)
    other = near(toy, 8, 0.7)
    options = dict(options)
    fused = paired(toy, other, device=DoubleDevice(**options.pop("device", {})), **options)
    single = paired(toy, other, **options)
    committed = [*PROMPT, 2]
    cached = 0
    for pair in (fused, single):
        pair.target.forward([PROMPT], 0, 1)
        pair.draft.forward([committed[:-1]], 0, 1)
        cached = len(committed) - 1
    while len(committed) < 45:
        gamma = data.draw(st.sampled_from(GAMMAS), label="gamma")
        pending, place = committed[cached:], len(committed) - 1
        assert len(pending) in (1, 2)
        wanted, expected = one_by_one(single, pending, cached, committed[-1], place, gamma)
        assert fused.rounds.fits(gamma, len(pending), cached, place)
        found = fused.rounds.run(pending, cached, committed[-1], place, gamma)
        assert found == wanted
        launches = fused.device.calls["cudaGraphLaunch"]
        same(fused.target.forward([[committed[-1], *found.tokens]], place), expected)
        assert fused.device.calls["cudaGraphLaunch"] == launches
        kept = data.draw(st.integers(0, gamma), label="kept")
        following = data.draw(st.integers(0, 28), label="following")
        cached = min(cached + len(pending) + gamma - 1, len(committed) + kept)
        committed += [*found.tokens[:kept], following]
        if data.draw(st.booleans(), label="passes between"):
            for pair in (fused, single):
                pair.target.forward([[committed[-1]]], len(committed) - 1)
                pair.draft.forward([committed[cached : len(committed)]], cached, 1)
            cached = len(committed) - 1
    fused.close()
    single.close()


def ready(**options: Any) -> Pair:
    toy = TableEngine(7, max_length=LENGTH)
    pair = paired(toy, near(toy, 8, 0.7), **options)
    pair.target.forward([PROMPT], 0, 1)
    pair.draft.forward([PROMPT], 0, 1)
    return pair


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("count", [1, 2])
def test_a_round_is_one_launch_and_one_wait(gamma: int, count: int) -> None:
    pair = ready()
    pending = PROMPT[-count:]
    first = pair.rounds.run(pending, 5 - count, 5, 4, gamma)
    before = pair.device.calls.copy()
    assert pair.rounds.run(pending, 5 - count, 5, 4, gamma) == first
    assert pair.device.calls - before == {"cudaGraphLaunch": 1, "cudaStreamSynchronize": 1}


def test_only_the_same_pass_is_known_to_have_run() -> None:
    pair = ready()
    done = pair.rounds.run([5], 4, 5, 4, 3)
    fed = [5, *done.tokens]

    def runs(tokens: list[int], start: int, rows: int | None = None) -> bool:
        pair.rounds.run([5], 4, 5, 4, 3)
        waits = pair.device.calls["cudaStreamSynchronize"]
        pair.target.forward([tokens], start, rows)
        return pair.device.calls["cudaStreamSynchronize"] > waits

    assert not runs(fed, 4)
    assert not runs(fed, 4, 4)
    assert runs(fed, 4, 1)
    assert runs(fed, 3)
    assert runs(fed[:-1], 4)
    assert runs([*fed[:-1], (fed[-1] + 1) % 29], 4)
    pair.rounds.run([5], 4, 5, 4, 3)
    pair.target.forward([[1]], 4)  # what the round wrote is gone
    waits = pair.device.calls["cudaStreamSynchronize"]
    pair.target.forward([fed], 4)
    assert pair.device.calls["cudaStreamSynchronize"] > waits


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_draft_without_numbers_says_so_and_breaks_nothing(step: int) -> None:
    toy = TableEngine(7, max_length=LENGTH)
    device = DoubleDevice()
    target = opened(device, toy)
    draft = opened(device, toy, draft_profiles(PREFILL), broken_at=(5 + step,))
    rounds = CapturedRounds(target, draft)
    plain = opened(DoubleDevice(), toy)
    for engine in (target, draft, plain):
        engine.forward([PROMPT], 0, 1)
    for _ in range(2):
        found = rounds.run([5], 4, 5, 4, 4)
        assert found.tokens[step] == -1
        assert min(found.tokens[:step], default=0) >= 0
        fed = [5, *found.tokens[:step], 1]
        waits = device.calls["cudaStreamSynchronize"]
        same(target.forward([fed], 4), plain.forward([fed], 4))
        assert device.calls["cudaStreamSynchronize"] > waits
    for engine in (target, draft):
        engine.forward([[1] * 10], 5, 1)
    assert min(rounds.run([1], 14, 1, 14, 4).tokens) >= 0


def test_a_round_without_numbers_is_not_finished_nor_is_what_came_before() -> None:
    toy = TableEngine(7, max_length=LENGTH)
    device = DoubleDevice()
    target = opened(device, toy)
    draft = opened(device, toy, draft_profiles(PREFILL), broken_at=(7,))
    rounds = CapturedRounds(target, draft)
    for engine in (target, draft):
        engine.forward([PROMPT], 0, 1)
    good = rounds.run([5], 4, 5, 4, 2)
    broken = rounds.run([5], 4, 5, 4, 4)
    assert good.tokens == broken.tokens[:2]
    assert broken.tokens[2] == -1
    for fed in ([5, *good.tokens], [5, *broken.tokens]):
        rounds.run([5], 4, 5, 4, 2)
        rounds.run([5], 4, 5, 4, 4)
        waits = device.calls["cudaStreamSynchronize"]
        target.forward([fed], 4)
        assert device.calls["cudaStreamSynchronize"] > waits


# Which rounds there are


@pytest.mark.parametrize(
    ("gamma", "pending", "draft_start", "target_start", "fits"),
    [
        (4, 1, 9, 9, True),
        (4, 2, 8, 9, True),
        (5, 1, 9, 9, False),
        (0, 1, 9, 9, False),
        (4, 0, 9, 9, False),
        (4, 3, 7, 9, False),
        (4, 1, -1, 9, False),
        (4, 1, 9, -1, False),
        (4, 1, LENGTH - 4, 9, True),
        (4, 1, LENGTH - 3, 9, False),
        (4, 2, LENGTH - 4, 9, False),
        (4, 1, 9, LENGTH - 5, True),
        (4, 1, 9, LENGTH - 4, False),
    ],
)
def test_rounds_fit_where_nothing_is_written_outside(
    gamma: int, pending: int, draft_start: int, target_start: int, fits: bool
) -> None:
    pair = ready()
    assert pair.rounds.fits(gamma, pending, draft_start, target_start) == fits
    if not fits:
        calls = dict(pair.device.calls)
        with pytest.raises(EngineError, match=r"that can be: 1, 2, 3, 4, 8; run its passes one"):
            pair.rounds.run([1] * pending, draft_start, 1, target_start, gamma)
        assert dict(pair.device.calls) == calls


def test_pairs_that_cannot_have_rounds_have_none() -> None:
    toy = TableEngine(7, max_length=LENGTH)
    device = DoubleDevice()
    target = opened(device, toy)

    def fits(target: TensorRtEngine, draft: TensorRtEngine, pending: int = 1) -> bool:
        return CapturedRounds(target, draft).fits(4, pending, 0, 0)

    def draft(device: DoubleDevice, toy: TableEngine, **options: Any) -> TensorRtEngine:
        return opened(device, toy, options.pop("profiles", draft_profiles(PREFILL)), **options)

    assert fits(target, draft(device, toy))
    assert not fits(target, draft(DoubleDevice(), toy))
    assert not fits(target, draft(device, toy, form="decomposed"))
    assert not fits(opened(device, toy, form="decomposed"), draft(device, toy))
    assert not fits(target, draft(device, TableEngine(7, vocab=30, max_length=LENGTH)))
    assert fits(target, draft(device, TableEngine(7, vocab=28, max_length=LENGTH)))
    two = TableEngine(7, batch=2, max_length=LENGTH)
    assert not fits(opened(device, two), draft(device, two))
    assert not fits(opened(device, toy, target_profiles((2,), PREFILL)), draft(device, toy))
    bare = draft(device, toy, profiles=draft_profiles(PREFILL)[:2])
    assert fits(target, bare)
    assert not fits(target, bare, 2)
    assert not fits(target, draft(device, toy, profiles=draft_profiles(PREFILL)[:1]))
