"""Vectors of drafting: what the Python runtime's drafters do, and what policies must reach."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gamma_traces import MACHINES, REGRETS, Drafts, Trace, best_fixed, families
from numpy.typing import ArrayLike, NDArray

from specrt.bundle import Geometry
from specrt.engine.protocol import check_bounds
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.sampling.processors import LogitsProcessors, build_processors
from specrt.speculation.costs import Costs
from specrt.speculation.gamma import BuiltGamma, DraftDecision
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.ngram import NgramDrafter, Suffixes
from specrt.speculation.pool import DrafterPool, Models
from specrt.speculation.round import Drafter, Round, run_alone

Vector = dict[str, Any]
KINDS = (DraftDecision.DISCARD, DraftDecision.STOP, DraftDecision.CONTINUE)
POSITIONS = slice(1500, 4500)
"""Of each text; a text that recovers does so in between."""


def gamma() -> Vector:
    """Return traces with the rate that a policy must reach on each, and gammas to keep one to."""
    cases = []
    for family, traces in families().items():
        for trace in [t for t in traces if t.name == "206 M int8" and len(t.loads) == 1][::4]:
            short = replace(trace, drafts=_cut(trace.drafts))
            least = (1 - REGRETS[family]) * best_fixed(short)
            cases.append({"name": f"{family}, {trace.name}", "least": least, **_trace(short)})
    return {"cases": cases, "built": _built()}


def _cut(drafts: Drafts) -> Drafts:
    return Drafts(drafts.right[POSITIONS], drafts.confidence[POSITIONS])


def _trace(trace: Trace) -> Vector:
    tuned = trace.tuned or trace.costs
    return {
        "right": trace.drafts.right, "confidence": trace.drafts.confidence,
        "jitter": trace.jitter, "costs": _costs(trace.costs), "tuned": _costs(tuned),
    }  # fmt: skip


def _costs(costs: Costs) -> Vector:
    return {"verify": costs.verify_ns, "draft": costs.draft_ns, "outside": costs.outside_ns}


def _built() -> list[Vector]:
    """Return what becomes of a policy's wishes where few gammas were built."""
    draw = random.Random(5)
    wishes = []
    for _ in range(400):
        gammas = [0, *sorted(draw.sample(range(1, 9), draw.randint(1, 4)))]
        chosen, stop = draw.randint(0, 9), draw.randint(1, 8)
        script = _Script(chosen, stop, draw.choice((DraftDecision.DISCARD, DraftDecision.STOP)))
        built = BuiltGamma(script, gammas)
        wishes.append(
            {
                "gammas": gammas, "chosen": chosen, "stop": stop,
                "discards": int(script.end is DraftDecision.DISCARD), "gamma": built.choose(),
                "decisions": [KINDS.index(built.decide(k, 0.5)) for k in range(1, 9)],
            }
        )  # fmt: skip
    return wishes


class _Script:
    """Chooses one gamma, and ends every draft at one place."""

    def __init__(self, chosen: int, stop: int, end: DraftDecision) -> None:
        self.chosen, self.stop, self.end = chosen, stop, end

    def choose(self) -> int:
        return self.chosen

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        return self.end if drafted >= self.stop else DraftDecision.CONTINUE

    def observe(self, round_: Round) -> None:
        pass


def between() -> Vector:
    """Return costs between those measured."""
    return {"cases": [*_between(random.Random(11))]}


def _between(draw: random.Random) -> Iterable[Vector]:
    for _ in range(100):
        gammas = [0, *sorted(draw.sample(range(1, 20), draw.randint(0, 5)))]
        measured = [(g, draw.uniform(1e5, 1e7)) for g in gammas]
        most = draw.randint(0, 24)
        yield {"measured": measured, "most": most, "costs": Costs.between(measured, most)}


def ngram() -> Vector:
    """Return texts of few letters, where they were there before, and what lookup copies."""
    draw = random.Random(12)
    return {
        "suffixes": [_matches(draw, letters) for letters in (1, 2, 2, 3, 5, 40) for _ in range(6)],
        "drafts": [_copies(draw) for _ in range(60)],
    }


def _matches(draw: random.Random, letters: int) -> Vector:
    least = draw.randint(1, 3)
    suffixes = Suffixes(least, most := draw.randint(least, 12))
    tokens: list[int] = []
    matches = []
    for at in range(500):
        again = at > 60 and at % 90 < 40
        token = tokens[at - 50] if again else draw.randrange(letters)
        tokens.append(token)
        suffixes.extend([token])
        match = suffixes.longest()
        matches.append([] if match is None else [*match])
    return {"least": least, "most": most, "tokens": tokens, "matches": matches}


class _Cautious:
    """Drafts so far, and leaves out what follows too little."""

    def __init__(self, most: int, drop: float, last: float) -> None:
        self._most, self._drop, self._last = most, drop, last

    def choose(self) -> int:
        return self._most

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        if confidence < self._drop:
            return DraftDecision.DISCARD
        return DraftDecision.STOP if confidence < self._last else DraftDecision.CONTINUE

    def observe(self, round_: Round) -> None:
        pass


def _copies(draw: random.Random) -> Vector:
    """Return a text that grows, and now and then is another one."""
    most, drop, last = draw.randint(0, 8), draw.choice((0.0, 0.55)), draw.choice((0.0, 0.7))
    drafter = NgramDrafter(_Cautious(most, drop, last))
    letters = draw.choice((1, 2, 3, 6, 30))
    tokens: list[int] = []
    steps = []
    for _ in range(60):
        keep = draw.randint(0, len(tokens)) if draw.random() < 0.05 else len(tokens)
        add = [draw.randrange(letters) for _ in range(draw.randint(1, 9))]
        tokens = tokens[:keep] + add
        room = draw.choice((0, 1, 3, 8, 20))
        made = run_alone(drafter.propose(tokens, room))
        steps.append(
            {
                "keep": keep, "add": add, "room": room, "tokens": [*made.tokens],
                "confidences": [*made.confidences], "source": made.source,
            }
        )  # fmt: skip
        tokens = [*tokens, *made.tokens[: draw.randint(0, 8)]]
        steps[-1]["kept"] = len(tokens) - keep - len(add)
    return {"most": most, "drop": drop, "last": last, "steps": steps}


# ---- whole drafters, over an engine that is a function of the tokens fed ----

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
TARGET = 29
"""How many ids the target knows."""


def mix(x: int) -> int:
    """Return a number that looks random; the same as in native/numbers.cpp."""
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
