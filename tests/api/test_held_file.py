"""Files that a user names: what is waited for, what is refused, and what a failed write leaves."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from specrt import held_file
from specrt.held_file import open_file, read_file, replacing


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def kinds(folder: Path) -> dict[str, Path]:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "socket"))
    os.mkfifo(folder / "fifo")
    device = {"a device": Path("/dev/zero")}
    return {"a folder": folder, "a pipe": folder / "fifo", "a socket": folder / "socket", **device}


@pytest.mark.parametrize("read", [read_file, open_file])
def test_what_is_no_file_is_refused_at_once(read: Callable[[Path], object], tmp_path: Path) -> None:
    for kind, path in kinds(tmp_path).items():
        with pytest.raises(OSError, match=f"it is {kind}, not a file"):
            read(path)


def test_a_pipe_is_read_to_its_end_once_somebody_writes(pipe: Path) -> None:
    data = bytes(range(256)) * 4096
    for piece in (b"", b"a", data):
        writer = threading.Timer(0.1, lambda text=piece: pipe.write_bytes(text))
        writer.start()
        assert read_file(pipe, pipe=True) == piece
        writer.join()
    file = pipe.with_name("file")
    file.write_bytes(data)
    assert read_file(file) == read_file(file, len(data)) == data


def test_what_has_no_end_and_what_nobody_writes_is_given_up(
    pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_file, "_WRITER_S", 0.1)
    with pytest.raises(OSError, match="nothing writes to"):
        read_file(pipe, pipe=True)
    with pytest.raises(OSError, match="more than 10 bytes"):
        read_file(Path("/dev/zero"), 10, pipe=True)
    assert read_file(Path("/dev/null"), pipe=True) == b""


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for error in (full, KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, replacing(path):
            raise error
        if error is full:
            assert caught.value.filename == str(path)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"
    link = tmp_path / "link"
    link.symlink_to(path)
    with replacing(link, 0o600) as file:
        file.write(b"new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o600)
    assert link.is_symlink()
