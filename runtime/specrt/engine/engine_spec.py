"""A compiled engine, and how it is opened: one record for every backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from specrt.bundle import HEADS, Bundle, EncoderRecord, ModelRecord
from specrt.engine.protocol import Engine
from specrt.geometry import Geometry
from specrt.held_file import HeldFile, hold_folder


@dataclass(frozen=True)
class EngineSpec:
    """A compiled engine, and how it is opened."""

    backend: str
    path: Path
    geometry: Geometry
    batch: int
    max_length: int
    max_width: int
    threads: int = 1
    kind: str = "decoder"
    """A key of `KINDS`."""
    encoder: EncoderRecord | None = None
    """What conditions the decoder of an encoder-decoder."""
    target: Engine | None = None
    """The engine that a draft drafts for, whose device, features or encoder it may share."""
    held: Mapping[str, HeldFile] | None = None
    """The files of its folder that it may read; all of them when None."""

    @classmethod
    def of(
        cls, bundle: Bundle, model: ModelRecord, threads: int = 1, target: Engine | None = None
    ) -> EngineSpec:
        """Return how an engine of a bundle is opened."""
        manifest = bundle.manifest
        return cls(
            manifest.backend_of(model), bundle.file(model.engine), model.geometry, manifest.batch,
            manifest.max_length, manifest.max_width, threads, model.engine_kind, model.encoder,
            target, bundle.beside(model.engine),
        )  # fmt: skip

    @property
    def ring_width(self) -> int:
        """Return what rings leave room for, in tokens; 0 of a head, which keeps every position."""
        return 0 if self.kind in HEADS.values() else self.max_width

    def require_encoder(self) -> EncoderRecord:
        """Return what conditions the decoder of an encoder-decoder."""
        assert self.encoder is not None, f"an engine of kind {self.kind} has an encoder"
        return self.encoder

    @cached_property
    def files(self) -> Mapping[str, HeldFile]:
        """What it may read, by name in its folder."""
        return hold_folder(self.path.parent) if self.held is None else self.held
