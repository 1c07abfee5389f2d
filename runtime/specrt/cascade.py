"""Two drafters in turn: the second is asked where the first has nothing to propose."""

from __future__ import annotations

from collections.abc import Sequence

from specrt.draft import Drafter
from specrt.passes import Asking
from specrt.round import Round
from specrt.verify import Proposal


class CascadeDrafter:
    """Asks one drafter, and another where the first proposes nothing.

    Meant for lookup before the draft model: a copy costs next to nothing and runs further, and
    where there is nothing to copy, or its policy chose a plain step or dropped the first token,
    the model drafts.

    While lookup drafts, the draft model's cache falls behind the committed tokens, and stays as it
    is. When its turn comes the model feeds all that it lacks in the one pass that drafts its first
    token, `tokens[length:]` wide (in chunks where that is wider than any pass it was built for),
    and drafts on from there one token at a time. Passes that nobody would have used are never run.

    Who was asked hears what came of it. To the first drafter a round that the second drafted was a
    plain step, of one token: its policy learns acceptance from tokens of its own only, and one that
    has given up still counts the rounds until it tries again, whoever drafts meanwhile. The times
    are those of the whole round. The second hears nothing of rounds that the first drafted.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._first = first
        self._second = second
        self._both = False
        """Whether the second drafter was asked in this round."""

    def propose(self, tokens: Sequence[int], room: int) -> Asking[Proposal]:
        """Return what the first drafter proposes, else what the second does."""
        proposal = yield from self._first.propose(tokens, room)
        self._both = not proposal.tokens
        return (yield from self._second.propose(tokens, room)) if self._both else proposal

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Tell the drafters that were asked what came of the round for each."""
        if not self._both:
            self._first.observe(tokens, round_)
            return
        plain = Round(round_.tokens[:1], 0, 0, round_.draft_ns, round_.verify_ns)
        self._first.observe(tokens, plain)
        self._second.observe(tokens, round_)
