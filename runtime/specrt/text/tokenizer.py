"""The tokenizer of a bundle, which reads control tokens in templates and not in contents."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from tokenizers import Tokenizer as HubTokenizer
from tokenizers.models import WordLevel

from specrt.errors import BundleError, RequestError
from specrt.text.detokenizer import (
    CONTEXT,
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    read_spelling,
)

_WORDS = ("role", "type")
"""Keys of a message whose values a template compares, and may make control tokens of."""

_STAND_INS = range(0x10FFFD, 0x10F000, -1)
"""Private characters, which no tokenizer joins with others."""

_LONGEST_CONTROL = 256
"""Characters; only what a normalizer drops makes the text of a control token longer."""


class ChatPrompt(str):
    """What a chat template made of messages, whose contents are text whatever they hold.

    `render` is what made it.
    """

    def __new__(
        cls, text: str, messages: Sequence[Any], render: Callable[[Sequence[Any]], str]
    ) -> ChatPrompt:
        """Keep what the text was made of; raises RequestError for what could hide text."""
        made = super().__new__(cls, text)
        made._messages, made._render = _copied(list(messages)), render
        return made

    _messages: Sequence[Any]
    _render: Callable[[Sequence[Any]], str]

    def guarded(self, controls: Collection[str]) -> tuple[str, str]:
        """Return the prompt with stand-ins in contents, and what it is without them.

        A character of a content has a stand-in wherever it could be part of one of the control
        tokens, alone or with what the template writes beside it.
        """
        used, stand_ins = set(self), dict[str, str]()
        free = (chr(code) for code in _STAND_INS if chr(code) not in used)

        def stand_in(char: str) -> str:
            if char not in stand_ins:
                stand_ins[char] = next(free, "")
            if not stand_ins[char]:
                raise RequestError(
                    f"the messages hold all private characters from {chr(_STAND_INS[-1])!a} to "
                    f"{chr(_STAND_INS[0])!a}, and a control token's text; leave one of these out"
                )
            return stand_ins[char]

        def cover(value: Any, *, word: bool = False) -> Any:
            if isinstance(value, str):
                text = list(value)
                for at in _exposed(value, controls, whole=word):
                    text[at] = stand_in(text[at])
                return "".join(text)
            if isinstance(value, dict):
                return {cover(k, word=True): cover(v, word=k in _WORDS) for k, v in value.items()}
            return [cover(v) for v in value] if isinstance(value, list) else value

        messages = cover(self._messages)
        if not stand_ins:
            return str(self), str(self)
        text = self._render(messages)
        return text, text.translate({ord(s): char for char, s in stand_ins.items()})


def _copied(value: Any) -> Any:
    """Return a copy of what messages hold.

    Raises: RequestError for what JSON has none of.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {_copied(k): _copied(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(v) for v in value]
    raise RequestError(
        f"the messages hold an object of type {type(value).__name__}; expected text, numbers, "
        "lists and mappings, as JSON has them"
    )


def _exposed(text: str, controls: Collection[str], *, whole: bool) -> set[int]:
    """Return where a text holds control tokens, and where its part in one, or the `whole`, begins.

    A template may drop the blanks around the text.
    """
    found = set[int]()
    head, tail = text.lstrip(), text.rstrip()
    first = len(text) - len(head)
    for control in controls:
        at = text.find(control)
        while at >= 0:
            found.update(range(at, at + len(control)))  # which a normalizer may drop some of
            at = text.find(control, at + 1)
        if whole or len(control) > _LONGEST_CONTROL:
            continue
        for begin, part in ((0, text), (first, text.strip())):
            if part and part in control:
                found.add(begin)
        for length in range(1, min(len(control), len(text) + 1)):
            start, end = control[:length], control[-length:]
            found |= {len(part) - length for part in (text, tail) if part.endswith(start)}
            found |= {at for at, part in ((0, text), (first, head)) if part.startswith(end)}
    return found


class Control(NamedTuple):
    """A control token that a text was found to hold."""

    token: int
    start: int
    end: int
    """Where it stands in the text, with the blanks beside it that it takes in."""
    position: int
    """Where it stands among the ids."""


Place = Literal["start", "inner", "middle"]
"""Where plain text stands: at the start, behind a control token, behind other text.

SentencePiece tokenizers begin a text with a space of their own, some those behind control tokens
too; the middle of a text has none but its own.
"""


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
        self.sha256 = hashlib.sha256(found).hexdigest()
        """Of its file."""
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.bos_token_id = bos_token_id
        self._spelling = read_spelling(_state(self._tokenizer.decoder))
        self._bytes: dict[int, bytes] = {}
        self._readers: dict[tuple[Place, bool], Any] = {("start", False): self._tokenizer}

    @cached_property
    def size(self) -> int:
        """The largest id the tokenizer knows, plus one; ids may be sparse."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that are no text."""
        return frozenset(self._controls)

    @cached_property
    def _controls(self) -> dict[int, str]:
        """The names of special tokens."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.special}

    def control_name(self, token: int) -> str:
        """Return the name of a special token; empty for others."""
        return self._controls.get(token, "")

    def to_json(self) -> str:
        """Return what a `tokenizer.json` would hold."""
        return str(self._tokenizer.to_str())

    def encode(
        self, text: str, *, special: bool = True, parse_special: bool = True, behind: int = 0
    ) -> list[int]:
        """Return the ids of a prompt, or of what is `behind` so many of its characters.

        `special` adds the tokenizer's own special tokens. The text of a control token becomes that
        token with `parse_special`, and is text like any other without; in a `ChatPrompt` those of
        the template become tokens and those of contents do not, and no special tokens are added.
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
        if not parse_special:
            ids = self._plain(text[behind:], "middle" if behind else "start")
            if special and not behind:
                ids = [*self._added[0], *ids, *self._added[1]]
        elif behind or isinstance(text, ChatPrompt):
            ids = self._parsed(text, behind)
        else:
            ids = [*_encoding(self._tokenizer, text, special=special).ids]
        if ids or behind:
            return ids
        if self.bos_token_id is None:
            raise RequestError(
                "the prompt is empty and this model has no BOS token to start from; "
                "give at least one character"
            )
        return [self.bos_token_id]

    def _parsed(self, text: str, behind: int) -> list[int]:
        """Return the ids of what is behind a character, control tokens parsed but in contents."""
        encoding = _encoding(self._tokenizer, str(text))
        found = self._found(encoding, text)
        own = self._own(text, found) if isinstance(text, ChatPrompt) else found
        later = [control for control in own if control.end > behind]
        if own == found and not behind:
            return [*encoding.ids]
        at, ids = behind, list[int]()
        place: Place = "middle" if behind else "start"
        for control in later:
            ids += self._plain(text[at : max(at, control.start)], place)
            if own == found:  # from here on the tokenizer has it right
                return [*ids, *encoding.ids[control.position :]]
            ids.append(control.token)
            at, place = control.end, "inner"
        return ids + self._plain(text[at:], place)

    def _own(self, prompt: ChatPrompt, found: list[Control]) -> list[Control]:
        """Return the control tokens of a prompt that are its template's own, of those found.

        Raises: RequestError where the template reads control tokens in contents.
        """
        own, known = found, set[str]()
        restored = text = str(prompt)
        while more := {_bare(text[c.start : c.end]) for c in own} - known - {""}:
            known |= more
            text, restored = prompt.guarded(known)
            own = self._found(_encoding(self._tokenizer, text), text)
        if restored == prompt:
            same = [c[:3] for c in own] == [c[:3] for c in found]
            return found if same else own
        if [c.token for c in own] == [c.token for c in found]:
            return found
        raise RequestError(
            "the chat template treats a control token in a message's content as its own: "
            f"{', '.join(map(repr, sorted(known)))}; leave such texts out of the message"
        )

    def fewest(self, text: str) -> int:
        """Return how many tokens a text has at least, told by its length; 0 where that tells none.

        To tokenize a text of megabytes takes seconds, and hundreds of bytes for each of its own.
        """
        return len(text) // self._longest if self._longest else 0

    @cached_property
    def _longest(self) -> int:
        """The most characters that become one token; 0 where there is no bound."""
        state = json.loads(self.to_json())
        first, model = state["pre_tokenizer"] or {}, state["model"]
        parts = first.get("pretokenizers", [first])
        kept = all(
            part.get("type") in ("ByteLevel", "Digits") or part.get("behavior") == "Isolated"
            for part in parts
        )
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        whole = (
            kept
            and any(part.get("type") == "ByteLevel" for part in parts)
            and sum(len(word) == 1 for word in vocabulary) >= _BYTES  # else some are dropped
            and not any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
        )
        normalizer = (state["normalizer"] or {}).get("type")
        if not whole or model["type"] != "BPE" or normalizer not in (None, "NFC"):
            return 0
        return max(map(len, vocabulary)) * (1 if normalizer is None else _COMPOSED)

    def _plain(self, text: str, place: Place) -> list[int]:
        """Return the ids of a text in which nothing is a control token."""
        if place == "middle" and self._parts_at_spaces:
            head = re.split(r"\s", text, maxsplit=1)[0]
            if head != text:  # blanks are no tokens there: each word begins with a space
                return self._plain(head, place) + self._plain(text[len(head) :], "start")
        for literal in (False, True):  # the first will do where the text holds no control token
            encoding = _encoding(self._reader(place, literal), text)
            found = self._found(encoding, text)
            if not found:
                return list(encoding.ids)
        # The model's own vocabulary has a control token as a word: cut the text within it.
        edges = [0, *(control.start + 1 for control in found), len(text)]
        if any(control.end - control.start < 2 for control in found):
            raise RequestError(
                f"{text[found[0].start : found[0].end]!r} can only be spelled as a control token "
                "here; leave it out of the text"
            )
        parts = [text[a:b] for a, b in pairwise(edges)]
        return [
            i for at, part in enumerate(parts) for i in self._plain(part, "middle" if at else place)
        ]

    def _found(self, encoding: Any, text: str) -> list[Control]:
        """Return the control tokens that were found in a text; one for unknown text is none.

        A normalizer may have dropped characters between those of one.
        """
        names = self._controls
        if self.special.isdisjoint(encoding.ids):
            return []
        return [
            Control(token, start, end, position)
            for position, (token, (start, end)) in enumerate(
                zip(encoding.ids, encoding.offsets, strict=True)
            )
            if token in names
            and (_folded(text[start:end]) == _folded(names[token]) or token != self._unknown)
        ]

    @cached_property
    def _unknown(self) -> int | None:
        """The token for text that the vocabulary lacks."""
        model = json.loads(self.to_json())["model"]
        name = model.get("unk_token")
        found: int | None = (
            model.get("unk_id") if name is None else self._tokenizer.token_to_id(name)
        )
        return found

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before a text, and behind it."""
        encoding = self._tokenizer.post_process(_one_token(), add_special_tokens=True)
        pairs = list(zip(encoding.ids, encoding.special_tokens_mask, strict=True))
        before = [token for token, _ in takewhile(lambda pair: pair[1], pairs)]
        after = [token for token, _ in takewhile(lambda pair: pair[1], reversed(pairs))]
        return before, after[::-1]

    @cached_property
    def _parts_at_spaces(self) -> bool:
        return "WhitespaceSplit" in str(_state(self._tokenizer.pre_tokenizer))

    def _reader(self, place: Place, literal: bool) -> Any:
        """Return the tokenizer that reads plain text at a place; `literal` has no control tokens.

        Both are properties of the library's object, so there are several where they differ.
        """
        made = self._readers.get((place, literal))
        if made is None:
            forms = {other: self._form(other) for other in get_args(Place)}
            alike = [(other, literal) for other in forms if forms[other] == forms[place]]
            made = next((self._readers[key] for key in alike if key in self._readers), None)
            self._readers[place, literal] = made = made or self._variant(forms[place], literal)
        return made

    def _form(self, place: Place) -> dict[str, Any]:
        """Return the parts of the tokenizer that put a space before a text."""
        names = ("normalizer", "pre_tokenizer")
        return {name: _unspaced(_state(getattr(self._tokenizer, name)), place) for name in names}

    def _variant(self, form: dict[str, Any], literal: bool) -> Any:
        made = HubTokenizer.from_str(json.dumps({**json.loads(self.to_json()), **form}))
        made.encode_special_tokens = literal
        return made

    def decode(self, ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """Return the text that ids add behind others, special tokens left out."""
        if self._spelling is None and not before:
            return self._decoded([*filter(self._is_text, ids)])
        detokenizer = self.detokenizer(before)
        return detokenizer.push(ids) + detokenizer.finish()

    def piece(self, token: int) -> str:
        """Return the text of a token behind others; parts of characters are U+FFFD."""
        if self._spelling is None:
            return self.decode([token], before=[token])
        return self._bytes_of(token).decode(errors="replace")

    def text_of(self, token: int) -> str | None:
        """Return the text of a token behind others; None for bytes that are no text."""
        try:
            return self.bytes_of(token).decode()
        except UnicodeDecodeError:
            return None

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token behind others; none for special tokens."""
        return self.piece(token).encode() if self._spelling is None else self._bytes_of(token)

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """Return what turns the tokens of one completion of a prompt into text.

        Its text is what they add to the prompt's: a space at the beginning is dropped where no
        text stands before, and half a character is completed.
        """
        if self._spelling is None:
            known = [*islice(filter(self._is_text, reversed(prompt)), CONTEXT)]
            return WindowDetokenizer(self._decoded, known[::-1], self._is_text)
        before = b""
        for token in reversed(prompt):
            if len(before) >= _LONGEST_CHARACTER:
                break
            before = self._bytes_of(token) + before
        first = self._first_bytes if self._spelling.drops_space else None
        return ByteDetokenizer(self._bytes_of, self._bytes, first, before)

    def _bytes_of(self, token: int, *, first: bool = False) -> bytes:
        name = None if token in self.special else self._tokenizer.id_to_token(token)
        assert self._spelling is not None, "another decoder spells no bytes"
        return b"" if name is None else self._spelling.bytes_of(name, first=first)

    def _is_text(self, token: int) -> bool:
        return token not in self.special and self._tokenizer.id_to_token(token) is not None

    def _first_bytes(self, token: int) -> bytes:
        return self._bytes_of(token, first=True)

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


_LONGEST_CHARACTER = 4
"""Bytes of UTF-8."""


def _state(part: Any) -> Any:
    """Return a part of a tokenizer as `tokenizer.json` has it."""
    return None if part is None else json.loads(part.__getstate__())


_BYTES = 256

_COMPOSED = 4
"""Most characters that NFC makes one of."""

_LONG = 10_000
"""Characters from which on other threads go on meanwhile, which costs a short text more."""


def _encoding(reader: Any, text: str, *, special: bool = False) -> Any:
    """Return the encoding of a text; a long one is read without Python's lock."""
    if len(text) < _LONG:
        return reader.encode(text, add_special_tokens=special)
    (encoding,) = reader.encode_batch([text], add_special_tokens=special)
    return encoding


def _one_token() -> Any:
    """Return an encoding of one token, which no special tokens stand beside."""
    return HubTokenizer(WordLevel({"": 0}, "")).encode("a")


def _unspaced(part: Any, place: Place) -> Any:
    """Return a normalizer or pre-tokenizer that puts no space before a text at a place."""
    if part is None or place == "start":
        return part
    for inner in ("normalizers", "pretokenizers"):
        if inner in part:
            kept = [_unspaced(one, place) for one in part[inner]]
            return {**part, inner: [one for one in kept if one is not None]}
    kind, middle = part["type"], place == "middle"
    if kind == "Prepend" and middle:
        return None
    if kind == "Metaspace" and (middle or part["prepend_scheme"] == "first"):
        return {**part, "prepend_scheme": "never"}
    if kind == "ByteLevel" and middle and "add_prefix_space" in part:
        return {**part, "add_prefix_space": False}
    return part


def _bare(text: str) -> str:
    """Return a text without the blanks around it, or blanks alone as they are."""
    return text.strip() or text


def _folded(text: str) -> str:
    """Return a text as tokenizers may find control tokens in it: case and blanks do not count."""
    return unicodedata.normalize("NFKC", text).strip().casefold()
