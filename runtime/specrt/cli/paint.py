"""Text in two colours: what was drafted and accepted, and what is the target's own."""

from __future__ import annotations

from collections import deque
from itertools import groupby
from typing import NamedTuple

from specrt.completion import Chunk
from specrt.text import Tokenizer

_GREEN, _RESET = "\x1b[32m", "\x1b[0m"
LEGEND = f"{_GREEN}green{_RESET}: drafted and accepted; plain: the target's own"


class Span(NamedTuple):
    """A part of a text, and whether it was drafted."""

    text: str
    drafted: bool


class Painter:
    """Tells which part of an answer came from which token.

    A character split over tokens belongs to the one that completes it. Spans of a chunk, joined,
    are its text: what a stop string holds back is told when it is shown.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._waiting: deque[tuple[int, bool]] = deque()
        """(characters, whether drafted) of tokens whose text was not shown yet."""

    def spans(self, chunk: Chunk) -> list[Span]:
        """Return the text of a chunk, token by token."""
        for number, token in enumerate(chunk.token_ids):
            length = len(self._detokenizer.push([token]))
            if length:
                self._waiting.append((length, number < chunk.accepted))
        found = []
        text = chunk.text
        while text and self._waiting:
            length, drafted = self._waiting.popleft()
            if length > len(text):
                self._waiting.appendleft((length - len(text), drafted))
            found.append(Span(text[:length], drafted))
            text = text[length:]
        return [*found, Span(text, False)] if text else found

    def paint(self, chunk: Chunk) -> str:
        """Return the text of a chunk with what was drafted in green."""
        shown = ""
        for drafted, spans in groupby(self.spans(chunk), lambda span: span.drafted):
            text = "".join(span.text for span in spans)
            shown += f"{_GREEN}{text}{_RESET}" if drafted else text
        return shown
