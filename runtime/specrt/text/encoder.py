"""Reads text as tokens: some of it as control tokens, the rest as text whatever it holds."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

from tokenizers import Tokenizer as HubTokenizer

from specrt.errors import RequestError
from specrt.text.traced_text import ChatPrompt

_STAND_IN = "\U0010fffd"
"""A private character, which no tokenizer joins with others."""


class Control(NamedTuple):
    """A control token that a text was found to hold."""

    token: int
    start: int
    end: int
    """Where it stands in the text, with the blanks next to it that it takes in."""
    position: int
    """Where it stands among the ids."""


Place = Literal["start", "inner", "middle"]
"""Where plain text stands: at the start, after a control token, after other text.

SentencePiece tokenizers begin a text with a space of their own, some those after control tokens
too; the middle of a text has none but its own.
"""


class Encoder:
    """A tokenizer with the tokens that it takes for control tokens."""

    def __init__(self, tokenizer: Any, controls: Mapping[int, str]) -> None:
        self._tokenizer = tokenizer
        self._controls = controls
        """Their names."""
        self._readers: dict[tuple[Place, bool], Any] = {("start", False): tokenizer}

    def parsed(self, text: str, behind: int) -> list[int]:
        """Return the ids of what is after a character, control tokens parsed but in contents."""
        encoding = encoding_of(self._tokenizer, str(text))
        found = self._found(encoding, text)
        own = self._own(text, found) if isinstance(text, ChatPrompt) else found
        later = [control for control in own if control.end > behind]
        if own == found and not behind:
            return [*encoding.ids]
        at, ids = behind, list[int]()
        place: Place = "middle" if behind else "start"
        for control in later:
            ids += self.plain(text[at : max(at, control.start)], place)
            if own == found:  # from here on the tokenizer has it right
                return [*ids, *encoding.ids[control.position :]]
            ids.append(control.token)
            at, place = control.end, "inner"
        return ids + self.plain(text[at:], place)

    def _own(self, prompt: ChatPrompt, found: list[Control]) -> list[Control]:
        """Return the control tokens that the template of a prompt wrote, of those found."""
        text, marks = str(prompt), prompt.marks
        while True:  # what is covered may have hidden others
            covered = [*text]
            for control in found:
                for at in _core(text, control):
                    covered[at] = _STAND_IN if marks[at] else text[at]
            if text == (text := "".join(covered)):
                return found
            found = self._found(encoding_of(self._tokenizer, text), text)

    def plain(self, text: str, place: Place) -> list[int]:
        """Return the ids of a text in which nothing is a control token."""
        if place == "middle" and self._parts_at_spaces:
            head = re.split(r"\s", text, maxsplit=1)[0]
            if head != text:  # blanks are not tokens there: each word begins with a space
                return self.plain(head, place) + self.plain(text[len(head) :], "start")
        for literal in (False, True):  # the first will do where the text holds no control token
            encoding = encoding_of(self._reader(place, literal), text)
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
            i for at, part in enumerate(parts) for i in self.plain(part, "middle" if at else place)
        ]

    def _found(self, encoding: Any, text: str) -> list[Control]:
        """Return the control tokens that were found in a text; one for unknown text is none.

        A normalizer may have dropped characters between those of one.
        """
        names = self._controls
        if names.keys().isdisjoint(encoding.ids):
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
        model = json.loads(self._tokenizer.to_str())["model"]
        name = model.get("unk_token")
        found: int | None = (
            model.get("unk_id") if name is None else self._tokenizer.token_to_id(name)
        )
        return found

    @cached_property
    def _parts_at_spaces(self) -> bool:
        return "WhitespaceSplit" in str(state_of(self._tokenizer.pre_tokenizer))

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
        return {name: _unspaced(state_of(getattr(self._tokenizer, name)), place) for name in names}

    def _variant(self, form: dict[str, Any], literal: bool) -> Any:
        state = json.loads(self._tokenizer.to_str())
        for token in state["added_tokens"]:
            token["special"] |= token["id"] in self._controls
        made = HubTokenizer.from_str(json.dumps({**state, **form}))
        made.encode_special_tokens = literal
        return made


_LONG = 10_000
"""Characters from which on other threads go on meanwhile, which costs a short text more."""


def encoding_of(reader: Any, text: str, *, special: bool = False) -> Any:
    """Return the encoding of a text; a long one is read without Python's lock."""
    if len(text) < _LONG:
        return reader.encode(text, add_special_tokens=special)
    (encoding,) = reader.encode_batch([text], add_special_tokens=special)
    return encoding


def state_of(part: Any) -> Any:
    """Return a part of a tokenizer as `tokenizer.json` has it."""
    return None if part is None else json.loads(part.__getstate__())


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


def _core(text: str, control: Control) -> range:
    """Return where a control token stands, without blanks next to it unless it is blank."""
    whole = text[control.start : control.end]
    part = whole.strip() or whole
    first = control.start + whole.find(part)
    return range(first, first + len(part))


def _folded(text: str) -> str:
    """Return a text as tokenizers may find control tokens in it: case and blanks do not count."""
    return unicodedata.normalize("NFKC", text).strip().casefold()
