"""Traces: what a target wrote for prompts, and how likely it held tokens to be at each place.

A folder of traces has shards in the safetensors format and an index.json that names them. A shard
is written aside and takes its name whole, and the index after it: whatever stops the work, what
the index names is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from specrt.errors import RequestError
from specrt.held_file import check_place, read_file, replacing
from specrt.records import Count, Interval, read

FORMAT = 1

INDEX = "index.json"

RANKED = 64
"""The likeliest tokens that are kept of each place."""

_TYPES: dict[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}

_MOST_BYTES = 16 << 20
"""Of an index."""


@dataclass(frozen=True)
class TraceText:
    """What a target wrote for one prompt.

    Shapes: prompt [P], answer [A] int32; ids [A, K] int32 and logprobs [A, K] f16, the likeliest
        first, as the target has them at temperature 1; rest [A] f32, what the others weigh.
    """

    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]
    ids: NDArray[np.int32]
    logprobs: NDArray[np.float16]
    rest: NDArray[np.float32]
    domain: str = ""

    @property
    def chance(self) -> float:
        """A number from 0 to 1 that follows from the prompt alone: which side of a split it is."""
        digest = hashlib.sha256(self.prompt.astype("<i4").tobytes()).digest()
        return int.from_bytes(digest[:8], "little") / 2**64


@dataclass(frozen=True)
class TraceShard:
    """A file of traces."""

    file: str
    sha256: str
    prompts: str
    """SHA-256 of the prompts' texts."""
    texts: Count
    tokens: Annotated[int, Interval(0, 2**40)]
    """Of the answers."""


@dataclass(frozen=True)
class TraceIndex:
    """What a folder of traces is of."""

    format: int
    tokenizer: str
    """SHA-256 of the target's tokenizer.json."""
    vocabulary: Count
    ranked: Count
    """The likeliest tokens kept of each place: `RANKED`, or all of a small vocabulary."""
    bundle: str
    """`source` of the manifest of the bundle that wrote."""
    name: str
    temperature: float
    max_tokens: Count
    shards: tuple[TraceShard, ...] = ()

    @property
    def texts(self) -> int:
        """How many prompts were answered."""
        return sum(shard.texts for shard in self.shards)

    @property
    def tokens(self) -> int:
        """How many tokens were written."""
        return sum(shard.tokens for shard in self.shards)


