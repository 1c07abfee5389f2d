"""How much of a draft the target keeps: two lossless rules, as pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from specrt.logprobs import Ranked
from specrt.noise import Noise, Purpose
from specrt.sampling import Distribution, residual


class Proposal(NamedTuple):
    """What a drafter proposes.

    `distributions` are those the tokens were drawn from, one each; None where every token was
    certain (an n-gram) or where the rule does not ask. `source` names the drafter, `confidences`
    are what it thought of each token, where it was asked; `caught_up` says that it first fed
    tokens of rounds that it had no part in, which takes longer. `scored` says that the target has
    seen the tokens already, in the launch that drafted them.
    """

    tokens: Sequence[int]
    distributions: Sequence[Distribution] | None = None
    source: str = ""
    confidences: Sequence[float] = ()
    caught_up: bool = False
    scored: bool = False


NOTHING = Proposal(())


class Verdict(NamedTuple):
    """How many drafted tokens were kept, and the target's own token after them.

    `next` is the correction after a rejection, the bonus after none. `logprobs` are of the kept
    tokens and the next one, `prompt_logprobs` of all tokens of the prompt but the first; None
    where nobody asked, or not in this round.
    """

    accepted: int
    next: int
    logprobs: Ranked | None = None
    prompt_logprobs: Ranked | None = None


def agree(drafted: Sequence[int], best: Sequence[int]) -> Verdict:
    """Accept drafted tokens while they are the target's likeliest: `match` at temperature 0.

    `best[i]` is the target's argmax after i drafted tokens.
    Source: Stern et al. 2018, arXiv:1811.03115.
    """
    for i, token in enumerate(drafted):
        if best[i] != token:
            return Verdict(i, best[i])
    return Verdict(len(drafted), best[len(drafted)])


def match(drafted: Sequence[int], choose: Callable[[int], int]) -> Verdict:
    """Accept drafted tokens while they are what the target itself chooses.

    `choose(i)` is the target's choice after i drafted tokens: its draw, with noise keyed by
    position. The output is therefore the plain output, token for token.
    """
    for i, token in enumerate(drafted):
        chosen = choose(i)
        if chosen != token:
            return Verdict(i, chosen)
    return Verdict(len(drafted), choose(len(drafted)))


def rejection(
    proposal: Proposal, target: Callable[[int], Distribution], noise: Noise, position: int
) -> Verdict:
    """Accept x with probability min(1, p(x)/q(x)), else draw from norm(max(0, p - q)).

    `target(i)` is the target's distribution after i drafted tokens; `position` is the index of
    the first drafted token. The output is distributed as the target's own.
    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1; Chen et al. 2023,
        arXiv:2302.01318.
    """
    for i, token in enumerate(proposal.tokens):
        p = target(i)
        q = proposal.distributions[i] if proposal.distributions is not None else None
        allowance = p.prob(token) / (q.prob(token) if q is not None else 1.0)
        if noise.uniform(Purpose.ACCEPT, position + i) >= allowance:
            rest = residual(p, q, token)
            return Verdict(i, rest.draw(noise, Purpose.CORRECTION, position + i))
    last = len(proposal.tokens)
    return Verdict(last, target(last).draw(noise, Purpose.CORRECTION, position + last))
