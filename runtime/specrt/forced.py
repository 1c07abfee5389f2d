"""Tokens that a grammar leaves no choice about, drafted before anybody is asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from specrt.draft import Drafter
from specrt.passes import Asking
from specrt.round import Round
from specrt.verify import Proposal


class ForcedDrafter:
    """Proposes what must follow, and asks another drafter where nothing must.

    `forced(tokens)` names the tokens; they cost nothing to draft and are nearly certain: a target
    may still spell the same text in other tokens, so they are verified as all drafts are. As many
    are proposed as the widest pass of `gammas` holds, whatever gamma a policy would choose.

    The other drafter hears nothing of rounds that it was not asked in, as the second of a cascade.
    """

    SOURCE = "forced"

    def __init__(
        self,
        inner: Drafter,
        forced: Callable[[Sequence[int]], Sequence[int]],
        gammas: Collection[int],
    ) -> None:
        self._inner = inner
        self._forced = forced
        self._gammas = sorted(gammas)
        self._asked = False
        """Whether the other drafter was asked in this round."""

    def propose(self, tokens: Sequence[int], room: int) -> Asking[Proposal]:
        """Return what must follow, in a number that passes were built for, or the other's."""
        must = self._forced(tokens)
        most = min(len(must), room)
        kept = max((gamma for gamma in self._gammas if gamma <= most), default=0)
        self._asked = kept == 0
        if self._asked:
            return (yield from self._inner.propose(tokens, room))
        return Proposal(must[:kept], None, self.SOURCE)

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Tell the other drafter of the rounds that it was asked in."""
        if self._asked:
            self._inner.observe(tokens, round_)
