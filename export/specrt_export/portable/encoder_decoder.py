"""Traces an encoder-decoder: its decoder, its encoder, and what makes cross keys and values.

The decoder keeps the contract of every decoder, and reads besides the cross keys and values of each
row's source, and how long that is:

    input_ids or features ── encoder ── hidden ── cross ── cross_key.{i}, cross_value.{i} ── decoder
"""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.cache_utils import EncoderDecoderCache
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutput

from specrt.errors import ExportError
from specrt.geometry import Geometry
from specrt_export.checkpoint.task import SPEECH, UNBOUNDED, ModelTask, normalized
from specrt_export.portable.fake_model import StoredWeights, build
from specrt_export.portable.graph import EXACT, PART, SOURCE, TASK, SourceGeometry
from specrt_export.portable.hook import Buffers, Hook, Probe, TracedSource, installed
from specrt_export.portable.trace import (
    BATCH,
    ROWS,
    WIDTH,
    Traced,
    best_ids,
    buffer_dims,
    check_positions,
    contract,
    example_buffers,
    fill,
    graph_of,
    quiet,
    rows_only,
    traced,
)

SOURCE_WIDTH = 7
"""Positions of the example source; no other example size is the same."""

Pairs = list[tuple[Tensor, Tensor]]


def trace_encoder_decoder(folder: Path, task: ModelTask) -> tuple[Traced, ...]:
    """Trace the model that `folder`'s config.json describes: decoder, cross, and encoder if any.

    Raises: ExportError if the model does not fit the graph contract, or does not trace.
    """
    return traced(folder, lambda: _trace(folder, task))


def _trace(folder: Path, task: ModelTask) -> tuple[Traced, ...]:
    mode, hook = FakeTensorMode(), Hook()
    with quiet(), installed(hook) as name:
        with no_init_weights():  # some would copy values into what has none
            model, buffers = build(folder, mode, task.factory)
        model.tie_weights()
        stored = StoredWeights.of(model, mode, buffers)
        buffers |= _replace_biases(model, hook, mode)
        _replace_positions(model, hook)
        for module in model.modules():
            if hasattr(module, "config"):  # an encoder and a decoder may have copies of their own
                module.config._attn_implementation = name
        with mode:
            geometry, source = measure(model, hook, task)
        hook.check_masks()
        with mode:
            graphs = {"": _decoder(model, hook, geometry, source)}
            graphs["cross"] = _cross(model, hook, geometry, source)
            if task.encodes:
                graphs["encoder"] = _encoder(model, hook, source)
    kind = str(model.config.model_type)
    exact = sorted(getattr(model, "_keep_in_fp32_modules", None) or ())
    parts = []
    for part, (graph, inputs, outputs) in graphs.items():
        fill(graph, stored.names, buffers)
        facts = {TASK: task.name, SOURCE: json.dumps(source.to_json())}
        facts |= stored.facts(graph) | ({PART: part} if part else {})
        facts |= {EXACT: json.dumps(exact)} if exact else {}
        one = Traced(graph, geometry, kind, inputs, outputs, facts, stored.optional)
        parts.append(one)
    return tuple(parts)


class RelativeBias:
    """The bias of a module for relative positions, at the positions of each row.

    A table says which bucket a distance is in, so that no graph has a logarithm:

        buckets [D] ── Gather(weight [buckets, H]) ── [D, H] ── Gather(distance) ── [B, H, S, M]
    """

    def __init__(self, hook: Hook, module: Any) -> None:
        self.hook = hook
        self.module = module
        self.reach = int(module.relative_attention_max_distance)

    def __call__(self, query_length: Any, key_length: Any, *_: Any, **__: Any) -> Tensor:
        """Return the bias [B, H, S, M], or [1, H, E, E] of an encoder."""
        weight = self.module.relative_attention_bias(self.module.distance_buckets)
        key, positions = torch.arange(key_length), self.hook.positions
        if positions is None:
            far = (key - key.unsqueeze(1)).clamp(-self.reach, self.reach) + self.reach
            bias: Tensor = torch.nn.functional.embedding(far, weight).permute(2, 0, 1).unsqueeze(0)
        else:
            far = (positions.unsqueeze(-1) - key).clamp(0, self.reach)
            bias = torch.nn.functional.embedding(far, weight).permute(0, 3, 1, 2)
        self.hook.biases.append(bias)
        return bias


class _Identity(torch.nn.Module):
    def forward(self, buckets: Tensor) -> Tensor:
        return buckets.unsqueeze(-1)


