"""A GGUF file as a checkpoint folder: its configuration and vocabulary as files, its weights named.

The folder is a temporary one. What a file stores as floats is written there as safetensors when a
build asks for it; what it stores as whole numbers is read from the file itself.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from specrt.errors import CheckpointError
from specrt.system.memory import size
from specrt_export.gguf.configuration import configuration
from specrt_export.gguf.reader import GgufFile, read_gguf
from specrt_export.gguf.vocabulary import Vocabulary
from specrt_export.gguf.weights import GgufWeight, weights

FLOATS = "model.safetensors"

SLICE_BYTES = 16 << 20
"""Bytes of a weight that are in memory at a time."""


@dataclass(frozen=True)
class WeightBytes:
    """Where a weight lies: `bytes` bytes from `offset` of `file`, once that is there."""

    file: Path
    dtype: str
    """Of floats as safetensors names it; of whole numbers their format, such as `Q4_K`."""
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class GgufModel:
    """A model in GGUF that was looked at, with no weight read."""

    file: GgufFile
    config: dict[str, Any]
    weights: Mapping[str, GgufWeight]
    places: Mapping[str, WeightBytes]
    folder: Path
    """The checkpoint folder, which is there as long as this is."""

    def __post_init__(self) -> None:
        weakref.finalize(self, shutil.rmtree, self.folder.parent, ignore_errors=True)

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
        folder = _written(file.path.name, texts)
        return cls(file, config, named, _places(folder / FLOATS, named), folder)

    def unpack(self) -> None:
        """Write the weights that the file stores as floats, once.

        Raises: CheckpointError for a disk that is full, and for what are no finite numbers.
        """
        out = self.folder / FLOATS
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


def _written(name: str, texts: Mapping[str, dict[str, Any]]) -> Path:
    """Write files into a new folder of a name, within another: messages name it then.

    Raises: CheckpointError for a disk that is full; nothing is left there.
    """
    place = Path(tempfile.gettempdir())
    try:
        place = Path(tempfile.mkdtemp(prefix="specrt-gguf-"))
        folder = place / name
        folder.mkdir()
        for file, value in texts.items():
            text = json.dumps(value, ensure_ascii=False)
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        full = _full(Path(tempfile.gettempdir()), error)
        if place.name.startswith("specrt-gguf-"):
            shutil.rmtree(place, ignore_errors=True)
        raise full from error
    return folder


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
