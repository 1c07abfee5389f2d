"""What a recipe will take: a download, engines, KV buffers, working memory, the bytes of a step.

Run as a module it says which of some recipes can be built without a download; `make engines` asks.
Only configs are read, and where weights are here, whether a head of its own is among them. Sizes
follow from the numbers in a config.json, and what the engines of a backend make of them: joined
projections, blocks with scales, tables of angles, whole pages. An encoder-decoder has three
engines, and cross keys and values of each row's source.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import click

from specrt.engine.ort.kernels import missing_kernels
from specrt.errors import CheckpointError, RecipeError, SpecrtError, first_line
from specrt.geometry import ATTENTION, LENT, Geometry
from specrt.held_file import read_file
from specrt.system.memory import size
from specrt_export.checkpoint.checkpoint import Checkpoint, text_config
from specrt_export.checkpoint.gguf.configuration import configuration
from specrt_export.checkpoint.gguf.reader import SUFFIX, GgufFile, read_gguf
from specrt_export.checkpoint.hub_cache import cached_snapshot, has_weights
from specrt_export.checkpoint.prequantized.quantization_config import Scheme, read_scheme
from specrt_export.checkpoint.safetensors_file import WeightBytes, same_floats
from specrt_export.estimate.encoder_decoder_shape import (
    CROSS,
    ENCODER,
    FAMILIES,
    EncoderDecoderShape,
)
from specrt_export.estimate.model_shape import (
    DECODER,
    EngineShape,
    Matrix,
    ModelShape,
)
from specrt_export.precision import BITS, SCALED, fitting_block
from specrt_export.recipe.model_options import ModelOptions
from specrt_export.recipe.recipe import Recipe, read_recipe, settle, with_own_head
from specrt_export.recipe.recipe_tables import EngineOptions, ModelSource

SHAPES = "shape.json"
"""Next to a recipe: the sizes of its models, where no config.json of theirs is on the machine."""

PAGE = 4096
"""Each weight of an engine begins on a page of its own."""

TILE = 16
"""Outputs of a weight that the CPU kernels store together; see `lower/tiles.py`."""

INLINE = 1024
"""Bytes up to which a weight lies in the graph instead of next to it."""

PROCESS_BYTES = 90 << 20
"""Python, ONNX Runtime, the tokenizer and the sessions of a pair without weights: codelet's process
on an x86-64 machine, less its weights, filled KV buffers and activations."""

KERNEL_QUERIES = 16 * 32
"""Queries whose scores the CPU kernels keep at once: 32 in each thread, of up to 16."""

_PLAIN = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class ModelEstimate:
    """What one model of a recipe will take, in bytes."""

    role: str
    checkpoint: str
    model_type: str
    precision: str
    parameters: int
    engine_bytes: int
    kv_bytes: int
    """KV buffers, cross keys and values among them."""
    whole_kv_bytes: int
    """The same if all attention kept every position, not rings of those that it sees."""
    ring_kv_bytes: int
    """The same if it kept rings, where its backend does not."""
    keeper: str
    """Backend, and whether kernels are missing: what keeps rings, or does not."""
    seen_bytes: int
    """What a step reads of full KV buffers."""
    working_bytes: int
    """Activations of the widest prefill pass, or of an encoder's, and of the logits that are read.
    """
    step_bytes: int
    """What a step reads of the weights."""
    pass_bytes: dict[int, int]
    """What passes of some tokens read of a mixture's, by tokens; none of another model."""
    parts: dict[str, int]
    """Of an encoder-decoder, the bytes of its `encoder`, of `cross`, which makes cross keys and
    values, and of its decoder, `engine`; else the last alone."""
    cross_bytes: int = 0
    """Cross keys and values of all rows."""
    kind: str = ""
    """The format of a head; empty for a model."""
    encoder_of: str = ""
    """Whose hidden states a draft reads: `target`, or `target or own` where only the weights tell
    whether both encoders are the same."""

    @property
    def full_step_bytes(self) -> int:
        """Return what a step reads once all positions are filled."""
        return self.step_bytes + self.seen_bytes

    def lines(self) -> Iterator[str]:
        """Yield the figures in words: one line, and one on what may be shared."""
        engines = f"engine {size(self.engine_bytes)}"
        if self.cross_bytes:
            engines = ", ".join(f"{_PARTS[part]} {size(n)}" for part, n in self.parts.items())
        cross = f", cross keys and values {size(self.cross_bytes)}" if self.cross_bytes else ""
        rings = ""
        if self.whole_kv_bytes > self.kv_bytes:
            rings = f" ({size(self.whole_kv_bytes)} without rings)"
        elif self.ring_kv_bytes < self.kv_bytes:
            rings = f" ({size(self.ring_kv_bytes)} in rings, which {self.keeper} does not keep)"
        yield (
            f"  {self.role:6} {self.checkpoint}{self.kind and f' ({self.kind})'}: "
            f"{_count(self.parameters)} parameters, {self.precision}, {engines}, KV buffers "
            f"{size(self.kv_bytes - self.cross_bytes)}{rings}{cross}"
        )
        if self.encoder_of == "target":
            yield "         reads the target's encoder"
        elif self.encoder_of:
            less = size(self.parts[ENCODER])
            yield f"         {less} less if its encoder is the target's, bit for bit"


