"""What a recipe says of one model, with every default filled in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specrt_export.precision import BitBound, Precision
from specrt_export.recipe.compiler_spec import COMPILERS, CompilerSpec
from specrt_export.recipe.recipe_tables import EngineOptions, ModelSource, TensorRtOptions


@dataclass(frozen=True)
class ModelOptions:
    """What one engine is compiled from and for."""

    recipe: Path
    """The file, which messages name."""
    role: str
    source: ModelSource
    backend: str
    precision: Precision
    bound: BitBound | None
    """What its bits must keep to, where they are chosen."""
    engine: EngineOptions
    tensorrt: TensorRtOptions

    @property
    def spec(self) -> CompilerSpec:
        """What a recipe may ask of its backend."""
        return COMPILERS[self.backend]

    def source_problem(self, name: str, *, reads: bool) -> str:
        """Return why no engine of the model `name` fits the recipe; empty where one does.

        `reads` says whether it reads a source, as encoder-decoders do.
        """
        if not reads:
            most = self.engine.max_source
            found = f"engine.max_source is {most}, and {name} reads no source; remove it"
            return found if most else ""
        if self.spec.encoder_decoders:
            return ""
        able = [name for name, spec in COMPILERS.items() if spec.encoder_decoders]
        return (
            f"{name} is an encoder-decoder, and {self.backend} builds none yet; build it for "
            f"{' or '.join(able)}"
        )
