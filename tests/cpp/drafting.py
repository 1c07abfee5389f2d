"""Calls of policies and drafters, with what the Python runtime's do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import gamma_traces
import numpy as np
from numpy.typing import ArrayLike

from cpp.native_calls import Case, Document, plain
from specrt.params import Row, SamplingParams
from specrt.sampling.noise import Noise
from specrt.sampling.processors import build_processors
from specrt.speculation.costs import Costs
from specrt.speculation.gamma import BuiltGamma, DraftDecision
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.ngram import NgramDrafter
from specrt.speculation.pool import DrafterPool, Models
from specrt.speculation.round import Drafter, Proposal, Round, run_alone
from support.toy import TableEngine, TableOutput

DECISIONS = [DraftDecision.DISCARD, DraftDecision.STOP, DraftDecision.CONTINUE]


def _costs(costs: Costs) -> Document:
    return {"verify": costs.verify_ns, "draft": costs.draft_ns, "outside": costs.outside_ns,
            "assumed": costs.assumed}  # fmt: skip


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

    def observe(self, round_: Round) -> None: ...


def built() -> Iterator[Case]:
    """Yield what becomes of a policy's wishes where few gammas were built."""
    draw = random.Random(5)
    for _ in range(400):
        gammas = [0, *sorted(draw.sample(range(1, 9), draw.randint(1, 4)))]
        wishes = {"most": draw.randint(0, 9), "drop": draw.choice((0.0, 0.1)), "last": 0.2}
        confidences = [draw.random() for _ in range(8)]
        policy = BuiltGamma(_Cautious(**wishes), gammas)  # type: ignore[arg-type]
        decisions = [policy.decide(place, sure) for place, sure in enumerate(confidences, 1)]
        call = {"call": "built", "gammas": gammas, "confidences": confidences, **wishes}
        yield call, [policy.choose(), *map(DECISIONS.index, decisions)]


def _told(made: Proposal, held: int = 0) -> Document:
    drawn_from = [{"ids": d.ids, "probs": d.probs} for d in made.distributions or ()]
    return plain(
        {"tokens": made.tokens, "confidences": made.confidences, "source": made.source,
         "caught_up": made.caught_up, "drawn_from": drawn_from, "held": held}
    )  # fmt: skip


def ngram() -> Iterator[Case]:
    """Yield texts of few letters, and what lookup copies of them."""
    draw = random.Random(12)
    for _ in range(60):
        wishes = {"most": draw.randint(0, 8), "drop": draw.choice((0.0, 0.55)),
                  "last": draw.choice((0.0, 0.7))}  # fmt: skip
        drafter = NgramDrafter(_Cautious(**wishes))  # type: ignore[arg-type]
        letters = draw.choice((1, 2, 3, 6, 30))
        steps, answers, tokens = [], [], []
        for _ in range(60):  # a text that grows, and now and then is another one
            keep = draw.randint(0, len(tokens)) if draw.random() < 0.05 else len(tokens)
            add = [draw.randrange(letters) for _ in range(draw.randint(1, 9))]
            tokens = tokens[:keep] + add
            steps.append({"text": tokens, "room": draw.choice((0, 1, 3, 8, 20))})
            made = run_alone(drafter.propose(tokens, steps[-1]["room"]))
            answers.append(_told(made))
            tokens = [*tokens, *made.tokens[: draw.randint(0, 8)]]
        yield {"call": "copies", **wishes, "steps": steps}, answers


# ---- whole drafters, over an engine that leaves the same on both sides ----

TARGET = 29
"""How many ids the target knows."""


class Recorded(TableEngine):
    """A draft that remembers what its passes left, some of it no numbers."""

    def __init__(self, vocabulary: int, width: int, *, sure: bool, broken: bool) -> None:
        def spoil(number: int, logits: Row) -> None:
            if broken and number % 13 == 0:
                logits[..., number % vocabulary] = np.nan

        super().__init__(vocab=vocabulary, max_width=width, max_length=512, memory=3, corrupt=spoil)
        self.sure = sure
        self.passes: list[Document] = []

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> TableOutput:
        found = super().forward(tokens, start, rows)
        confidence: Any = found.confidence if self.sure else None
        self.passes.append(
            {"tokens": np.asarray(tokens)[0], "start": self.calls[-1].start,
             "scores": found.logits[0, 0].copy(), "best": found.argmax[0, 0],
             "confidence": confidence[0].copy() if self.sure else []}
        )  # fmt: skip
        return replace(found, confidence=confidence)


