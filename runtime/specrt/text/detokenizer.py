"""Tokens to text as they come: what each token spells, detokenizers, stop strings."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

Decoder = dict[str, Any]
"""The `decoder` of a `tokenizer.json`."""

_LOST = "\ufffd"

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Spelling:
    """The bytes that each token stands for, whatever stands next to it."""

    byte_level: bool = False
    """Whether each character of a token's name is a byte."""
    replacements: tuple[tuple[str, str, str], ...] = ()
    """What is replaced in a name, by what, and by what in the first token of a text."""
    falls_back: bool = False
    """Whether a token named `<0xNN>` is that byte."""
    strip: bytes = b""
    """What the first token of a text loses, where it begins with it."""

    @property
    def drops_space(self) -> bool:
        """Whether the first token of a text is spelled otherwise."""
        return bool(self.strip) or any(new != first for _, new, first in self.replacements)

    def bytes_of(self, name: str, *, first: bool = False) -> bytes:
        """Return the bytes of a token; the `first` one of a text may lose a space."""
        if self.byte_level:
            return token_bytes(name)
        for old, new, at_first in self.replacements:
            name = name.replace(old, at_first if first else new)
        byte = _BYTE.fullmatch(name) if self.falls_back else None
        data = bytes([int(byte[1], 16)]) if byte else name.encode()
        return data.removeprefix(self.strip) if first else data


def read_spelling(decoder: Decoder | None) -> Spelling | None:
    """Return how a decoder spells tokens; None where that depends on their neighbours."""
    parts = _parts(decoder)
    if [part["type"] for part in parts] == ["ByteLevel"]:
        return Spelling(byte_level=True)
    replacements: list[tuple[str, str, str]] = []
    seen, strip = set[str](), b""
    for part in parts:
        kind = part["type"]
        if kind == "Replace" and "String" in part["pattern"] and not seen:
            content = part["content"]
            replacements.append((part["pattern"]["String"], content, content))
        elif kind == "Metaspace" and not seen:
            kept = " " if part["prepend_scheme"] == "never" else ""
            replacements.append((part["replacement"], " ", kept))
        elif kind == "Fuse" or (kind == "ByteFallback" and "Fuse" not in seen):
            seen.add(kind)
        elif (
            kind == "Strip"
            and "Fuse" in seen
            and (part["start"], part["stop"], strip) == (1, 0, b"")
        ):
            strip = part["content"].encode()
        else:
            return None
    known = Spelling(False, tuple(replacements), "ByteFallback" in seen, strip)
    return known if parts else None


def _parts(decoder: Decoder | None) -> list[Decoder]:
    """Return the decoders that one applies in turn."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [part for inner in decoder["decoders"] for part in _parts(inner)]
    return [decoder]


@cache
def byte_symbols() -> dict[str, int]:
    """Return the byte each printable symbol of a byte-level vocabulary stands for.

    Source: Radford et al. 2019 (GPT-2): printable bytes stand for themselves, the others for the
        code points from 256 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    return {**symbols, **{chr(256 + at): byte for at, byte in enumerate(rest)}}


def token_bytes(token: str) -> bytes:
    """Return the bytes a byte-level token spells; one with other characters is its own text."""
    symbols = byte_symbols()
    try:
        return bytes([symbols[c] for c in token])
    except KeyError:
        return token.encode()


class ByteDetokenizer:
    """Joins the bytes of tokens and gives out whole characters.

    Bytes that cannot become a character are U+FFFD as soon as that is certain. What is given out,
    joined, depends on the tokens alone, not on how they come.

    `bytes_of(token)` is the token's bytes, empty for a special token; `known` keeps them. `before`
    are bytes that stand before, the last ones at least: half a character at their end is given out
    once it is completed, and never as U+FFFD. Where there are none, the first token with bytes is
    spelled by `first`.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        known: dict[int, bytes],
        first: Callable[[int], bytes] | None = None,
        before: bytes = b"",
    ) -> None:
        self._bytes_of = bytes_of
        self._known = known
        self._first = None if before else first
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(before)
        self._lost = self._decoder.getstate()[0].decode(errors="replace")
        """What half a character of the text before is where nothing completes it."""

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that became certain."""
        data = self._joined(ids) if self._first is None else self._begin(list(ids))
        return self._fresh(self._decoder.decode(data))

    def finish(self) -> str:
        """Return what was held back; half a character becomes U+FFFD."""
        return self._fresh(self._decoder.decode(b"", final=True))

    def _fresh(self, text: str) -> str:
        if text and self._lost:
            text, self._lost = text.removeprefix(self._lost), ""
        return text

    def _begin(self, ids: list[int]) -> bytes:
        first = self._first
        for at, token in enumerate(ids):
            if first is not None and self._joined([token]):
                self._first = None
                return first(token) + self._joined(ids[at + 1 :])
        return b""

    def _joined(self, ids: Iterable[int]) -> bytes:
        known = self._known
        try:
            return b"".join([known[i] for i in ids])
        except KeyError:
            ids = list(ids)
            known.update({i: self._bytes_of(i) for i in ids if i not in known})
            return b"".join([known[i] for i in ids])


