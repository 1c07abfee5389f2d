"""What is compared: a gamma and the drafter that drafts so far."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from specrt.models import AUTO, Gamma


class Configuration(NamedTuple):
    """One way to decode: how many tokens a round drafts, and who drafts them."""

    gamma: Gamma
    drafter: str

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted: what all others are measured against."""
        return self.gamma == 0

    def __str__(self) -> str:
        """Return it in words."""
        if self.is_plain:
            return "plain decoding"
        return f"{AUTO if self.gamma == AUTO else f'gamma {self.gamma}'} ({self.drafter})"


PLAIN = Configuration(0, "none")


def configurations(gammas: Iterable[Gamma], drafters: Iterable[str]) -> list[Configuration]:
    """Return every gamma with every drafter, once each, plain decoding first and always."""
    drafters = list(drafters)
    pairs = [Configuration(g, d) for d in drafters for g in gammas]
    plain = [c.is_plain or c.drafter == PLAIN.drafter for c in pairs]
    drafting = [c for c, is_plain in zip(pairs, plain, strict=True) if not is_plain]
    return list(dict.fromkeys([PLAIN, *drafting]))


def in_turn(compared: list[Configuration], turn: int) -> list[Configuration]:
    """Return the order for one turn, so that none always comes first, or after the same one.

    In as many turns as there are configurations each one has every place once; in the next as
    many turns the order runs backwards.
    """
    cycle, shift = divmod(turn, len(compared))
    order = compared[shift:] + compared[:shift]
    return order[::-1] if cycle % 2 else order
