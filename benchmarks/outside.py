"""Time what specrt itself does in a round: the loop over engines that answer at once.

`--evict 64` reads so many MiB in every target pass, which leaves the processor's caches as a
model of that size does; the rest of a round then takes longer, because its code and data come
from main memory again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specrt.bundle import Geometry
from specrt.engine.protocol import Candidates
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.sampling.processors import build_processors
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.pool import DrafterPool, Models
from specrt.speculation.round import run_rounds, speculate
from specrt.speculation.target import EngineTarget

LENGTH = 2048

_PROCESSORS: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
    "no_repeat_ngram_size": 3,
    "logit_bias": dict.fromkeys(range(20), 1.0),
    "min_tokens": LENGTH,
}


@dataclass(frozen=True)
class Answer:
    """What a pass leaves behind."""

    argmax: NDArray[np.int64]
    logits: NDArray[np.float32]
    confidence: NDArray[np.float32] | None = None
    candidates: Candidates | None = None


class Idle:
    """An engine that computes nothing, and counts the time it is asked for.

    Its logits are a steep distribution, the same for target and draft, over the whole vocabulary.
    """

    batch, max_length, max_width = 1, LENGTH, LENGTH

    def __init__(self, vocabulary: int, evict: int = 0) -> None:
        self.geometry = Geometry(1, 1, 1, 64, vocabulary, LENGTH, (0,))
        ranks = np.random.default_rng(0).permutation(vocabulary)
        self._row = (-1.3 * np.log1p(ranks)).astype(np.float32)
        self._other = np.ones(evict << 17)
        self._answers: dict[int, Answer] = {}
        self.ns = 0

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Answer:
        """Return the one answer there is for this many rows."""
        began = perf_counter_ns()
        self._other.sum()
        rows = rows or np.shape(tokens)[1]
        if rows not in self._answers:
            logits = np.tile(self._row, (1, rows, 1))
            self._answers[rows] = Answer(logits.argmax(-1), logits)
        self.ns += perf_counter_ns() - began
        return self._answers[rows]

    def close(self) -> None:
        """Hold nothing."""


def outside_us(vocabulary: int, gamma: int, params: SamplingParams, evict: int) -> float:
    """Return the microseconds a round of one completion spends outside both engines."""
    target, draft = Idle(vocabulary, evict), Idle(vocabulary)
    drafters = DrafterPool(Models(target, draft, tuple(range(gamma + 1)), gamma))
    noise = Noise(0)
    processors = build_processors(params, None, (0,), vocabulary)
    scorer = EngineTarget(KVCache(target), params, noise, processors)
    drafter = drafters.make(drafters.borrow(), "model", gamma, params, noise, processors)
    rounds = run_rounds(speculate(scorer, drafter, [1], LENGTH - gamma - 2))
    next(rounds)
    target.ns = draft.ns = 0
    began = perf_counter_ns()
    count = sum(1 for _ in rounds)
    return (perf_counter_ns() - began - target.ns - draft.ns) / count / 1e3


def main() -> None:
    """Measure and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--typical-p", type=float, default=1.0)
    parser.add_argument("--verifier", default="match")
    parser.add_argument("--evict", type=int, default=0, help="MiB read in every target pass")
    parser.add_argument("--processors", action="store_true", help="Ask for many of them.")
    parser.add_argument("--allowed", type=int, default=0, help="Allow only so many tokens.")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    params = SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        typical_p=given.typical_p,
        seed=0,
        verifier=given.verifier,
        max_tokens=LENGTH,
        ignore_eos=True,
        allowed_token_ids=tuple(range(given.allowed)) or None,
        **(_PROCESSORS if given.processors else {}),
    )
    took = [
        outside_us(given.vocabulary, given.gamma, params, given.evict) for _ in range(given.repeats)
    ]
    shown = {"outside_us": round(median(took), 1), "least": round(min(took), 1)}
    print(json.dumps({**vars(given), **shown}))


if __name__ == "__main__":
    main()
