"""Files that were opened once: what was hashed is what is read, whatever their names mean later.

Every file that a user names is opened here: a pipe that nobody writes to is not waited for, and
what is written is there whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import select
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from specrt.errors import BundleError

WEIGHTS = (".data", ".plan")
"""Files as large as the weights; mapped, so that pages can be dropped."""

_PIECE = 1 << 20

MOST_BYTES = 1 << 30
"""Of a file that is read whole: a device may have no end."""

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would be waited for

_WRITER_S = 10.0
"""How long a pipe that nobody writes to is waited for."""


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


def open_file(path: Path) -> BinaryIO:
    """Open a file to read.

    Raises: OSError for what is missing, or another kind of thing.
    """
    file = _open(path)
    try:
        _facts(file)
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise


def read_file(path: Path, most: int = MOST_BYTES, *, pipe: bool = False) -> bytes:
    """Read a whole file.

    With `pipe` it may be a pipe or a terminal, too, and is read up to its end.
    Raises: OSError for what is missing, another kind of thing, or larger than `most` bytes.
    """
    file = _open(path)
    try:
        first = _begun(file) if pipe else b""
        if not pipe:
            _facts(file)
        data = first + _read(file, most + 1 - len(first))
    finally:
        os.close(file)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes")
    return data


def check_place(path: Path) -> None:
    """Refuse, before any work, a place where no file can be written.

    Raises: OSError.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, f"it is {_kind(path.stat())}, not a file")
    if not path.parent.is_dir():
        raise OSError(errno.ENOENT, f"there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, f"{path.parent} may not be written to")


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file to write; it takes the place of `path` once it is whole and on the disk.

    `mode` is what its owner and others may do, less what the process forbids.
    Raises: OSError that names `path`; what was there stays then, and nothing is left aside.
    """
    place = path.resolve()
    aside = place.with_name(f".{place.name}.{os.getpid()}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        check_place(place)
        with os.fdopen(os.open(aside, flags, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(place)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        with suppress(OSError):
            aside.unlink()


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
    file = _open(path)
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
    file = _open(path)
    try:
        facts = _facts(file)
        if size not in (None, facts.st_size):
            return HeldFile(path, b"", facts)
        if path.suffix in WEIGHTS:
            return HeldFile(path, _mapped(file, facts), facts, _hash(file) if hashes else "")
        data = _read(file, facts.st_size)
        return HeldFile(path, data, facts, hashlib.sha256(data).hexdigest())
    finally:
        os.close(file)


def _open(path: Path) -> int:
    try:
        return os.open(path, _FLAGS)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.EINVAL, "it is a socket, not a file") from None
        raise


def _facts(file: int) -> os.stat_result:
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, f"it is {_kind(facts)}, not a file")
    return facts


_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def _kind(facts: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(facts.st_mode), "a device")


def _begun(file: int) -> bytes:
    """Wait for who writes to a pipe, where the file is one; return the first bytes.

    Raises: OSError for a folder, and a pipe that nobody writes to.
    """
    mode, first = os.fstat(file).st_mode, b""
    if stat.S_ISDIR(mode) or stat.S_ISBLK(mode):
        _facts(file)
    if stat.S_ISFIFO(mode):
        first = _first_of(file)
    os.set_blocking(file, True)
    return first


def _first_of(pipe: int) -> bytes:
    """Return the first bytes of a pipe; none where its writer has ended, or has written none yet.

    Raises: OSError where nobody comes to write.
    """
    ends = time.monotonic() + _WRITER_S
    events = select.poll()
    events.register(pipe, select.POLLIN)
    while time.monotonic() < ends:
        try:
            first = os.read(pipe, _PIECE)
        except BlockingIOError:  # somebody has it open, and has written nothing yet
            return b""
        if first or events.poll(50):  # the end, after a writer; before the first there is no event
            return first
    raise OSError(errno.EINVAL, "it is a pipe that nothing writes to")


def _hash(file: int) -> str:
    digest = hashlib.sha256()
    while piece := os.read(file, _PIECE):
        digest.update(piece)
    return digest.hexdigest()


def _read(file: int, most: int) -> bytes:
    """Return up to `most` bytes."""
    pieces: list[bytes] = []
    while most > 0 and (piece := os.read(file, min(most, _PIECE))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def _mapped(file: int, facts: os.stat_result) -> mmap.mmap | bytes:
    return mmap.mmap(file, facts.st_size, access=mmap.ACCESS_READ) if facts.st_size else b""
