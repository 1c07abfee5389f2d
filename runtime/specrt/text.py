"""Text to tokens and back: tokenizer, detokenizers, stop strings, prompt files."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HubTokenizer

from specrt.errors import BundleError, RequestError, did_you_mean

_INCOMPLETE = "\ufffd"


class Tokenizer:
    """The tokenizer of a bundle, read from its `tokenizer.json`."""

    def __init__(
        self, path: Path, bos_token_id: int | None = None, data: bytes | None = None
    ) -> None:
        """Read a file; `data` are its bytes where they are known."""
        try:
            found = path.read_bytes() if data is None else data
            self._tokenizer: Any = HubTokenizer.from_buffer(found)
        except Exception as error:  # the library raises bare Exception
            raise BundleError(
                f"{path} is not a tokenizer: {error}; build the bundle again"
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.bos_token_id = bos_token_id
        decoder = repr(self._tokenizer.decoder)
        self.falls_back_to_bytes = "ByteFallback" in decoder
        self._joins_bytes = decoder.startswith("ByteLevel")
        self._bytes: dict[int, bytes] = {}

    @cached_property
    def size(self) -> int:
        """The largest id the tokenizer knows, plus one; ids may be sparse."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a prompt; `special` adds the tokenizer's own special tokens.

        An empty prompt is the BOS token alone.
        Raises: RequestError for an empty prompt where there is no BOS token, and for a text that
            is not valid Unicode.
        """
        try:
            text.encode()  # the library only says that half a surrogate pair is not a str
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode at character {error.start}: {error.reason}; "
                "pass text decoded as UTF-8"
            ) from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        if ids:
            return ids
        if self.bos_token_id is None:
            raise RequestError(
                "the prompt is empty and this model has no BOS token to start from; "
                "give at least one character"
            )
        return [self.bos_token_id]

    def detokenizer(self) -> ByteDetokenizer | Detokenizer:
        """Return what turns the tokens of one completion into text."""
        return (
            ByteDetokenizer(self._bytes_of, self._bytes) if self._joins_bytes else Detokenizer(self)
        )

    def _bytes_of(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        return b"" if name is None or token in self.special else token_bytes(name, self._symbols)

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that are no text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @cached_property
    def _symbols(self) -> dict[str, int]:
        return byte_symbols()

    def to_json(self) -> str:
        """Return what a `tokenizer.json` would hold."""
        return str(self._tokenizer.to_str())

    def decode(self, ids: list[int]) -> str:
        """Return the text of some ids, special tokens left out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class Detokenizer:
    """Turns tokens into text as they come, by asking the tokenizer.

    What it gave out, joined, is always a prefix of the whole text: a character split over tokens
    is held back until it is whole, and decoders that look at their neighbours see a few of them.
    One exception: a decoder with byte fallback spoils a whole run of byte tokens when one of them
    is invalid, and text given out before is not taken back. Such tokenizers are best fed one token
    at a time, so that what is shown does not depend on how tokens arrive.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0
        self._given_text = ""

    def push(self, ids: list[int]) -> str:
        """Add tokens and return the text that became certain."""
        self._ids.extend(ids)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(_INCOMPLETE) or len(text) <= len(self._given_text):
            return ""
        return self._give(text)

    def finish(self) -> str:
        """Return what was held back; half a character becomes U+FFFD."""
        return self._give(self._tokenizer.decode(self._ids))

    def _give(self, text: str) -> str:
        fresh = text[len(self._given_text) :]
        # The next window starts at the tokens just given, so that a decoder has their context.
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        self._given_text = self._tokenizer.decode(self._ids)
        return fresh


class StopStrings:
    """Finds where a text must end, holding back what may be the beginning of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return what may be shown, and the stop string that was met, if any."""
        if not self._stops:
            return text, None
        held = self._held + text
        met = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if met:
            at, stop = min(met)
            self._held = ""
            return held[:at], stop
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def finish(self) -> str:
        """Return what was held back, when no stop string came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that begins the stop string."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class ByteDetokenizer:
    """Joins the bytes of tokens and gives out whole characters.

    One lookup per token, where asking the tokenizer to decode costs more than a round does.
    `bytes_of(token)` is the token's bytes, empty for a special token; `known` keeps them.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], known: dict[int, bytes]) -> None:
        self._bytes_of = bytes_of
        self._known = known
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that became certain."""
        known = self._known
        try:
            data = b"".join([known[i] for i in ids])
        except KeyError:
            ids = list(ids)
            known.update({i: self._bytes_of(i) for i in ids if i not in known})
            data = b"".join([known[i] for i in ids])
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return what was held back; half a character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


def byte_symbols() -> dict[str, int]:
    """Return the byte each printable symbol of a byte-level vocabulary stands for.

    Source: Radford et al. 2019 (GPT-2): printable bytes stand for themselves, the others for the
        code points from 256 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    return {**symbols, **{chr(256 + at): byte for at, byte in enumerate(rest)}}


def token_bytes(token: str, symbols: dict[str, int]) -> bytes:
    """Return the bytes a token spells; one with other characters in it is its own text."""
    try:
        return bytes([symbols[c] for c in token])
    except KeyError:
        return token.encode()


@dataclass(frozen=True)
class PromptRecord:
    """One prompt of a file, and the class of task it belongs to."""

    text: str
    category: str = ""
    place: str = field(default="", compare=False)
    """File and line it came from, for error messages."""


def read_prompts(path: Path) -> list[PromptRecord]:
    """Read every prompt of a JSONL file; of several turns the first is taken.

    Raises: RequestError naming the line that is wrong.
    """
    prompts = []
    # JSON strings may hold the other line ends that splitlines() knows.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            prompts.append(_parse(f"{path}:{number}", line))
    if not prompts:
        raise RequestError(f"{path} holds no prompts; expected JSON lines with `prompt` or `turns`")
    return prompts


def of_categories(prompts: Sequence[PromptRecord], wanted: Iterable[str]) -> list[PromptRecord]:
    """Return the prompts of the categories wanted, all of them when none is named.

    Raises: RequestError for a category without a prompt.
    """
    there = {p.category for p in prompts}
    names = set(wanted)
    for name in sorted(names - there):
        raise RequestError(f"no prompt is of category {name!r}{did_you_mean(name, there)}")
    return [p for p in prompts if p.category in (names or there)]


def first_of_each(prompts: Iterable[PromptRecord], most: int) -> list[PromptRecord]:
    """Return the first so many prompts of each category, in the order they came."""
    taken: dict[str, int] = {}
    first = []
    for prompt in prompts:
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if taken[prompt.category] <= most:
            first.append(prompt)
    return first


def read_text(path: Path) -> str:
    """Read a text file as UTF-8, with or without a byte order mark.

    Raises: RequestError when it is missing or not UTF-8.
    """
    try:
        return decode_utf8(path.read_bytes(), str(path))
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read: {error.strerror}; name a file of text"
        ) from error


def decode_utf8(data: bytes, origin: str) -> str:
    """Decode bytes that must be UTF-8; a byte order mark is no part of the text.

    Raises: RequestError naming the first byte that is not.
    """
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{origin} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}; "
            "convert it to UTF-8 first"
        ) from None


def _parse(place: str, line: str) -> PromptRecord:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{place} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise RequestError(f"{place} is {type(data).__name__}; expected an object with `prompt`")
    turns = data.get("turns")
    text = data.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    if not isinstance(text, str):
        raise RequestError(f"{place} has neither a string `prompt` nor a list of `turns`")
    return PromptRecord(text, str(data.get("category", "")), place)
