"""Texts on which a gamma policy can be ridden without an engine: recorded ones and made ones.

A trace knows, for every position of a text, how many of the tokens drafted from there are right,
and how confident the drafter was of each. What a policy would have gained is then arithmetic.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.speculation.costs import Costs
from specrt.speculation.gamma import DraftDecision, GammaPolicy
from specrt.speculation.round import Round

LARGEST = 8
"""The largest gamma of all traces."""
FOLDER = Path(__file__).parent / "traces"
REGRETS = {
    "recorded": 0.035,
    "steady": 0.03,
    "always wrong": 0.03,
    "always right": 0.01,
    "fading": 0.03,
    "alternating": -0.02,
    "recovering": -0.05,
    "telling": 0.02,
    "misleading": 0.03,
    "noisy clock": 0.05,
    "busy": 0.05,
    "wrong scale": 0.03,
    "wrong shape": 0.04,
    "untuned": 0.03,
}
"""The most that `auto` may fall behind the best fixed gamma, by family of traces."""
TEXT = 199
"""Positions of each text of a recorded trace."""
LEVELS = 255
"""Of a confidence, as it is stored."""


@dataclass(frozen=True, eq=False)
class Drafts:
    """What one drafter proposes from each position of a text.

    `right[t]` counts the tokens drafted from position t that the text goes on with;
    `confidence[t]` has the drafter's for each token it proposes there, at most `LARGEST`.
    """

    right: Sequence[int]
    confidence: Sequence[Sequence[float]]


@dataclass(frozen=True, eq=False)
class Trace:
    """A text, what was drafted along it, and the machine it runs on.

    `costs` are the machine's, `tuned` what a policy is told of them. With a second drafter the
    first is asked first, as in a cascade. `jitter` has how many times as long as they should passes
    take on the clock, in turn.
    """

    name: str
    drafts: Drafts
    costs: Costs
    second: Drafts | None = None
    tuned: Costs | None = None
    jitter: Sequence[float] = (1.0,)

    @property
    def length(self) -> int:
        """Positions of the text."""
        return len(self.drafts.right)

    @cached_property
    def known(self) -> Costs:
        """What a policy is told that passes cost."""
        return self.tuned or self.costs

    def timed(self, ns: float, number: int) -> int:
        """Return what a pass takes on the clock; `number` counts passes."""
        return round(ns * self.jitter[number % len(self.jitter)])


@dataclass
class Ride:
    """A policy on a trace: its rounds, and what they cost by the machine's true costs."""

    rounds: list[Round] = field(default_factory=list)
    ns: list[float] = field(default_factory=list)

    def rate(self, first: int = 0, last: int | None = None) -> float:
        """Return the tokens per second from one token of the text to another."""
        position, tokens, ns = 0, 0, 0.0
        for round_, spent in zip(self.rounds, self.ns, strict=True):
            if position >= first and (last is None or position < last):
                tokens += len(round_.tokens)
                ns += spent
            position += len(round_.tokens)
        return tokens / ns * 1e9


def draft(policy: GammaPolicy, drafts: Drafts, position: int) -> tuple[int, int, int]:
    """Draft from a position; return the draft steps, the tokens verified, and those accepted."""
    proposed = drafts.confidence[position]
    most = min(policy.choose(), len(proposed))
    steps = kept = 0
    while steps < most:
        steps += 1
        decision = policy.decide(steps, proposed[steps - 1])
        if decision is not DraftDecision.DISCARD:
            kept = steps
        if decision is not DraftDecision.CONTINUE:
            break
    return steps, kept, min(kept, drafts.right[position])


