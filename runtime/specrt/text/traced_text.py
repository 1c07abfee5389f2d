"""Where the characters of a text come from: a message, or the template that writes it.

Parts and sums of texts keep what is known of each character. What else an operation makes of a
message's text counts as the message's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from specrt.errors import RequestError

_OWN, _GIVEN = b"\0", b"\1"

_WORDS = ("role", "type")
"""Keys of a message whose values, where they are words, a template may make control tokens of."""

_SHADOW = "\ua66e"
"""A rare letter without case, which stands for a message's character where an operation is tried
again."""

_STRIP = ("lstrip", "removeprefix", "removesuffix", "rstrip", "strip", "trim")
_SPLIT = ("partition", "rpartition", "rsplit", "split", "splitlines")


class TracedText(str):
    """A text some or all of whose characters are a message's."""

    __slots__ = ("_marks",)
    _marks: bytes

    def __new__(cls, text: str, marks: bytes | None = None) -> TracedText:
        """Mark a message's characters with 1, others with 0; without marks all are a message's."""
        made = super().__new__(cls, text)
        made._marks = _GIVEN * len(text) if marks is None else marks
        return made

    def __str__(self) -> str:
        return self

    def __iter__(self) -> Iterator[str]:
        pairs = zip(super().__iter__(), self._marks, strict=True)
        return (_given(char) if mark else char for char, mark in pairs)

    def __getitem__(self, at: SupportsIndex | slice) -> str:
        marks = self._marks[at] if isinstance(at, slice) else bytes([self._marks[at]])
        return _marked(super().__getitem__(at), marks)

    def __add__(self, other: str) -> str:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented


@lru_cache(4096)
def _given(char: str) -> str:
    """Return a character of a message: the same object where one comes often."""
    return TracedText(char)


class ChatPrompt(str):
    """What a chat template made of messages, whose contents are text whatever they hold."""

    def __new__(cls, pieces: Sequence[str], literals: Sequence[str] = ()) -> ChatPrompt:
        """Join what a template wrote; `literals` are all texts that are written in it."""
        made = super().__new__(cls, "".join(pieces))
        made.marks = b"".join(map(marks_of, pieces))
        made.literals = tuple(literals)
        return made

    marks: bytes
    """1 for each character of a message, 0 for the template's."""
    literals: tuple[str, ...]


def marks_of(text: str) -> bytes:
    """Return 1 for each character of a text that is a message's, 0 for the others."""
    return text._marks if isinstance(text, TracedText) else _OWN * len(text)


def joined(parts: Iterable[str], separator: str = "") -> str:
    """Join texts."""
    texts = [*parts]
    text = separator.join(texts)
    if not any(isinstance(one, TracedText) for one in (separator, *texts)):
        return text
    return _marked(text, marks_of(separator).join(map(marks_of, texts)))


def _marked(text: str, marks: bytes) -> str:
    return TracedText(text, marks) if _GIVEN in marks else text


def traced(value: Any) -> Any:
    """Return a copy of what messages hold, whose texts are known as theirs.

    Raises: RequestError for what JSON does not have.
    """
    if isinstance(value, str):
        return TracedText(value)
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {
            traced(key): one if key in _WORDS and _is_word(one) else traced(one)
            for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [traced(one) for one in value]
    raise RequestError(
        f"the messages hold an object of type {type(value).__name__}; expected text, numbers, "
        "lists and mappings, as JSON has them"
    )


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.replace("_", "").replace("-", "").isalnum()


def followed(name: str, operation: Callable[..., Any], values: Sequence[Any], result: Any) -> Any:
    """Return the result of an operation on values, its characters known by where they come from."""
    split = name in _SPLIT and isinstance(result, list | tuple)
    new = split or (isinstance(result, str) and not isinstance(result, TracedText))
    if not (new and result and _holds(values)):
        return result
    if split:
        return type(result)(_pieces(name, values, result))
    if name in _STRIP:
        return _stripped(name, values, result)
    if name == "replace" and values[1]:
        return _replaced(*values)
    return _marked(result, _aligned(operation, values, result))


def _holds(value: Any) -> bool:
    """Tell whether a value has text of a message."""
    if isinstance(value, dict):
        return any(map(_holds, value)) or any(map(_holds, value.values()))
    return isinstance(value, TracedText) or (
        isinstance(value, list | tuple) and any(map(_holds, value))
    )


def _stripped(name: str, values: Sequence[Any], result: str) -> str:
    text: Any = shown(values[0])
    if name in ("rstrip", "removesuffix"):
        return str(text[: len(result)])
    if name in ("lstrip", "removeprefix"):
        return str(text[len(text) - len(result) :])
    at = len(text) - len(text.lstrip(*values[1:]))
    return str(text[at : at + len(result)])


def _pieces(name: str, values: Sequence[Any], pieces: Iterable[str]) -> Iterator[str]:
    """Yield the pieces that a text was split into, as parts of it."""
    text, at, between = values[0], 0, 0
    if name in ("split", "rsplit") and len(values) > 1 and isinstance(values[1], str):
        between = len(values[1])
    for piece in pieces:
        at = at if between else text.find(piece, at)
        yield text[at : at + len(piece)]
        at += len(piece) + between


def _replaced(text: Any, old: Any, new: Any, most: int | None = None) -> str:
    text, old = shown(text), str(old)
    pieces = text.split(old, -1 if most is None else most)
    return joined(_pieces("split", (text, old), pieces), shown(new))


def shown(value: Any) -> str:
    """Return the text of a value, as a template shows it."""
    if isinstance(value, str):
        return value
    return str(followed("str", str, [value], str(value)))


def _aligned(operation: Callable[..., Any], values: Sequence[Any], result: str) -> bytes:
    """Return which characters of a result change with the messages; all where it is unclear.

    The operation is done again on other text of the same lengths.
    """
    try:
        shadow = str(operation(*map(_shadowed, values)))
    except Exception:  # it looks at what the text says
        shadow = ""
    if len(shadow) != len(result):
        return _GIVEN * len(result)
    codes = _codes(shadow)
    changed = codes == ord(_SHADOW)
    known = bool((changed | (codes == _codes(result))).all())
    return changed.tobytes() if known else _GIVEN * len(result)


def _shadowed(value: Any) -> Any:
    if isinstance(value, TracedText):
        marks = np.frombuffer(value._marks, np.bool_)
        codes = np.where(marks, np.uint32(ord(_SHADOW)), _codes(value))
        return codes.tobytes().decode("utf-32-le", "surrogatepass")
    if isinstance(value, dict):
        return {_shadowed(key): _shadowed(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_shadowed, value))
    return value


def _codes(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
