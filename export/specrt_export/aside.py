"""Build a folder out of sight and put it in place by renaming, or leave nothing behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specrt.errors import BuildError


@contextmanager
def aside(out: Path) -> Iterator[Path]:
    """Give a folder to build in; put it in the place of `out` at the end.

    Whatever stops the build, what was at `out` is as it was and the folder is gone. Leftovers of
    builds that were killed are removed by the next one.
    Raises: BuildError for what the disk refused.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    _sweep(out)
    folder = out.parent / f".{out.name}.{os.getpid()}.part"
    try:
        folder.mkdir()
        yield folder
        _swap(folder, out)
    except OSError as error:
        place = error.filename2 or error.filename or folder
        raise BuildError(
            f"the build stopped: {error.strerror or error} ({place}); {out} is as it was"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _swap(folder: Path, out: Path) -> None:
    old = out.parent / f".{out.name}.{os.getpid()}.old"
    if out.exists():
        out.rename(old)
    folder.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _sweep(out: Path) -> None:
    """Remove what a killed build left, and bring back a bundle it had moved away."""
    for left in out.parent.glob(f".{out.name}.*"):
        owner, _, kind = left.name.removeprefix(f".{out.name}.").partition(".")
        if not owner.isdigit() or _alive(int(owner)):
            continue
        if kind == "old" and not out.exists():
            left.rename(out)
        elif kind in ("part", "old"):
            shutil.rmtree(left, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
