"""The error family of specrt: a message holds the value, what was expected, and the remedy."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable
from pathlib import Path


class SpecrtError(Exception):
    """Base of every error a caller can cause or meet; its text is one line for a person."""


class RecipeError(SpecrtError):
    """A recipe is missing, malformed or names something unknown."""


class CheckpointError(SpecrtError):
    """A checkpoint cannot be read, or target and draft do not belong together."""


class ExportError(SpecrtError):
    """A model cannot be turned into a portable graph, or the graph disagrees with it."""


class BuildError(SpecrtError):
    """An engine or a bundle cannot be built."""


class BundleError(SpecrtError):
    """A bundle is missing, damaged, of another format, or not for this machine."""


class EngineError(SpecrtError):
    """An engine refused or failed a forward pass."""


class RequestError(SpecrtError):
    """A prompt or an option of a request is out of range."""


class CapacityError(RequestError):
    """A prompt does not fit the context the bundle was built for."""


class LinkError(SpecrtError):
    """The link to a server cannot be made or kept, or the server ended a session."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest known word, or the list of them."""
    words = sorted(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(words)}"


_NO_MEMORY = (
    "bad_alloc", "bad allocation", "failed to map segment", "Cannot allocate memory",
    "Failed to allocate memory", "can't start new thread",
)  # fmt: skip
"""What libraries write where the system gave them no memory."""

NOT_ENOUGH_MEMORY = (
    "not enough memory: free some, raise the limit of `ulimit -v` if there is one, or take a "
    "smaller bundle"
)

_NO_FILES = "Too many open files"


def shortage(error: BaseException) -> str | None:
    """Return what this process is short of, with the remedy; None where that is not the reason.

    Libraries pass the reason on in their messages alone.
    """
    number, text = getattr(error, "errno", None), str(error)
    if number in (errno.EMFILE, errno.ENFILE) or _NO_FILES in text:
        return "too many files are open: close some, or allow more with `ulimit -n 1024`"
    known = isinstance(error, MemoryError) or number == errno.ENOMEM
    if known or any(words in text for words in _NO_MEMORY):
        return NOT_ENOUGH_MEMORY
    return None


def lacks_memory(error: BaseException | None) -> bool:
    """Return whether an error, or what it came from, is that the system gave no memory."""
    while error is not None and shortage(error) != NOT_ENOUGH_MEMORY:
        error = error.__cause__
    return error is not None


def first_line(error: BaseException) -> str:
    """Return an error's text in one line; the name of its type where it has none."""
    text = getattr(error, "strerror", None) or str(error)
    return one_line(text) if text.strip() else type(error).__name__


_LONGEST = 400


def one_line(message: str) -> str:
    """Return what a library's message comes down to, in one line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    said = next((at for at, line in enumerate(lines) if line.startswith("error: ")), 0)
    # What ends with a colon says nothing without the lines after it.
    last = next((at for at in range(said, len(lines)) if not lines[at].endswith(":")), said)
    reason = " ".join(lines[said : last + 1]).removeprefix("error: ")
    reason = re.sub(r"^(at )?(\d+)\(\d+\): ", r"line \2: ", reason)
    shown = "".join(c if c.isprintable() else "?" for c in reason)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."


def reason_of(error: BaseException) -> str:
    """Return why something failed, in one line; of an error that is not ours, its type too."""
    if isinstance(error, SpecrtError):
        return str(error)
    text = str(error)
    return f"{type(error).__name__}: {one_line(text)}" if text.strip() else type(error).__name__


_CLONE = Path(__file__).parents[2]

_TARGETS = {
    "build": "make setup",
    "export": "make setup-export",
    "align": "make setup-align",
    "serve": "make setup-serve",
    "structured": "make setup",
}


def how_to_install(extra: str, clone: Path = _CLONE) -> str:
    """Return the command that installs an extra; in a clone a target of its Makefile."""
    if extra in _TARGETS and (clone / "Makefile").is_file() and (clone / "engines").is_dir():
        return _TARGETS[extra]
    return f'pip install "specrt[{extra}]"'
