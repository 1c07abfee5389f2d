"""What is typed into a chat: messages and commands, of a terminal or a pipe; their history."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from specrt.errors import RequestError
from specrt.held_file import read_file, replacing
from specrt.text.prompt_file import decode_utf8

PROMPT, MORE = ">>> ", "... "

_QUOTES = '"""'

HISTORY = "chat_history.jsonl"
"""The file of what was typed."""

Read = Callable[[str], str]
"""Shows a prompt and returns a line, or a pasted text of several; raises EOFError at the end."""


class Typed(NamedTuple):
    """A message or a command."""

    text: str
    command: bool = False


def next_typed(read: Read) -> Typed:
    r"""Read a message or a command.

    A line that ends in a backslash continues in the next. Text after three quotes continues to the
    next three, and is a message even where it begins with a slash; so is a text of several lines.
    Raises: EOFError at the end, RequestError for input that is not UTF-8 or ends in a message.
    """
    line = read(PROMPT)
    if line.startswith(_QUOTES):
        return Typed(_quoted(line[len(_QUOTES) :], read))
    if line.startswith("/") and "\n" not in line:
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


def pipe_reader() -> Read:
    """Return a reader of the lines of standard input, without a prompt."""
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


def terminal_reader(*, keeps_history: bool) -> Read:
    """Return a reader of what is typed or pasted at a terminal, with editing and history.

    Ctrl-C drops what was typed of a message, and says how to leave.
    """
    shown = sys.stdout.isatty()
    remember = _with_readline(keeps_history)

    def read(prompt: str) -> str:
        while True:
            try:
                text = input(prompt if shown else "")
            except UnicodeDecodeError as error:
                raise RequestError(f"the line is not UTF-8: {error.reason}") from None
            except KeyboardInterrupt:
                if prompt == MORE:
                    raise RequestError("the message that was begun is dropped") from None
                print("\n(Ctrl-D or /quit leaves)", file=sys.stderr, flush=True)
                continue
            remember(text)
            return text

    return read


def _with_readline(keeps_history: bool) -> Callable[[str], None]:
    """Let `input` edit lines and take pasted ones whole; return what remembers one."""
    try:
        import readline
    except ImportError:  # some Pythons have none; `input` reads plain lines then
        return lambda _: None
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    readline.set_auto_history(False)
    history = History((state_folder() if keeps_history else Path(os.devnull)) / HISTORY)
    for text in history.texts:
        readline.add_history(text)

    def remember(text: str) -> None:
        if history.add(text):
            readline.add_history(text)

    return remember


def state_folder() -> Path:
    """Return the folder of what should outlast a run, as the XDG Base Directory Specification says.

    Where there is no home it is one that nothing can be written to.
    """
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    with suppress(RuntimeError):
        named = named if named.is_absolute() else Path.home() / ".local/state"
    return named / "specrt" if named.is_absolute() else Path(os.devnull)


class History:
    """Texts typed so far, in a file that only its owner can read; chats at once may share it.

    Units: `MOST` texts of up to `LONGEST` characters; what is longer is not kept. Where the file
    cannot be read or written, nothing outlasts the run.
    """

    MOST, LONGEST = 500, 4096

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def texts(self) -> list[str]:
        """The texts, the latest last."""
        with suppress(OSError, ValueError, RecursionError):
            lines = read_file(self._path, 8 * self.MOST * self.LONGEST).splitlines()
            texts: list[Any] = [json.loads(line) for line in lines]
            return [text for text in texts if isinstance(text, str)][-self.MOST :]
        return []

    def add(self, text: str) -> bool:
        """Keep a text; return whether it is one to keep: not if it is empty, too long or known."""
        texts = self.texts
        if not text.strip() or len(text) > self.LONGEST or texts[-1:] == [text]:
            return False
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self._path, 0o600) as file:
                for kept in [*texts, text][-self.MOST :]:
                    file.write(json.dumps(kept).encode() + b"\n")
        return True
