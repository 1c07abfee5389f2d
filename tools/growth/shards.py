"""Write weights one at a time into safetensors files of bounded size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from specrt_export.checkpoint.hub_cache import INDEX, SINGLE

SHARD_BYTES = 2_000_000_000


@dataclass(frozen=True)
class Entry:
    """One weight as the header tells of it; the bytes are made when its turn comes."""

    name: str
    dtype: str
    """As safetensors calls it."""
    shape: tuple[int, ...]
    bytes: int
    make: Callable[[], NDArray[Any]]

    @property
    def parameters(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


def write_shards(folder: Path, entries: list[Entry], limit: int = SHARD_BYTES) -> None:
    """Write one file, or several with their index; one weight at a time is in memory."""
    shards = split(entries, limit)
    if len(shards) == 1:
        _write(folder / SINGLE, shards[0])
        return
    places = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write(folder / name, shard)
        places.update(dict.fromkeys((entry.name for entry in shard), name))
    index = {"metadata": {"total_size": sum(e.bytes for e in entries)}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def split(entries: Iterable[Entry], limit: int) -> list[list[Entry]]:
    """Fill shards in order; a weight beyond the limit gets one of its own."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.bytes
    return shards


def _write(path: Path, entries: list[Entry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.bytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers lie where a map may read them
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            array = entry.make()
            assert array.nbytes == entry.bytes, f"{entry.name} is not what its header tells"
            file.write(array.data)