def ride(policy: GammaPolicy, trace: Trace, second: GammaPolicy | None = None) -> Ride:
    """Run a policy along a trace; a trace of two drafters takes two."""
    done = Ride()
    position = 0
    while position + LARGEST < trace.length:
        number = len(done.rounds)
        costs = trace.costs
        steps, kept, accepted = draft(policy, trace.drafts, position)
        draft_ns = costs.draft(steps) if trace.second is None else 0.0
        both = second is not None and trace.second is not None and not kept
        if both:
            assert second is not None
            assert trace.second is not None
            steps, kept, accepted = draft(second, trace.second, position)
            draft_ns = costs.draft(steps)
        verify_ns = costs.verify(kept)
        round_ = Round(
            tokens=[0] * (accepted + 1),
            drafted=kept,
            accepted=accepted,
            draft_ns=trace.timed(draft_ns, 2 * number),
            verify_ns=trace.timed(verify_ns, 2 * number + 1),
        )
        if both:
            assert second is not None
            second.observe(round_)
            policy.observe(Round([0], 0, 0, round_.draft_ns, round_.verify_ns))
        else:
            policy.observe(round_)
        done.rounds.append(round_)
        done.ns.append(draft_ns + verify_ns + costs.outside_ns)
        position += accepted + 1
    return done


def best_fixed(trace: Trace, first: int = 0, last: int | None = None) -> float:
    """Return the tokens per second of the fixed gammas that turn out best in hindsight."""
    seconds = range(LARGEST + 1) if trace.second is not None else (0,)
    return max(
        fixed_rate(trace, gamma, second, first, trace.length if last is None else last)
        for gamma in range(LARGEST + 1)
        for second in seconds
    )


def fixed_rate(trace: Trace, gamma: int, second: int, first: int, last: int) -> float:
    """Return what `ride` with fixed gammas comes to, from one token of the text to another."""
    position, tokens, ns = 0, 0, 0.0
    drafts, other, costs = trace.drafts, trace.second, trace.costs
    while position + LARGEST < trace.length:
        kept = min(gamma, len(drafts.confidence[position]))
        accepted, steps = min(kept, drafts.right[position]), kept
        if other is not None:  # then the first drafter is lookup, which takes no time
            steps = 0
            if not kept:
                steps = kept = min(second, len(other.confidence[position]))
                accepted = min(kept, other.right[position])
        if first <= position < last:
            tokens += accepted + 1
            ns += costs.draft_ns[steps] + costs.verify_ns[kept] + costs.outside_ns
        position += accepted + 1
    return tokens / ns * 1e9


# Recorded texts.


def save(path: Path, costs: Costs, jitter: Iterable[float], **drafts: Drafts) -> None:
    """Write a recorded text: what passes cost, by how much they vary, and the drafts."""
    arrays: dict[str, NDArray[Any]] = {
        "verify_ns": np.array(costs.verify_ns),
        "draft_ns": np.array(costs.draft_ns),
        "outside_ns": np.array(costs.outside_ns),
        "jitter": np.array(list(jitter), np.float32),
    }
    for name, made in drafts.items():
        table = np.zeros((len(made.right), LARGEST), np.uint8)
        for row, confidences in zip(table, made.confidence, strict=True):
            row[: len(confidences)] = [max(1, round(c * LEVELS)) for c in confidences]
        arrays[f"{name}_right"] = np.array(made.right, np.uint8)
        arrays[f"{name}_confidence"] = table
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def recorded(path: Path) -> Trace:
    """Read a recorded text, drafted by a cascade; `alone` leaves one drafter of it."""
    arrays = np.load(path)
    costs = Costs(
        tuple(arrays["verify_ns"].tolist()),
        tuple(arrays["draft_ns"].tolist()),
        float(arrays["outside_ns"]),
    )
    first, second = _drafts(arrays, "ngram"), _drafts(arrays, "model")
    return Trace(path.stem, first, costs, second, jitter=arrays["jitter"].tolist())


def _drafts(arrays: np.lib.npyio.NpzFile, name: str) -> Drafts:
    rows = arrays[f"{name}_confidence"].tolist()
    # A sure token is stored below 1, which is what a drafter says that knows nothing.
    confidence = [[min(c, LEVELS - 0.5) / LEVELS for c in row if c] for row in rows]
    return Drafts(arrays[f"{name}_right"].tolist(), confidence)


def alone(trace: Trace, drafter: str) -> Trace:
    """Return a cascade's trace with one of its drafters only: `model` or `ngram`."""
    if drafter == "ngram":
        free = replace(trace.costs, draft_ns=(0.0,) * len(trace.costs.draft_ns))
        return replace(trace, name=f"{trace.name} ngram", costs=free, second=None)
    assert trace.second is not None
    return replace(trace, name=f"{trace.name} {drafter}", drafts=trace.second, second=None)


