"""The page of the architecture names rooms and files that exist, and all rooms."""

from __future__ import annotations

import re

from shared import REPOSITORY

PAGE = (REPOSITORY / "docs" / "architecture.md").read_text("utf-8")
ROOTS = [
    REPOSITORY / place
    for place in ("runtime/specrt", "export/specrt_export", "runtime/cpp/src", ".")
]


def test_every_file_that_is_named_is_there() -> None:
    files = re.findall(r"`([\w./]+\.(?:py|hpp))`", PAGE)
    assert len(files) > 25
    assert [name for name in files if not any((root / name).is_file() for root in ROOTS)] == []


def test_every_room_is_named() -> None:
    for root in ROOTS[:2]:
        rooms = {path.stem for path in root.iterdir() if (path / "__init__.py").is_file()}
        assert rooms - set(re.findall(r"\w+", PAGE)) == set()
