"""What one round did: the record that drafters learn from and statistics count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specrt.logprobs import Ranked


class Round(NamedTuple):
    """What one round did. The prefill is the round that drafts nothing and emits first."""

    tokens: list[int]
    """Committed: the accepted ones and the target's own."""
    drafted: int
    accepted: int
    draft_ns: int
    verify_ns: int
    source: str = ""
    """Which drafter proposed: `model`, `ngram`; empty where nothing was proposed."""
    confidences: Sequence[float] = ()
    """What the drafter thought of each token it drafted, in (0, 1]; empty where nobody asked."""
    caught_up: bool = False
    """Whether the drafter first fed tokens of rounds that it had no part in."""
    logprobs: Ranked | None = None
    """What the target thought of each token, where the request asks for it."""
    prompt_logprobs: Ranked | None = None
    """What it thought of the prompt's, told with the first round, where the request asks for it."""

    @property
    def evaluated(self) -> int:
        """Drafted tokens the target examined, up to and including the first rejection."""
        return self.accepted + (self.accepted < self.drafted)