@dataclass(frozen=True)
class RecipeEstimate:
    """What a recipe will take. Weights and KV buffers are sums; working memory is a bound."""

    name: str
    backend: str
    max_length: int
    batch: int
    models: tuple[ModelEstimate, ...]
    process_bytes: int
    max_source: int = 0
    """Positions of the longest source; 0 where the models read none."""
    download_bytes: int = 0
    """About what a build fetches first; 0 where all weights are here."""

    @property
    def engine_bytes(self) -> int:
        """Return the bytes of all engines."""
        return sum(m.engine_bytes for m in self.models)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of all KV buffers."""
        return sum(m.kv_bytes for m in self.models)

    @property
    def working_bytes(self) -> int:
        """Return the bytes of everything else that is in memory."""
        return self.process_bytes + sum(m.working_bytes for m in self.models)

    @property
    def total_bytes(self) -> int:
        """Return the memory that running the bundle takes with full KV buffers."""
        return self.engine_bytes + self.kv_bytes + self.working_bytes

    def tokens_per_second(self, bandwidth: float, *, full: bool = False) -> float:
        """Return what memory of a bandwidth (bytes a second) allows in plain decoding, one row."""
        target = self.models[0]
        return bandwidth / (target.full_step_bytes if full else target.step_bytes)

    def to_json(self) -> dict[str, Any]:
        """Return every figure by name, the sums too."""
        sums = ("engine_bytes", "kv_bytes", "working_bytes", "total_bytes")
        models = [{**asdict(m), "full_step_bytes": m.full_step_bytes} for m in self.models]
        return {**asdict(self), "models": models, **{name: getattr(self, name) for name in sums}}

    def lines(self) -> Iterator[str]:
        """Yield the figures in words, a line for each model and one for each sum."""
        source = f"sources up to {self.max_source}, " if self.max_source else ""
        yield (
            f"{self.name} for {self.backend}: {self.max_length} positions, {source}batch "
            f"{self.batch}; from configs alone"
        )
        for m in self.models:
            yield from m.lines()
        if self.download_bytes:
            yield f"download: about {size(self.download_bytes)} before it is built"
        yield (
            f"memory: {size(self.total_bytes)}: engines {size(self.engine_bytes)}, KV buffers "
            f"{size(self.kv_bytes)}, working memory up to {size(self.working_bytes)}"
        )
        target, *draft = self.models
        yield (
            f"a step of the target reads {size(target.step_bytes)}, and "
            f"{size(target.full_step_bytes)} with all positions filled"
        )
        if target.pass_bytes:
            widths = ", ".join(str(w) for w in target.pass_bytes)
            read = ", ".join(size(n) for n in target.pass_bytes.values())
            yield f"a pass of {widths} tokens reads {read}, if tokens choose experts independently"
        for m in draft:
            share = 100 * m.step_bytes / target.step_bytes
            yield f"a drafted token reads {size(m.step_bytes)}, {share:.0f} % of a step"


WIDTHS = (2, 4, 8)
"""Tokens of passes whose bytes of a mixture are told."""
_PARTS = {ENCODER: "encoder", CROSS: "cross projections", DECODER: "decoder"}


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 10**8 else f"{parameters / 1e6:.1f} M"


def estimate(recipe: Recipe) -> RecipeEstimate:
    """Work out what a recipe takes, from the configs of its models.

    Raises: CheckpointError, RecipeError.
    """
    there = {role: find_gguf(model) or _scheme(model) for role, model in recipe.models.items()}
    if there["target"] is None:
        config, where = find_config(recipe.models["target"])
        target = Checkpoint(where.parent, text_config(config), _weights_at(where))
        recipe = with_own_head(recipe, target)
    recipe = settle(recipe, {role: one for role, one in there.items() if one is not None})
    models = recipe.models
    shapes = {role: _as_stored(*find_config(m), m.source.kind) for role, m in models.items()}
    whole, head = shapes["target"], shapes.get("draft")
    if isinstance(head, ModelShape) and head.head and isinstance(whole, ModelShape):
        shapes["target"] = whole.leaving(head)
    sources = {role: _source_positions(models[role], shape) for role, shape in shapes.items()}
    places = {(source.checkpoint, source.revision) for source in recipe.sources.values()}
    found = []
    for role, model in models.items():
        encoder_of = _encoder_of(role, shapes, same=len(places) == 1)
        found.append(_model(model, shapes[role], encoder_of, there.get(role), sources[role]))
    return RecipeEstimate(
        name=recipe.name,
        backend=recipe.engine.backend,
        max_length=recipe.engine.max_length,
        batch=recipe.engine.batch,
        models=tuple(found),
        process_bytes=PROCESS_BYTES if any(m.spec.on_cpu for m in models.values()) else 0,
        max_source=sources["target"],
        download_bytes=_download(models, shapes),
    )


def _download(
    models: Mapping[str, ModelOptions], shapes: Mapping[str, ModelShape | EncoderDecoderShape]
) -> int:
    """Return about what is fetched before a build: what is stored of models that are not here."""
    missing = {
        (model.source.checkpoint, model.source.revision): _stored(shapes[role])
        for role, model in tuple(models.items())[::-1]  # the target counts its own head
        if not weights_are_here(model)
    }
    return _STORED_BYTES * sum(missing.values())


def _stored(shape: ModelShape | EncoderDecoderShape) -> int:
    """Return the weights of a checkpoint; a head's are fewer than its engine has."""
    return shape.parameters - (shape.borrowed if isinstance(shape, ModelShape) else 0)


