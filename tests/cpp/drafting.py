"""Vectors of drafting: what the Python runtime's drafters do, and what policies must reach."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gamma_traces import REGRETS, Drafts, Trace, best_fixed, families

from specrt.speculation.costs import Costs
from specrt.speculation.gamma import BuiltGamma, DraftDecision
from specrt.speculation.ngram import NgramDrafter, Suffixes
from specrt.speculation.round import Round, run_alone

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
