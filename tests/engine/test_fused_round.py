"""A round as one graph: the same as its passes one by one, for every gamma, over many rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specrt.engine.protocol import CudaGraphs, Drafted, cuda_graphs
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.errors import EngineError
from support.gpu_double import (
    GAMMAS,
    PREFILL,
    DoubleDevice,
    Pair,
    double_of,
    draft_profiles,
    opened,
    target_profiles,
)
from support.toy import TableEngine, near

LENGTH = 160
PROMPT = [3, 1, 4, 1, 5]


def ready(**options: Any) -> Pair:
    """Return a table and one like it, which have read the prompt."""
    toy = TableEngine(7, max_length=LENGTH)
    pair = Pair(toy, near(toy, 8, 0.7), **options)
    pair.target.forward([PROMPT], 0, 1)
    pair.draft.forward([PROMPT], 0, 1)
    return pair


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


def runs_a_pass(pair: Pair, tokens: list[int], start: int, rows: int | None = None) -> bool:
    """Ask the target for a pass; tell whether the device had to do anything for it."""
    waits = pair.device.calls["cudaStreamSynchronize"]
    pair.target.forward([tokens], start, rows)
    return pair.device.calls["cudaStreamSynchronize"] > waits


@pytest.mark.parametrize(
    ("integrated", "options"),
    [
        (False, {"candidates": 4}),
        (True, {"own": {"confidence": False, "candidates": 7}}),
        (False, {"capture": False, "compute": "bf16"}),
        (False, {"kv_lengths": ((8, 12, 25, LENGTH), (11, 20, LENGTH)), "candidates": 4}),
    ],
    ids=["candidates", "integrated", "uncaptured", "KV lengths"],
)
def test_a_round_is_its_passes_one_by_one(integrated: bool, options: dict[str, Any]) -> None:
    """Whatever is accepted, whatever the gamma, with single passes and prompts in between."""
    rng = np.random.default_rng(0)
    fused = ready(device=DoubleDevice(integrated=integrated), **options)
    single = ready(**options)
    committed, cached = [*PROMPT, 2], len(PROMPT)
    while len(committed) < 35:
        gamma = int(rng.choice(GAMMAS))
        pending, place = committed[cached:], len(committed) - 1
        assert len(pending) in (1, 2)
        wanted, expected = one_by_one(single, pending, cached, committed[-1], place, gamma)
        assert fused.rounds.fits(gamma, len(pending), cached, place)
        found = fused.rounds.run(pending, cached, committed[-1], place, gamma)
        assert found == wanted
        assert not runs_a_pass(fused, [committed[-1], *found.tokens], place)
        scores = fused.target.forward([[committed[-1], *found.tokens]], place)
        for name in ("argmax", "logits", "confidence", "candidates"):
            mine, theirs = getattr(scores, name), getattr(expected, name)
            assert (mine is None) == (theirs is None)
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
        kept = int(rng.integers(gamma + 1))
        cached = min(cached + len(pending) + gamma - 1, len(committed) + kept)
        committed += [*found.tokens[:kept], int(rng.integers(29))]
        if rng.random() < 0.5:  # passes in between
            for pair in (fused, single):
                pair.target.forward([[committed[-1]]], len(committed) - 1)
                pair.draft.forward([committed[cached : len(committed)]], cached, 1)
            cached = len(committed) - 1
    fused.close()
    single.close()


def test_a_pass_reads_the_least_length_that_holds_it() -> None:
    """Of the KV buffers, alone or within a round, and each length has graphs of its own."""
    lengths = (8, 16, LENGTH)
    pair = ready(kv_lengths=(lengths, lengths))
    reads = {engine: double_of(engine).read for engine in (pair.target, pair.draft)}
    for start, width, length in ((5, 3, 8), (5, 4, 16), (11, 5, 16), (12, 5, LENGTH), (1, 1, 8)):
        pair.target.forward([[1] * width], start)
        assert reads[pair.target][-1] == length
    pair.rounds.run([5], 3, 5, 4, 3)  # 6 positions of the draft and 8 of the target
    pair.rounds.run([5, 5], 11, 5, 12, 4)  # 16 and 17
    assert reads[pair.target][-2:] == [8, LENGTH]
    assert reads[pair.draft][-7:] == [8] * 3 + [16] * 4
    pair.rounds.run([5], 12, 5, 12, 3)  # 15 and 16
    assert (reads[pair.target][-1], reads[pair.draft][-3:]) == (16, [16] * 3)
    graphs = cuda_graphs(pair.rounds)
    assert graphs == CudaGraphs(captured=3, refusals=())


def test_only_the_same_pass_is_known_to_have_run() -> None:
    pair = ready()
    fed = [5, *pair.rounds.run([5], 4, 5, 4, 3).tokens]
    other = [*fed[:-1], (fed[-1] + 1) % 29]
    for tokens, start, rows, again in (
        (fed, 4, None, False), (fed, 4, 1, True), (fed, 3, None, True), (other, 4, None, True),
    ):  # fmt: skip
        pair.rounds.run([5], 4, 5, 4, 3)
        assert runs_a_pass(pair, tokens, start, rows) is again
    pair.rounds.run([5], 4, 5, 4, 3)
    pair.target.forward([[1]], 4)  # what the round wrote is gone
    assert runs_a_pass(pair, fed, 4)


def test_pairs_that_cannot_have_rounds_have_none() -> None:
    toy, two = TableEngine(7, max_length=LENGTH), TableEngine(7, batch=2, max_length=LENGTH)
    device, profiles = DoubleDevice(), draft_profiles(PREFILL)

    def fits(target: TensorRtEngine, draft: TensorRtEngine, pending: int = 1) -> bool:
        rounds = CapturedRounds(target, draft)
        if not (found := rounds.fits(4, pending, 0, 0)):
            with pytest.raises(EngineError, match=r"gammas that can be: .*run its passes one by"):
                rounds.run([1] * pending, 0, 1, 0, 4)
        return found

    target, draft = opened(device, toy), opened(device, toy, profiles)
    assert fits(target, draft)
    assert not fits(target, opened(device, toy, profiles, form="decomposed"))
    assert not fits(opened(device, toy, form="decomposed"), draft)
    assert not fits(opened(device, two), opened(device, two, profiles))
    assert not fits(opened(device, toy, target_profiles((2,), PREFILL)), draft)
    bare = opened(device, toy, profiles[:2])
    assert fits(target, bare)
    assert not fits(target, bare, 2)
    assert not fits(target, opened(device, toy, profiles[:1]))