def read_index(folder: Path) -> TraceIndex:
    """Read the index of a folder of traces.

    Raises: RequestError where there is none, or it is damaged.
    """
    path = folder / INDEX
    try:
        data: Any = json.loads(read_file(path, _MOST_BYTES))
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}: {short(data)}")
        return read(TraceIndex, data)
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(
            f"{folder} holds no {INDEX}; write traces there with `specrt collect BUNDLE --prompts "
            f"F --out {folder}`"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(
            f"{path} is damaged ({reason}); collect the traces again, into another folder"
        ) from error


def read_texts(folder: Path, index: TraceIndex) -> Iterator[TraceText]:
    """Read all texts of a folder, shard by shard, each held to its hash.

    Raises: RequestError for a shard that is missing or damaged.
    """
    for shard in index.shards:
        path = folder / shard.file
        try:
            data = read_file(path)
        except OSError as error:
            raise RequestError(
                f"{path} cannot be read ({error.strerror}), and {INDEX} names it; collect the "
                "traces again, into another folder"
            ) from error
        if hashlib.sha256(data).hexdigest() != shard.sha256:
            raise RequestError(
                f"{path} is damaged: its hash is not that in {INDEX}; collect the traces again, "
                "into another folder"
            )
        try:
            yield from _texts(data)
        except (KeyError, ValueError, TypeError) as error:
            raise RequestError(
                f"{path} is not a shard of traces ({error}); collect the traces again"
            ) from error


class TraceWriter:
    """Adds shards to a folder of traces; the folder is made where it is missing.

    Raises: RequestError for a folder that holds traces of something else, or other files.
    """

    def __init__(self, folder: Path, wanted: TraceIndex) -> None:
        self._folder = folder
        self.index = wanted
        known = (folder / INDEX).exists() or not folder.exists()
        if not known and not (folder.is_dir() and all(map(_is_left, folder.iterdir()))):
            raise RequestError(
                f"{folder} is there and holds no traces; name another folder with --out"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            check_place(folder / INDEX)
            _lock(self, folder)
            for left in folder.glob(".*.part"):  # of a process that was killed
                left.unlink()
        except BlockingIOError:
            raise RequestError(
                f"another process collects traces in {folder}; wait for it, or name another folder "
                "with --out"
            ) from None
        except OSError as error:
            raise RequestError(
                f"no traces can be kept in {folder}: {error.strerror}; name another folder with "
                "--out"
            ) from error
        if (folder / INDEX).exists():  # read once nobody else writes there
            self.index = _same(folder, read_index(folder), wanted)

    def done(self, prompts: Sequence[str]) -> int:
        """Return how many of the prompts are answered already.

        Raises: RequestError where other prompts were.
        """
        first = 0
        for shard in self.index.shards:
            own = prompts[first : first + shard.texts]
            if len(own) == shard.texts and _hash(own) != shard.prompts:
                raise RequestError(
                    f"{self._folder / shard.file} answers other prompts than those from number "
                    f"{first + 1} on; name another folder with --out, or add prompts at the end"
                )
            first += shard.texts
        return min(first, len(prompts))

    def add(self, prompts: Sequence[str], texts: Sequence[TraceText]) -> None:
        """Write a shard of the traces of some prompts.

        Raises: RequestError where that cannot be; the shards before it stay.
        """
        data = _bytes(texts)
        name = f"traces-{len(self.index.shards):05}.safetensors"
        _write(self._folder / name, data)
        tokens = sum(len(text.answer) for text in texts)
        digest = hashlib.sha256(data).hexdigest()
        shard = TraceShard(name, digest, _hash(prompts), len(texts), tokens)
        values = {**vars(self.index), "shards": (*self.index.shards, shard)}
        self.index = TraceIndex(**values)
        text = json.dumps(asdict(self.index), indent=1) + "\n"
        _write(self._folder / INDEX, text.encode())


def _lock(owner: object, folder: Path) -> None:
    """Let no other process write to a folder as long as an object is there.

    Raises: BlockingIOError where one does.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    weakref.finalize(owner, os.close, opened)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        pass


def _same(folder: Path, there: TraceIndex, wanted: TraceIndex) -> TraceIndex:
    for name, value in vars(wanted).items():
        found = getattr(there, name)
        if name not in ("shards", "name") and found != value:
            raise RequestError(
                f"{folder} holds traces whose {name} is {found}, and {value} was asked for; name "
                "another folder with --out"
            )
    return there


def _hash(prompts: Sequence[str]) -> str:
    text = json.dumps(list(prompts))
    return hashlib.sha256(text.encode()).hexdigest()


def _is_left(path: Path) -> bool:
    """Tell whether a file is of a process that was stopped before it wrote an index."""
    return re.fullmatch(r"traces-\d+\.safetensors|\..*\.part", path.name) is not None


def _write(path: Path, data: bytes) -> None:
    try:
        with replacing(path) as file:
            file.write(data)
    except OSError as error:
        raise RequestError(
            f"{path} cannot be written: {error.strerror}; make room, and run the same again: it "
            "goes on after what is there"
        ) from error


def _bytes(texts: Sequence[TraceText]) -> bytes:
    """Return texts as a file in the safetensors format."""
    ends = [np.cumsum([len(part) for part in parts]) for parts in _parts(texts)]
    joined = {
        "prompts": ("I32", np.concatenate([text.prompt for text in texts])),
        "prompt_ends": ("I64", ends[0]),
        "answers": ("I32", np.concatenate([text.answer for text in texts])),
        "answer_ends": ("I64", ends[1]),
        "ids": ("I32", np.concatenate([text.ids for text in texts])),
        "logprobs": ("F16", np.concatenate([text.logprobs for text in texts])),
        "rest": ("F32", np.concatenate([text.rest for text in texts])),
    }
    domains = json.dumps([text.domain for text in texts])
    header: dict[str, Any] = {"__metadata__": {"domains": domains}}
    body, place = [], 0
    for name, (kind, array) in joined.items():
        data = array.astype(_TYPES[kind]).tobytes()
        span = [place, place + len(data)]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": span}
        body.append(data)
        place += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *body])


def _parts(texts: Sequence[TraceText]) -> tuple[list[Any], list[Any]]:
    return [text.prompt for text in texts], [text.answer for text in texts]


def _texts(data: bytes) -> Iterator[TraceText]:
    """Yield the texts of a shard.

    Raises: KeyError, ValueError, TypeError for what is not one.
    """
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    domains = json.loads(header.pop("__metadata__")["domains"])

    def array(name: str) -> NDArray[Any]:
        dtype, shape = _TYPES[header[name]["dtype"]], header[name]["shape"]
        begin = 8 + length + header[name]["data_offsets"][0]
        flat: NDArray[Any] = np.frombuffer(data, dtype, prod(shape), begin)
        return flat.reshape(shape)

    arrays = {name: array(name) for name in header}
    before = asked = 0
    ends = zip(arrays["prompt_ends"].tolist(), arrays["answer_ends"].tolist(), strict=True)
    for (prompt, answer), domain in zip(ends, domains, strict=True):
        span = slice(before, answer)
        yield TraceText(
            arrays["prompts"][asked:prompt], arrays["answers"][span], arrays["ids"][span],
            arrays["logprobs"][span], arrays["rest"][span], str(domain),
        )  # fmt: skip
        asked, before = prompt, answer
