"""The JSON contract between a build machine and a device."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from specrt.errors import BundleError
from specrt.geometry import Geometry

FORMAT = 1
FILE_NAME = "manifest.json"


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of one file of a bundle."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ModelRecord:
    """One compiled model: its engine, its shape, and what lowering achieved."""

    engine: str
    geometry: Geometry
    model_type: str
    parameters: int
    weight_bytes: int
    kv_item_bytes: int
    fused: dict[str, str]
    """Per rewrite, how many places it took of how many there are, as `"8/8"`."""


@dataclass(frozen=True)
class Manifest:
    """Everything a device needs to know about a bundle before it opens an engine."""

    format: int
    name: str
    backend: str
    precision: str
    batch: int
    max_length: int
    prefill: int
    """Widest prefill pass, in tokens."""
    gammas: tuple[int, ...]
    """Every gamma a verify pass was built for, 0 included."""
    gamma: int
    """The gamma used when none is asked for."""
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
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        written = data["format"]
    except FileNotFoundError:
        what = "is not a bundle: it has no manifest.json" if folder.is_dir() else "does not exist"
        raise BundleError(
            f"{folder} {what}; build one with `make engines` or `specrt build RECIPE`"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BundleError(
            f"{path} cannot be read ({error}); build the bundle again with `specrt build RECIPE`"
        ) from error
    if not isinstance(written, int) or written > FORMAT:
        raise BundleError(
            f"{folder} has bundle format {written}, and this specrt reads up to {FORMAT}; "
            "upgrade specrt, or build the bundle again with this version"
        )
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(
            f"{path} is not a complete manifest ({type(error).__name__}: {error}); "
            "build the bundle again with `specrt build RECIPE`"
        ) from error


def _parse(data: dict[str, Any]) -> Manifest:
    known = {f.name for f in fields(Manifest)}
    return Manifest(
        **{
            **{k: v for k, v in data.items() if k in known},
            "gammas": tuple(int(g) for g in data["gammas"]),
            "eos_token_ids": tuple(int(t) for t in data["eos_token_ids"]),
            "target": _model(data["target"]),
            "draft": _model(data["draft"]) if data["draft"] else None,
            "versions": dict(data["versions"]),
            "device": dict(data["device"]),
            "files": {name: FileRecord(**record) for name, record in data["files"].items()},
        }
    )


def _model(data: dict[str, Any]) -> ModelRecord:
    return ModelRecord(**{**data, "geometry": Geometry.from_json(data["geometry"])})
