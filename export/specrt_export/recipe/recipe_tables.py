"""The tables of a recipe as frozen records: what each key means, and what it is when left out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Annotated

from specrt.errors import BuildError
from specrt.params import AUTO, Gamma
from specrt.records import Interval, Words
from specrt_export.heads.mtp_format import KIND as MTP
from specrt_export.precision import AUTO_BITS
from specrt_export.recipe.compiler_spec import COMPILERS

NONE = "none"
"""As the kind of draft: nothing but lookup drafts."""
DRAFTS = (MTP, NONE)
"""Kinds of drafts that need no checkpoint of their own."""


@dataclass(frozen=True)
class ModelSource:
    """Where one model of the pair comes from."""

    checkpoint: str = ""
    """A folder or a GGUF file next to the recipe, or a hub name."""
    revision: str = ""
    """Branch, tag or commit of a hub name."""
    graph: str = ""
    """A portable graph exported earlier, next to the recipe; exported now when empty."""
    precision: str = ""
    """What weights are stored as; `engine.precision` when empty."""
    embedding: str = ""
    """The same for the embedding table; int8 in an int4 model, else `precision`, when empty."""
    head: str = ""
    """The same for the last projection."""
    block: int = 0
    """Weights that share a scale in int8 and int4; 32 when 0. With TensorRT in int4 alone, 128 when
    0: int8 and fp8 have one scale for each row there."""
    quantizer: str = ""
    """How codes of int4 are found; `engine.quantizer` when empty."""
    symmetric: bool = True
    """Whether codes of int4 lie around 0; else each block has a zero as well as a scale."""
    bits: Annotated[str, Words((AUTO_BITS,), 'set `precision`, such as "int4"')] = ""
    """`auto`: each part of the model is int4 or int8, as `max_kl` or `max_bytes` asks for."""
    max_kl: float | None = None
    """With `bits`: most nats of KL divergence from the checkpoint on the calibration text."""
    max_bytes: int | None = None
    """With `bits`: most bytes of the engine's weights."""
    weight_only: bool = False
    """Of a checkpoint that quantizes activations, keys or values, too: whether to leave that out,
    and keep its weights as they are."""
    layers: tuple[int, ...] = ()
    """Of a head: the layers of the target whose inputs it reads, in place of those that its
    checkpoint names."""
    kind: Annotated[str, Words(DRAFTS, "leave it out, and name a `checkpoint`")] = ""
    """Of a draft: `mtp` for the head that predicts several tokens in a checkpoint, the target's
    where none is named, `none` for none, not even that head."""
    backend: str = ""
    """What runs this model; `engine.backend` when empty."""


_MOST_POSITIONS = 10**7
"""More than any model was trained for."""

USUAL_SOURCE = 512
"""Positions of the longest source of text where a recipe names none: what T5 was trained on."""


@dataclass(frozen=True)
class EngineOptions:
    """What the engines are built for."""

    backend: str = next(iter(COMPILERS))
    """What runs the models; `auto` is the fastest that works on the machine that builds."""
    precision: str = ""
    """What the weights of both models are stored as, unless their tables say otherwise; when empty
    `stored`, as they are, of a quantized checkpoint, and fp32 of others."""
    quantizer: str = "search"
    """How codes of int4 are found: `search` looks for each block's best scale; `gptq` also lets
    the rest of a row make good what a weight loses, judged by the calibration text."""
    batch: int = 1
    """Rows of text that an engine holds, each with KV buffers of its own: as many completions can
    share a pass. On a CPU a pass costs what the tokens of its rows cost, without padding."""
    max_length: Annotated[int, Interval(2, _MOST_POSITIONS)] = 2048
    """Positions of the KV buffers: prompt and completion together."""
    max_source: Annotated[int, Interval(0, _MOST_POSITIONS)] = 0
    """Of an encoder-decoder: positions of the longest source. When 0, 512 or as many as the encoder
    was trained for, whichever are fewer; those of speech always are as many as that."""
    prefill: Annotated[int, Interval(1, _MOST_POSITIONS)] = 256
    """Widest prefill pass, in tokens; a longer prompt goes through in several."""
    gammas: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    """Every gamma a verify pass is built for; 0 always is."""
    gamma: Gamma = AUTO
    """The gamma used when none is asked for; `auto` chooses one each round."""
    drafter: str = ""
    """The drafter used when none is asked for and `specrt tune` found no other; when empty the
    draft model, or lookup without one."""
    snapshot_bytes: Annotated[int, Interval(0, 1 << 40)] = 256 << 20
    """Of layers with recurrent states: most bytes of snapshots, by which a text goes on from the
    end of an earlier prompt or turn; without one it is read again."""

    @property
    def widest(self) -> int:
        """Return the tokens of the widest verify pass."""
        return max(self.gammas, default=0) + 1

    @property
    def max_width(self) -> int:
        """Return the tokens of the widest pass."""
        return max(self.prefill, self.widest)

    def source_positions(self, trained: int, *, features: bool) -> int:
        """Return the positions of the longest source; of features they are always as many.

        `trained` are those that the encoder was trained for.
        Raises: BuildError for more, or another number than features have.
        """
        if self.max_source and features and self.max_source != trained:
            raise BuildError(
                f"engine.max_source is {self.max_source}, and a source of this model's features "
                f"always has {trained} positions; remove it"
            )
        if self.max_source > trained:
            raise BuildError(
                f"engine.max_source is {self.max_source}, more than the {trained} positions that "
                "the encoder was trained for; lower it in the recipe"
            )
        return self.max_source or (trained if features else min(USUAL_SOURCE, trained))


