"""Traces heads into graphs of their own, each by the contract of its format."""

from __future__ import annotations

import json
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.onnx.ops import symbolic

from specrt.engine.ort.block_engine import BLOCK
from specrt.errors import CheckpointError
from specrt.geometry import LENT, SHARED, Geometry, LayerMemory
from specrt_export.heads.assistant_format import EMBEDDING, Assistant
from specrt_export.heads.assistant_module import AssistantHead, config_of
from specrt_export.heads.dflash_format import (
    CONFIDENCE,
    CONTEXT,
    MARKOV,
    MARKOV_CONFIDENCE,
    PREVIOUS,
    BlockHead,
    block_facts,
)
from specrt_export.heads.dflash_module import BlockDraftHead
from specrt_export.heads.eagle3_format import HIDDEN
from specrt_export.heads.head_checkpoint import HeadCheckpoint
from specrt_export.heads.head_formats import HEAD_FORMATS
from specrt_export.portable.fake_model import StoredWeights, faked, take_buffers, traceable
from specrt_export.portable.graph import TIED
from specrt_export.portable.hook import OPSET, Buffers, Hook, Probe, installed, visible
from specrt_export.portable.trace import (
    BATCH,
    WIDTH,
    Traced,
    best_ids,
    contract,
    export_module,
    fill,
    looked_up,
    quiet,
    traced,
)

CONTEXT_WIDTH = 7
PREVIOUS_WIDTH = 11
"""Of the example context, and of the tokens before others; unlike all other sizes."""


def trace_chain_head(head: HeadCheckpoint, positions: int) -> Traced:
    """Trace a head, for texts of up to so many positions.

    Raises: ExportError if it does not trace.
    """
    return traced(head.checkpoint.folder, lambda: _trace_chain(head, positions))


def trace_block_head(head: BlockHead, positions: int) -> Traced:
    """Trace a block head, for texts of up to so many positions.

    Raises: ExportError if it does not trace.
    """
    return traced(head.checkpoint.folder, lambda: _trace_block(head, positions))


def trace_assistant(head: Assistant, positions: int) -> Traced:
    """Trace an assistant, for texts of up to so many positions.

    Raises: ExportError if it does not trace, CheckpointError if its layers do not fit its target's.
    """
    memories = lent_memories(head)
    return traced(head.checkpoint.folder, lambda: _trace_assistant(head, positions, memories))


def _trace_chain(head: HeadCheckpoint, positions: int) -> Traced:
    mode, hook = FakeTensorMode(), Hook()
    with quiet(), installed(hook) as name:
        with faked(mode):
            model: Any = traceable(HEAD_FORMATS[head.KIND].part("module")(head.config))
        buffers = _buffers(model, head, mode)
        model.config._attn_implementation = name
        with mode:
            geometry = _measured(model, hook, head, positions)
            module = DraftHead(model, hook, head.entries is not None).eval()
            hidden = torch.zeros(BATCH, WIDTH, head.config.width)
            graph = export_module(module, geometry, [(hidden, "S")])
    fill(graph, {n: n for n, _ in model.named_parameters()}, buffers)
    names = contract(geometry, reads=(HIDDEN,), makes=("state",))
    facts = {TIED: json.dumps(dict.fromkeys(_TABLES, _TABLES))}
    return Traced(graph, geometry, head.KIND, *names, facts)


_TABLES = ("embed_tokens.weight", "lm_head.weight")
"""A head that takes the same table of its target for both has one."""


def _measured(model: Any, hook: Hook, head: HeadCheckpoint, positions: int) -> Geometry:
    """Run a head once and read off what its layers remember."""
    probe, order = Probe(head.config.layers, WIDTH), torch.arange(WIDTH).unsqueeze(0)
    hook.begin(order)
    pair = torch.zeros(1, WIDTH, head.config.width)
    model(pair, pair, order, _causal(hook, WIDTH), probe)
    memories = probe.memories(hook, head.config.layers, head.KIND)
    return Geometry(hook.heads, head.config.vocabulary, positions, head.config.layers, memories)


def _causal(hook: Hook, length: Any) -> Tensor | None:
    from transformers.masking_utils import causal_mask_function

    return hook.mask(length, cast(Any, causal_mask_function))


