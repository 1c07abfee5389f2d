"""Vectors of whole drafters: generations over an engine that is a function of the tokens fed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from gamma_traces import MACHINES
from numpy.typing import ArrayLike, NDArray

from specrt.bundle import Geometry
from specrt.engine.protocol import check_bounds
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.sampling.processors import LogitsProcessors, build_processors
from specrt.speculation.costs import Costs
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.pool import DrafterPool, Models
from specrt.speculation.round import Drafter, Round, run_alone

Vector = dict[str, Any]
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
TARGET = 29
"""How many ids the target knows."""


def mix(x: int) -> int:
    """Return a number that looks random; the same as in native/draft_check.cpp."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass
class _Output:
    argmax: NDArray[np.int64]
    logits: NDArray[np.float32]
    confidence: NDArray[np.float32] | None
    candidates: None = None


class HashEngine:
    """Scores by the latest three tokens that its buffer holds, some of them as NaN."""

    batch, max_length = 1, 512

    def __init__(self, vocabulary: int, width: int, *, sure: bool, broken: bool) -> None:
        self.geometry = Geometry(1, 1, 1, 1, vocabulary, self.max_length, (0,))
        self.max_width = width
        self.sure, self.broken = sure, broken
        self.buffer = [0] * self.max_length
        self.calls: list[list[int]] = []

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> _Output:
        fed = [int(token) for token in np.asarray(tokens)[0]]
        first, width = int(np.asarray(start)), len(fed)
        check_bounds(self, width, first, first)
        assert rows == 1
        assert all(0 <= token < self.geometry.vocab_size for token in fed)
        self.calls.append([first, width, rows])
        self.buffer[first : first + width] = fed
        key = 7
        for token in self.buffer[max(0, first + width - 3) : first + width]:
            key = mix(key + _GOLDEN * (token + 1))
        vocabulary = self.geometry.vocab_size
        bits = [mix(key + _GOLDEN * (token + 1)) >> 52 for token in range(vocabulary)]
        row = np.array(bits, np.float32) / np.float32(512)
        best = int(row.argmax())
        if self.broken and key % 13 == 0:
            row[key % vocabulary], best = np.nan, -1
        confidence = np.float32((key >> 40) + 1) / np.float32(1 << 24)
        return _Output(
            np.array([[best]]), row[None, None],
            np.array([[confidence]]) if self.sure else None,
        )  # fmt: skip

    def close(self) -> None: ...


ASKED: dict[str, Vector] = {
    "greedy": {},
    "match": {"temperature": 0.9},
    "hot": {"temperature": 2.5, "top_p": 0.8},
    "top-k": {"temperature": 0.7, "top_k": 4, "min_p": 0.05},
    "typical": {"temperature": 1.2, "typical_p": 0.7},
    "rejection": {"temperature": 0.9, "verifier": "rejection"},
    "rejection, top-p": {"temperature": 1.5, "top_p": 0.7, "verifier": "rejection"},
    "greedy by rejection": {"verifier": "rejection"},
}
RULES: dict[str, Vector] = {
    "no rules": {},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "no pair twice": {"no_repeat_ngram_size": 2},
    "few allowed": {"allowed_token_ids": [2, 3, 5, 7, 11], "no_repeat_ngram_size": 2},
    "unknown to the draft": {"allowed_token_ids": [27, 28]},
    "biased": {"logit_bias": [[3, 2.5], [4, -100.0]]},
}


def _params(asked: Vector) -> SamplingParams:
    return SamplingParams(**{**asked, "logit_bias": dict(asked.get("logit_bias", ()))})