def beginnings(trace: Trace, tokens: int) -> list[Trace]:
    """Return the first tokens of each text of a recorded trace, as traces of their own."""

    def cut(drafts: Drafts, first: int) -> Drafts:
        part = slice(first, first + tokens + LARGEST)
        return Drafts(drafts.right[part], drafts.confidence[part])

    return [
        replace(
            trace,
            drafts=cut(trace.drafts, first),
            second=None if trace.second is None else cut(trace.second, first),
        )
        for first in range(0, trace.length - TEXT + 1, TEXT)
    ]


# Made texts.


def steady(chance: float, length: int, seed: int, fade: float = 1.0) -> Drafts:
    """Return drafts that are equally often right everywhere, less by `fade` at each place."""
    return made([chance] * length, seed, fade=fade)


def alternating(easy: float, hard: float, length: int, seed: int) -> Drafts:
    """Return drafts along stretches of 100 to 300 tokens, easy and hard in turn."""
    draw = random.Random(seed)
    chances: list[float] = []
    while len(chances) < length:
        chances += [easy] * draw.randint(100, 300)
        chances += [hard] * draw.randint(100, 300)
    return made(chances, seed)


def telling(
    length: int, seed: int, shape: tuple[float, float] = (2.0, 1.0), warp: float = 1.0
) -> Drafts:
    """Return drafts of many chances, of which confidence tells: chance ** warp."""
    draw = random.Random(seed)
    chances = [draw.betavariate(*shape) for _ in range(length)]
    return made(chances, seed, [min(0.999, max(1e-6, c**warp)) for c in chances])


def made(
    chances: Sequence[float],
    seed: int,
    confidence: Sequence[float] | None = None,
    fade: float = 1.0,
) -> Drafts:
    """Return drafts whose token for position t, at place i, is right by chances[t] * fade ** i.

    The luck of a position is the same at every place, so that all policies meet it.
    """
    draw = random.Random(seed)
    luck = [draw.random() for _ in chances]
    right = []
    for position in range(len(chances)):
        count = 0
        for place, chance in enumerate(chances[position : position + LARGEST]):
            if luck[position + place] >= chance * fade**place:
                break
            count += 1
        right.append(count)
    shown = confidence or [1.0] * len(chances)
    return Drafts(right, [shown[t : t + LARGEST] for t in range(len(chances))])


MACHINES = {
    "cheap draft": Costs(
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
    "16 M int8": Costs(
        tuple(ms * 1e6 for ms in (0.43, 0.5, 0.58, 0.66, 0.74, 0.81, 0.9, 0.98, 1.06)),
        tuple(0.07e6 * g for g in range(9)),
        4e4,
    ),
    "lookup": Costs(
        tuple(ms * 1e6 for ms in (6.1, 6.8, 7.5, 8.15, 8.8, 9.5, 10.2, 11.0, 11.7)), (0.0,) * 9, 2e4
    ),
    "stairs": Costs(
        tuple(1e6 * (1 if g < 4 else 1.6) for g in range(9)),
        tuple(1e6 * 0.04 * g for g in range(9)),
        2e4,
    ),
}
"""Machines of the shapes that engines have, measured ones among them."""

H200 = {
    f"H200, {name}": Costs(
        tuple(ms * 1e6 * over for over in (1.0, *passes)), tuple(0.14e6 * g for g in range(9)), 2e4
    )
    for name, ms, passes in (
        ("16 M fp16", 0.35, (1.2316, 1.2417, 1.2608, 1.2596, 1.2781, 1.2868, 1.2821, 1.2795)),
        ("1 B int8", 1.43, (1.2066, 1.4872, 1.7417, 2.082, 1.7126, 1.7146, 1.7155, 1.7254)),
        ("1 B int4", 1.09, (1.3991, 1.2805, 1.3059, 1.6409, 1.6627, 1.7015, 1.7734, 2.5492)),
    )
}
"""Engines of ort-cuda as they ran on 2026-11-26: a plain step, and passes over it by width."""


def all_traces() -> dict[str, list[Trace]]:
    """Return the made traces and the recorded ones, these with each drafter alone and with both."""
    found = families()
    found["recorded"] = []
    for path in sorted(FOLDER.glob("*.npz")):
        both = recorded(path)
        found["recorded"] += [alone(both, "model"), alone(both, "ngram")]
        found["recorded"].append(replace(both, name=f"{both.name} cascade"))
    return found


def made_texts(seed: int) -> dict[str, list[Drafts]]:
    """Return made drafts, by how right they are and how much they tell of it."""
    draw = random.Random(seed)
    return {
        "steady": [steady(p, 6000, seed) for p in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)],
        "always wrong": [
            steady(0.0, 4000, seed),
            made([0.0] * 4000, seed, [draw.uniform(0.6, 1) for _ in range(4000)]),
            made([0.0] * 4000, seed, [0.04] * 4000),
        ],
        "always right": [steady(1.0, 4000, seed)],
        "fading": [steady(0.9, 6000, seed, fade) for fade in (0.6, 0.9)],
        "alternating": [
            alternating(easy, hard, 8000, seed)
            for easy, hard in ((0.95, 0.0), (0.9, 0.05), (0.85, 0.1))
        ],
        "recovering": [made([0.02] * 3000 + [0.92] * 3000, seed)],
        "telling": [
            telling(5000, seed, shape, warp)
            for shape in ((1.0, 1.0), (2.0, 1.0))
            for warp in (0.4, 1.0, 2.5)
        ],
        "misleading": [
            made([p] * 6000, seed, [draw.random() for _ in range(6000)]) for p in (0.3, 0.7, 0.9)
        ],
    }


