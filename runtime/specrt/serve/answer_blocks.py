"""Other protocols over the chat route: their bodies become a chat's, its text becomes blocks.

A block is a run of text or one tool call. No protocol has a path of its own to the engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pydantic import ValidationError

from specrt.completion import Completion
from specrt.errors import RequestError, reason_of
from specrt.serve.bodies import Body, ChatBody, refusal_of
from specrt.serve.sending import as_event, status_of
from specrt.serve.service import ServedCompletions, Service
from specrt.serve.speculation_report import metrics_of, speculation_of
from specrt.serve.tool_calls import CallPiece
from specrt.serve.tools import ToolUse

Event = tuple[str, dict[str, Any]]
"""The type of a streamed event, and its other fields."""


class ConvertedBody(Body):
    """A request of another protocol."""

    def chat(self) -> ChatBody:
        """Return the request as the chat route has it.

        Raises: RequestError for what has no meaning there.
        """
        self.refuse()
        shared = {
            name: value for name in Body.model_fields if (value := getattr(self, name)) is not None
        }
        body = shared | self.converted()
        try:
            return ChatBody.model_validate(body)
        except ValidationError as error:
            raise RequestError(refusal_of(error.errors(), body)[1]) from None

    def converted(self) -> dict[str, Any]:
        """Return the protocol's own fields as the chat route has them."""
        raise NotImplementedError


class BlockAnswer:
    """An answer made of blocks. The whole and the stream pass the same methods."""

    def __init__(
        self, service: Service, body: ConvertedBody, answers: ServedCompletions, use: ToolUse
    ) -> None:
        self._service = service
        self._answers = answers
        self._stream = use.stream(reasoning=answers.reasoning)
        self._told = bool(body.stream_options and body.stream_options.include_speculation)

    @property
    def completion(self) -> Completion:
        """The one completion of the answer."""
        return self._answers.completions[0]

    @property
    def metrics(self) -> dict[str, Any]:
        """What came of speculating."""
        return metrics_of(self._answers.completions)

    def whole(self) -> dict[str, Any]:
        """Return the answer, once its completion is over."""
        for part in [*self._read(self.completion.text), *self._rest()]:
            deque(self.add(part), maxlen=0)
        deque(self.finish(), maxlen=0)
        return self.to_json()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed answer; an error within it is the last one."""
        for event in self.opening():
            yield self.encode(event)
        try:
            async for part, extra in self._parts():
                for number, (kind, fields) in enumerate(self.add(part)):
                    yield self.encode((kind, fields if number else fields | extra))
            last = [*self.finish(), *self.closing()]
        except Exception as error:
            last = [self.failure(status_of(error), reason_of(error))]
        for event in last:
            yield self.encode(event)

    def encode(self, event: Event) -> bytes:
        """Return an event as it is sent, with its type as its name."""
        kind, fields = event
        return as_event({"type": kind, **fields}, kind)

    def opening(self) -> Iterator[Event]:
        """Yield the events before the first block."""
        raise NotImplementedError

    def add(self, part: str | CallPiece) -> Iterator[Event]:
        """Take a piece of text or of a call; yield the events of it."""
        raise NotImplementedError

    def finish(self) -> Iterator[Event]:
        """End the last block; yield the events of that."""
        raise NotImplementedError

    def closing(self) -> Iterator[Event]:
        """Yield the events after the last block."""
        raise NotImplementedError

    def failure(self, status: int, reason: str) -> Event:
        """Return the event of an answer that failed."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the answer's object as it is now."""
        raise NotImplementedError

    async def _parts(self) -> AsyncIterator[tuple[str | CallPiece, dict[str, Any]]]:
        """Yield pieces of text and of calls as they become certain, and what is told of them."""
        painted = self._answers.spans(0) if self._told else None
        async for update in self._answers.updates():
            extra = {} if painted is None else {"speculation": speculation_of(update, painted)}
            for part in self._read(update.chunk.text):
                yield part, extra
                extra = {}
        for part in self._rest():
            yield part, {}

    def _read(self, text: str) -> list[str | CallPiece]:
        if self._stream is not None:
            return self._stream.push(text)
        return [text] if text else []

    def _rest(self) -> list[str | CallPiece]:
        return [] if self._stream is None else self._stream.finish()