@dataclass(frozen=True)
class PlanOptions:
    """The builder's settings; what is None or empty is left to the library."""

    optimization_level: int | None = None
    """0 (builds fastest) to 5; not of tensorrt-rtx, whose builder times nothing."""
    workspace_mib: int | None = None
    """The most working memory that kernels may ask for."""
    aux_streams: int | None = None
    """How many streams next to the main one a pass may use; with 0 nothing runs side by side, which
    takes less working memory."""
    hardware_compatible: str = ""
    """`ampere+` or `same-capability`: which other GPUs the plan shall run on. Not of
    tensorrt-rtx."""
    capabilities: tuple[str, ...] = ()
    """Compute capabilities to build for, such as `8.9`; `current` is this GPU's. Only of
    tensorrt-rtx."""
    version_compatible: bool = False
    """Whether later versions of the library shall read the plan. Not of tensorrt-rtx."""
    weight_streaming: bool = False
    """Whether weights may stay in host memory and be copied when they are needed."""
    stripped: bool = False
    """Whether to leave the weights out, to be put back on the device by refitting."""
    candidates: int = 0
    """How many best scores of each row the graph cuts out; the graph is held to it."""

    def settings(self) -> dict[str, str]:
        """Return what was set, for the record."""
        return {
            name: ", ".join(value) if isinstance(value, tuple) else str(value)
            for name, value in asdict(self).items()
            if value != _DEFAULTS[name]
        }


_DEFAULTS = asdict(PlanOptions())


@dataclass(frozen=True)
class TensorRtOptions(PlanOptions):
    """What only the TensorRT backends read."""

    candidates: int = 64
    """Best scores of each row that are cut out on the device for sampling; 0 for none."""
    version: str = ""
    """The TensorRT that will parse the graphs, such as `10.3`: before 10.15 they are written out in
    simpler operators. The one installed when empty."""
    grouped_queries: bool = False
    """Whether the queries that share keys are rows of one head: wide passes then copy keys and
    values once, not once for each of them. Before 10.15 they always are."""
    kv_lengths: tuple[int, ...] = ()
    """Lengths below `max_length`, rising: a pass reads as much of the KV buffers as the least that
    holds its positions. Not before 10.15."""

    @property
    def plan(self) -> PlanOptions:
        """Return the builder's part."""
        return PlanOptions(**{f.name: getattr(self, f.name) for f in fields(PlanOptions)})


@dataclass(frozen=True)
class QualityOptions:
    """What quantized models are measured on, and how far from their checkpoints they may be."""

    calibration: str = ""
    """A text, or JSON lines with `prompt`, by the recipe; the more like real use the better."""
    max_kl: float | None = None
    """Most nats of KL divergence, a mean over positions."""
    min_top1: float | None = None
    """Smallest share of positions where the likeliest token is the checkpoint's."""
    min_acceptance: float = 0.3
    """Smallest share of rounds in which the first token that a head drafts is accepted, on the
    calibration text; a head that reads the wrong layers has about a tenth."""


@dataclass(frozen=True)
class RecipeTables:
    """A recipe as it is written; an unknown key is an error that names the nearest one."""

    target: ModelSource
    draft: ModelSource | None = None
    name: str | None = None
    engine: EngineOptions = EngineOptions()
    quality: QualityOptions = QualityOptions()
    tensorrt: TensorRtOptions = TensorRtOptions()
