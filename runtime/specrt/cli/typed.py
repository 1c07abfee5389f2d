"""What is typed in a chat: messages of one line or several, and commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from specrt.errors import RequestError
from specrt.prompts import decode_utf8

PROMPT, MORE = ">>> ", "... "
_QUOTES = '"""'

Read = Callable[[str], str]
"""Shows a prompt and returns a line; raises EOFError at the end."""


class Typed(NamedTuple):
    """A message or a command."""

    text: str
    command: bool = False


def next_typed(read: Read) -> Typed:
    r"""Read a message or a command.

    A line that ends in a backslash goes on in the next; what begins with three quotes goes on to
    the next three, and is a message whatever it begins with.
    Raises: EOFError at the end, RequestError for what cannot be read.
    """
    line = read(PROMPT)
    if line.startswith(_QUOTES):
        return Typed(_quoted(line[len(_QUOTES) :], read))
    if line.startswith("/"):
        return Typed(line, command=True)
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{_more(read, 'a backslash')}"
    return Typed(line)


def _quoted(text: str, read: Read) -> str:
    while not text.endswith(_QUOTES):
        text += "\n" + _more(read, _QUOTES)
    return text[: -len(_QUOTES)]


def _more(read: Read, opened: str) -> str:
    try:
        return read(MORE)
    except EOFError:
        raise RequestError(f"the input ended in a message that {opened} keeps open") from None


def terminal_reader() -> Read:
    """Return what reads lines from a person, who may edit them and call earlier ones back."""
    with suppress(ImportError):
        import readline  # noqa: F401  (input() uses it once it is there)
    shown = sys.stdout.isatty()

    def read(prompt: str) -> str:
        try:
            return input(prompt if shown else "")
        except UnicodeDecodeError as error:
            raise RequestError(f"the line is not UTF-8: {error.reason}") from None

    return read


def pipe_reader() -> Read:
    """Return what reads lines from standard input, showing no prompt."""
    number = 0

    def read(_: str) -> str:
        nonlocal number
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        number += 1
        text = decode_utf8(line, f"line {number} of standard input")
        return text.removesuffix("\n").removesuffix("\r")

    return read