def shape_of(
    config: dict[str, Any], where: Path, head: str = ""
) -> ModelShape | EncoderDecoderShape:
    """Return the sizes of a model, read off its config, or of the `head` next to it.

    Raises: CheckpointError.
    """
    if config.get("model_type") in FAMILIES:
        return EncoderDecoderShape.from_config(config, where)
    return ModelShape.from_config(config, where, others=tuple(FAMILIES), head=head)


def _as_stored(
    config: dict[str, Any], where: Path, head: str = ""
) -> ModelShape | EncoderDecoderShape:
    """Return the sizes of a model; a head of its own counts whatever its config says.

    Raises: CheckpointError.
    """
    shape = shape_of(config, where, head)
    weights = dict(_weights_at(where)) if shape.tied else {}
    last = weights.pop("lm_head.weight", None)
    tables = [one for one in weights.values() if last is not None and one.shape == last.shape]
    is_own = last is not None and tables and not any(same_floats(last, one) for one in tables)
    return replace(shape, tied=False) if is_own else shape


def _weights_at(where: Path) -> Mapping[str, WeightBytes]:
    """Return the weights next to a config.json, none where they are not here or not whole."""
    with suppress(CheckpointError):  # the build tells
        return Checkpoint.open(where.parent).weights if where.name == "config.json" else {}
    return {}


