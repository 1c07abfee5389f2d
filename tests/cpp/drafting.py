"""Vectors of drafting: what the Python runtime's policies and drafters do, call by call."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from runtime import traces
from runtime.traces import COSTS, LARGEST, Text, one_round
from specrt.speculation.costs import Costs, RoundCosts, plan
from specrt.speculation.gamma import AutoGamma, BuiltGamma, DraftDecision, GammaPolicy
from specrt.speculation.ngram import NgramDrafter, Suffixes
from specrt.speculation.round import Round, run_alone

Vector = dict[str, Any]
CHOSE, WEIGHED, OBSERVED = range(3)
KINDS = (DraftDecision.DISCARD, DraftDecision.STOP, DraftDecision.CONTINUE)


class Recorded:
    """A policy whose every call is written down, with what came of it."""

    def __init__(self, auto: AutoGamma, policy: GammaPolicy, index: int, events: list[Any]) -> None:
        self._auto, self._policy, self._index, self._events = auto, policy, index, events

    def choose(self) -> int:
        gamma = self._policy.choose()
        self._events.append([self._index, CHOSE, gamma])
        return gamma

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        weight = self._policy.decide(drafted, confidence)
        self._events.append([self._index, WEIGHED, drafted, confidence, KINDS.index(weight)])
        return weight

    def observe(self, round_: Round) -> None:
        self._policy.observe(round_)
        self._events.append(
            [
                self._index, OBSERVED, len(round_.tokens), round_.drafted, round_.accepted,
                round_.draft_ns, round_.verify_ns, int(round_.caught_up), self._auto.rate,
                self._auto.fallback,
            ]
        )  # fmt: skip


def policy_of(costs: Costs, rival: int | None = None, gammas: Sequence[int] = ()) -> Vector:
    return {
        "verify": costs.verify_ns, "draft": costs.draft_ns, "outside": costs.outside_ns,
        "most": gammas[-1] if gammas else LARGEST, "rival": rival, "gammas": [*gammas],
    }  # fmt: skip


def _played(costs: Costs, text: Text, seed: int, gammas: Sequence[int] = ()) -> Vector:
    """Return a policy on a text, on a machine that is busy at times."""
    events: list[Any] = []
    most = gammas[-1] if gammas else LARGEST
    auto = AutoGamma(costs, most)
    built = BuiltGamma(auto, gammas) if gammas else auto
    policy = Recorded(auto, built, 0, events)
    draw = random.Random(seed)

    def clock(ns: float, engine: str, number: int) -> float:
        slow = 1.8 if number % 700 > 450 else 1.0
        held_up = 100.0 if draw.random() < 0.002 else 1.0
        return ns * slow * held_up * draw.uniform(0.9, 1.2) if draw.random() < 0.99 else 0.0

    position = number = 0
    while position + LARGEST < len(text.chances):
        room = draw.randint(0, LARGEST) if draw.random() < 0.02 else LARGEST
        made = one_round(policy, text, costs, position, clock, number, room)
        if draw.random() < 0.03:
            made = made._replace(caught_up=True, draft_ns=3 * made.draft_ns)
        policy.observe(made)
        position += len(made.tokens)
        number += 1
    return {"policies": [policy_of(costs, None, gammas)], "events": events}


def _rivals(costs: Costs, copied: Text, modelled: Text, seed: int) -> Vector:
    """Return lookup before a model, on a text of which stretches can be copied."""
    events: list[Any] = []
    free = replace(costs, draft_ns=(0.0,) * len(costs.draft_ns))
    model = AutoGamma(costs, LARGEST)
    lookup = AutoGamma(free, LARGEST, model)
    second = Recorded(model, model, 0, events)
    first = Recorded(lookup, lookup, 1, events)
    draw = random.Random(seed)
    position = number = 0
    while position + LARGEST < len(copied.chances):
        there = draw.random() < 0.7
        room = LARGEST if there else 0
        made = one_round(first, copied, free, position, traces.exact, number, room)
        if made.drafted:
            first.observe(made)
        else:
            made = one_round(second, modelled, costs, position, traces.exact, number, LARGEST)
            first.observe(Round(made.tokens[:1], 0, 0, made.draft_ns, made.verify_ns))
            second.observe(made)
        position += len(made.tokens)
        number += 1
    return {"policies": [policy_of(costs), policy_of(free, 0)], "events": events}


def _odd(text: Text, seed: int) -> Text:
    """Return a text whose drafter now and then says what is no probability."""
    draw = random.Random(seed)
    assert text.confidences is not None
    odd = [c if draw.random() < 0.9 else draw.choice((1.5, -0.25, 0.0)) for c in text.confidences]
    return replace(text, confidences=odd)


def gamma() -> Vector:
    """Return policies in texts and on machines of many kinds."""
    texts = {
        "good": traces.steady(0.9, 1200, 1),
        "fading": traces.steady(0.85, 900, 2, fade=0.8),
        "hopeless": traces.steady(0.04, 2500, 3),
        "changing": traces.alternating(0.95, 0.05, 2000, 4),
        "telling": traces.telling(1500, 5),
        "modest": traces.telling(1500, 6, (1.0, 3.0), 0.5),
        "odd": _odd(traces.telling(1200, 7), 7),
        "unsure": replace(traces.steady(0.05, 1500, 8), confidences=[0.04] * 1500),
    }
    dear = Costs((1e6,) * 9, tuple(5e6 * g for g in range(9)))
    short = Costs((1e6, 1.1e6, 1.3e6), (0.0, 1e5), 3e4)
    costs = {**COSTS, "no acceptance pays": dear, "few were measured": short}
    cases: list[Vector] = []
    for seed, (text_name, text) in enumerate(texts.items()):
        for at, (name, cost) in enumerate(costs.items()):
            if (at + seed) % 2 or text_name in ("hopeless", "telling"):
                cases.append({"name": f"{text_name}, {name}", **_played(cost, text, seed)})
        for gammas in ((0, 2, 4, 8), (0, 1, 3, 7), (0, 5)):
            made = _played(COSTS["cheap draft, flat verify"], text, seed, gammas)
            cases.append({"name": f"{text_name}, built {gammas}", **made})
    for at, name in enumerate(("206 M int8", "cheap draft, flat verify", "stairs")):
        for copied in ("changing", "telling", "hopeless"):
            made = _rivals(costs[name], texts[copied], traces.telling(3000, 9), at)
            cases.append({"name": f"lookup on {copied}, {name}", **made})
    return {"cases": cases}


def plans() -> Vector:
    """Return plans of random prices, stairs among them, and costs between those measured."""
    draw = random.Random(11)
    cases = []
    for _ in range(600):
        most = draw.randint(0, 12)
        stair = draw.choice((1, 1, 2, 4))
        verify = [1e6 * (1 + draw.uniform(0, 0.3) * (g // stair)) for g in range(most + 1)]
        if draw.random() < 0.5:
            verify.sort()
        draft = [draw.choice((0.0, 3e4, 4e5)) * g for g in range(most + 1)]
        outside = draw.choice((0.0, 2e4))
        prices = RoundCosts.of(verify, draft, outside)
        chances = [draw.uniform(0.02, 0.98) for _ in range(most)]
        surest = [draw.uniform(chance, 1.0) for chance in chances]
        share = draw.uniform(0.3, 1.0)
        rate = draw.uniform(0.5, 3.0) / prices.total[0]
        made = plan(prices, chances, surest, share, rate)
        cases.append(
            {
                "verify": verify, "draft": draft, "outside": outside, "total": prices.total,
                "landings": prices.landings, "chances": chances, "surest": surest, "share": share,
                "floor": rate, "gamma": made.gamma, "rate": made.rate, "keep": made.keep,
                "more": made.more,
            }
        )  # fmt: skip
    return {"cases": cases, "between": [*_between(draw)]}


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
