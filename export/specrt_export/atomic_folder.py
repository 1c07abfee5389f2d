"""A folder that takes its place whole, in one step, whatever stops the work on it."""

from __future__ import annotations

import ctypes
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specrt.errors import BuildError, shortage

_AT_FDCWD, _EXCHANGE = -100, 2

_LEFT = re.compile(r"([0-9]{1,9})\.\w+\.(part|old)")
"""What the name of a folder to build in adds to a bundle's: process, chance, state."""


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Give a folder to build in; put it in the place of `out` at the end.

    Whatever stops the build, what was at `out` is as it was and the folder is gone. Leftovers of
    builds that were killed are removed by the next one.
    Raises: BuildError for what the disk refused.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out)
        prefix = f".{out.name}.{os.getpid()}."
        folder = Path(tempfile.mkdtemp(".part", prefix, out.parent))
        folder.chmod(0o755)
    except OSError as error:
        raise _refused(error, out) from error
    try:
        yield folder
        _put_in_place(folder, out)
    except OSError as error:
        raise _refused(error, out) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refused(error: OSError, out: Path) -> BuildError:
    place = error.filename2 or error.filename or out
    why = f"the build stopped: {error.strerror or error} ({place})"
    return BuildError("; ".join(filter(None, (why, f"{out} is as it was", shortage(error)))))


def _put_in_place(folder: Path, out: Path) -> None:
    """Rename a folder to `out`; a folder that is there changes places with it in one step."""
    if not out.exists():
        folder.rename(out)
    elif not _exchange(folder, out):
        old = folder.with_suffix(".old")
        out.rename(old)
        try:
            folder.rename(out)
        except BaseException:
            old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Let two names change places atomically; return False where the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (os.fsencode(first), os.fsencode(second))
    return rename is not None and (rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE) == 0)


def _sweep(out: Path) -> None:
    """Remove what a killed build left, and bring back a bundle it had moved away."""
    for left in out.parent.glob(f".{glob.escape(out.name)}.*"):
        # All of the rest: what `m.2` left begins with `.m.` too.
        match = _LEFT.fullmatch(left.name.removeprefix(f".{out.name}."))
        if match is None or _alive(int(match[1])):
            continue
        if left.suffix == ".old" and not out.exists():
            left.rename(out)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
