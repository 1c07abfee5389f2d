"""What a completion is: chunks while it runs, counts, times and a reason when it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from specrt.logprobs import Entry
from specrt.stats import SpeculationStats, Timings


class Chunk(NamedTuple):
    """What one round added: text that is certain, and the tokens that arrived."""

    text: str
    token_ids: list[int]
    accepted: int = 0
    """How many of the tokens, from the first, were drafted; the rest is the target's own."""
    logprobs: list[Entry] | None = None
    """One for each token; None where nobody asked."""


@dataclass
class Completion:
    """Everything known about one completion; complete once `finish_reason` is set."""

    prompt_tokens: int
    seed: int
    speculation: SpeculationStats
    timings: Timings
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    """How many of the prompt's tokens were in the KV buffers already."""
    finish_reason: str | None = None
    """`stop` (an end token or a stop string), `length`, `error`, `cancelled` (by `cancel`), or
    None: it is not finished, or who read it gave it up."""
    index: int = 0
    """Which of the n completions of its prompt it is."""
    error: str | None = None
    """What ended it before its time, where others went on."""
    stop_reason: int | str | None = None
    """The token or string that ended the text, when it was not the model's own end."""
    logprobs: list[Entry] | None = None
    """What the target thought of each token and of the likeliest; None where nobody asked."""
    prompt_logprobs: list[Entry | None] | None = None
    """The same of the prompt's tokens, None for the first; None where nobody asked."""

    def to_json(self) -> dict[str, Any]:
        """Return the public JSON object; it has log-probabilities where they were asked for."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "seed": self.seed,
            "ttft_ms": round(self.timings.ttft_ms, 3),
            "itl_ms": round(self.timings.itl_ms, 3),
            "tokens_per_second": round(self.timings.tokens_per_second, 2),
            "speculation": self.speculation.to_json(),
            **_told("logprobs", self.logprobs),
            **_told("prompt_logprobs", self.prompt_logprobs),
        }


def _told(name: str, entries: Sequence[Entry | None] | None) -> dict[str, Any]:
    """Return what JSON says of positions; nothing where nobody asked."""
    if entries is None:
        return {}
    return {
        name: [
            None if entry is None else {str(t): told.to_json() for t, told in entry.items()}
            for entry in entries
        ]
    }


class Source(Protocol):
    """Where a stream has its chunks from; any thread may call."""

    def fetch(self) -> Chunk | None:
        """Return the next chunk; None at the end, after a failure, and once it was given up."""
        ...

    def cancel(self) -> None:
        """End it before its time, and say so in the completion."""
        ...

    def drop(self) -> None:
        """Give up what is not read yet."""
        ...


class Stream(Iterator[Chunk]):
    """An iterator of chunks; `completion` holds what came so far, and all of it at the end.

    Threads: any may cancel or close it, also while another waits for its next chunk, which then
    ends after the pass that runs. Dropping the stream closes it.
    """

    def __init__(self, completion: Completion, source: Source) -> None:
        self.completion = completion
        self._source = source

    def __next__(self) -> Chunk:
        """Return the next chunk; text may be empty while a character is incomplete."""
        chunk = self._source.fetch()
        if chunk is None:
            raise StopIteration
        return chunk

    def cancel(self) -> None:
        """Stop, from any thread: the reader is at the end, and the row is free at once.

        A completion that was not finished has the finish reason `cancelled`. Never waits.
        """
        self._source.cancel()

    def close(self) -> None:
        """Give up what is not read yet; the row is free at once. Nothing is finished by it."""
        self._source.drop()

    def finish(self) -> Completion:
        """Run to the end and return the completion."""
        for _ in self:
            pass
        return self.completion

    def __del__(self) -> None:
        self._source.drop()
