"""The loop of the runtime over TensorRT engines in NumPy: its output is plain decoding's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from engine.numpy_device import NumpyDevice
from engine.tensorrt_double import GAMMAS, PREFILL, draft_profiles, opened
from runtime.toy import TableEngine, near, plain
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.errors import EngineError
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.speculation.drafters import ModelDrafter
from specrt.speculation.gamma import FixedGamma
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import (
    NOTHING,
    Drafter,
    Passes,
    Proposal,
    Round,
    run_rounds,
    speculate,
)
from specrt.speculation.target import EngineTarget

LENGTH = 200
PROMPT = list(range(1, 24))  # more than one chunk of a prompt


def loop(target: TensorRtEngine, drafter: Drafter, params: SamplingParams, new: int) -> list[int]:
    tokens = list(PROMPT)
    limit = min(len(tokens) + new, LENGTH + 1)
    judge = EngineTarget(KVCache(target), params, Noise(3))
    rounds = list(run_rounds(speculate(judge, drafter, tokens, limit)))
    assert rounds
    return tokens[len(PROMPT) :]


class RoundDrafter:
    """Drafts with whole rounds where they fit, as a caller would wire them."""

    def __init__(self, rounds: CapturedRounds, draft: TensorRtEngine, gamma: int) -> None:
        self._rounds, self._gamma = rounds, gamma
        self._draft = draft
        self.length = 0
        self.fused = self.chunks = self.nothing = 0

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        yield from ()
        pending = list(tokens[self.length :])
        gamma, place = min(self._gamma, room), len(tokens) - 1
        while len(pending) > 2:
            chunk = pending[: min(PREFILL, len(pending) - 1)]
            self._draft.forward([chunk], self.length, 1)
            self.chunks += 1
            self.length += len(chunk)
            pending = pending[len(chunk) :]
        if not self._rounds.fits(gamma, len(pending), self.length, place):
            self.nothing += 1
            return NOTHING
        self.fused += 1
        drafted = self._rounds.run(pending, self.length, tokens[-1], place, gamma)
        self.length += len(pending) + gamma - 1
        return Proposal(drafted.tokens, None, "model", drafted.confidences)

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        self.length = min(self.length, len(tokens) - 1)


OPTIONS: list[dict[str, Any]] = [
    {}, {"form": "decomposed"}, {"capture": False}, {"candidates": 4}, {"compute": "bf16"},
]  # fmt: skip


@pytest.mark.parametrize("integrated", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("gamma", [0, 1, 3, 5, 8])
def test_speculation_is_plain_decoding(
    gamma: int, options: dict[str, Any], integrated: bool
) -> None:
    toy = TableEngine(11, max_length=LENGTH)
    other = near(toy, 12, 0.65)
    device = NumpyDevice(integrated=integrated)
    target = opened(device, toy, **options)
    draft = opened(device, other, draft_profiles(PREFILL), confidence=True, **options)
    for sampling in ({}, {"temperature": 1.0}):
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        drafter = ModelDrafter(KVCache(draft), params, Noise(3), FixedGamma(gamma))
        found = loop(target, drafter, params, 500)
        idle = ModelDrafter(KVCache(draft), params, Noise(3), FixedGamma(0))
        assert found == loop(target, idle, params, 500)
        if params.greedy:
            assert found == plain(toy, PROMPT, 500)
            assert len(found) == LENGTH + 1 - len(PROMPT)
    draft.close()
    target.close()
    assert device.live == []


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("closeness", [0.3, 0.7, 1.0])
def test_whole_rounds_are_plain_decoding(gamma: int, closeness: float) -> None:
    toy = TableEngine(13, max_length=LENGTH)
    device = NumpyDevice()
    target = opened(device, toy)
    draft = opened(device, near(toy, 14, closeness), draft_profiles(PREFILL), confidence=True)
    drafter = RoundDrafter(CapturedRounds(target, draft), draft, gamma)
    assert loop(target, drafter, SamplingParams(), 500) == plain(toy, PROMPT, 500)
    assert drafter.fused > 5
    # Two chunks of the prompt; the target never runs what a round has run.
    assert device.calls["wait"] == 2 + drafter.chunks + drafter.fused + drafter.nothing


def test_a_device_lost_in_mid_stream_keeps_what_was_emitted() -> None:
    toy = TableEngine(11, max_length=LENGTH)
    device = NumpyDevice(loses=True)
    target = opened(device, toy)
    draft = opened(device, near(toy, 12, 0.65), draft_profiles(PREFILL))
    device.fails = {"wait": device.calls["wait"] + 40}
    params = SamplingParams()
    tokens = list(PROMPT)
    drafter = ModelDrafter(KVCache(draft), params, Noise(3), FixedGamma(3))
    emitted: list[int] = []
    rounds = run_rounds(
        speculate(EngineTarget(KVCache(target), params, Noise(3)), drafter, tokens, 150)
    )
    with pytest.raises(EngineError, match="wait failed"):
        emitted.extend(token for round_ in rounds for token in round_.tokens)
    assert len(emitted) > 5
    assert emitted == plain(toy, PROMPT, len(emitted))
    with pytest.raises(EngineError):
        target.forward(np.array([tokens[:5]]), 0)
