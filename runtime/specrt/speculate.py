"""The round: draft, verify, accept, commit. The whole algorithm is the one loop below."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import NamedTuple

from specrt.draft import Drafter
from specrt.target import Target


class Round(NamedTuple):
    """What one round did. The prefill is the round that drafts nothing and emits first."""

    tokens: list[int]
    """Committed: the accepted ones and the target's own."""
    drafted: int
    accepted: int
    draft_ns: int
    verify_ns: int

    @property
    def evaluated(self) -> int:
        """Drafted tokens the target examined, up to and including the first rejection."""
        return self.accepted + (self.accepted < self.drafted)


def speculate(
    target: Target,
    drafter: Drafter,
    tokens: list[int],
    gamma: Callable[[], int],
    limit: int,
) -> Iterator[Round]:
    """Extend `tokens` to at most `limit`, yielding the tokens each round commits.

    `tokens` holds the prompt and is the only truth: each model's cache is a prefix of it that
    never includes the last token. `gamma()` says how many tokens to draft; near the limit fewer
    are, so that no committed token is thrown away. The first yield is the prefill's token.
    Source: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318.
    """
    prefilled = False
    while len(tokens) < limit:
        began = perf_counter_ns()
        room = limit - len(tokens) - 1
        proposal = drafter.propose(tokens, min(gamma(), room) if prefilled else 0)
        drafted = perf_counter_ns()
        verdict = target.verify(tokens, proposal)
        committed = [*proposal.tokens[: verdict.accepted], verdict.next]
        tokens.extend(committed)
        drafter.observe(tokens)
        prefilled = True
        yield Round(
            tokens=committed,
            drafted=len(proposal.tokens),
            accepted=verdict.accepted,
            draft_ns=drafted - began,
            verify_ns=perf_counter_ns() - drafted,
        )
