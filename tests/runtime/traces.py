"""Texts whose acceptance is known, and the clock of a machine whose costs are: no engine runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from specrt.speculation.costs import Costs
from specrt.speculation.gamma import DraftDecision, FixedGamma, GammaPolicy
from specrt.speculation.round import Round

LARGEST = 8

COSTS = {
    # Of shapes that engines have, by name where one was measured.
    "cheap draft, flat verify": Costs(
        tuple(1e6 * (1 + 0.02 * g) for g in range(9)), tuple(1e6 * 0.02 * g for g in range(9)), 2e4
    ),
    "expensive draft": Costs(
        tuple(1e6 * (1 + 0.05 * g) for g in range(9)), tuple(1e6 * 0.3 * g for g in range(9)), 2e4
    ),
    "206 M int8": Costs(
        tuple(ms * 1e6 for ms in (6.1, 6.8, 7.5, 8.15, 8.8, 9.5, 10.2, 11.0, 11.7)),
        tuple(0.25e6 * g for g in range(9)),
        5e4,
    ),
    "206 M int4": Costs(
        tuple(ms * 1e6 for ms in (4.1, 4.6, 5.5, 6.35, 7.2, 7.9, 8.8, 9.75, 10.7)),
        tuple(0.25e6 * g for g in range(9)),
        5e4,
    ),
    "206 M measured": Costs(
        tuple(ms * 1e6 for ms in (7.1, 7.7, 8.4, 9.6, 10.4, 11.2, 12.0, 12.9, 13.8)),
        tuple(0.25e6 * g for g in range(9)),
        5e4,
    ),
    "16 M int8": Costs(
        tuple(ms * 1e6 for ms in (0.43, 0.5, 0.58, 0.66, 0.74, 0.81, 0.9, 0.98, 1.06)),
        tuple(0.07e6 * g for g in range(9)),
        4e4,
    ),
    "lookup": Costs(
        tuple(ms * 1e6 for ms in (6.1, 6.8, 7.5, 8.15, 8.8, 9.5, 10.2, 11.0, 11.7)),
        (0.0,) * 9,
        2e4,
    ),
    "stairs": Costs(
        tuple(1e6 * (1 if g < 4 else 1.6) for g in range(9)),
        tuple(1e6 * 0.04 * g for g in range(9)),
        2e4,
    ),
}

FREE = Costs((1e6,) * 9, (0.0,) * 9)


@dataclass(frozen=True, eq=False)
class Text:
    """A text whose token at each position a draft would get right or not.

    `luck` is uniform; a token drafted for position t at place i is right where
    `luck[t] < chances[t] * fade ** i`, whatever policy asks, so that policies meet equal luck.
    """

    chances: Sequence[float]
    luck: Sequence[float]
    confidences: Sequence[float] | None = None
    fade: float = 1.0

    def right(self, position: int, place: int) -> bool:
        return self.luck[position] < self.chances[position] * self.fade**place

    def untold(self) -> Text:
        """Return the same text, drafted by one that has no confidence to give."""
        return replace(self, confidences=None)

    def confidence(self, position: int) -> float:
        return 1.0 if self.confidences is None else self.confidences[position]


def steady(chance: float, length: int, seed: int, fade: float = 1.0) -> Text:
    """Equally hard everywhere."""
    draw = random.Random(seed)
    return Text([chance] * length, [draw.random() for _ in range(length)], fade=fade)


def alternating(easy: float, hard: float, length: int, seed: int) -> Text:
    """Stretches of 100 to 300 tokens, easy and hard in turn."""
    draw = random.Random(seed)
    chances: list[float] = []
    while len(chances) < length:
        chances += [easy] * draw.randint(100, 300)
        chances += [hard] * draw.randint(100, 300)
    return Text(chances, [draw.random() for _ in chances])


def telling(
    length: int, seed: int, shape: tuple[float, float] = (2.0, 1.0), warp: float = 1.0
) -> Text:
    """Tokens of many chances, about which the draft's confidence tells: chance ** warp."""
    draw = random.Random(seed)
    chances = [draw.betavariate(*shape) for _ in range(length)]
    return Text(chances, [draw.random() for _ in chances], [max(1e-6, c**warp) for c in chances])


Clock = Callable[[float, str, int], float]
"""Gives what a pass took: of what it should take, which engine's, in which round."""


def exact(ns: float, engine: str, number: int) -> float:
    """Take what passes cost."""
    return ns


@dataclass
class Ride:
    """A policy on a text: what was emitted, and when."""

    tokens: int = 0
    ns: float = 0.0
    rounds: list[Round] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per plain second."""
        return self.tokens / self.ns * 1e9


def ride(
    policy: GammaPolicy,
    text: Text,
    costs: Costs,
    clock: Clock = exact,
    room: int = LARGEST,
) -> Ride:
    """Run a policy over a text."""
    done = Ride()
    position = 0
    while position + room < len(text.chances):
        round_ = one_round(policy, text, costs, position, clock, len(done.rounds), room)
        policy.observe(round_)
        done.rounds.append(round_)
        done.ns += round_.draft_ns + round_.verify_ns + costs.outside_ns
        position += len(round_.tokens)
    done.tokens = position
    return done


def one_round(
    policy: GammaPolicy,
    text: Text,
    costs: Costs,
    position: int,
    clock: Clock,
    number: int,
    room: int,
) -> Round:
    most = min(policy.choose(), room)
    steps = kept = 0
    confidences: list[float] = []
    while steps < most:
        confidence = text.confidence(position + steps)
        steps += 1
        weight = policy.decide(steps, confidence)
        if weight is DraftDecision.DISCARD:
            break
        kept = steps
        confidences.append(confidence)
        if weight is DraftDecision.STOP:
            break
    accepted = 0
    while accepted < kept and text.right(position + accepted, accepted):
        accepted += 1
    return Round(
        tokens=[0] * (accepted + 1),
        drafted=kept,
        accepted=accepted,
        draft_ns=round(clock(costs.draft(steps), "draft", number)),
        verify_ns=round(clock(costs.verify(kept), "verify", number)),
        source="model" if kept else "",
        confidences=confidences,
    )


@cache
def fixed_rounds(text: Text) -> tuple[int, ...]:
    """Return how many rounds each fixed gamma takes for a text, whatever they cost."""
    return tuple(len(ride(FixedGamma(g), text, FREE).rounds) for g in range(LARGEST + 1))


def fixed_rates(text: Text, costs: Costs) -> list[float]:
    """Return the tokens per second of every fixed gamma on a text."""
    emitted = len(text.chances) - LARGEST
    return [emitted / n / costs.round_ns(g) * 1e9 for g, n in enumerate(fixed_rounds(text))]


def best_fixed(text: Text, costs: Costs) -> float:
    """Return the tokens per second of the fixed gamma that turned out best."""
    return max(fixed_rates(text, costs))
