"""A model quantized and lowered for its backend, and how far that is from its checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from specrt.bundle import Quality
from specrt_export.check.equivalence import check_engine, max_width
from specrt_export.check.quality import Likeliest, QualityGate
from specrt_export.compile.compiler import GraphSource, LoweredModel, Progress
from specrt_export.heads.head_formats import HEAD_FORMATS
from specrt_export.plan.model_plan import ModelPlan
from specrt_export.portable.graph import GraphRun, runs_here
from specrt_export.precision import BitBound
from specrt_export.quantize.bit_allocation import BitTrial, open_search
from specrt_export.quantize.calibration import CalibratedCodes, CalibrationText
from specrt_export.quantize.quantizer import Quantized, quantize
from specrt_export.quantize.weight_choice import Formats


@dataclass(frozen=True)
class MeasuredModel:
    """A lowered model, and how far it is from its checkpoint, where that was measured."""

    quantized: Quantized | None
    lowered: LoweredModel
    quality: Quality | None = None
    likeliest: Likeliest | None = None
    bits: dict[str, str] | None = None
    """Of each part whose bits were chosen, what it is stored as."""

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of its weights; of a plan that is still to be built, the graph's."""
        files = (path.stat().st_size for path in self.lowered.folder.iterdir())
        return self.lowered.weight_bytes or sum(files)

    def moved(self, folder: Path, bits: dict[str, str]) -> MeasuredModel:
        """Return it as it lies in another folder, with the bits that were chosen."""
        assert self.quantized is not None
        quantized = replace(self.quantized, folder=folder / self.quantized.folder.name)
        lowered = replace(self.lowered, folder=folder / self.lowered.folder.name)
        return replace(self, quantized=quantized, lowered=lowered, bits=bits)


@dataclass(frozen=True)
class ModelTrials:
    """Quantizes, lowers and measures one model: once, or with other bits until a bound is met."""

    model: ModelPlan
    gate: QualityGate | None
    """None without a calibration text."""
    text: CalibrationText
    """Pieces of that text that codes are found on, and where a killed build leaves what it found.
    """
    original: GraphSource
    """The portable graph of the checkpoint."""
    scratch: Path
    """A folder for what is made."""
    progress: Progress

    def best(self) -> MeasuredModel:
        """Return the model, with the best bits where the recipe has them chosen.

        Raises: BuildError beyond a limit of the recipe.
        """
        bound = self.model.options.bound
        if bound is None:
            found = self._try(self.scratch / "new", text=self.text)
        else:
            found = self._choose_bits(bound)
        if self.gate is not None and found.quantized is not None and found.quality is not None:
            self.gate.check(self.model.role, self.original, found.quantized, found.quality)
        return found

    def _choose_bits(self, bound: BitBound) -> MeasuredModel:
        """Try bits until the whole model keeps to a bound; return the best."""
        assert self.gate is not None, "the recipe was held to a calibration text"

        def show(stage: str, done: float) -> None:
            self.progress(f"{self.model.role}: {stage}", 0.1 + 0.1 * done)

        text = self.text
        if not text.pieces:
            text = replace(text, pieces=self.gate.pieces, sources=self.gate.sources)
        search, codes = open_search(
            self.original.graph, self.original.weights, self.model.options.precision, bound,
            text, show,
        )  # fmt: skip
        best: MeasuredModel | None = None
        trial_folder, best_folder = self.scratch / "new", self.scratch / "best"
        while (raised := search.propose()) is not None:
            found = self._try(trial_folder, search.formats(raised), codes)
            assert found.quality is not None, "a quantized model is measured"
            trial = BitTrial(raised, found.quality.kl, found.weight_bytes)
            self.progress(f"{self.model.role}: {search.told(trial)}", 0.55)
            if search.record(trial):
                shutil.rmtree(best_folder, ignore_errors=True)
                trial_folder.rename(best_folder)
                best = found.moved(best_folder, search.bits(raised))
            else:
                shutil.rmtree(trial_folder, ignore_errors=True)
        assert best is not None, "a search ends with a trial or with an error"
        return best

    def _try(
        self, folder: Path, formats: Formats | None = None, codes: CalibratedCodes | None = None,
        text: CalibrationText | None = None,
    ) -> MeasuredModel:  # fmt: skip
        """Quantize and lower the model, compare it with its graph, and measure what it lost."""
        role, original = self.model.role, self.original
        quantized = self._quantize(folder, formats, codes, text)
        source = original
        if quantized is not None:
            source = GraphSource(quantized.graph, quantized.folder)
        self.progress(f"lower {role}", 0.3)
        lowered = self.model.compiler.lower(source, folder / "lowered")
        if lowered.warning:
            self.progress(f"warning: {lowered.warning}", 0.4)
        self.progress(f"check {role}", 0.4)
        self._check(source, lowered)
        if self.gate is None:
            return MeasuredModel(quantized, lowered)
        self.progress(f"measure {role}", 0.5)
        if quantized is None:
            return MeasuredModel(quantized, lowered, likeliest=self.gate.likeliest(original))
        with self.model.compiler.score(lowered, self.gate.max_width) as engine:
            quality, likeliest = self.gate.measure(role, original, folder, engine)
        return MeasuredModel(quantized, lowered, quality, likeliest)

    def _quantize(
        self, folder: Path, formats: Formats | None, codes: CalibratedCodes | None,
        text: CalibrationText | None,
    ) -> Quantized | None:  # fmt: skip
        """Write the model in the recipe's precision; None where it stays as it is."""
        role, precision = self.model.role, self.model.options.precision
        if not precision.rewrites:
            return None
        self.progress(f"{'quantize' if precision.quantizes else 'narrow'} {role}", 0.2)

        def calibrated(part: str, done: float) -> None:
            self.progress(f"calibrate {role}, {part}", 0.2 + 0.1 * done)

        return quantize(
            self.original.graph, self.original.weights, folder / "quantized", precision, calibrated,
            text if precision.calibrated else None, formats, codes,
        )  # fmt: skip

    def _check(self, source: GraphSource, lowered: LoweredModel) -> None:
        """Compare an engine with its graph, where the ONNX Runtime installed can run that."""
        if not runs_here():
            return
        options, backend = self.model.options.engine, self.model.options.backend
        widths = sorted({1, options.widest})
        widest = max_width(lowered.geometry, options.max_length, widths)
        with self.model.compiler.score(lowered, widest, exact=True) as engine:
            reference = GraphRun(source.graph, source.weights)
            form = HEAD_FORMATS.get(lowered.model_type)
            if form is not None:
                form.part("check_engine")(reference, engine, widths, lowered.compute)
                return
            check_engine(reference, engine, widths, lowered.compute, backend)