def _source_positions(model: ModelOptions, shape: ModelShape | EncoderDecoderShape) -> int:
    """Return the positions of a model's longest source, 0 where it reads none.

    Raises: BuildError, RecipeError.
    """
    name = model.source.checkpoint
    if isinstance(shape, ModelShape):
        model.require_kind("decoder", name, RecipeError)
        return 0
    model.require_kind("speech" if shape.features else "text2text", name, RecipeError)
    return model.engine.source_positions(shape.trained_source, features=shape.features > 0)


def _scheme(model: ModelOptions) -> Scheme | None:
    """Return how a model's config.json says that its weights are quantized."""
    config, where = find_config(model)
    return read_scheme(where, text_config(config), weight_only=model.source.weight_only)


def _model(
    model: ModelOptions, shape: ModelShape | EncoderDecoderShape, encoder_of: str,
    stored: GgufFile | Scheme | None, max_source: int,
) -> ModelEstimate:  # fmt: skip
    g, options, precision = shape.geometry, model.engine, model.precision
    if options.max_length > g.max_positions:
        raise RecipeError(
            f"{model.recipe}: engine.max_length is {options.max_length}; {model.source.checkpoint} "
            f"was trained for {g.max_positions} positions, so expected at most these"
        )
    model.check_layers(g, mixes=shape.mixes)
    weights = _Weights(model, shape, encodes=encoder_of != "target")
    if isinstance(stored, Scheme):
        weights = replace(weights, model=_as_if(model, stored))
    kept = stored if isinstance(stored, GgufFile) and precision.keeps else None
    bound = model.bound
    most = bound.max_bytes if bound is not None else None

    def bounded(count: int) -> int:
        return count if most is None else min(count, most)

    parts = {DECODER: _kept(kept, step=False)} if kept else weights.parts()
    engine_bytes, cross_bytes = bounded(sum(parts.values())), 0
    is_head = isinstance(shape, ModelShape) and shape.head != ""
    lacks = model.spec.on_cpu and missing_kernels() != ""
    rings = model.spec.on_cpu and not is_head and not lacks

    def kv_bytes(geometry: Geometry, ring_width: int, rings: bool = rings) -> int:
        sizes = options.batch, options.max_length, weights.float_bytes
        return geometry.kv_bytes(*sizes, ring_width * rings) + cross_bytes + features

    left = shape.features if isinstance(shape, ModelShape) else 0
    features = 4 * options.batch * options.max_length * left

    if isinstance(shape, EncoderDecoderShape):
        cross_bytes = g.kv_bytes(options.batch, max_source, weights.float_bytes)
    return ModelEstimate(
        role=model.role,
        checkpoint=model.source.checkpoint,
        model_type=shape.model_type,
        precision="up to int8" if precision.auto else precision.layers,
        parameters=weights.parameters,
        engine_bytes=engine_bytes,
        kv_bytes=kv_bytes(g, options.max_width),
        whole_kv_bytes=kv_bytes(_unwindowed(g), options.max_width),
        ring_kv_bytes=kv_bytes(g, options.max_width, not is_head),
        keeper=f"{model.backend}{' without kernels' * lacks}",
        seen_bytes=kv_bytes(g, 1),
        working_bytes=_working(options, shape, max_source, model.spec.on_cpu),
        step_bytes=_kept(kept, step=True) if kept else bounded(weights.step()),
        pass_bytes={w: bounded(weights.step(w)) for w in WIDTHS} if shape.mixes else {},
        parts=parts if len(parts) > 1 else {DECODER: engine_bytes},
        cross_bytes=cross_bytes,
        kind=shape.head if isinstance(shape, ModelShape) else "",
        encoder_of=encoder_of,
    )


