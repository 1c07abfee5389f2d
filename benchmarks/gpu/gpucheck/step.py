"""One thing to verify: what it needs, what it found, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpucheck.place import Place

Facts = dict[str, Any]
OK, FAILED, NOT_RUN = "ok", "failed", "not run"


class NotRunError(Exception):
    """What a step says when it cannot be done here; it is no failure."""


class CheckError(Exception):
    """What a check found wrong, and all it found."""

    def __init__(self, reason: str, facts: Facts | None = None) -> None:
        super().__init__(reason)
        self.facts = facts or {}


@dataclass(frozen=True)
class Step:
    """A function that returns facts."""

    subject: str
    """What it does, as in `codelet.logits` or `8B-fp16.bench`."""
    backend: str
    """Empty where no engine takes part."""
    run: Callable[[Place, str], Facts]
    """Called with the place and the backend."""
    needs_gpu: bool = True
    minutes: float = 1.0
    """About what it takes on a data-centre GPU; a step is not begun with less time left."""

    package: str = ""
    """What has to be installed for it, beyond what specrt itself needs."""

    @property
    def needed(self) -> str:
        """What it can do without, as a list of steps says it."""
        if self.needs_gpu:
            return ""
        return f"no GPU needed, but {self.package}" if self.package else "no GPU needed"

    @property
    def key(self) -> str:
        """Its name in results and on the command line."""
        return f"{self.subject}@{self.backend}" if self.backend else self.subject

    def asked(self, patterns: list[str]) -> bool:
        """Tell whether it is among those asked for; all are where none is named."""
        return not patterns or any(
            fnmatchcase(self.key, p) or fnmatchcase(self.subject, p) for p in patterns
        )


@dataclass(frozen=True)
class Outcome:
    """How a step ended."""

    step: str
    backend: str
    status: str
    """`ok`, `failed` or `not run`."""
    reason: str = ""
    """Why, where it is not ok; one line."""
    seconds: float = 0.0
    when: str = ""
    facts: Facts = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name of its step in results."""
        return f"{self.step}@{self.backend}" if self.backend else self.step
