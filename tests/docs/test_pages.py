"""Pages: prose fits a line, and the architecture names every room, and files that are there."""

from __future__ import annotations

import re
import subprocess

from shared import REPOSITORY

ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text("utf-8")
ROOTS = [
    REPOSITORY / place
    for place in ("runtime/specrt", "export/specrt_export", "runtime/cpp/src", ".")
]


def prose(page: str) -> list[str]:
    """Return the lines that are no code, no table, and not one command alone."""
    text = re.sub(r"^ *```.*?^ *```", "", page, flags=re.S | re.M)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("|")]
    return [line for line in lines if not re.fullmatch(r"[-\s(]*`[^`]*`\S*", line)]


def test_no_line_of_prose_is_wide() -> None:
    listed = ["git", "ls-files", "*.md"]
    pages = subprocess.check_output(listed, cwd=REPOSITORY, text=True).split()
    wide = [
        f"{page}: {line}"
        for page in pages
        if page != "CHANGELOG.md"
        for line in prose((REPOSITORY / page).read_text("utf-8"))
        if len(line) > 120
    ]
    assert len(pages) > 20
    assert wide == []


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
