"""Compilers: one module a backend, each from a portable graph to a saved engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

import numpy as np

from specrt.bundle import HEADS, EncoderRecord
from specrt.engine.protocol import Engine, EngineTraits
from specrt.geometry import Geometry
from specrt_export.portable.graph import SourceGeometry, parts_beside
from specrt_export.recipe.model_options import ModelOptions

KV_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of one number of the KV buffers, by what an engine computes in."""

Progress = Callable[[str, float], None]
"""Called with the stage that begins and the fraction of the work that is done."""


@dataclass(frozen=True)
class GraphSource:
    """A portable graph, and the folder of its weights; of an encoder-decoder, the decoder's."""

    graph: Path
    weights: Path

    @property
    def parts(self) -> dict[str, Path]:
        """Of an encoder-decoder: its other graphs, by part."""
        return parts_beside(self.graph)


@dataclass(frozen=True)
class LoweredModel:
    """A graph in the operators of a backend, its weights next to it: what an engine is made of."""

    role: str
    folder: Path
    geometry: Geometry
    compute: str
    """`fp32`, `fp16` or `bf16`."""
    model_type: str
    fused: dict[str, str]
    """Per rewrite, how many places it took of how many there are, as `"8/8"`."""
    weight_bytes: int = 0
    """What its weights take once an engine is opened."""
    features: int = 0
    """Width of the features that it leaves for a head, or reads as one."""
    encoder: EncoderRecord | None = None
    """Of an encoder-decoder: what conditions it on a source, by names in `folder`."""
    warning: str = ""
    """What may keep this machine from checking or compiling it, and the remedy."""

    @property
    def engine_kind(self) -> str:
        """What a backend must run for it: a key of `KINDS`."""
        if self.model_type in HEADS:
            return HEADS[self.model_type]
        return self.encoder.kind if self.encoder else "decoder"


class MadeUpTarget:
    """What a head reads where there is no target, the same every time.

    That is features, and buffers of some shapes.
    """

    def __init__(
        self, shape: tuple[int, int, int], buffers: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        rng = np.random.default_rng(0)
        self.features = rng.normal(size=shape).astype(np.float32)
        made = {name: rng.normal(size=s).astype(np.float32) for name, s in (buffers or {}).items()}
        self.traits = EngineTraits(features=self.features, buffers=made)


@dataclass(frozen=True)
class CompiledModel:
    """A saved engine, and what is known about it."""

    file: str
    """Name of the engine within its folder."""
    weight_bytes: int
    encoder: EncoderRecord | None = None
    """Of an encoder-decoder: what conditions it on a source, by names in that folder."""


def encoder_record(
    source: SourceGeometry, positions: int, parts: Iterable[str], suffix: str = "onnx"
) -> EncoderRecord:
    """Describe what conditions a decoder, by names in its folder."""
    return EncoderRecord(
        cross=f"cross.{suffix}", max_source=positions, width=source.width, heads=source.heads,
        head_dim=source.head_dim, encoder=f"encoder.{suffix}" if "encoder" in parts else "",
        features=source.features, frames=source.frames,
    )  # fmt: skip


class Compiler(Protocol):
    """Compiles one model for its backend: check, lower, score, compile.

    A class takes the model's options; `COMPILERS` lists it, in
    `specrt_export.recipe.compiler_spec`.
    """

    def check(self, *, measured: bool) -> None:
        """Refuse, before any work, what the backend's library would refuse after it.

        `measured` is whether the model will be scored on a calibration text.
        Raises: SpecrtError.
        """

    def versions(self) -> dict[str, str]:
        """Return the versions of whatever decides the bytes of an engine.

        Raises: EngineError where a library is missing.
        """

    def lower(self, source: GraphSource, folder: Path) -> LoweredModel:
        """Write the lowered graph of the model, and its weights, into a new folder.

        Raises: BuildError, CheckpointError, ExportError.
        """

    def score(
        self, lowered: LoweredModel, max_width: int, *, exact: bool = False
    ) -> AbstractContextManager[Engine]:
        """Open a lowered graph as an engine on this machine's CPU, for passes up to a width.

        `exact` is for comparing with the portable graph: activations are not rounded then.
        Raises: SpecrtError.
        """

    def compile(
        self, lowered: LoweredModel, out: Path, previous: Path, progress: Progress
    ) -> CompiledModel:
        """Write the engine of a lowered graph into a folder.

        `previous` is where an older engine of the model may be.
        Raises: BuildError; KeyboardInterrupt.
        """


def open_compiler(model: ModelOptions) -> Compiler:
    """Return the compiler of a model.

    Raises: EngineError where the library of its backend is missing.
    """
    module, _, name = model.spec.compiler.partition(":")
    compiler: Compiler = getattr(import_module(module), name)(model)
    return compiler
