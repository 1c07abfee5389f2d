"""What a recipe says of one model, with every default filled in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specrt.engine.backends import require_runs
from specrt.engine.ort.kernels import missing_kernels
from specrt.errors import BuildError, SpecrtError
from specrt.geometry import LAG, TAKEN_BACK, Geometry
from specrt_export.precision import BitBound, Precision
from specrt_export.recipe.compiler_spec import COMPILERS, CompilerSpec
from specrt_export.recipe.recipe_tables import EngineOptions, ModelSource, TensorRtOptions


@dataclass(frozen=True)
class ModelOptions:
    """What one engine is made from and for."""

    recipe: Path
    """The file, which messages name."""
    role: str
    """`target` or `draft`."""
    source: ModelSource
    engine: EngineOptions
    tensorrt: TensorRtOptions

    @property
    def local(self) -> Path:
        """Where the checkpoint is if it is not on the hub."""
        return self.recipe.parent / self.source.checkpoint

    @property
    def backend(self) -> str:
        """What runs it."""
        return self.source.backend or self.engine.backend

    @property
    def spec(self) -> CompilerSpec:
        """What a recipe may ask of its backend; of an unknown one anything."""
        return COMPILERS.get(self.backend, CompilerSpec(""))

    @property
    def precision(self) -> Precision:
        """What its weights are stored as."""
        source = self.source
        return Precision.of(
            source.precision or ("int4" if source.bits else self.engine.precision),
            source.embedding,
            source.head,
            source.block,
            per_row=self.spec.row_scales,
            calibrated=(source.quantizer or self.engine.quantizer) == "gptq",
            auto=bool(source.bits),
            symmetric=source.symmetric,
        )

    @property
    def bound(self) -> BitBound | None:
        """What its bits must keep to, where they are chosen."""
        return BitBound(self.source.max_kl, self.source.max_bytes) if self.source.bits else None

    def check_layers(self, geometry: Geometry, *, mixes: bool) -> None:
        """Refuse what no engine of it can have, where layers mix experts or have recurrent states.

        A draft has written all but the last two tokens when its states reach past the first.
        Raises: BuildError.
        """
        if mixes and not self.spec.on_cpu:
            raise BuildError(
                f"{self.recipe}: the {self.role} is a mixture of experts, which {self.backend} "
                "does not run; build for ort-cpu"
            )
        if mixes and (reason := missing_kernels()):
            raise BuildError(
                f"{self.recipe}: the {self.role} is a mixture of experts, which specrt's "
                f"kernels alone run; {reason}"
            )
        if not geometry.recurs:
            return
        most = LAG + 2 if self.role == "draft" else TAKEN_BACK - 1
        if self.engine.widest - 1 > most:
            raise BuildError(
                f"{self.recipe}: engine.gammas reaches {self.engine.widest - 1}, and a {self.role} "
                f"with recurrent states takes back up to {most} drafted tokens; lower it"
            )
        if not self.spec.on_cpu and self.engine.batch > 1:
            raise BuildError(
                f"{self.recipe}: engine.batch is {self.engine.batch}, and {self.backend} runs "
                "recurrent states for one row: rows of several are padded, and what a pad changes "
                "in a state stays. Set it to 1"
            )
        if not self.spec.states:
            raise BuildError(
                f"{self.recipe}: the {self.role} has layers with a recurrent state, which "
                f"{self.backend} does not run; build for ort-cpu, tensorrt or tensorrt-rtx"
            )

    def require_kind(self, kind: str, name: object, error: type[SpecrtError]) -> None:
        """Refuse a model `name` that its backend does not run, or a source that it does not read.

        Raises: `error`.
        """
        require_runs(self.backend, kind, f"{self.recipe}: {name}", error)
        if self.engine.max_source and kind == "decoder":
            raise error(
                f"{self.recipe}: engine.max_source is {self.engine.max_source}, and {name} reads "
                "no source; remove it"
            )
