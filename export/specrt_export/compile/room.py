"""What to say when a disk is full."""

from __future__ import annotations

import shutil
from pathlib import Path

from specrt.errors import BuildError


def no_room(path: Path) -> BuildError:
    """Return the error for a file that could not be written, with what is free on its disk."""
    free = shutil.disk_usage(path.parent).free >> 20
    return BuildError(
        f"{path} could not be written, with {free} MiB free on its disk; free some, or build "
        "elsewhere with --out"
    )
