"""Prompt files: JSON lines of prompts and their categories, and text files in UTF-8."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import Any

from specrt.errors import RequestError, did_you_mean, shortage
from specrt.held_file import read_file

_LINE = 'expected lines such as {"prompt": "TEXT"}'


@dataclass(frozen=True)
class PromptRecord:
    """One prompt of a file, and the class of task it belongs to."""

    text: str
    category: str = ""
    place: str = field(default="", compare=False)
    """File and line it came from, for error messages."""
    domain: str = ""
    """What its text is about, where the line says so."""
    completion: str = ""
    """A text that answers it, where the line has one."""


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
        raise RequestError(f"{path} holds no prompts; {_LINE}")
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
    """Read a text file, or a pipe, as UTF-8, with or without a byte order mark.

    Raises: RequestError when it is missing or not UTF-8.
    """
    try:
        return decode_utf8(read_file(path, pipe=True), str(path))
    except OSError as error:
        remedy = shortage(error) or "name a file of text"
        raise RequestError(f"{path} cannot be read: {error.strerror}; {remedy}") from error


def decode_utf8(data: bytes, origin: str) -> str:
    """Decode bytes that must be UTF-8; a byte order mark is not part of the text.

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
        raise RequestError(f"{place} is not JSON: {error}; {_LINE}") from None
    if not isinstance(data, dict):
        raise RequestError(f"{place} is {short(data)}, not an object; {_LINE}")
    turns = data.get("turns")
    text = data.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
    if not isinstance(text, str):
        raise RequestError(f"{place} has neither a string `prompt` nor a list of `turns`; {_LINE}")
    answer = data.get("completion", "")
    if not isinstance(answer, str):
        raise RequestError(f"{place} has completion {short(answer)}; expected a string")
    return PromptRecord(
        text, str(data.get("category", "")), place, str(data.get("domain", "")), answer
    )
