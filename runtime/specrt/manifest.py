"""The JSON contract between a build machine and a device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from reprlib import repr as short
from typing import Annotated, Any

from specrt.errors import BundleError
from specrt.geometry import Geometry
from specrt.schema import Count, Span, read

FORMAT = 1
FILE_NAME = "manifest.json"
TOKENIZER = "tokenizer.json"
_AGAIN = "build the bundle again with `specrt build RECIPE`"


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of one file of a bundle."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Quality:
    """How far a model is from the one its checkpoint holds, on the recipe's calibration text."""

    kl: float
    """Mean over positions of the KL divergence of its distribution from theirs, in nats."""
    top1: float
    """Share of positions where both find the same token the likeliest."""
    tokens: Count


@dataclass(frozen=True)
class ModelRecord:
    """One compiled model: its engine, its shape, and what lowering achieved."""

    engine: str
    geometry: Geometry
    model_type: str
    parameters: int
    weight_bytes: int
    """In memory: a CPU widens weights that are stored in half precision when they are opened."""
    kv_item_bytes: Annotated[int, Span(1, 16)]
    fused: dict[str, str]
    """Per rewrite, how many places it took of how many there are, as `"8/8"`."""
    precision: str = "fp32"
    """What the weights of the layers are stored as."""
    embedding: str = "fp32"
    head: str = "fp32"
    """What the embedding table and the last projection are stored as."""
    block: int = 0
    """Weights that share a scale; 0 where none share any, or only those of a row."""
    per_row: bool = False
    """Whether weights of 8 bits share one scale for each row."""
    quality: Quality | None = None
    """None where nothing was measured, because the weights are those of the checkpoint."""
    backend: str = ""
    """What runs it; the bundle's when empty."""

    @property
    def quantized(self) -> bool:
        """Whether any weights share a scale."""
        return self.block > 0 or self.per_row

    @property
    def half_stored(self) -> bool:
        """Whether any weights are stored in half precision."""
        return bool({"fp16", "bf16"} & {self.precision, self.embedding, self.head})


@dataclass(frozen=True)
class Manifest:
    """Everything a device needs to know about a bundle before it opens an engine."""

    format: Annotated[int, Span(1, FORMAT)]
    name: str
    backend: str
    precision: str
    batch: Count
    max_length: Count
    prefill: Count
    """Widest prefill pass, in tokens."""
    gammas: tuple[int, ...]
    """Every gamma a verify pass was built for, 0 included."""
    gamma: int | None
    """The gamma used when none is asked for; None leaves it to be chosen round by round."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    target: ModelRecord
    draft: ModelRecord | None
    versions: dict[str, str]
    device: dict[str, str]
    source: str
    """Hash of what the bundle was built from; another one means that it is stale."""
    files: dict[str, FileRecord]

    @property
    def max_width(self) -> int:
        """Widest pass the engines accept."""
        return max(self.prefill, max(self.gammas) + 1)

    def backend_of(self, model: ModelRecord) -> str:
        """Return what runs one of the models."""
        return model.backend or self.backend

    def host_bytes(self) -> int:
        """Return the bytes of main memory that weights and full KV buffers take."""
        models = [m for m in (self.target, self.draft) if m]
        return sum(
            m.weight_bytes + m.geometry.kv_bytes(self.batch, self.max_length, m.kv_item_bytes)
            for m in models
            if self.backend_of(m) == "ort-cpu"
        )

    def kv_bytes(self) -> int:
        """Return the bytes of all KV buffers when every position is filled."""
        models = [m for m in (self.target, self.draft) if m]
        return sum(
            m.geometry.kv_bytes(self.batch, self.max_length, m.kv_item_bytes) for m in models
        )

    def to_json(self) -> str:
        """Return the manifest as JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read a bundle's manifest.

    Raises: BundleError when it is missing, of a newer format, or not a manifest.
    """
    path = folder / FILE_NAME
    data = _load(path)
    written = data["format"]
    if type(written) is int and written > FORMAT:
        raise BundleError(
            f"{folder} has bundle format {short(written)}, and this specrt reads up to {FORMAT}; "
            "upgrade specrt, or build the bundle again with this version"
        )
    known = {f.name for f in fields(Manifest)}  # a later version may write more
    try:
        manifest = read(Manifest, {k: v for k, v in data.items() if k in known})
        for problem in _problems(manifest):
            raise ValueError(problem)
    except ValueError as error:
        raise BundleError(f"{path} is not a complete manifest ({error}); {_AGAIN}") from error
    return manifest


def _load(path: Path) -> dict[str, Any]:
    """Read an object that has a format, whatever else is in it."""
    folder = path.parent
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ValueError("it is no file")
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or "format" not in data:
            raise ValueError(f"it holds {short(data)}; expected an object with `format`")
    except (FileNotFoundError, NotADirectoryError):
        there = "is not a bundle: it has no manifest.json"
        what = there if folder.exists() else "does not exist"
        raise BundleError(
            f"{folder} {what}; build one with `make engines` or `specrt build RECIPE`"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read ({error}); {_AGAIN}") from error
    return data


def _problems(manifest: Manifest) -> Iterator[str]:
    """Yield what does not fit together between fields that are fine by themselves."""
    m, ends = manifest, manifest.eos_token_ids
    listed = [m.target.engine, *([m.draft.engine] if m.draft else []), TOKENIZER]
    vocab = m.target.geometry.vocab_size
    checks = [
        (0 not in m.gammas, f"gammas is {short(m.gammas)}; expected 0 among them"),
        (m.gamma is not None and m.gamma not in m.gammas,
         f"gamma is {m.gamma}; expected one of {short(m.gammas)}"),
        (m.max_width > m.max_length,
         f"prefill or gammas asks for passes of {m.max_width}; expected up to {m.max_length}"),
        (any(r.quality and r.quality.top1 > 1 for r in (m.target, m.draft) if r),
         "quality.top1 is above 1; expected a share"),
        (max(ends, default=0) >= vocab,
         f"eos_token_ids is {short(ends)}; expected ids below {vocab}"),
        ((m.bos_token_id or 0) >= vocab,
         f"bos_token_id is {m.bos_token_id}; expected an id below {vocab}"),
    ]  # fmt: skip
    yield from (problem for wrong, problem in checks if wrong)
    yield from (f"files lacks {short(name)}; expected it" for name in listed if name not in m.files)
    yield from (
        f"files names {short(name)}; expected a place inside the bundle"
        for name in m.files
        if not _inside(name)
    )
    yield from _misshapen("target", m.target.geometry)
    if m.draft:
        yield from _misshapen("draft", m.draft.geometry)


def _inside(name: str) -> bool:
    place = PurePosixPath(name)
    return bool(place.parts) and not place.is_absolute() and ".." not in place.parts


def _misshapen(role: str, shape: Geometry) -> Iterator[str]:
    if len(shape.windows) != shape.layers:
        yield (
            f"{role}.geometry.windows has {len(shape.windows)} entries; expected one for each of "
            f"{shape.layers} layers"
        )
    if shape.heads % shape.kv_heads:
        yield (
            f"{role}.geometry.kv_heads is {shape.kv_heads}; expected a divisor of heads, "
            f"{shape.heads}"
        )
