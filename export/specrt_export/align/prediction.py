"""What drafts would be accepted on texts of the target, and how fast that makes decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specrt.speculation.costs import Costs
from specrt_export.align.lookup import NOTHING
from specrt_export.align.sparse_loss import SparseTarget, overlap
from specrt_export.align.trace_batches import TraceBatch, TraceWindow, grouped
from specrt_export.align.trained_drafts import TrainedDraft

BATCH = 4096
"""Tokens that are read at once."""

_LEAST = 1e-30


@dataclass(frozen=True)
class TextAcceptance:
    """Which tokens of a text each position of a draft would have had accepted.

    Shapes: accepted [positions, A]: whether a draft has token a of the answer right in that
        position, where all before it are; looked_up [A], see `looked_up`, None where lookup takes
        no part.
    """

    accepted: NDArray[np.bool_]
    domain: str
    looked_up: NDArray[np.int16] | None = None

    def rounds(self, gamma: int) -> list[TextRound]:
        """Return the rounds that draft `gamma` tokens.

        The first token of an answer is the prefill's; the rounds follow one another. As in
        `cascade`, lookup drafts where it finds something.
        """
        positions, total = self.accepted.shape
        at, found = 1, list[TextRound]()
        while at < total:
            copied = NOTHING if self.looked_up is None else self.looked_up[at]
            asked = gamma if copied == NOTHING and positions else 0
            checked = asked if copied == NOTHING else gamma
            room = min(checked, total - at)
            right = self._drafted(at, room) if asked else max(0, min(int(copied), room))
            emitted = min(right + 1, total - at)
            found.append(TextRound(right, emitted, asked, checked))
            at += emitted
        return found

    def _drafted(self, at: int, room: int) -> int:
        """Return how many tokens the draft has right in a round that begins at a place."""
        last, right = len(self.accepted) - 1, 0
        while right < room and self.accepted[min(right, last), at + right]:
            right += 1
        return right


class TextRound(NamedTuple):
    """A round over a text."""

    accepted: int
    emitted: int
    asked: int
    """Tokens that the draft drafted: none where lookup did."""
    checked: int
    """Tokens that were drafted at all."""


def rounds_of(texts: Sequence[TextAcceptance], gamma: int) -> list[TextRound]:
    """Return the rounds over several texts."""
    return [one for text in texts for one in text.rounds(gamma)]


def tokens_per_round(rounds: Sequence[TextRound]) -> float:
    """Return the tokens that a round yields, its own one included; 1 without rounds."""
    return sum(one.emitted for one in rounds) / len(rounds) if rounds else 1.0


def by_position(rounds: Sequence[TextRound], gamma: int) -> list[float]:
    """Return, for each position, the share of the draft's rounds that accept the token there."""
    own = [one.accepted for one in rounds if one.asked]
    return [sum(right > at for right in own) / max(1, len(own)) for at in range(gamma)]


SHOWN = 4
"""Positions of a draft whose acceptance is told."""


@dataclass(frozen=True)
class Prediction:
    """What rounds over some texts come to, with one draft."""

    domain: str
    """Empty for all texts."""
    texts: int
    accepted: tuple[float, ...]
    """See `by_position`."""
    tokens_per_round: tuple[float, ...]
    """At each gamma from 0 on."""
    speeds: tuple[float, ...]
    """Tokens a second at each gamma from 0 on; a step of the target where costs are assumed."""

    @property
    def gamma(self) -> int:
        """The gamma at which decoding is fastest."""
        return self.speeds.index(self.speed)

    @property
    def speed(self) -> float:
        """The speed at that gamma."""
        return max(self.speeds)

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON types, rounded."""
        rates = {n: [round(v, 4) for v in getattr(self, n)] for n in _RATES}
        return {"domain": self.domain, "texts": self.texts, "gamma": self.gamma, **rates}


_RATES = ("accepted", "tokens_per_round", "speeds")


def predictions(texts: Sequence[TextAcceptance], costs: Costs, most: int) -> tuple[Prediction, ...]:
    """Return what gammas up to `most` come to over all texts, then over each domain's."""
    domains = sorted({text.domain for text in texts})
    parts = {"": list(texts)}
    if len(domains) > 1:
        parts |= {name: [text for text in texts if text.domain == name] for name in domains}
    return tuple(_prediction(name, part, costs, most) for name, part in parts.items())