def _unwindowed(geometry: Geometry) -> Geometry:
    """Return the geometry of a model whose attention sees all positions in every layer."""
    memories = [
        replace(one, window=0) if one.kind == ATTENTION else one for one in geometry.memories
    ]
    return replace(geometry, memories=tuple(memories))


def _encoder_of(
    role: str, shapes: Mapping[str, ModelShape | EncoderDecoderShape], *, same: bool
) -> str:
    """Tell whose encoder a draft reads; see `ModelEstimate.encoder_of`.

    `same` is whether one checkpoint is both models.
    """
    shape, target = shapes[role], shapes["target"]
    if role == "target" or not isinstance(shape, EncoderDecoderShape):
        return ""
    if same or not shape.encodes:
        return "target"
    if not isinstance(target, EncoderDecoderShape) or shape.model_type != target.model_type:
        return ""
    return "target or own" if shape.encoder == target.encoder else ""


def _as_if(model: ModelOptions, scheme: Scheme) -> ModelOptions:
    """Return options that ask for what a quantized checkpoint has: tables are in floats there."""
    source = replace(
        model.source, precision=scheme.precision, block=scheme.block, embedding="bf16", head="bf16"
    )
    return replace(model, source=source)


@dataclass(frozen=True)
class _Weights:
    """The weights of one model as its backend stores them."""

    model: ModelOptions
    shape: ModelShape | EncoderDecoderShape
    encodes: bool = True
    """Whether an encoder-decoder has an encoder of its own."""

    @property
    def parameters(self) -> int:
        """Return the weights of the model, less an encoder that it does not have."""
        if isinstance(self.shape, EncoderDecoderShape):
            return self.shape.parameters_of(self.encodes and self.shape.encodes)
        return self.shape.parameters

    @property
    def float_bytes(self) -> int:
        """Return the bytes of a number that is not of a matrix: a scale, a norm, a key."""
        full = self.model.spec.on_cpu or self.model.precision.layers == "fp32"
        return 4 if full else 2

    @property
    def _is_kept(self) -> bool:
        """Tell whether halves stay so that nobody asked for: a CPU widens them in its registers."""
        return self.model.spec.on_cpu and self.shape.half

    def parts(self) -> dict[str, int]:
        """Return the bytes of each file that holds weights."""
        return {name: self._file(engine) for name, engine in self._engines().items()}

    def _engines(self) -> dict[str, EngineShape]:
        length = self.model.engine.max_length
        if isinstance(self.shape, EncoderDecoderShape):
            return self.shape.engines(length, encodes=self.encodes)
        return self.shape.engines(length)

    def _file(self, engine: EngineShape) -> int:
        stored = [m for m in engine.matrices if not self._repeats(m, engine.matrices)]
        sizes = [size for matrix in stored for size in self._tensors(matrix)]
        sizes += [self.float_bytes * items for items in (*engine.vectors, *engine.tables)]
        whole = sum(-(-size // PAGE) * PAGE for size in sizes if size > INLINE)
        return int(whole * self._growth())

    def step(self, width: int = 1) -> int:
        """Return the bytes of the weights that a pass reads: of the embedding only rows."""
        decoder = self._engines()[DECODER]
        read = [m for m in decoder.matrices if m.role != "embedding"]
        sizes = [m.read(width) * size for m in read for size in self._tensors(m)]
        return int(sum(sizes)) + self.float_bytes * sum(decoder.vectors)

    def _repeats(self, head: Matrix, matrices: Sequence[Matrix]) -> bool:
        """Tell whether a matrix is the head, and one table with the embedding as it is tied to."""
        if head.role != "head" or not self.shape.tied:
            return False
        tables = [list(self._tensors(m)) for m in matrices if m.role == "embedding"]
        return list(self._tensors(head)) in tables

    def _tensors(self, matrix: Matrix) -> Iterator[int]:
        """Yield the bytes of a matrix and of its scales."""
        precision = self.model.precision
        name = "int8" if matrix.role in precision.auto else getattr(precision, matrix.role)
        rows = matrix.rows
        if self.model.spec.on_cpu:  # whose kernels read whole tiles
            rows = -(-rows // TILE) * TILE
        items = rows * matrix.columns
        if name not in SCALED:
            yield (2 if self._is_kept else _PLAIN[name]) * items
            return
        block = precision.block_of(name, matrix.columns)
        block = fitting_block(matrix.columns, block)
        if not block:  # no block divides it, and it stays as it was
            yield (2 if self._is_kept else self.float_bytes) * items
            return
        codes = items * BITS[name] // 8
        # On a CPU in fp16, which holds them all but where weights are very small or large.
        scale = 2.0 if self.model.spec.on_cpu else self.float_bytes
        scale += 0.5 if name == "int4" and not precision.symmetric else 0
        scales = int(scale * (items // block))
        yield from (codes + scales,) if self.model.spec.on_cpu else (codes, scales)

    def _growth(self) -> float:
        """Return how much larger than its graph an engine may be."""
        floats = self.model.precision.layers in _PLAIN
        return self.model.spec.float_factor if floats else 1.0


_TOKENS, _BY_LAYER = "token_embd.weight", "per_layer_token_embd.weight"


def _kept(file: GgufFile, *, step: bool) -> int:
    """Return the bytes of a file's weights in an engine, or those that a step reads of them."""
    tied = "output.weight" not in file.tensors
    total = 0
    for tensor in file.tensors.values():
        form, items = tensor.format, prod(tensor.shape)
        if step and (tensor.name == _BY_LAYER or (tensor.name == _TOKENS and not tied)):
            continue  # of which it reads a row
        if form.precision:
            # A block of several scales has products of them, which fp16 does not hold.
            scale = 2 if form.block == form.items else 4
            scale *= 1 + form.minimums
            total += items * BITS[form.precision] // 8 + scale * (items // form.block)
        else:
            total += items * (4 if len(tensor.shape) == 1 else form.bytes)
    return total


def find_gguf(model: ModelOptions) -> GgufFile | None:
    """Return the GGUF file that is named as a checkpoint, if it is one and there.

    Raises: CheckpointError.
    """
    file = model.local
    return read_gguf(file) if file.suffix == SUFFIX and file.is_file() else None


def _working(
    options: EngineOptions, shape: ModelShape | EncoderDecoderShape, max_source: int, on_cpu: bool
) -> int:
    """Return the most that a prefill pass and the logits of a verify pass keep at once.

    Scores of one layer and the mask are [heads + 1, prefill, max_length], but for the CPU kernels;
    next to them lie the products of a layer and two residual streams. Of an encoder-decoder those
    of an encoder's pass are more, where a source is long, and the hidden states of each row are
    kept.
    """
    g = shape.geometry
    attending = [own for own in g.memories if own.kind in (ATTENTION, LENT)]
    joined = max(((g.heads + 2 * own.kv_heads) * own.key_width for own in attending), default=0)
    products = 3 * shape.intermediate + joined + 3 * shape.hidden
    queries = options.prefill * (g.heads + 1)
    queries = min(queries, KERNEL_QUERIES) if on_cpu else queries
    scores = queries * max(options.max_length, max_source)
    rows = max(options.gammas, default=0) + 1
    logits = 2 * rows * g.vocab_size * options.batch
    widest, states = options.prefill * products + scores, 0
    if isinstance(shape, EncoderDecoderShape):
        states = options.batch * max_source * shape.width
        widest = max(widest, shape.source_activations(max_source))
    return 4 * (widest + logits + states)


def find_config(model: ModelOptions) -> tuple[dict[str, Any], Path]:
    """Return the config of a model and where it lies: its folder, the hub's cache, `shape.json`.

    Raises: CheckpointError for a file that is damaged or no JSON object; RecipeError where there
        is none.
    """
    gguf = find_gguf(model)
    if gguf is not None:
        return configuration(gguf), gguf.path
    local, name = model.local / "config.json", model.source.checkpoint
    found = local if local.is_file() else cached_file(model.source, "config.json")
    if found is not None:
        return _object(found), found
    shapes = model.recipe.parent / SHAPES
    config = _object(shapes).get(model.role) if shapes.is_file() else None
    if isinstance(config, dict):
        return config, shapes
    raise RecipeError(
        f"{model.recipe}: no config.json of the {model.role} {name} is on this machine; fetch it "
        f"alone with `hf download {name} config.json`, or put its sizes as {model.role!r} into "
        f"{shapes}"
    )


def cached_file(source: ModelSource, name: str) -> Path | None:
    """Return a file of a hub model that was downloaded before; None where there is none."""
    folder = cached_snapshot(source.checkpoint, source.revision)
    return folder / name if folder is not None and (folder / name).is_file() else None


def _object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({first_line(error)}); fetch it again"
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}; expected an object")
    return data


GATED = ("meta-llama/", "google/gemma-3-")
"""How the hub names begin whose owners ask that their terms are accepted first."""


_STORED_BYTES = 2
"""Of a weight on the hub: these checkpoints are stored as bf16."""


def can_build(recipe: Recipe) -> bool:
    """Tell whether a recipe builds without a download: weights are here, and what exports them."""
    exports = find_spec("torch") is not None
    models = recipe.models.values()
    return all(weights_are_here(m) and (bool(m.source.graph) or exports) for m in models)


def weights_are_here(model: ModelOptions) -> bool:
    """Tell whether the weights of a model lie next to the recipe or in the hub's cache."""
    if model.local.is_dir():
        return _is_whole(model.local)
    if model.local.suffix == SUFFIX:
        with suppress(CheckpointError):  # of several parts one may lack
            return bool(read_gguf(model.local).tensors)
        return False
    config = cached_file(model.source, "config.json")
    return config is not None and _is_whole(config.parent)


def _is_whole(folder: Path) -> bool:
    """Tell whether a checkpoint has all its files."""
    there = (folder / "config.json").exists() and (folder / "tokenizer.json").exists()
    return there and has_weights(folder)


def how_to_get(recipe: Recipe) -> str:
    """Return one line on what building a pair would download."""
    missing = [model for model in recipe.models.values() if not weights_are_here(model)]
    if not missing:
        return "the weights are here, what exports them is not"
    names = [model.source.checkpoint for model in missing]
    facts = ["gated"] if any(name.startswith(GATED) for name in names) else []
    with suppress(SpecrtError):  # where their sizes are known
        shapes = {model.role: shape_of(*find_config(model)) for model in missing}
        facts.insert(0, size(_download({m.role: m for m in missing}, shapes)))
    return " and ".join(names) + (f" ({', '.join(facts)})" if facts else "")


def main(paths: Sequence[str]) -> int:
    """Print the recipes that can be built now; on standard error, a line for each of the others.

    One that is broken has a line too, and fails where it is asked for by name.
    """
    others = []
    for path in map(Path, paths):
        try:
            recipe = read_recipe(path)
        except SpecrtError as error:
            click.echo(f"specrt: left out: {error}", err=True)
            continue
        if can_build(recipe):
            click.echo(path)
        else:
            others.append(f"  {path.resolve().parent.name:13} {how_to_get(recipe)}")
    if others:
        gpu = " BACKEND=tensorrt-rtx" if Path(paths[0]).stem == "tensorrt" else ""
        click.echo(
            f"not here yet; `make engines PAIR=NAME{gpu}` downloads what is missing and builds\n"
            "(gated: accept the terms on the hub first, then `hf auth login`):",
            err=True,
        )
        click.echo("\n".join(others), err=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