def bucket_table(module: Any) -> Tensor:
    """Return the bucket of each distance, of a decoder from 0 on, of an encoder from -reach on.

    Raises: ExportError for a module whose buckets go on beyond its greatest distance, or whose
    bias is not one of each query and key.
    """
    if not {"device", "past_seen_tokens"} <= signature(module.compute_bias).parameters.keys():
        raise ExportError(
            f"{type(module).__name__} computes its relative bias in a way of its own, not for each "
            "query and key; this model does not export"
        )
    reach, weight = int(module.relative_attention_max_distance), module.relative_attention_bias
    most, cpu = 4 * reach, torch.device("cpu")
    module.relative_attention_bias = _Identity()
    try:
        ends = 1 if module.is_decoder else 2
        found = module.compute_bias(1, ends * most + 1, device=cpu, past_seen_tokens=most)
    finally:
        module.relative_attention_bias = weight
    buckets = found.reshape(-1)
    if module.is_decoder:
        buckets = buckets.flip(0)
        table, beyond = buckets[: reach + 1], [buckets[reach:]]
    else:
        table = buckets[most - reach : most + reach + 1]
        beyond = [buckets[: most - reach + 1], buckets[most + reach :]]
    if any((part != part[0]).any() for part in beyond):
        raise ExportError(
            f"{type(module).__name__} tells distances apart beyond {reach}, its "
            "relative_attention_max_distance; this model does not export"
        )
    return cast(Tensor, table.to(torch.int64))


def _replace_biases(model: Any, hook: Hook, mode: FakeTensorMode) -> dict[str, Tensor]:
    """Let modules compute their relative bias row by row; return the tables that they read."""
    tables = {}
    for path, module in model.named_modules():
        if not hasattr(module, "relative_attention_bias"):
            continue
        table = bucket_table(module)
        module.register_buffer("distance_buckets", mode.from_tensor(table), persistent=False)
        module.compute_bias = RelativeBias(hook, module)
        tables[f"{path}.distance_buckets"] = table
    return tables


def _replace_positions(model: Any, hook: Hook) -> None:
    """Let a decoder look up the position of each token of each row in its table.

    So does an encoder that else would number the tokens of a source by what they are not, padding.
    """
    replaced = []
    if not any(map(_from_padding, _tables(model.get_encoder()))):
        check_positions(model)
    for part in (model.get_encoder(), model.get_decoder()):
        for module in _tables(part):
            is_table, numbers = isinstance(module, torch.nn.Embedding), _from_padding(module)
            if part is model.get_decoder() and not is_table and not numbers:
                raise ExportError(
                    f"{type(module).__name__} computes positions otherwise than by a table; this "
                    "model does not export"
                )
            if numbers or part is model.get_decoder():
                module.forward = _positions(module, hook)
                replaced.append(module)
    check_positions(model, replaced)


def _tables(part: Any) -> list[Any]:
    """Return the modules of an encoder or a decoder that look positions up."""
    named = part.named_modules() if part is not None else ()
    return [module for name, module in named if name.rpartition(".")[2] == "embed_positions"]


def _from_padding(module: Any) -> bool:
    """Tell whether a module has a sinusoidal table, read from after the padding token's row on."""
    table = getattr(module, "weights", None)
    return isinstance(table, Tensor) and isinstance(module.padding_idx, int)


def _first_row(module: Any) -> int:
    """Return the row of a table that position 0 is in."""
    return int(module.padding_idx) + 1 if _from_padding(module) else getattr(module, "offset", 0)


def _positions(module: Any, hook: Hook) -> Callable[..., Tensor]:
    def looked_up(tokens: Tensor, *_: Any, **__: Any) -> Tensor:
        positions = hook.positions
        if positions is None:  # in an encoder, whose rows all begin at 0
            positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        table = module.weights if _from_padding(module) else module.weight
        rows: Tensor = torch.nn.functional.embedding(positions + _first_row(module), table)
        return rows

    return looked_up


def table_size(part: Any) -> int:
    """Return how many positions an encoder or a decoder has a table for."""
    for module in _tables(part):
        table = module.weights if _from_padding(module) else module.weight
        return int(table.shape[0]) - _first_row(module)
    return UNBOUNDED