class _Generation:
    """Rounds of one text: what was drafted, and a made-up fate for it."""

    def __init__(
        self, drafter: Drafter, draft: KVCache, tokens: list[int], draw: random.Random
    ) -> None:
        self.drafter, self.draft, self.tokens, self.draw = drafter, draft, tokens, draw

    def step(self, costs: Costs) -> Vector:
        """Return one round; now and then one that the drafter has no part in."""
        draw, tokens = self.draw, self.tokens
        if draw.random() < 0.08:
            add = [draw.randrange(TARGET - 1) for _ in range(draw.randint(1, 12))]
            tokens += add
            return {"add": add}
        room = draw.choice((0, 1, 3, 8, 8, 8))
        made = run_alone(self.drafter.propose(tokens, room))
        drafted = len(made.tokens)
        luck = draw.random()
        accepted = drafted if luck < 0.4 else draw.randint(0, drafted) if luck < 0.8 else 0
        # Mostly an id that the smallest draft knows, too.
        own = draw.randrange(TARGET if draw.random() < 0.02 else 20)
        committed = [*made.tokens[:accepted], own]
        tokens += committed
        draft_ns = round(costs.draft(drafted))
        verify_ns = round(costs.verify(drafted) * draw.uniform(0.9, 1.3))
        round_ = Round(committed, drafted, accepted, draft_ns, verify_ns, made.source,
                       made.confidences, made.caught_up)  # fmt: skip
        self.drafter.observe(tokens, round_)
        return {
            "room": room, "tokens": [*made.tokens], "confidences": [*made.confidences],
            "source": made.source, "caught_up": made.caught_up,
            "drawn_from": [
                {"ids": d.ids.tolist(), "probs": d.probs.tolist()} for d in made.distributions or ()
            ],
            "accepted": accepted, "next": own, "times": [draft_ns, verify_ns],
            "held": self.draft.length,
        }  # fmt: skip


def _case(
    drafter: str,
    gamma: int,
    gammas: tuple[int, ...],
    asked: Vector,
    engine: Vector,
    seed: int,
) -> Vector:
    """Return a few generations of one session, of fixed gamma: `auto` goes by its own estimates."""
    draw = random.Random(seed)
    made = HashEngine(**engine)
    target = HashEngine(TARGET, 8, sure=True, broken=False)
    costs = MACHINES["expensive draft"]
    drafters = DrafterPool(Models(target, made, gammas), costs)
    policies = drafters.borrow()
    params = _params(asked)
    generations = []
    for number in range(3):
        rules: LogitsProcessors | None = build_processors(params, None, (), TARGET)
        noise, caches = Noise(seed, number), (KVCache(target), KVCache(made))
        one = drafters.make(policies, drafter, gamma, params, noise, rules, caches)
        prompt = [draw.randrange(20) for _ in range(draw.choice((1, 2, 5, 30)))]
        playing = _Generation(one, caches[1], [*prompt], draw)
        steps = [playing.step(costs) for _ in range(30)]
        generations.append({"prompt": prompt, "steps": steps})
    return {
        "drafter": drafter, "gamma": gamma, "gammas": gammas,
        "params": asked, "engine": engine, "seed": seed, "generations": generations,
        "calls": made.calls, "verify": costs.verify_ns, "draft": costs.draft_ns,
        "outside": costs.outside_ns,
    }  # fmt: skip


def draft() -> Vector:
    """Return sessions of every drafter, verifier and kind of request."""
    draw = random.Random(21)
    cases: list[Vector] = []
    whole, gaps = tuple(range(9)), (0, 2, 5, 8)
    for asked_name, asked in ASKED.items():
        for rules_name, rules in RULES.items():
            for drafter in ("model", "cascade", "ngram"):
                if drafter == "ngram" and rules:
                    continue
                engine = {
                    "vocabulary": draw.choice((23, 29, 37)), "width": draw.choice((2, 8, 64)),
                    "sure": draw.random() < 0.7, "broken": draw.random() < 0.4,
                }  # fmt: skip
                gamma, gammas = draw.choice((1, 4, 8)), (*gaps, 1, 4)
                made = _case(
                    drafter, gamma, tuple(sorted(gammas)), {**asked, **rules}, engine, len(cases)
                )
                cases.append({"name": f"{drafter}, {asked_name}, {rules_name}", **made})
    engine = {"vocabulary": 29, "width": 8, "sure": True, "broken": False}
    cases.append({"name": "none", **_case("none", 4, whole, {}, engine, 99)})
    return {"cases": cases}
