"""What a command printed, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ran:
    """One finished command."""

    status: int
    out: str
    err: str

    @property
    def refusal(self) -> str:
        """What a command said that refused its input: status 2, one line, nothing on stdout."""
        assert (self.status, self.out) == (2, ""), self
        assert self.err.startswith("specrt: ")
        assert self.err.count("\n") == 1, self.err
        assert self.err.endswith("\n")
        return self.err


Run = Callable[..., Ran]
