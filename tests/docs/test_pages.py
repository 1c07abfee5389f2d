"""Pages: prose fits a line, and the architecture names every room, and files that are there."""

from __future__ import annotations

import re
import subprocess

from shared import REPOSITORY
from test_walls import NOT_PLAIN

ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text("utf-8")
ROOTS = [
    REPOSITORY / place
    for place in ("runtime/specrt", "export/specrt_export", "runtime/cpp/src", ".")
]


LISTED = subprocess.check_output(["git", "ls-files", "*.md"], cwd=REPOSITORY, text=True).split()
PAGES = {page: (REPOSITORY / page).read_text("utf-8") for page in LISTED if page != "CHANGELOG.md"}
FENCED = re.compile(r"^ *```.*?^ *```", re.S | re.M)


def prose(page: str) -> list[str]:
    """Return the lines that are no code, no table, and not one command alone."""
    lines = [
        line for line in FENCED.sub("", page).splitlines() if not line.lstrip().startswith("|")
    ]
    return [line for line in lines if not re.fullmatch(r"[-\s(]*`[^`]*`\S*", line)]


def test_no_line_of_prose_is_wide() -> None:
    wide = [f"{n}: {line}" for n, page in PAGES.items() for line in prose(page) if len(line) > 120]
    assert len(PAGES) > 20
    assert wide == []


def test_words_are_plain() -> None:
    """As those of modules are."""
    texts = {name: " ".join(FENCED.sub("", page).split()) for name, page in PAGES.items()}
    said = [
        f"{name}: {found.group()!r} ({plain})"
        for name, text in texts.items()
        for words, plain in NOT_PLAIN.items()
        for found in re.finditer(words, text)
    ]
    assert said == []


def test_pages_that_are_read_whole_are_short() -> None:
    assert len(ARCHITECTURE.splitlines()) < 140
    assert (REPOSITORY / "docs" / "decisions.md").stat().st_size <= 20_000


def test_every_file_that_is_named_is_there() -> None:
    files = re.findall(r"`([\w./]+\.(?:py|hpp))`", ARCHITECTURE)
    assert len(files) > 25
    assert [name for name in files if not any((root / name).is_file() for root in ROOTS)] == []


def test_every_room_is_named() -> None:
    for root in ROOTS[:2]:
        rooms = {path.stem for path in root.iterdir() if (path / "__init__.py").is_file()}
        assert rooms - set(re.findall(r"\w+", ARCHITECTURE)) == set()
