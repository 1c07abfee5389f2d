"""A request: its state, and the chunks its rounds become, cut at ends and stop strings."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from specrt.completion import Chunk, Completion
from specrt.engine.protocol import Source
from specrt.errors import RequestError, one_line
from specrt.params import SamplingParams
from specrt.sampling.distribution import Entry, Ranked
from specrt.sampling.noise import Noise
from specrt.sampling.processors import LogitsProcessors
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.pool import GammaPolicies
from specrt.speculation.round import Drafter, Round, Rounds
from specrt.text.detokenizer import StopStrings, TextEnd
from specrt.text.tokenizer import Tokenizer


class OutputProcessor:
    """Turns rounds into chunks: cuts at ends and stop strings, and records counts and times."""

    def __init__(
        self,
        completion: Completion,
        params: SamplingParams,
        eos: frozenset[int],
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
    ) -> None:
        self._completion = completion
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        self._eos = eos
        self._detokenizer = tokenizer.detokenizer(prompt)
        self._stops: TextEnd = StopStrings(params.stop)
        self._one_by_one = bool(params.stop)
        self._piece = cache(tokenizer.piece)
        if params.logprobs is not None:
            completion.logprobs = []

    def end_with(self, end: TextEnd) -> None:
        """Find the end of the text by something else than its stop strings."""
        self._stops, self._one_by_one = end, True

    def take(self, round_: Round, now_ns: int) -> Chunk:
        """Return what a round delivers; `finish_reason` is set where it ended the text."""
        done = self._completion
        tokens, text = self._cut(round_.tokens)
        if done.timings.arrivals:  # the first round is the prefill's
            done.speculation.add(round_, len(tokens))
        done.timings.arrivals.append((now_ns, len(tokens)))
        done.token_ids.extend(tokens)
        done.text += text
        accepted = min(round_.accepted, len(tokens))
        if round_.prompt_logprobs is not None:
            done.prompt_logprobs = [None, *self._entries(round_.prompt_logprobs)]
        if done.logprobs is None:
            return Chunk(text, tokens, accepted)
        assert round_.logprobs is not None, "a target ranks tokens for requests with logprobs"
        entries = self._entries(round_.logprobs, len(tokens))
        done.logprobs += entries
        return Chunk(text, tokens, accepted, entries)

    def finish(self) -> Chunk | None:
        """End a text that no end or stop string ended; return the rest of it."""
        done = self._completion
        done.finish_reason = "length"
        rest, _ = self._show(self._detokenizer.finish())
        rest += self._stops.finish()
        done.text += rest
        if not rest:
            return None
        return Chunk(rest, [], logprobs=None if done.logprobs is None else [])

    def _entries(self, ranks: Ranked, count: int | None = None) -> list[Entry]:
        """Return the first `count` rows, all when None, with the texts of their tokens."""
        return ranks.entries(len(ranks.ranks) if count is None else count, self._piece)

    def _cut(self, tokens: list[int]) -> tuple[list[int], str]:
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


class CommonPrefix:
    """How many first tokens two texts share, which only grow; no token is compared twice.

    Texts of different sources, and those of different salts, share none: they are not `shareable`.
    """

    def __init__(self, first: list[int], second: list[int], *, shareable: bool = True) -> None:
        self.first = first
        self.shareable = shareable
        self._second = second
        self._length = 0
        self._parted = not shareable
        """Whether they differ after what they share."""

    def length(self) -> int:
        """Return how many they share now."""
        first, second = self.first, self._second
        most = min(len(first), len(second))
        if first is second:
            return most
        if not self._parted:
            self._length = _common(first, second, self._length, most)
            self._parted = self._length < most
        return self._length


def _common(first: Sequence[int], second: Sequence[int], low: int, high: int) -> int:
    """Return how many first tokens two texts share, from `low` to `high`.

    It looks no further than twice as far as they are alike.
    """
    width = 16
    while low < high:
        end = min(low + width, high)
        if first[low:end] == second[low:end]:  # whole slices compare faster than tokens
            low, width = end, 2 * width
        else:
            high, width = end - 1, max(1, (end - low) // 2)
    return low


def same_source(first: Source | None, second: Source | None) -> bool:
    """Return whether two texts are of one source, or both of none."""
    if first is None or second is None:
        return first is second
    return first is second or (first.dtype == second.dtype and np.array_equal(first, second))


AHEAD = 8
"""Chunks that wait to be fetched before a request pauses."""


@dataclass(eq=False)
class Request:
    """A completion that waits, runs or is over."""

    tokens: list[int]
    """The prompt, and after it what was committed."""
    limit: int
    """Tokens at which it ends, whatever they say."""
    params: SamplingParams
    completion: Completion
    noise: Noise
    processors: LogitsProcessors | None
    output: OutputProcessor
    caches: list[KVCache]
    """What the KV buffers of its slot hold of its text, the target's first."""
    source: Source | None = None
    """What the encoder reads, where there is one."""
    readers: int = 1
    """How many of the engines read the source, the target first: all but a draft that is idle."""
    drafter: Drafter | None = None
    """Proposes for it, where that is none of `DRAFTERS`."""
    until: int | None = None
    """Tokens at which it pauses until this is raised; it goes on by itself when None."""
    fresh: bool = False
    """Whether its whole prompt is to be read, whatever a slot holds of it."""
    memory_key: str | None = None
    """Whose finished texts it is drafted from and joins; None for neither."""
    cache_salt: str = ""
    """Whose texts it shares with what slots hold."""
    collected: bool = False
    """Whether it is read as a whole when it is over: it has no chunks."""
    rounds: Rounds | None = None
    """Once it has begun."""
    policies: GammaPolicies | None = None
    """Borrowed while it runs."""
    chunks: deque[Chunk] = field(default_factory=deque)
    """Delivered, and not fetched yet."""
    error: BaseException | None = None
    done: bool = False
    submitted: bool = False
    """Whether it waits for a slot, or has waited."""
    has_slot: bool = False
    """Whether it holds one now, of those with which it began or went on."""
    cancelled: bool = False
    """Whether it was cancelled or dropped."""
    prefixes: dict[int, CommonPrefix] = field(default_factory=dict)
    """What it shares with the texts that slots hold, by their indices."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while it changes, never during a pass; a signal's handler may cancel within it."""

    on_update: Callable[[], object] | None = None
    """Called, in any thread, when a chunk, an error or the end is there."""

    @property
    def source_positions(self) -> int:
        """How many positions the source has; 0 where there is none."""
        return 0 if self.source is None else self.completion.prompt_tokens

    @property
    def over(self) -> bool:
        """Whether it needs no more rounds."""
        return self.done or self.cancelled or self.error is not None

    @property
    def paused(self) -> bool:
        """Whether it waits until its chunks are fetched, or until it is told to go on."""
        told = self.until is None or len(self.tokens) < self.until
        return len(self.chunks) >= AHEAD or not told

    @property
    def runnable(self) -> bool:
        """Whether it needs a step."""
        return not self.over and not self.paused

    def notify(self) -> None:
        """Call `on_update`."""
        on_update = self.on_update
        if on_update is not None:
            on_update()

    def deliver(self, round_: Round, now_ns: int) -> None:
        """Add what a round committed, and end where it ended the text."""
        with self.lock:
            if self.cancelled:
                return
            chunk = self.output.take(round_, now_ns)
            if not self.collected:
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
            rest = self.output.finish()
            if rest is not None and not self.collected:
                self.chunks.append(rest)
            self.done = True
        self.notify()

    def cancel(self) -> None:
        """End before its time, with the finish reason `cancelled`; its text so far stays."""
        with self.lock:
            if self.completion.finish_reason is None:
                self.completion.finish_reason = "cancelled"
            self.cancelled = True
        self.notify()

    def drop(self) -> None:
        """End without a finish reason. Takes no lock: the garbage collector may call."""
        self.cancelled = True

    def fail(self, error: BaseException) -> None:
        """End with an error; one that is over stays as it ended."""
        if not isinstance(error, Exception):  # a library panicked: that must not end the program
            error = RequestError(f"the completion failed: {one_line(str(error))}")
        with self.lock:
            if self.over:
                return
            self.error = error
        self.notify()
