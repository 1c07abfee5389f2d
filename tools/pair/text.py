"""Which texts are trained on, and which are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from pair.errors import BadInputError

FILE_BYTES = range(200, 400_000)
LONGEST_LINE = 1000  # characters; a file with a longer line is data, not writing


def usable_texts(folders: Iterable[Path], suffix: str) -> Iterator[tuple[bytes, str]]:
    """Yield (hash, text) of every file in UTF-8, of a usable size and without endless lines.

    Raises: BadInputError for what is not a folder.
    """
    for folder in folders:
        if not folder.is_dir():
            raise BadInputError(f"not a folder: {folder}")
        for path in folder.rglob(f"*{suffix}"):
            if not path.is_file() or path.stat().st_size not in FILE_BYTES:
                continue
            try:
                text = path.read_text("utf8")
            except UnicodeDecodeError:
                continue
            if max(map(len, text.split("\n"))) <= LONGEST_LINE:
                yield hashlib.sha256(text.encode()).digest(), text


def split_texts(
    folders: Iterable[Path], seen: Iterable[Path], suffix: str, share: float
) -> tuple[list[str], list[str]]:
    """Return the different texts of all folders as (training, held out), in order of their hash.

    A text's side follows from its content alone: another run, another order of folders or a copy
    under another name cannot move it across. Nothing in `seen` is ever held out.
    Raises: BadInputError where either side is left empty.
    """
    old, new = dict(usable_texts(seen, suffix)), dict(usable_texts(folders, suffix))
    train: list[str] = []
    held_out: list[str] = []
    for digest, text in sorted((new | old).items()):
        chance = int.from_bytes(digest[:8], "big") / 2**64
        (held_out if chance < share and digest not in old else train).append(text)
    if not train or not held_out:
        counts = f"{len(train)} files to train on, {len(held_out)} held out"
        raise BadInputError(f"too little text in *{suffix}: {counts}")
    return train, held_out
