"""A GGUF file as a checkpoint folder: its configuration and vocabulary as files, its weights named.

The folder is a temporary one. What a file stores as floats is written there as safetensors when a
build asks for it; what it stores as whole numbers is read from the file itself.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from specrt.errors import CheckpointError
from specrt.system.memory import size
from specrt_export.checkpoint.gguf.configuration import configuration
from specrt_export.checkpoint.gguf.reader import GgufFile, read_gguf
from specrt_export.checkpoint.gguf.vocabulary import Vocabulary
from specrt_export.checkpoint.gguf.weights import GgufWeight, weights
from specrt_export.checkpoint.hub_cache import SINGLE
from specrt_export.checkpoint.safetensors_file import WeightBytes

SLICE_BYTES = 16 << 20
"""Bytes of a weight that are in memory at a time."""


@dataclass(frozen=True)
class GgufModel:
    """A model in GGUF that was looked at, with no weight read."""

    file: GgufFile
    config: dict[str, Any]
    weights: Mapping[str, GgufWeight]
    places: Mapping[str, WeightBytes]
    folder: Path
    """The checkpoint folder, which is there as long as this is."""
    lock: int
    """A descriptor whose lock says that the folder is in use."""

    def __post_init__(self) -> None:
        weakref.finalize(self, _remove, self.folder.parent, self.lock)

    @classmethod
    def open(cls, path: Path) -> GgufModel:
        """Read a file's header, and write what it says of its model into a folder.

        Raises: CheckpointError.
        """
        file = read_gguf(path)
        config = configuration(file)
        named = weights(file, config)
        vocabulary = Vocabulary(file)
        if len(vocabulary.tokens) > config["vocab_size"]:
            raise CheckpointError(
                f"{file.path} has {len(vocabulary.tokens)} tokens, and the model scores "
                f"{config['vocab_size']}; they do not belong together, convert the model again"
            )
        config["eos_token_id"] = vocabulary.ends or None
        texts = {
            "config.json": config,
            "tokenizer.json": vocabulary.tokenizer(),
            "tokenizer_config.json": vocabulary.tokenizer_config(),
            "generation_config.json": vocabulary.generation_config(),
        }
        folder, lock = _written(file.path.name, texts)
        return cls(file, config, named, _places(folder / SINGLE, named), folder, lock)

    def unpack(self) -> None:
        """Write the weights that the file stores as floats, once.

        Raises: CheckpointError for a disk that is full, and for numbers that are not finite.
        """
        out = self.folder / SINGLE
        if out.exists():
            return
        aside = out.with_suffix(".part")
        floats = {n: weight for n, weight in self.weights.items() if not weight.quantized}
        try:
            with aside.open("wb") as file:
                file.write(_header(floats))
                for weight in floats.values():
                    _write(weight, file)
            aside.replace(out)
        except OSError as error:
            raise _full(self.folder, error) from error


PREFIX, LOCK = "specrt-gguf-", ".lock"
"""How the names of temporary folders begin, and the file in them whose lock is held meanwhile."""


def _written(name: str, texts: Mapping[str, dict[str, Any]]) -> tuple[Path, int]:
    """Write files into a new folder of a name, within another: messages name it then.

    Also returns a descriptor whose lock others meet. What killed processes left is removed first.
    Raises: CheckpointError for a disk that is full; nothing is left there.
    """
    root = Path(tempfile.gettempdir())
    _sweep(root)
    place, lock = None, -1
    try:
        place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        new = place / f"{LOCK}.new"
        lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # a file system without locks, where none is swept either
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(place / LOCK)  # nobody finds it without its lock
        folder = place / name
        folder.mkdir()
        for file, value in texts.items():
            text = json.dumps(value, ensure_ascii=False)
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        full = _full(root, error)
        if place is not None:
            _remove(place, lock)
        raise full from error
    return folder, lock


def _sweep(root: Path) -> None:
    """Remove the folders of processes that were killed: nobody holds their locks."""
    for left in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is another user's, or has just been made or removed
            lock = os.open(left / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


def _remove(place: Path, lock: int) -> None:
    shutil.rmtree(place, ignore_errors=True)
    if lock >= 0:
        os.close(lock)


def _full(folder: Path, error: OSError) -> CheckpointError:
    free = size(shutil.disk_usage(folder).free)
    return CheckpointError(
        f"{folder} cannot hold the unpacked model ({error.strerror}; {free} free); name a larger "
        "place for temporary files with TMPDIR"
    )


def _places(floats: Path, named: Mapping[str, GgufWeight]) -> dict[str, WeightBytes]:
    """Return where each weight is, or will be."""
    places = {}
    at = len(_header({n: w for n, w in named.items() if not w.quantized}))
    for name, weight in named.items():
        if weight.quantized:
            tensor = weight.tensor
            length = math.prod(weight.shape[:-1]) * tensor.row_bytes
            places[name] = WeightBytes(
                tensor.file, tensor.format.name, weight.shape, tensor.offset, length
            )
            continue
        length = _bytes(weight)
        places[name] = WeightBytes(floats, weight.dtype, weight.shape, at, length)
        at += length
    return places


def _bytes(weight: GgufWeight) -> int:
    return math.prod(weight.shape) * (4 if weight.dtype == "F32" else 2)


def _header(floats: Mapping[str, GgufWeight]) -> bytes:
    """Return the header of a safetensors file of some weights, one after another."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, weight in floats.items():
        end = at + _bytes(weight)
        entries[name] = {
            "dtype": weight.dtype,
            "shape": list(weight.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(weight: GgufWeight, file: BinaryIO) -> None:
    rows = weight.shape[0]
    step = max(1, SLICE_BYTES // max(1, _bytes(weight) // rows))
    for begin in range(0, rows, step):
        file.write(weight.stored(begin, min(begin + step, rows)))
