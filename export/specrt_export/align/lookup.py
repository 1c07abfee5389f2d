"""What n-gram lookup drafts in a text: where it drafts at all, and how much of that is right."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specrt.speculation.gamma import FixedGamma
from specrt.speculation.ngram import NgramDrafter
from specrt.speculation.round import Proposal

NOTHING = -1
"""Where lookup finds nothing: in `cascade` the draft is asked there."""


def looked_up(tokens: NDArray[np.int64], first: int, most: int) -> NDArray[np.int16]:
    """Return how many tokens lookup drafts right in a round that begins at each place.

    A round at place s has the tokens before s, and drafts `most`.
    Shapes: tokens [S] -> [S - first].
    """
    text = tokens.tolist()
    drafter = NgramDrafter(FixedGamma(most))
    found = np.full(len(text) - first, NOTHING, np.int16)
    for number, place in enumerate(range(first, len(text))):
        drafted = _proposal(drafter, text[:place], most).tokens
        if drafted:
            pairs = zip(drafted, text[place:], strict=False)
            wrong = (at for at, (mine, theirs) in enumerate(pairs) if mine != theirs)
            found[number] = next(wrong, min(len(drafted), len(text) - place))
    return found


def _proposal(drafter: NgramDrafter, text: list[int], most: int) -> Proposal:
    try:
        next(drafter.propose(text, most))
    except StopIteration as done:
        proposal: Proposal = done.value
        return proposal
    raise AssertionError("lookup runs no pass")