ASKED: tuple[Document, ...] = (
    {},
    {"temperature": 0.9},
    {"temperature": 2.5, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 4, "min_p": 0.05},
    {"temperature": 1.2, "typical_p": 0.7},
    {"temperature": 0.9, "verifier": "rejection"},
    {"temperature": 1.5, "top_p": 0.7, "verifier": "rejection"},
    {"verifier": "rejection"},
)
RULES: tuple[Document, ...] = (
    {},
    {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"no_repeat_ngram_size": 2},
    {"allowed_token_ids": [2, 3, 5, 7, 11], "no_repeat_ngram_size": 2},
    {"allowed_token_ids": [27, 28]},  # unknown to the draft
    {"logit_bias": {3: 2.5, 4: -100.0}},
)


def _step(
    drafter: Drafter, cache: KVCache, tokens: list[int], draw: random.Random, costs: Costs
) -> Case:
    """Return a round with a made-up fate; now and then one that the drafter has no part in."""
    if draw.random() < 0.08:
        add = [draw.randrange(TARGET - 1) for _ in range(draw.randint(1, 12))]
        tokens += add
        return {"add": add}, None
    room = draw.choice((0, 1, 3, 8, 8, 8))
    made = run_alone(drafter.propose(tokens, room))
    drafted, luck = len(made.tokens), draw.random()
    accepted = drafted if luck < 0.4 else draw.randint(0, drafted) if luck < 0.8 else 0
    # Mostly an id that the smallest draft knows, too.
    own = draw.randrange(TARGET if draw.random() < 0.02 else 20)
    committed = [*made.tokens[:accepted], own]
    tokens += committed
    draft_ns = round(costs.draft(drafted))
    verify_ns = round(costs.verify(drafted) * draw.uniform(0.9, 1.3))
    drafter.observe(tokens, Round(committed, drafted, accepted, draft_ns, verify_ns, made.source,
                                  made.confidences, made.caught_up))  # fmt: skip
    step = {"add": [], "room": room, "accepted": accepted, "next": own, "draft_ns": draft_ns,
            "verify_ns": verify_ns}  # fmt: skip
    return step, _told(made, cache.length)


def _session(drafter: str, gammas: tuple[int, ...], gamma: int, asked: Document, engine: Document,
             seed: int) -> Case:  # fmt: skip
    """Return a few generations of one session, of fixed gamma: `auto` goes by its own estimates."""
    draw = random.Random(seed)
    made, target = Recorded(**engine), TableEngine(vocab=TARGET, max_length=512)
    costs = gamma_traces.MACHINES["expensive draft"]
    drafters = DrafterPool(Models(target, made, gammas, costs=costs))
    policies, params = drafters.borrow(), SamplingParams(**asked)
    generations, answers = [], []
    for number in range(2):
        caches = KVCache(target), KVCache(made)
        rules = build_processors(params, None, (), TARGET)
        noise = Noise(seed, number)
        one = drafters.make(policies, drafter, gamma, params, noise, rules, caches)
        prompt = [draw.randrange(20) for _ in range(draw.choice((1, 2, 5, 30)))]
        tokens = [*prompt]
        rounds = [_step(one, caches[1], tokens, draw, costs) for _ in range(30)]
        generations.append({"prompt": prompt, "steps": [step for step, _ in rounds]})
        answers += [answer for _, answer in rounds if answer]
    bias = {"logit_bias": [*asked["logit_bias"].items()]} if "logit_bias" in asked else {}
    call = {
        "call": "session", "drafter": drafter, "gamma": gamma, "gammas": gammas,
        "params": {**asked, **bias}, "engine": {**engine, "passes": made.passes}, "seed": seed,
        "generations": generations, "vocabulary": TARGET, "costs": _costs(costs),
    }  # fmt: skip
    return call, {"rounds": answers, "passes": len(made.passes)}


def draft() -> Iterator[Case]:
    """Yield sessions of every drafter, verifier and kind of request."""
    draw = random.Random(21)
    engine: Document = {"vocabulary": 29, "width": 8, "sure": True, "broken": False}
    yield _session("none", tuple(range(9)), 4, {}, engine, 99)
    for seed, (asked, rules, drafter) in enumerate(
        product(ASKED, RULES, ("model", "cascade", "ngram"))
    ):
        if seed % 7 % 2 or (drafter == "ngram" and rules):
            continue
        engine = {
            "vocabulary": draw.choice((23, 29, 37)), "width": draw.choice((2, 8, 64)),
            "sure": draw.random() < 0.7, "broken": draw.random() < 0.4,
        }  # fmt: skip
        gamma = draw.choice((1, 4, 8))
        yield _session(drafter, (0, 1, 2, 4, 5, 8), gamma, {**asked, **rules}, engine, seed)
