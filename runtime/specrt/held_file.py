"""Files that were opened once: what was hashed is what is read, whatever their names mean later."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from specrt.errors import BundleError

WEIGHTS = (".data", ".plan")
"""Files as large as the weights; mapped, so that pages can be dropped."""

_PIECE = 1 << 20

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would be waited for


@dataclass(frozen=True)
class HeldFile:
    """The bytes of a file, which stay the same when another file takes its name.

    Weights are mapped and the rest is read. Who may write to a file of weights itself may still
    change them: no copy is made.
    """

    path: Path
    data: mmap.mmap | bytes
    facts: os.stat_result
    """Of the file, when it was opened."""
    sha256: str = ""
    """Empty where it was not hashed."""

    def require_same(self) -> None:
        """Refuse a file whose name has come to mean another one, or that was written to.

        For what a library opens by its name: to be asked when it has.
        Raises: BundleError.
        """
        with suppress(OSError):
            now = self.path.stat()
            if all(getattr(now, name) == getattr(self.facts, name) for name in _IDENTITY):
                return
        raise BundleError(
            f"{self.path} was replaced while it was opened; open the bundle again when nothing "
            "writes to it"
        )

    def release(self) -> None:
        """Let the system have the memory of what was read; it is mapped again when it is used."""
        if isinstance(self.data, mmap.mmap):
            self.data.madvise(mmap.MADV_DONTNEED)


_IDENTITY = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")


def hold(path: Path, size: int | None = None) -> HeldFile:
    """Open a file once, read or map it, and hash it.

    It is not read where it does not have the `size` that is expected.
    Raises: OSError for what is missing, or no file.
    """
    return _hold(path, size, hashes=True)


def hash_whole(path: Path) -> tuple[int, str]:
    """Return size and sha256 of a file, whatever its size: nothing of it is kept.

    Raises: OSError for what is missing, or no file.
    """
    file = os.open(path, _FLAGS)
    try:
        return _facts(file).st_size, _hash(file)
    finally:
        os.close(file)


def hold_folder(folder: Path) -> dict[str, HeldFile]:
    """Open the files of a folder that has no manifest, such as one that is being built.

    Without those of kernels, which a device made and has rules of its own for.
    """
    paths = [path for path in folder.iterdir() if path.is_file() and path.suffix != ".kernels"]
    return {path.name: _hold(path, None, hashes=False) for path in paths}


def _hold(path: Path, size: int | None, *, hashes: bool) -> HeldFile:
    file = os.open(path, _FLAGS)
    try:
        facts = _facts(file)
        if size not in (None, facts.st_size):
            return HeldFile(path, b"", facts)
        if path.suffix in WEIGHTS:
            return HeldFile(path, _mapped(file, facts), facts, _hash(file) if hashes else "")
        data = _read(file)
        return HeldFile(path, data, facts, hashlib.sha256(data).hexdigest())
    finally:
        os.close(file)


def _facts(file: int) -> os.stat_result:
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "it is no file")
    return facts


def _hash(file: int) -> str:
    digest = hashlib.sha256()
    while piece := os.read(file, _PIECE):
        digest.update(piece)
    return digest.hexdigest()


def _read(file: int) -> bytes:
    return b"".join(iter(lambda: os.read(file, _PIECE), b""))


def _mapped(file: int, facts: os.stat_result) -> mmap.mmap | bytes:
    return mmap.mmap(file, facts.st_size, access=mmap.ACCESS_READ) if facts.st_size else b""