class _Cache(EncoderDecoderCache):
    """What transformers asks of the caches of a decoder and of its source."""

    def __init__(self, own: Any, cross: Any, updated: dict[int, bool]) -> None:
        self.self_attention_cache = own
        self.cross_attention_cache = cross
        self.is_updated = updated

    def get_query_offset(self, *_: Any) -> int:
        return 0


def conditioned_cache(own: Any, cross: Pairs) -> _Cache:
    """Return a cache whose cross keys and values are there."""
    layers = [SimpleNamespace(keys=key, values=value) for key, value in cross]
    updated = dict.fromkeys(range(len(layers)), True)
    return _Cache(own, SimpleNamespace(layers=layers), updated)


def measure(model: Any, hook: Hook, task: ModelTask) -> tuple[Geometry, SourceGeometry]:
    """Run the decoder once on fake tensors and read off the geometry it really has.

    Raises: ExportError if its layers do not all keep keys and values of one shape.
    """
    sizes, config, speech = normalized(model.config), model.config, task.name == SPEECH
    if speech and not hasattr(config, "num_mel_bins"):
        raise ExportError(
            f"{config.model_type} reads speech otherwise than as log-mel features; expected "
            "num_mel_bins in its config.json. Export a Whisper model"
        )
    layers, width = int(sizes.num_layers), int(sizes.hidden_size)
    probe, cross = Probe(layers, WIDTH), Probe(layers, SOURCE_WIDTH)
    positions = torch.arange(WIDTH).unsqueeze(0)
    hook.begin(positions, TracedSource(None, cross.keys))
    output = _run(model, torch.zeros_like(positions), torch.zeros(1, SOURCE_WIDTH, width),
                  _Cache(probe, cross, {}))  # fmt: skip
    memories = probe.memories(hook, layers, config.model_type)
    shapes = {tuple(one.shape) for pair in cross.pairs.values() for one in pair}
    if sorted(cross.pairs) != list(range(layers)) or len(shapes) != 1:
        raise ExportError(
            f"{config.model_type} attends to its source in layers {sorted(cross.pairs)} of "
            f"{layers}, with keys and values of shapes {sorted(shapes)}; the portable graph needs "
            "one shape in all layers, through transformers' attention interface"
        )
    _, heads, _, cross_dim = shapes.pop()
    encoder, decoder = model.get_encoder(), model.get_decoder()
    source = SourceGeometry(
        max_source=table_size(encoder),
        width=width,
        heads=heads,
        head_dim=cross_dim,
        vocab_size=0 if speech else len(encoder.get_input_embeddings().weight),
        features=int(config.num_mel_bins) if speech else 0,
        frames=_frames(encoder) if speech else 0,
    )
    vocabulary = int(output.logits.shape[-1])
    geometry = Geometry(hook.heads, vocabulary, table_size(decoder), layers, memories)
    return geometry, source


def _frames(encoder: Any) -> int:
    """Return how many frames an encoder of speech reads, always."""
    strides = [m.stride[0] for m in encoder.modules() if isinstance(m, torch.nn.Conv1d)]
    return int(np.prod(strides)) * table_size(encoder)


def _run(model: Any, tokens: Tensor, hidden: Tensor, cache: _Cache) -> Any:
    return model(
        decoder_input_ids=tokens,
        encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
        past_key_values=cache,
        use_cache=True,
    )


