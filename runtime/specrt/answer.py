"""A message of a conversation and the answer to it, as it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specrt.completion import Chunk, Completion, Stream


@dataclass(eq=False)
class Turn:
    """A message, and what was read of the answer to it."""

    message: str
    script: str
    """The text of the whole conversation up to the answer."""
    prompt: list[int]
    """The same in tokens."""
    completion: Completion
    answer: str = ""
    tokens: list[int] = field(default_factory=list)
    """Of the answer."""

    @property
    def body(self) -> list[int]:
        """The answer's tokens without the one that ended it."""
        done = self.completion
        whole = len(self.tokens) == len(done.token_ids) and done.finish_reason == "stop"
        return self.tokens[:-1] if whole and not isinstance(done.stop_reason, str) else self.tokens


class Answer:
    """The answer to a message, which becomes part of the conversation as it is read."""

    def __init__(self, turn: Turn, stream: Stream, settle: Callable[[Turn], object]) -> None:
        self._turn = turn
        self._stream = stream
        self._settle = settle

    def fetch(self) -> Chunk | None:
        """Return the next chunk, None at the end; see `Stream`."""
        chunk = None
        try:
            chunk = next(self._stream, None)
        finally:
            if chunk is None:
                self._settle(self._turn)
        if chunk is not None:
            self._turn.answer += chunk.text
            self._turn.tokens += chunk.token_ids
        return chunk

    def cancel(self) -> None:
        """End it before its time; see `Stream.cancel`."""
        self._stream.cancel()

    def drop(self) -> None:
        """Give up what is not read yet."""
        self._stream.close()