def _trace_block(head: BlockHead, positions: int) -> Traced:
    mode, config = FakeTensorMode(), head.config
    with quiet():
        with faked(mode):
            model: Any = BlockDraftHead(config)
        buffers = _buffers(model, head, mode)
        geometry = _geometry(model, head, positions, config.windows)
        with mode:
            kind = MarkovBlock if config.markov_rank else DraftBlock
            module = kind(model, head.entries is not None).eval()
            read = [(torch.zeros(BATCH, CONTEXT_WIDTH, config.width), "C")]
            if config.markov_rank:
                read.append((torch.zeros(BATCH, PREVIOUS_WIDTH, dtype=torch.int64), "N"))
            graph = export_module(module, geometry, read)
    fill(graph, {n: n for n, _ in model.named_parameters()}, buffers)
    made = {
        CONFIDENCE: config.has_confidence, MARKOV: config.markov_rank,
        MARKOV_CONFIDENCE: config.confidence_reads_markov,
    }  # fmt: skip
    names = contract(
        geometry,
        reads=(CONTEXT, PREVIOUS) if config.markov_rank else (CONTEXT,),
        makes=[name for name, there in made.items() if there],
    )
    facts = {BLOCK: json.dumps(block_facts(config))}
    return Traced(graph, geometry, head.KIND, *names, facts)


def _trace_assistant(head: Assistant, positions: int, memories: tuple[LayerMemory, ...]) -> Traced:
    mode, hook, config = FakeTensorMode(), Hook(), head.config
    with quiet(), installed(hook) as name:
        with faked(mode):
            model = AssistantHead(config)
        buffers = take_buffers(model.assistant, mode)
        if config.order is not None:
            buffers["masked_embedding.token_ordering"] = torch.from_numpy(config.order)
        stored = StoredWeights.of(model.assistant, mode, buffers)
        model.assistant.model.config._attn_implementation = name
        heads = model.assistant.model.config.num_attention_heads
        geometry = Geometry(heads, config.vocabulary, positions, len(memories), memories)
        with mode:
            module = DraftAssistant(model, hook, geometry).eval()
            graph = export_module(
                module, geometry, [(torch.zeros(BATCH, WIDTH, config.width), "S")]
            )
    names = {f"assistant.{own}": name for own, name in stored.names.items()}
    values = {f"assistant.{own}": value for own, value in buffers.items()}
    fill(graph, names | {EMBEDDING: EMBEDDING}, values)
    inputs, outputs = contract(geometry, reads=(HIDDEN,), makes=("state",))
    return Traced(
        graph, geometry, head.KIND, inputs, outputs, stored.facts(graph), stored.optional
    )  # fmt: skip


def lent_memories(head: Assistant) -> tuple[LayerMemory, ...]:
    """Return what an assistant's layers read: the last keys that its target has of each type.

    Raises: CheckpointError where they are of other sizes.
    """
    own, target = (
        config_of(part) for part in (head.config.whole["text_config"], head.config.target)
    )
    owners = target.layer_types[: target.num_hidden_layers - target.num_kv_shared_layers]
    first: dict[str, int] = {}
    memories = []
    for layer, kind in enumerate(own.layer_types):
        if kind in first:
            memories.append(LayerMemory(SHARED, owner=first[kind]))
            continue
        first[kind], owner = layer, len(owners) - 1 - owners[::-1].index(kind)
        sizes = [
            (one.num_key_value_heads, one.head_dim)
            for one in (own.per_layer_config[layer], target.per_layer_config[owner])
        ]
        windows = [one.sliding_window * (kind == "sliding_attention") for one in (own, target)]
        if len({*sizes}) > 1 or len({*windows}) > 1:
            raise CheckpointError(
                f"layer {layer} of {head.checkpoint.origin} reads {sizes[0][0]} heads of "
                f"{sizes[0][1]} within {windows[0]} positions (0 is all), and layer {owner} of its "
                f"target has {sizes[1][0]} of {sizes[1][1]} within {windows[1]}. Is it of this "
                "target?"
            )
        (heads, width), window = sizes[0], windows[0]
        memories.append(LayerMemory(LENT, heads, width, width, window, owner))
    return tuple(memories)


def _buffers(model: Any, head: HeadCheckpoint, mode: FakeTensorMode) -> dict[str, Tensor]:
    """Give a model the ids of its entries; return its buffers' values."""
    none = torch.empty(0, dtype=torch.int64)
    model.register_buffer("entries", none if head.entries is None else looked_up(head.entries))
    return take_buffers(model, mode)