def _prediction(domain: str, texts: list[TextAcceptance], costs: Costs, most: int) -> Prediction:
    unit = 1.0 if costs.assumed else 1e9
    each = [rounds_of(texts, gamma) for gamma in range(most + 1)]
    yields = tuple(map(tokens_per_round, each))
    speeds = tuple(
        tokens / _round_ns(costs, rounds, gamma) * unit
        for gamma, (tokens, rounds) in enumerate(zip(yields, each, strict=True))
    )
    shown = min(SHOWN, most)
    return Prediction(domain, len(texts), tuple(by_position(each[shown], shown)), yields, speeds)


def _round_ns(costs: Costs, rounds: Sequence[TextRound], gamma: int) -> float:
    """Return what a round costs on average: lookup drafts for nothing."""
    if not rounds:
        return costs.round_ns(gamma)
    drafts = sum(costs.draft(one.asked) + costs.verify(one.checked) for one in rounds)
    return drafts / len(rounds) + costs.outside_ns


@dataclass(frozen=True)
class MeasuredCosts:
    """What passes of a bundle cost, and how large its target is."""

    costs: Costs
    target_weights: int

    def of_draft(self, read: int, measured: int | None) -> Costs:
        """Return the costs with another draft, which reads so many weights for a token.

        Next to the draft that was measured, which reads `measured`, each weight more or fewer costs
        what one of the target does; a draft of fewer costs no less than its share. Where no draft
        was measured, None, all of a step is its weights.
        """
        costs, most = self.costs, max(len(self.costs.draft_ns), 9)
        weight_ns = costs.verify_ns[0] / self.target_weights
        if measured is None or len(costs.draft_ns) < 2:
            drafts = [gamma * read * weight_ns for gamma in range(most)]
        else:
            more, least = (read - measured) * weight_ns, min(1.0, read / measured)
            known = [costs.draft(gamma) for gamma in range(most)]
            drafts = [max(ns + g * more, ns * least) for g, ns in enumerate(known)]
        return replace(costs, draft_ns=tuple(drafts))


@torch.no_grad()
def accepted(
    draft: TrainedDraft, windows: Sequence[TraceWindow], positions: int,
    entries: tuple[Tensor, Tensor] | None, temperature: float,
) -> list[TextAcceptance]:  # fmt: skip
    """Return what of a draft would be accepted on windows.

    `entries` are the target's ids of the entries that it scores, and the entry of each id. At
    temperature 0 that is the token the target wrote; above, chance decides, by the same noise each
    time, with the probability that `rejection` accepts.
    """
    draft.trained.eval()
    order = sorted(range(len(windows)), key=lambda at: len(windows[at].tokens))
    found: dict[int, TextAcceptance] = {}
    ids, entry_of = entries if entries is not None else (None, None)
    for group in grouped(windows, order, BATCH):
        batch = TraceBatch.of([windows[at] for at in group], entry_of)
        right = torch.zeros(positions, len(batch.chosen), dtype=torch.bool)
        everywhere = torch.ones(len(batch.chosen), dtype=torch.bool)
        for position, (states, places) in enumerate(draft.steps(batch, everywhere, positions)):
            here = _right(draft.logits(states), batch, places, ids, temperature)
            right[position:, places] = here
        ends = np.cumsum([len(windows[at].ids) for at in group])
        for at, one in zip(group, np.split(right.numpy(), ends[:-1], axis=1), strict=True):
            found[at] = TextAcceptance(one, windows[at].domain, windows[at].looked_up)
    return [found[at] for at in range(len(windows))]


def _right(
    logits: Tensor, batch: TraceBatch, chosen: Tensor, ids: Tensor | None, temperature: float
) -> Tensor:
    if temperature == 0:
        best = logits.argmax(-1)
        return (best if ids is None else ids[best]) == batch.chosen[chosen]
    target = batch.target.rows(chosen)
    scaled, rest = target.logprobs / temperature, torch.log(target.rest + _LEAST) / temperature
    total = torch.cat([scaled, rest[:, None]], -1).logsumexp(-1)
    colder = SparseTarget(target.ids, scaled - total[:, None], torch.exp(rest - total))
    noise = torch.from_numpy(np.random.default_rng(0).random(len(batch.chosen))).float()
    return noise[chosen] < overlap(logits / temperature, colder)