def families(seed: int = 1) -> dict[str, list[Trace]]:
    """Return the made traces, by family, each family on every machine."""
    texts = made_texts(seed)
    found = {
        family: [
            Trace(machine, drafts, costs)
            for machine, costs in MACHINES.items()
            for drafts in members
        ]
        for family, members in texts.items()
    }
    plain = [texts["steady"][i] for i in (0, 1, 3, 5)]
    found["noisy clock"] = [
        Trace(name, drafts, costs, jitter=noisy(noise))
        for noise in (1, 2, 3)
        for name, costs in MACHINES.items()
        for drafts in plain
    ]
    found["busy"] = [
        Trace(name, drafts, costs, jitter=busy(seed))
        for seed, (name, costs) in enumerate(MACHINES.items())
        for drafts in plain
    ]
    found["wrong scale"] = [
        Trace(name, drafts, MACHINES[name], tuned=MACHINES[name].scaled(verify, pace))
        for name in ("206 M int8", "expensive draft")
        for verify, pace in ((0.5, 1.0), (2.0, 1.0), (1.0, 3.0), (1.0, 1 / 3))
        for drafts in plain
    ]
    found["wrong shape"] = [
        Trace(name, drafts, costs, tuned=wrong)
        for name, costs in MACHINES.items()
        for wrong in wrong_shapes(costs)
        for drafts in (texts["steady"][3], texts["steady"][5], texts["telling"][4])
    ]
    found["untuned"] = [
        Trace(name, drafts, costs, tuned=Costs.assume(LARGEST))
        for name, costs in MACHINES.items()
        for drafts in (*texts["steady"], texts["always wrong"][0], texts["telling"][4])
    ]
    return found


def noisy(seed: int) -> list[float]:
    """Return a busy machine: passes vary by an eighth, and one in a hundred takes ten times."""
    draw = random.Random(seed)
    return [draw.lognormvariate(0, 0.12) * (10 if draw.random() < 0.01 else 1) for _ in range(4999)]


def busy(seed: int) -> list[float]:
    """Return a machine that others use: a third of all passes wait for a slice of time."""
    draw = random.Random(seed)
    return [draw.uniform(2, 6) if draw.random() < 0.35 else 1.0 for _ in range(4999)]


def wrong_shapes(costs: Costs) -> list[Costs]:
    """Return the costs with some widths 27 to 50 times too dear, as a busy machine measures."""
    draw = random.Random(2)
    spoiled = []
    for widths in (range(1, 9), range(2, 9), range(4, 9), (2, 3), (1, 4, 5), (0,)):
        verify_ns = list(costs.verify_ns)
        for width in widths:
            verify_ns[width] *= draw.uniform(27, 50)
        spoiled.append(replace(costs, verify_ns=tuple(verify_ns)))
    return spoiled
