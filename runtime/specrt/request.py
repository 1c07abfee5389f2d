"""One completion on its way: what was asked, what was delivered so far, and what went wrong."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from specrt.completion import Chunk, Completion
from specrt.drafters import Drafters
from specrt.errors import RequestError
from specrt.message import one_line
from specrt.noise import Noise
from specrt.params import SamplingParams
from specrt.reader import Reader
from specrt.round import Round
from specrt.rules import Rules
from specrt.speculate import Rounds
from specrt.target import CachedTokens

AHEAD = 8
"""Chunks that a completion may be ahead of who fetches them, before it pauses."""


@dataclass(eq=False)
class Request:
    """A completion that waits, runs or is over."""

    tokens: list[int]
    """The prompt, and behind it what was committed."""
    limit: int
    """Tokens at which it ends, whatever they say."""
    params: SamplingParams
    completion: Completion
    noise: Noise
    rules: Rules | None
    reader: Reader
    caches: list[CachedTokens]
    """What the KV buffers of its row hold of its text, the target's first."""
    fresh: bool = False
    """Whether its whole prompt is to be read, whatever a row holds of it."""
    patient: bool = False
    """Whether it never pauses: somebody collects it when it is over."""
    rounds: Rounds | None = None
    """Once it has begun."""
    drafters: Drafters | None = None
    """Whose policies it uses while it runs."""
    chunks: deque[Chunk] = field(default_factory=deque)
    """Delivered, and not fetched yet."""
    error: BaseException | None = None
    done: bool = False
    submitted: bool = False
    """Whether it waits for a row, or has waited."""
    cancelled: bool = False
    """Whether nobody wants more of it."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while it changes, never during a pass; a signal's handler may cancel within it."""

    heard: Callable[[], object] | None = None
    """Called, in whichever thread, when something came of it."""

    @property
    def over(self) -> bool:
        """Whether it needs no more rounds."""
        return self.done or self.cancelled or self.error is not None

    @property
    def paused(self) -> bool:
        """Whether it waits for who fetches its chunks."""
        return len(self.chunks) >= AHEAD and not self.patient

    @property
    def needy(self) -> bool:
        """Whether there is something to run for it."""
        return not self.over and not self.paused

    def tell(self) -> None:
        """Tell who waits that something came of it."""
        heard = self.heard
        if heard is not None:
            heard()

    def deliver(self, round_: Round, now_ns: int) -> None:
        """Take what a round committed, and end where it ended the text."""
        with self.lock:
            if self.cancelled:
                return
            chunk = self.reader.take(round_, now_ns)
            if not self.patient:
                self.chunks.append(chunk)
            if self.completion.finish_reason:
                self.done = True
            elif len(self.tokens) >= self.limit:
                self.finish()
        self.tell()

    def finish(self) -> None:
        """End at the limit."""
        with self.lock:
            if self.cancelled:
                return
            rest = self.reader.finish()
            if rest is not None and not self.patient:
                self.chunks.append(rest)
            self.done = True
        self.tell()

    def cancel(self) -> None:
        """End before its time, and say so; what it came to stays."""
        with self.lock:
            if self.completion.finish_reason is None:
                self.completion.finish_reason = "cancelled"
            self.cancelled = True
        self.tell()

    def drop(self) -> None:
        """Give it up. Takes no lock and tells nobody: the garbage collector may call."""
        self.cancelled = True

    def fail(self, error: BaseException) -> None:
        """End before its time; one that is over stays as it ended."""
        if not isinstance(error, Exception):  # a library panicked: that ends nobody's program
            error = RequestError(f"the completion failed: {one_line(str(error))}")
        with self.lock:
            if self.over:
                return
            self.error = error
        self.tell()
