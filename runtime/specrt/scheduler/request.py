"""One request on its way: from rounds to chunks, cut at ends and stop strings."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from specrt.completion import Chunk, Completion
from specrt.errors import RequestError, one_line
from specrt.params import SamplingParams
from specrt.sampling.distribution import Entry, Ranked
from specrt.sampling.noise import Noise
from specrt.sampling.processors import LogitsProcessors
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.pool import DrafterPool
from specrt.speculation.round import Round, Rounds
from specrt.text import StopStrings, Tokenizer


class OutputProcessor:
    """Turns rounds into chunks: cuts at ends and stop strings, keeps counts and times."""

    def __init__(
        self,
        completion: Completion,
        params: SamplingParams,
        eos: frozenset[int],
        tokenizer: Tokenizer,
    ) -> None:
        self._completion = completion
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        self._eos = eos
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(params.stop)
        self._one_by_one = bool(params.stop) or tokenizer.falls_back_to_bytes
        self._decode = tokenizer.decode
        self._pieces: dict[int, str] = {}
        if params.logprobs is not None:
            completion.logprobs = []

    def take(self, round_: Round, now_ns: int) -> Chunk:
        """Return what a round delivers; `finish_reason` is set where it ended the text."""
        done = self._completion
        kept, text = self._take(round_.tokens)
        if done.timings.arrivals:  # the first round is the prefill's
            done.speculation.add(round_, len(kept))
        done.timings.arrivals.append((now_ns, len(kept)))
        done.token_ids.extend(kept)
        done.text += text
        accepted = min(round_.accepted, len(kept))
        if round_.prompt_logprobs is not None:
            done.prompt_logprobs = [None, *self._entries(round_.prompt_logprobs)]
        if done.logprobs is None:
            return Chunk(text, kept, accepted)
        assert round_.logprobs is not None, "a target tells what it is asked"
        entries = self._entries(round_.logprobs, len(kept))
        done.logprobs += entries
        return Chunk(text, kept, accepted, entries)

    def finish(self) -> Chunk | None:
        """End a text that no end or stop string ended; return what was held back of it."""
        done = self._completion
        done.finish_reason = "length"
        rest, _ = self._show(self._detokenizer.finish())
        rest += self._stops.finish()
        done.text += rest
        if not rest:
            return None
        return Chunk(rest, [], logprobs=None if done.logprobs is None else [])

    def _entries(self, told: Ranked, count: int | None = None) -> list[Entry]:
        """Return what rows say, the first `count` of them, with the texts of their tokens."""
        return told.entries(len(told.ranks) if count is None else count, self._piece)

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._decode([token])
        return self._pieces[token]

    def _take(self, tokens: list[int]) -> tuple[list[int], str]:
        """Return the tokens to deliver and the text that became certain."""
        ended = None
        if not self._ends.isdisjoint(tokens):
            ended = next(i for i, t in enumerate(tokens) if t in self._ends)
        body = tokens if ended is None else tokens[:ended]
        text = ""
        pieces = [[t] for t in body] if self._one_by_one else [body]
        for number, piece in enumerate(pieces):
            shown, stopped = self._show(self._detokenizer.push(piece))
            text += shown
            if stopped:
                return body[: number + 1], text
        if ended is None:
            return tokens, text
        shown, stopped = self._show(self._detokenizer.finish())
        text += shown + ("" if stopped else self._stops.finish())
        if not stopped:
            last = tokens[ended]
            self._end("stop", None if last in self._eos else last)
        return tokens[: ended + 1], text

    def _show(self, text: str) -> tuple[str, str | None]:
        shown, stop = self._stops.push(text)
        if stop is not None:
            self._end("stop", stop)
        return shown, stop

    def _end(self, reason: str, stop: int | str | None) -> None:
        self._completion.finish_reason = reason
        self._completion.stop_reason = stop


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
    rules: LogitsProcessors | None
    reader: OutputProcessor
    caches: list[KVCache]
    """What the KV buffers of its row hold of its text, the target's first."""
    fresh: bool = False
    """Whether its whole prompt is to be read, whatever a row holds of it."""
    patient: bool = False
    """Whether it never pauses: somebody collects it when it is over."""
    rounds: Rounds | None = None
    """Once it has begun."""
    drafters: DrafterPool | None = None
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

    on_update: Callable[[], object] | None = None
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
    def runnable(self) -> bool:
        """Whether there is something to run for it."""
        return not self.over and not self.paused

    def notify(self) -> None:
        """Tell who waits that something came of it."""
        on_update = self.on_update
        if on_update is not None:
            on_update()

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
        self.notify()

    def finish(self) -> None:
        """End at the limit."""
        with self.lock:
            if self.cancelled:
                return
            rest = self.reader.finish()
            if rest is not None and not self.patient:
                self.chunks.append(rest)
            self.done = True
        self.notify()

    def cancel(self) -> None:
        """End before its time, and say so; what it came to stays."""
        with self.lock:
            if self.completion.finish_reason is None:
                self.completion.finish_reason = "cancelled"
            self.cancelled = True
        self.notify()

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
        self.notify()