class ConditionedDecoder(torch.nn.Module):
    """The graph contract of a decoder that attends to a source as well."""

    def __init__(self, model: Any, hook: Hook) -> None:
        super().__init__()
        self.model = model
        self.hook = hook

    def forward(
        self, input_ids: Tensor, source_length: Tensor, start: Tensor, rows: Tensor,
        cross: Pairs, buffers: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Run the decoder at positions start .. start + S.

        Shapes: input_ids [B, S], source_length [B], start [B], rows [R], cross pairs [B, H, E, D],
        buffers [B, heads, M, width]; returns logits [B, R, V], their argmax [B, R] (-1 for a row
        with a NaN), and the buffers as written.
        """
        positions = start.unsqueeze(1) + torch.arange(input_ids.shape[1])
        cache, keys = Buffers(buffers, start), [key for key, _ in cross]
        self.hook.begin(positions, TracedSource(source_length, keys))
        # Of the states that cross keys were made of, a model reads only how many they are.
        hidden = torch.zeros(input_ids.shape[0], keys[0].shape[2], 1)
        with rows_only(self.model, rows):
            logits = _run(self.model, input_ids, hidden, conditioned_cache(cache, cross)).logits
        return logits, best_ids(self.model, logits, False), cache.written


class CrossProjections(torch.nn.Module):
    """What turns the hidden states of a source into the cross keys and values of each layer."""

    def __init__(self, model: Any, hook: Hook) -> None:
        super().__init__()
        self.model = model
        self.hook = hook

    def forward(self, hidden: Tensor) -> Pairs:
        """Return a pair [B, H, E, D] of each layer, of hidden states [B, E, W]."""
        tokens = torch.zeros(hidden.shape[0], 1, dtype=torch.int64)
        probe, cross = Probe(1, 1), Probe(1, 1)
        self.hook.begin(tokens, TracedSource(None, cross.keys))
        _run(self.model, tokens, hidden, _Cache(probe, cross, {}))
        return [cross.pairs[layer] for layer in sorted(cross.pairs)]


class TextEncoder(torch.nn.Module):
    """The encoder of token ids."""

    def __init__(self, model: Any, hook: Hook) -> None:
        super().__init__()
        self.model = model
        self.hook = hook

    def forward(self, input_ids: Tensor, length: Tensor) -> Any:
        """Return the hidden states [B, E, W] of sources [B, E], padded beyond `length` [B]."""
        self.hook.begin(None, TracedSource(length))
        return self.model.get_encoder()(input_ids=input_ids).last_hidden_state


class SpeechEncoder(torch.nn.Module):
    """The encoder of features."""

    def __init__(self, model: Any, hook: Hook) -> None:
        super().__init__()
        self.model = model
        self.hook = hook

    def forward(self, input_features: Tensor) -> Any:
        """Return the hidden states [B, E, W] of features [B, C, F]."""
        self.hook.begin(None, TracedSource(None))
        return self.model.get_encoder()(input_features).last_hidden_state


_Graph = tuple[Any, tuple[str, ...], tuple[str, ...]]


def cross_names(layers: int) -> tuple[str, ...]:
    """Return the names of cross keys and values."""
    return tuple(f"cross_{kind}.{layer}" for layer in range(layers) for kind in ("key", "value"))


def _decoder(model: Any, hook: Hook, geometry: Geometry, source: SourceGeometry) -> _Graph:
    batch, width, length, rows, reach = (torch.export.Dim(name) for name in "BSMRE")
    other = (BATCH, source.heads, SOURCE_WIDTH, source.head_dim)
    count = range(geometry.layers)
    inputs = (
        torch.zeros(BATCH, WIDTH, dtype=torch.int64),
        torch.ones(BATCH, dtype=torch.int64),
        torch.zeros(BATCH, dtype=torch.int64),
        torch.zeros(ROWS, dtype=torch.int64),
        [(torch.zeros(other), torch.zeros(other)) for _ in count],
        example_buffers(geometry),
    )
    cross = {0: batch, 2: reach}
    shapes = (
        {0: batch, 1: width}, {0: batch}, {0: batch}, {0: rows},
        [(cross, cross) for _ in count], buffer_dims(geometry, batch, length),
    )  # fmt: skip
    graph = graph_of(ConditionedDecoder(model, hook).eval(), inputs, shapes)
    (tokens, *names), outputs = contract(geometry, reads=cross_names(geometry.layers))
    return graph, (tokens, "source_length", *names), outputs


def _cross(model: Any, hook: Hook, geometry: Geometry, source: SourceGeometry) -> _Graph:
    batch, reach = (torch.export.Dim(name) for name in "BE")
    inputs = (torch.zeros(BATCH, SOURCE_WIDTH, source.width),)
    graph = graph_of(CrossProjections(model, hook).eval(), inputs, ({0: batch, 1: reach},))
    return graph, ("hidden",), cross_names(geometry.layers)


def _encoder(model: Any, hook: Hook, source: SourceGeometry) -> _Graph:
    batch, reach = (torch.export.Dim(name) for name in "BE")
    if source.features:
        features = (torch.zeros(BATCH, source.features, source.frames),)
        graph = graph_of(SpeechEncoder(model, hook).eval(), features, ({0: batch},))
        return graph, ("input_features",), ("hidden",)
    tokens = torch.zeros(BATCH, SOURCE_WIDTH, dtype=torch.int64)
    lengths = torch.ones(BATCH, dtype=torch.int64)
    graph = graph_of(
        TextEncoder(model, hook).eval(), (tokens, lengths), ({0: batch, 1: reach}, {0: batch})
    )
    return graph, ("input_ids", "length"), ("hidden",)
