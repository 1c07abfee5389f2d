"""A pair of tables as TensorRT engines on one device in NumPy, and their whole rounds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from engine.numpy_device import NumpyDevice
from engine.tensorrt_double import PREFILL, draft_profiles, opened
from runtime.toy import TableEngine
from specrt.engine.protocol import Drafted
from specrt.engine.tensorrt.fused_round import CapturedRounds, fused_rounds
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.speculation.drafters import ModelDrafter
from specrt.speculation.gamma import GammaPolicy
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import Drafter, Round, run_rounds, speculate
from specrt.speculation.target import EngineTarget

LENGTH = 96
GREEDY = SamplingParams()
PROMPT = list(range(1, 20))


class Noted:
    """Whole rounds that are counted."""

    def __init__(self, rounds: CapturedRounds) -> None:
        self._rounds = rounds
        self.fits = rounds.fits
        self.ran: list[tuple[int, int]] = []
        """Pending tokens and gamma of each."""

    def run(
        self, pending: Sequence[int], draft_start: int, last: int, target_start: int, gamma: int
    ) -> Drafted:
        self.ran.append((len(pending), gamma))
        return self._rounds.run(pending, draft_start, last, target_start, gamma)


class Pair:
    """Two tables as TensorRT engines on one device, and their rounds."""

    def __init__(
        self, target: TableEngine, draft: TableEngine, broken_at: Collection[int] = ()
    ) -> None:
        self.device = NumpyDevice(1 << 21)
        self.target = opened(self.device, target)
        self.draft = opened(
            self.device, draft, draft_profiles(PREFILL), confidence=True, broken_at=broken_at
        )
        found = fused_rounds(self.target, self.draft)
        self.rounds = Noted(found) if found else None

    def drafter(self, policy: GammaPolicy, params: SamplingParams = GREEDY) -> ModelDrafter:
        both = min(self.target.geometry.vocab_size, self.draft.geometry.vocab_size)
        return ModelDrafter(KVCache(self.draft), params, Noise(3), policy, both, self.rounds)

    def run(
        self, drafter: Drafter, prompt: Sequence[int], new: int, params: SamplingParams = GREEDY
    ) -> tuple[list[int], list[Round]]:
        tokens = list(prompt)
        limit = min(len(prompt) + new, LENGTH + 1)
        target = EngineTarget(KVCache(self.target), params, Noise(3))
        rounds = list(run_rounds(speculate(target, drafter, tokens, limit)))
        return tokens[len(prompt) :], rounds
