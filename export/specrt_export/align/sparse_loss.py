"""Losses between a draft and a target of whose distributions the likeliest tokens are known.

What the target's other tokens weigh together is one more entry, the tail. A draft that scores
some of the vocabulary only is held to the target's distribution over the entries that it has.

Sources: Kullback-Leibler divergence as in Hinton et al. 2015, arXiv:1503.02531; the others are of
    arXiv:2602.23881: total variation is 1 - acceptance, `nla` is -log acceptance, and `lk_hybrid`
    moves from the first to the second as acceptance rises.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOSSES = ("lk_hybrid", "kl", "tv", "nla")

HARDENING = 3.0
"""How fast `lk_hybrid` leaves KL divergence behind."""

_LEAST = 1e-8


@dataclass(frozen=True)
class SparseTarget:
    """The target's distributions at N places.

    Shapes: ids [N, K] int64, those of the entries that the draft scores, or -1 for what it lacks;
        logprobs [N, K] f32; rest [N] f32.
    """

    ids: Tensor
    logprobs: Tensor
    rest: Tensor

    def rows(self, chosen: Tensor) -> SparseTarget:
        """Return some of the places."""
        return SparseTarget(self.ids[chosen], self.logprobs[chosen], self.rest[chosen])


def overlap(logits: Tensor, target: SparseTarget) -> Tensor:
    """Return the sum of min(p, q) over the known entries and the tail: what sampling accepts.

    The tail counts as one entry, so this is acceptance from above, by the rest at most.
    Shapes: logits [N, V] f32 -> [N].
    """
    p, q, rest, tail = _parts(logits, target, whole=True)
    return torch.minimum(p, q).sum(-1) + torch.minimum(rest, tail)


def sparse_loss(logits: Tensor, target: SparseTarget, kind: str) -> Tensor:
    """Return the mean loss over places; `kind` is one of `LOSSES`.

    Shapes: logits [N, V] f32.
    """
    p, q, rest, tail = _parts(logits, target, whole=False)
    agreed = torch.minimum(p, q).sum(-1) + torch.minimum(rest, tail)
    if kind == "nla":
        return -torch.log(agreed.clamp_min(_LEAST)).mean()
    distance = ((p - q).abs().sum(-1) + (rest - tail).abs()) / 2
    if kind == "tv":
        return distance.mean()
    surprise = torch.xlogy(p, p) - p * torch.log(q.clamp_min(_LEAST))
    behind = torch.xlogy(rest, rest) - rest * torch.log(tail.clamp_min(_LEAST))
    divergence = surprise.sum(-1) + behind
    if kind == "kl":
        return divergence.mean()
    weight = torch.exp(-HARDENING * agreed.detach().mean())
    return weight * divergence.mean() + (1 - weight) * distance.mean()


def _parts(
    logits: Tensor, target: SparseTarget, *, whole: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return p and q of the known entries, and what the rest weighs in both.

    Unless `whole`, p is the target's distribution over the entries that the draft has.
    """
    there = target.ids >= 0
    known = torch.gather(logits, -1, target.ids.clamp_min(0))
    q = torch.exp(known - logits.logsumexp(-1, keepdim=True)) * there
    p = torch.exp(target.logprobs) * there
    rest = target.rest
    if not whole:
        held = (p.sum(-1) + rest).clamp_min(_LEAST)
        p, rest = p / held[:, None], rest / held
    return p, q, rest, (1 - q.sum(-1)).clamp_min(0.0)
