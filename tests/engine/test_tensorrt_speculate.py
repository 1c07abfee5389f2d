"""The loop of the runtime over TensorRT engines in NumPy: its output is plain decoding's."""

from __future__ import annotations

from typing import Any

import pytest

from engine.numpy_device import NumpyDevice
from engine.tensorrt_double import PREFILL, draft_profiles, opened
from runtime.toy import TableEngine, near, plain
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.speculation.drafters import ModelDrafter
from specrt.speculation.gamma import FixedGamma
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import (
    Drafter,
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


OPTIONS: list[dict[str, Any]] = [
    {}, {"form": "decomposed"}, {"capture": False}, {"candidates": 4}, {"compute": "bf16"},
]  # fmt: skip


@pytest.mark.parametrize("integrated", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("gamma", [0, 3, 8])
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