def _geometry(
    model: Any, head: HeadCheckpoint, positions: int, windows: tuple[int, ...]
) -> Geometry:
    sizes = model.config
    return Geometry.uniform(
        layers=head.config.layers,
        heads=sizes.num_attention_heads,
        kv_heads=sizes.num_key_value_heads,
        head_dim=model.layers[0].self_attn.head_dim,
        vocab_size=head.config.vocabulary,
        max_positions=positions,
        windows=windows,
    )


class DraftHead(torch.nn.Module):
    """The graph contract of a head: the same, with a feature or an earlier state next to tokens."""

    def __init__(self, model: Any, hook: Hook, maps: bool) -> None:
        super().__init__()
        self.model = model
        self.hook = hook
        self.maps = maps

    def forward(
        self, input_ids: Tensor, start: Tensor, rows: Tensor, hidden: Tensor,
        buffers: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Run the head at positions start .. start + S.

        Shapes: input_ids [B, S], start [B], rows [R], hidden [B, S, H], buffers
        [B, heads, M, width]; returns logits [B, R, entries], their argmax [B, R] as the target's
        ids (-1 for a row with a NaN), the states [B, R, H] that the next token is
        paired with, and the buffers as written.
        """
        positions = start.unsqueeze(1) + torch.arange(input_ids.shape[1])
        cache = Buffers(buffers, start)
        self.hook.begin(positions, cache=cache)
        mask = _causal(self.hook, cache.length)
        embeds = self.model.embed_tokens(input_ids)
        states = self.model(embeds, hidden, positions, mask, cache).index_select(1, rows)
        logits = self.model.logits(states)
        best = best_ids(self.model, logits, self.maps)
        return logits, best, self.model.fed_back(states), cache.written


class DraftAssistant(torch.nn.Module):
    """The same of a head that reads its target's keys and values, and writes none.

    A token stands at the position before its own, the last one that has keys, and is turned by its
    own angles.
    """

    def __init__(self, model: AssistantHead, hook: Hook, geometry: Geometry) -> None:
        super().__init__()
        self.model = model
        self.hook = hook
        self.geometry = geometry

    def forward(
        self, input_ids: Tensor, start: Tensor, rows: Tensor, hidden: Tensor,
        buffers: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Run the head, for tokens of the positions start + 1 .. start + S + 1.

        Shapes: as of `DraftHead`, the buffers being the target's.
        """
        from transformers.masking_utils import causal_mask_function

        positions = start.unsqueeze(1) + torch.arange(input_ids.shape[1])
        self.hook.begin(positions)
        types = self.model.assistant.model.config.layer_types
        masks: dict[str, Tensor | None] = {}
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for layer, memory in enumerate(self.geometry.memories):
            if memory.kind == LENT:
                pair = pairs[types[layer]] = buffers[f"key.{layer}"], buffers[f"value.{layer}"]
                rule: Any = causal_mask_function
                masks[types[layer]] = self.hook.mask(pair[0].shape[2], rule, memory.seen)
        states = self.model(
            self.model.embeds(input_ids), hidden, attention_mask=masks, shared_kv_states=pairs,
            position_ids=positions + 1,
        ).index_select(1, rows)  # fmt: skip
        head, clusters = self.model.assistant.lm_head, self.model.assistant.masked_embedding
        logits = head(states) if clusters is None else clustered(clusters, head.weight, states)
        return logits, best_ids(self.model, logits, maps=False), self.model.fed_back(states)


def clustered(clusters: Any, table: Tensor, states: Tensor) -> Tensor:
    """Return the scores [B, R, V] of entries in the best clusters; others score 1 below these.

    Written so that no shape is computed from what a pass is fed.
    Shapes: table [V, H], states [B, R, H].
    """
    batch, rows, width = states.shape
    most, size = clusters.centroid_intermediate_top_k, clusters.vocab_size_per_centroid
    best = clusters.centroids(states).topk(most, dim=-1).indices
    order = clusters.token_ordering.view(clusters.num_centroids, size)
    ids = _gathered(order, best, (batch, rows, most, size)).reshape(batch, -1, most * size)
    entries = _gathered(table, ids, (batch, rows, most * size, width))
    scores = (entries @ states.unsqueeze(-1)).squeeze(-1)
    others = (scores.amin(-1, keepdim=True) - 1.0).expand(-1, -1, clusters.vocab_size)
    return others.scatter(-1, ids, scores)


def _gathered(table: Tensor, rows: Tensor, shape: tuple[Any, ...]) -> Tensor:
    return symbolic("Gather", [table, rows], {"axis": 0}, dtype=table.dtype, shape=shape,
                    version=OPSET)  # fmt: skip


class DraftBlock(torch.nn.Module):
    """The graph contract of a block head: blocks of tokens after contexts of features."""

    def __init__(self, model: BlockDraftHead, maps: bool) -> None:
        super().__init__()
        self.model = model
        self.maps = maps

    def forward(
        self, input_ids: Tensor, start: Tensor, rows: Tensor, context: Tensor,
        buffers: dict[str, Tensor],
    ) -> tuple[Any, ...]:  # fmt: skip
        """Write the context at positions start .. start + C, and run a block after it.

        Row r scores the token that follows position r of the block. What the block leaves in the
        buffers is junk, which the next pass writes over.
        Shapes: input_ids [B, S], start [B], rows [R], context [B, C, H], buffers
        [B, heads, M, width]; returns logits [B, R, entries], their argmax [B, R] as the target's
        ids (-1 for a row with a NaN), the confidence [B, R] if there is a head of it, and
        the buffers as written.
        """
        model, config = self.model, self.model.flags
        behind = context.shape[1]
        positions = start.unsqueeze(1) + torch.arange(behind + input_ids.shape[1])
        cache = Buffers(buffers, start)
        places = torch.arange(cast(int, cache.length))
        masks: dict[tuple[int, bool], Tensor] = {}

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.update(key, value, layer)
            kind = config.windows[layer], config.causal[layer]
            if kind not in masks:
                masks[kind] = block_mask(positions, behind, places, *kind)
            shape = (*query.shape[:3], value.shape[-1])
            attributes = {"scale": float(query.shape[-1]) ** -0.5}
            inputs = [query, keys, values, masks[kind]]
            out = symbolic(
                "Attention", inputs, attributes, dtype=query.dtype, shape=shape, version=OPSET
            )
            return out.transpose(1, 2)

        states = model(model.embed_tokens(input_ids), context, positions, attend)
        scored = rows if config.predicts_next else rows + 1
        states = states.index_select(1, scored)
        logits = model.lm_head(states)
        outputs: list[Any] = [logits, best_ids(model, logits, self.maps)]
        if model.confidence_head is not None:
            odds = model.confidence_head.of_states(states)
            outputs.append(odds if config.confidence_reads_markov else torch.sigmoid(odds))
        return (*outputs, cache.written)


class MarkovBlock(DraftBlock):
    """The same of a head whose scores depend on the token before, which a block does not know."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, start: Tensor, rows: Tensor, context: Tensor, previous: Tensor,
        buffers: dict[str, Tensor],
    ) -> tuple[Any, ...]:  # fmt: skip
        """Run a block, and tell what tokens [B, N] add to the next ones, wherever these are.

        Shapes: also returns what is added to scores [B, N, entries], and to the log odds of
        confidence [B, N] if these depend on it.
        """
        *outputs, written = super().forward(input_ids, start, rows, context, buffers)
        markov = self.model.markov_head
        assert markov is not None
        outputs.append(markov(previous))
        if self.model.confidence_head is not None and self.model.flags.confidence_reads_markov:
            outputs.append(self.model.confidence_head.of_tokens(markov.markov_w1(previous)))
        return (*outputs, written)


def block_mask(positions: Tensor, behind: int, places: Tensor, window: int, causal: bool) -> Tensor:
    """Return the additive mask [B, 1, S, M] of a block that begins `behind` the context.

    Shapes: positions [B, C + S] of context and block, places [M].
    """
    query = positions[:, behind:].unsqueeze(1).unsqueeze(-1)
    last = query if causal else positions[:, -1:].unsqueeze(1).unsqueeze(-1)
    seen = visible(last, places, 0) & (query >= 0)
    if window:
        seen = seen & (places > query - window)
    lowest = torch.full((), torch.finfo(torch.float32).min)
    return torch.where(seen, torch.zeros(()), lowest)