CONTEXT = 4
"""Tokens of what was given out that a decoder sees before new ones."""

_MOST_HELD = 8
"""Tokens without whole text after which what there is of it is given out."""


class WindowDetokenizer:
    """Asks a decoder that looks at a token's neighbours, with the last few tokens in view.

    `before` are the tokens that stand before, the last ones at least; they and those that count as
    `is_text` are not special ones.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        before: Sequence[int] = (),
        is_text: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._decode = decode
        self._is_text = is_text
        self._ids = list(before[-CONTEXT:])
        self._given = decode(self._ids)
        self._held = 0

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that became certain."""
        return "".join([self._push(token) for token in ids if self._is_text(token)])

    def finish(self) -> str:
        """Return what was held back; half a character becomes U+FFFD."""
        return self._give(self._decode(self._ids)) if self._held else ""

    def _push(self, token: int) -> str:
        self._ids.append(token)
        self._held += 1
        text = self._decode(self._ids)
        whole = len(text) > len(self._seen(text)) and not text.endswith(_LOST)
        return self._give(text) if whole or self._held >= _MOST_HELD else ""

    def _give(self, text: str) -> str:
        fresh = text[len(self._seen(text)) :]
        self._ids = self._ids[-CONTEXT:]
        self._given, self._held = self._decode(self._ids), 0
        return fresh

    def _seen(self, text: str) -> str:
        """Return what was given out of a text, without half a character that is whole now."""
        return self._given if text.startswith(self._given) else self._given.rstrip(_LOST)


Detokenizer = ByteDetokenizer | WindowDetokenizer


class TextEnd(Protocol):
    """Finds where a text must end."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return what may be shown, and what ended it, if anything did."""

    def finish(self) -> str:
        """Return what was held back, when nothing ended it."""


class StopStrings:
    """Finds where a text must end, holding back what may be the beginning of a stop string.

    What a character costs grows with the different lengths of stop strings, not with their number.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = sorted(stops)
        self._known = frozenset(stops)
        self._lengths = sorted(set(map(len, stops)))
        self._letters = frozenset(stop[0] for stop in stops)
        """Those that stop strings begin with."""
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return what may be shown, and the stop string that was met, if any."""
        if not self._stops:
            return text, None
        held = self._held + text
        places = [at for at, character in enumerate(held) if character in self._letters]
        for at in places:
            stop = self._first(held, at)
            if stop is not None:
                self._held = ""
                return held[:at], stop
        least = len(held) - self._lengths[-1]
        ends = (at for at in places if at > least and self._begins(held[at:]))
        keep = next(ends, len(held))
        self._held = held[keep:]
        return held[:keep], None

    def _first(self, text: str, at: int) -> str | None:
        """Return the stop string at a place, of several the one that sorts first: the shortest."""
        for length in self._lengths:
            if text[at : at + length] in self._known:
                return text[at : at + length]
        return None

    def _begins(self, text: str) -> bool:
        """Tell whether a stop string begins with a text."""
        place = bisect_left(self._stops, text)
        return place < len(self._stops) and self._stops[place].startswith(text)

    def finish(self) -> str:
        """Return what was held back, when no stop string came."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that begins the stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextSpan(NamedTuple):
    """A part of a text, and whether it was drafted."""

    text: str
    drafted: bool


class DraftedSpans:
    """Maps the text of a completion to the tokens it came from, those drafted among them.

    A character split over tokens belongs to the one that completes it. The spans of a chunk join to
    its text: text held back by a stop string has its span when it is shown.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._waiting: deque[tuple[int, bool]] = deque()
        """(characters, drafted) of tokens whose text was not shown yet."""

    def of(self, text: str, token_ids: Sequence[int], accepted: int) -> list[TextSpan]:
        """Return the text of a chunk, token by token; the first `accepted` ones were drafted."""
        for number, token in enumerate(token_ids):
            length = len(self._detokenizer.push([token]))
            if length:
                self._waiting.append((length, number < accepted))
        spans = []
        while text and self._waiting:
            length, drafted = self._waiting.popleft()
            if length > len(text):
                self._waiting.appendleft((length - len(text), drafted))
            spans.append(TextSpan(text[:length], drafted))
            text = text[length:]
        return [*spans, TextSpan(text, False)] if text else spans
