"""The sizes of a decoder, read off its config: its matrices, norms and biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specrt.errors import CheckpointError, did_you_mean
from specrt.geometry import ATTENTION, CONV, LENT, RECURRENT, SHARED, Geometry, LayerMemory
from specrt_export.checkpoint.checkpoint import named_head
from specrt_export.checkpoint.config_number import whole_number
from specrt_export.heads import assistant_format, dflash_format, eagle3_format, mtp_format

DECODER = "engine"
"""What the engine of a decoder is called: its file, and its figures in JSON."""


SLIDING, FULL = "sliding_attention", "full_attention"
"""The types of layers that attend, as a config.json names them."""
LINEAR, HYBRID, MLP = "linear_attention", "hybrid", "mlp"
"""Types of layers with a recurrent state, with one and attention, and with neither."""
_TYPES = {"mamba": LINEAR, "attention": FULL, "M": LINEAR, "*": FULL, "-": MLP}
"""Other names of these types; Nemotron-H writes a letter for each layer, in one word."""


@dataclass(frozen=True)
class Architecture:
    """What the decoders of one model type have next to Llama's projections."""

    norms: int = 2
    """Norms of a layer, over the hidden size."""
    head_norms: bool = False
    """Whether queries and keys of a head are normed."""
    query_bias: bool = False
    """Whether query, key and value have biases, whatever the config says."""
    rotations: int = 1
    """Kinds of angles, each with tables of its own."""
    slides: bool = True
    """Whether layers see a window where the config has one and does not say whether it is used."""
    defaults: tuple[tuple[str, int], ...] = ()
    """Sizes that a config.json may leave out."""
    head_dim: int = 0
    """The size of a head where the config has none; 0 for hidden size over heads."""
    scaled: bool = False
    """Whether a layer multiplies what it makes by a number."""
    gated: bool = False
    """Whether what a head attends to passes a gate."""
    adjusts: bool = False
    """Whether a feed-forward layer is two thirds as wide as a config says, if it says no more."""
    tied: bool = False
    """Whether embedding and head are one table, where the config does not say."""
    recurs: tuple[str, ...] = ()
    """How a config.json names the sizes of its layers with a recurrent state; see `_Recurrent`."""
    delta: bool = False
    """Whether these states change by the delta rule."""
    gates: bool = False
    """Whether each number that attention makes passes a gate."""
    experts: bool = False
    """Whether feed-forward layers are mixtures of experts."""
    apart: bool = False
    """Whether feed-forward layers are layers of their own, without gates."""


_GEMMA4 = Architecture(
    norms=4,
    scaled=True,
    head_norms=True,
    rotations=2,
    tied=True,
    head_dim=256,
    defaults=(
        ("vocab_size", 262144), ("sliding_window", 512), ("sliding_window_pattern", 6),
        ("global_head_dim", 512), ("hidden_size_per_layer_input", 256),
        ("vocab_size_per_layer_input", 262144), ("max_position_embeddings", 131072),
    ),
)  # fmt: skip
_LATENT = Architecture(tied=True)

ARCHITECTURES = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "qwen2": Architecture(query_bias=True, slides=False),
    "qwen3": Architecture(head_norms=True, slides=False, head_dim=128),
    "qwen3_moe": Architecture(
        head_norms=True,
        slides=False,
        head_dim=128,
        experts=True,
        defaults=(
            ("num_experts", 128), ("num_experts_per_tok", 8), ("moe_intermediate_size", 768),
            ("decoder_sparse_step", 1),
        ),
    ),
    "phi3": Architecture(),
    "smollm3": Architecture(slides=False, tied=True),
    "gemma3_text": Architecture(
        norms=4,
        head_norms=True,
        rotations=2,
        tied=True,
        head_dim=256,
        defaults=(
            ("vocab_size", 262208), ("num_attention_heads", 8), ("num_key_value_heads", 4),
            ("sliding_window", 4096), ("sliding_window_pattern", 6),
        ),
    ),
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": replace(
        _GEMMA4,
        defaults=(
            *_GEMMA4.defaults, ("sliding_window", 1024), ("hidden_size_per_layer_input", 0),
            ("max_position_embeddings", 262144),
        ),
    ),
    "lfm2": Architecture(
        head_norms=True,
        adjusts=True,
        tied=True,
        defaults=(
            ("conv_L_cache", 3), ("block_multiple_of", 256), ("max_position_embeddings", 128000),
        ),
    ),
    "lfm3": Architecture(
        norms=4,
        head_norms=True,
        rotations=2,
        tied=True,
        head_dim=128,
        gated=True,
        defaults=(
            ("conv_L_cache", 7), ("sliding_window", 256), ("max_position_embeddings", 128000),
        ),
    ),
    "minicpm3": _LATENT,
    "youtu": _LATENT,
    "qwen3_5_text": Architecture(
        head_norms=True,
        head_dim=256,
        recurs=(
            "linear_conv_kernel_dim", "linear_num_value_heads", "linear_num_key_heads",
            "linear_key_head_dim", "linear_value_head_dim",
        ),
        delta=True,
        gates=True,
        defaults=(
            ("vocab_size", 248320), ("full_attention_interval", 4), ("linear_conv_kernel_dim", 4),
            ("linear_key_head_dim", 128), ("linear_value_head_dim", 128),
            ("linear_num_key_heads", 16), ("linear_num_value_heads", 32),
            ("max_position_embeddings", 32768),
        ),
    ),
    "nemotron_h": Architecture(
        norms=1,
        rotations=0,  # its attention knows no positions
        head_dim=128,
        recurs=("conv_kernel", "mamba_num_heads", "n_groups", "ssm_state_size", "mamba_head_dim"),
        apart=True,
        defaults=(
            ("mamba_rms_norm", 1),
            ("conv_kernel", 4), ("n_groups", 8), ("ssm_state_size", 128), ("mamba_head_dim", 64),
            ("mamba_num_heads", 128), ("max_position_embeddings", 4096),
        ),
    ),
    "falcon_h1": Architecture(
        recurs=(
            "mamba_d_conv", "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head",
        ),
        defaults=(
            ("mamba_d_conv", 4), ("mamba_n_groups", 1), ("mamba_d_state", 256),
            ("max_position_embeddings", 8192),
        ),
    ),
}  # fmt: skip
"""The model types whose sizes are known, held to transformers' own models by the tests."""


@dataclass(frozen=True)
class Matrix:
    """A weight [rows, columns] of an engine; `role` is layers, embedding or head."""

    role: str
    rows: int
    columns: int
    experts: int = 1
    """How many experts its rows are of."""
    taken: int = 1
    """How many of these a token takes."""

    def read(self, width: int) -> float:
        """Return the share that a pass is expected to read, where tokens choose independently."""
        return 1.0 - (1.0 - self.taken / self.experts) ** width


@dataclass(frozen=True)
class EngineShape:
    """What the file of one engine holds."""

    matrices: tuple[Matrix, ...]
    """Projections that read the same input are one."""
    vectors: tuple[int, ...]
    """Numbers in each norm, bias and convolution, which a pass reads whole."""
    tables: tuple[int, ...] = ()
    """Numbers in each table that a pass looks rows up in: angles, positions, biases by distance."""


def is_half(config: Mapping[str, Any]) -> bool:
    """Tell whether a config.json says that its checkpoint is in fp16 or bf16."""
    return (config.get("dtype") or config.get("torch_dtype")) in ("bfloat16", "float16")


@dataclass(frozen=True)
class _Recurrent:
    """The sizes of a layer with a recurrent state."""

    taps: int
    heads: int
    key_heads: int
    key_size: int
    value_size: int
    delta: bool

    @property
    def values(self) -> int:
        """Return the numbers of the values of all heads."""
        return self.heads * self.value_size

    @property
    def channels(self) -> int:
        """Return the numbers that are convolved: queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.values

    @property
    def memories(self) -> tuple[LayerMemory, ...]:
        """Return what the layer remembers."""
        sizes = self.heads, self.key_size, self.value_size
        return (
            LayerMemory(CONV, key_width=self.channels, window=self.taps),
            LayerMemory(RECURRENT, *sizes, key_heads=self.key_heads),
        )


@dataclass(frozen=True)
class _Sizes:
    """The sizes in a config.json, or what its model type has where it leaves them out."""

    config: Mapping[str, Any]
    where: Path
    known: Architecture

    def number(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a size, one that may be 0 with `least`.

        Raises: CheckpointError.
        """
        default = dict(self.known.defaults).get(key, default)
        return whole_number(self.config, key, self.where, default, least=least)

    def maybe(self, key: str) -> int:
        """Return a size of something that a model may lack; 0 where it does."""
        return self.number(key, 0, least=0)

    def has(self, key: str, default: bool = False) -> bool:
        """Tell whether a model has something."""
        return bool(self.config.get(key, dict(self.known.defaults).get(key, default)))

    @property
    def hidden(self) -> int:
        """Return the numbers of a hidden state."""
        return self.number("hidden_size")

    @property
    def heads(self) -> int:
        """Return the query heads of a layer."""
        return self.number("num_attention_heads")

    def types(self) -> list[str]:
        """Return the type of each layer.

        Raises: CheckpointError.
        """
        if self.known.recurs:
            return self._hybrid_types()
        count, types = self.number("num_hidden_layers"), self.config.get("layer_types")
        if types is None and (whole := self.config.get("full_attn_idxs")):
            types = [FULL if layer in whole else CONV for layer in range(count)]
        if types is None:
            pattern, first = self.maybe("sliding_window_pattern"), self.maybe("max_window_layers")
            whole = [i < first or (pattern and (i + 1) % pattern == 0) for i in range(count)]
            types = [FULL if is_whole else SLIDING for is_whole in whole]
        if not isinstance(types, list) or len(types) != count:
            raise CheckpointError(
                f"{self.where}: layer_types is {types!r}; expected the types of {count} layers: "
                "fetch the checkpoint again"
            )
        return types

    def _hybrid_types(self) -> list[str]:
        """Return the types of layers of which some have a recurrent state.

        Raises: CheckpointError.
        """
        stated = self.config.get("layer_types") or self.config.get("layers_block_type")
        stated = stated or list(str(self.config.get("hybrid_override_pattern") or ""))
        count = self.number("num_hidden_layers", len(stated) or None)
        step = self.maybe("full_attention_interval")
        if not stated:
            stated = [LINEAR if (i + 1) % step else FULL for i in range(count if step else 0)]
        types = [_TYPES.get(str(one), str(one)) for one in stated or [HYBRID] * count]
        if len(types) != count or not {*types} <= {LINEAR, FULL, HYBRID, MLP}:
            raise CheckpointError(
                f"{self.where}: its layers are {types}; expected the types of {count} layers, of "
                f"{LINEAR}, {FULL}, {HYBRID} and {MLP}: build the recipe to see what it takes"
            )
        return types

    def layers(self) -> list[tuple[LayerMemory, ...]]:
        """Return what each layer remembers."""
        if not self.known.recurs:
            return [(one,) for one in self._memories()]
        attends = {kind: (self._memory(0, FULL),) for kind in (FULL, HYBRID)}
        recurs = {kind: self.recurrent().memories for kind in (LINEAR, HYBRID)}
        return [(*recurs.get(kind, ()), *attends.get(kind, ())) for kind in self.types()]

    def recurrent(self) -> _Recurrent:
        """Return the sizes of a layer with a recurrent state."""
        taps, heads, key_heads, key_size, value_size = map(self.number, self.known.recurs)
        return _Recurrent(taps, heads, key_heads, key_size, value_size, self.known.delta)

    def _memories(self) -> tuple[LayerMemory, ...]:
        types = self.types()
        owners = types[: len(types) - self.maybe("num_kv_shared_layers")]
        if not owners:  # a head, to which the target lends its own
            lent = {kind: replace(self._memory(0, kind), kind=LENT) for kind in types}
            return tuple(lent[kind] for kind in types)
        shared = [
            LayerMemory(SHARED, owner=len(owners) - 1 - owners[::-1].index(kind))
            for kind in types[len(owners) :]
        ]
        return (*[self._memory(layer, kind) for layer, kind in enumerate(owners)], *shared)

    def _memory(self, layer: int, kind: str) -> LayerMemory:
        if kind == CONV:
            return LayerMemory(CONV, key_width=self.hidden, window=self.number("conv_L_cache"))
        own = replace(self, config={**self.config, **self._other_sizes(layer, kind)})
        width = own.number("head_dim", self.known.head_dim or self.hidden // self.heads)
        heads, value = own.number("num_key_value_heads", self.heads), width
        if self.maybe("kv_lora_rank"):
            width = self.number("qk_nope_head_dim") + self.number("qk_rope_head_dim")
            value = self.number("v_head_dim", self.hidden // self.heads)
        slides = kind == SLIDING and self.has("use_sliding_window", self.known.slides)
        return LayerMemory(
            ATTENTION, heads, width, value, self.maybe("sliding_window") if slides else 0
        )

    def _other_sizes(self, layer: int, kind: str) -> dict[str, Any]:
        """Return the sizes in which a layer differs from the others."""
        each, wide = self.config.get("per_layer_config"), self.maybe("global_head_dim")
        if isinstance(each, dict):
            return dict(each.get(str(layer), {}))
        if kind != FULL or not wide:
            return {}
        heads = self.maybe("num_global_key_value_heads") if self.has("attention_k_eq_v") else 0
        return {"head_dim": wide, **({"num_key_value_heads": heads} if heads else {})}

    def inner(self) -> int:
        """Return the numbers between the projections of a feed-forward layer."""
        size = self.maybe("block_ff_dim") or self.number("intermediate_size")
        if not self.has("block_auto_adjust_ff_dim", self.known.adjusts):
            return size
        size, factor = 2 * size // 3, self.config.get("block_ffn_dim_multiplier", 1.0)
        if factor is None:
            return size
        step = self.number("block_multiple_of")
        return -(-int(factor * size) // step) * step

    def mixes(self, layer: int) -> bool:
        """Tell whether a layer mixes experts."""
        step, dense = self.maybe("decoder_sparse_step"), self.config.get("mlp_only_layers") or []
        sparse = not step or (layer + 1) % step == 0
        return self.known.experts and layer not in dense and sparse

    def rotated(self, geometry: Geometry) -> tuple[int, ...]:
        """Return the dimensions of a head that each kind of angles rotates."""
        each = zip(self.types(), self.layers(), strict=True)
        layers = {kind: geometry.attention(one) for kind, own in each for one in own}
        rope = self.config.get("rope_parameters")
        partial = self.config.get("partial_rotary_factor")
        partial = partial or (isinstance(rope, dict) and rope.get("partial_rotary_factor")) or 1.0
        rope = self.maybe("qk_rope_head_dim")
        widths = [
            rope or int(one.key_width * partial) for one in layers.values() if one.kind == ATTENTION
        ]
        return tuple(widths[: self.known.rotations])


Weight = Matrix | int
"""A matrix, or the numbers of a norm, a bias or a convolution."""


def _layer(
    sizes: _Sizes, geometry: Geometry, layer: int, memories: Sequence[LayerMemory], beside: int
) -> Iterator[Weight]:
    """Yield the weights of a layer; `beside` are numbers that it reads next to a hidden state."""
    hidden, shares = sizes.hidden, any(one.kind == SHARED for one in memories)
    for own in memories:
        if own.kind == CONV and not sizes.known.recurs:
            yield from _convolution(sizes, own)
        elif own.kind == RECURRENT:
            yield from _recurrence(sizes, sizes.recurrent())
        elif own.kind != CONV and sizes.maybe("kv_lora_rank"):
            yield from _latent_attention(sizes, own)
        elif own.kind != CONV:
            yield from _attention(sizes, own, geometry.attention(own), beside)
    yield from (hidden,) * (sizes.known.norms if sizes.has("use_sandwich_norm", True) else 2)
    if sizes.known.apart:
        if not memories:
            yield Matrix("layers", sizes.inner(), hidden)
            yield Matrix("layers", hidden, sizes.inner())
        return
    if sizes.mixes(layer):
        yield from _experts(sizes)
        return
    inner = sizes.inner() * (1 + (shares and sizes.has("use_double_wide_mlp")))
    yield Matrix("layers", 2 * inner, hidden)
    yield Matrix("layers", hidden, inner)
    yield from (2 * inner, hidden) * sizes.has("mlp_bias")
    yield from (1,) * sizes.known.scaled
    if extra := sizes.maybe("hidden_size_per_layer_input"):
        yield Matrix("layers", extra, hidden)
        yield Matrix("layers", hidden, extra)
        yield hidden


def _experts(sizes: _Sizes) -> Iterator[Weight]:
    """Yield the weights of experts, of what chooses them, and of the one that all tokens share."""
    experts = sizes.maybe("num_local_experts") or sizes.number("num_experts")
    taken = sizes.number("num_experts_per_tok")
    hidden, inner = sizes.hidden, sizes.number("moe_intermediate_size")
    yield hidden * experts
    yield Matrix("layers", 2 * inner * experts, hidden, experts, taken)
    yield Matrix("layers", hidden * experts, inner, experts, taken)
    if shared := sizes.maybe("shared_expert_intermediate_size"):
        yield Matrix("layers", 2 * shared, hidden)
        yield Matrix("layers", hidden, shared)
        yield hidden


def _attention(sizes: _Sizes, own: LayerMemory, read: LayerMemory, beside: int) -> Iterator[Weight]:
    """Yield the weights of attention to the keys and values of `read`, which a layer may own."""
    owns = own.kind == ATTENTION
    queries, keys = sizes.heads * read.key_width, owns * own.kv_heads * own.key_width
    values = 0 if sizes.has("attention_k_eq_v") and not own.window else keys
    joined, known = queries + keys + values, sizes.known
    gates = sizes.heads * (known.gated and sizes.has("use_attention_gate", True))
    gates += queries * known.gates
    yield Matrix("layers", joined + gates, sizes.hidden + beside)
    yield Matrix("layers", sizes.hidden, queries)
    yield from (read.key_width,) * (known.head_norms * (1 + owns))
    yield from (joined,) * (sizes.has("attention_bias") or known.query_bias)
    yield from (sizes.hidden,) * (sizes.has("attention_bias") and not known.query_bias)


def _latent_attention(sizes: _Sizes, own: LayerMemory) -> Iterator[Weight]:
    """Yield the weights of multi-head latent attention; see DeepSeek-V2, arXiv:2405.04434."""
    rank, latent = sizes.maybe("q_lora_rank"), sizes.number("kv_lora_rank")
    queries, bias = sizes.heads * own.key_width, sizes.has("attention_bias")
    joined = (rank or queries) + latent + sizes.number("qk_rope_head_dim")
    yield Matrix("layers", joined, sizes.hidden)
    if rank:
        yield Matrix("layers", queries, rank)
        yield rank
    expanded = sizes.number("qk_nope_head_dim") + own.value_width
    yield Matrix("layers", sizes.heads * expanded, latent)
    yield latent
    yield Matrix("layers", sizes.hidden, sizes.heads * own.value_width)
    yield from (joined, sizes.hidden) * bias


def _recurrence(sizes: _Sizes, own: _Recurrent) -> Iterator[Weight]:
    """Yield the weights of a layer with a recurrent state, and of the convolution before it."""
    joined = own.channels + own.values + own.heads * (1 + own.delta)
    yield Matrix("layers", joined, sizes.hidden)
    yield Matrix("layers", sizes.hidden, own.values)
    yield own.taps * own.channels
    yield from (own.heads, own.heads)  # of decays and steps
    if own.delta:
        yield own.value_size
        return
    yield own.heads  # the share of a value that passes the state by
    yield from (own.channels,) * sizes.has("mamba_conv_bias", sizes.has("use_conv_bias", True))
    yield from (own.values,) * sizes.has("mamba_rms_norm")


def _convolution(sizes: _Sizes, own: LayerMemory) -> Iterator[Weight]:
    """Yield the weights of a short convolution between two gates."""
    hidden = sizes.hidden
    yield Matrix("layers", 3 * hidden, hidden)
    yield Matrix("layers", hidden, hidden)
    yield own.window * hidden
    yield from (3 * hidden, hidden, hidden) * sizes.has("conv_bias")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of one decoder, read off its config."""

    model_type: str
    geometry: Geometry
    hidden: int
    intermediate: int
    weights: tuple[Weight, ...]
    rotated: tuple[int, ...]
    """Dimensions of a head that each kind of angles rotates."""
    tied: bool
    half: bool
    """Whether the checkpoint is in fp16 or bf16."""
    head: str = ""
    """The format of a head, which reads what its target leaves; empty of a model."""
    inputs: int = 0
    """Of a head: how many layers of the target it projects."""
    borrowed: int = 0
    """Weights that a head has of its target, and does not store."""
    features: int = 0
    """Width of the features that a target leaves for a head."""

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        where: Path,
        *,
        others: tuple[str, ...] = (),
        head: str = "",
    ) -> ModelShape:
        """Read the sizes off a config.json, or off its text part; `head` is one next to its model.

        Raises: CheckpointError naming the key that is not known, or the model type and those that
            are, and `others` that are read elsewhere.
        """
        head = head or named_head(config) or ""
        config = {**config, **config["text_config"]} if "text_config" in config else config
        if head == mtp_format.KIND:
            config = {**config, "num_hidden_layers": 1, "layer_types": [FULL]}
        elif head:
            config = {**config, **config.get("transformer_layer_config", {})}
        kind = config.get("model_type")
        known = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
        if known is None:
            names = (*ARCHITECTURES, *others)
            raise CheckpointError(
                f"{where}: model_type is {kind!r}; sizes are known of {', '.join(names)}"
                f"{did_you_mean(str(kind), names)}; build the recipe to see what it takes"
            )
        if config.get("enable_moe_block"):
            raise CheckpointError(
                f"{where}: its layers are mixtures of experts, whose sizes are not known; expected "
                "a dense model"
            )
        sizes = _Sizes(config, where, known)
        # With two sets of angles only that of short texts is built.
        trained = sizes.number("max_position_embeddings", 2048)
        positions = sizes.number("original_max_position_embeddings", trained)
        vocab = sizes.number("vocab_size")
        layers = sizes.layers()
        memories = tuple(memory for layer in layers for memory in layer)
        geometry = Geometry(sizes.heads, vocab, positions, len(layers), memories)
        weights = tuple(_weights(sizes, geometry, head))
        return cls(
            model_type=str(kind),
            geometry=geometry,
            hidden=sizes.hidden,
            intermediate=sizes.inner(),
            weights=weights,
            rotated=sizes.rotated(geometry),
            tied=bool(config.get("tie_word_embeddings", known.tied)),
            half=is_half(config),
            head=head,
            inputs=_inputs(config) if head in (dflash_format.KIND, eagle3_format.KIND) else 0,
            borrowed=vocab * _borrowed(sizes, head),
        )

    def leaving(self, head: ModelShape) -> ModelShape:
        """Return the shape of a target that leaves its last state, or a projection of inputs."""
        if not head.inputs:
            return replace(self, features=self.hidden)
        added = Matrix("layers", head.hidden, head.inputs * self.hidden)
        norms = (head.hidden,) * (head.head == dflash_format.KIND)
        return replace(self, weights=(*self.weights, added, *norms), features=head.hidden)

    @property
    def mixes(self) -> bool:
        """Whether layers mix experts."""
        return any(isinstance(one, Matrix) and one.experts > 1 for one in self.weights)

    @property
    def parameters(self) -> int:
        """Return the weights of the model, a tied table once."""
        matrices = [one for one in self.weights if isinstance(one, Matrix)]
        scored = next((one.rows for one in matrices if one.role == "head"), 0)
        own = (
            not self.tied
            or self.head not in ("", mtp_format.KIND)
            or scored != self.geometry.vocab_size
        )
        kept = [one for one in matrices if own or one.role != "head"]
        return sum(one.rows * one.columns for one in kept) + sum(self.vectors())

    def engines(self, max_length: int) -> dict[str, EngineShape]:
        """Return what the file of each engine holds: there is one."""
        matrices = tuple(one for one in self.weights if isinstance(one, Matrix))
        tables = tuple(max_length * (width // 2) for width in self.rotated for _ in range(2))
        return {DECODER: EngineShape(matrices, tuple(self.vectors()), tables)}

    def vectors(self) -> Iterator[int]:
        """Yield the sizes of norms, biases and convolutions."""
        return (one for one in self.weights if isinstance(one, int))


_INPUTS = "target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"


def _inputs(config: Mapping[str, Any]) -> int:
    """Return how many layers of its target a head projects: three, where it names none."""
    nested = (config.get(part) or {} for part in ("dflash_config", "eagle_config"))
    named = [part.get(key) for part in (config, *nested) for key in _INPUTS]
    return next((len(ids) for ids in named if isinstance(ids, list)), 3)


def _borrowed(sizes: _Sizes, head: str) -> int:
    """Return the width of all tables together that a head takes from its target."""
    if head == assistant_format.KIND:
        return sizes.number("backbone_hidden_size")
    both = head == dflash_format.KIND and "speculators_model_type" not in sizes.config
    return 2 * sizes.hidden * both


def _assistant(sizes: _Sizes, vocab: int) -> Iterator[Weight]:
    """Yield what an assistant has besides its layers; of clustered entries a pass reads rows."""
    hidden, wide = sizes.hidden, sizes.number("backbone_hidden_size")
    clustered = sizes.has("use_ordered_embeddings")
    yield hidden
    yield Matrix("layers", hidden, 2 * wide)
    yield Matrix("layers", wide + clustered * sizes.number("num_centroids", 2048), hidden)
    yield Matrix("embedding", vocab, wide)
    yield Matrix("embedding" if clustered else "head", vocab, hidden)


def _weights(sizes: _Sizes, geometry: Geometry, head: str) -> Iterator[Weight]:
    """Yield the weights of a model. Projections that read the same input are one."""
    hidden, vocab = sizes.hidden, geometry.vocab_size
    for layer, memories in enumerate(sizes.layers()):
        # The feature next to each token, where a head reads pairs.
        is_pair = head == eagle3_format.KIND and not layer
        yield from _layer(sizes, geometry, layer, memories, hidden * is_pair)
    if head == assistant_format.KIND:
        yield from _assistant(sizes, vocab)
        return
    if head == mtp_format.KIND:
        yield Matrix("layers", hidden, 2 * hidden)
        yield from (hidden, hidden)
    yield hidden
    if extra := sizes.maybe("hidden_size_per_layer_input"):
        yield Matrix("layers", geometry.layers * extra, hidden)
        yield extra
        rows = sizes.number("vocab_size_per_layer_input")
        yield Matrix("embedding", rows, geometry.layers * extra)
    yield Matrix("embedding", vocab, hidden)
    scored = sizes.number("draft_vocab_size", vocab)
    yield Matrix("head", scored, hidden)
    rank = sizes.maybe("markov_rank") if head else 0
    if rank:
        yield Matrix("embedding", vocab, rank)
        yield Matrix("layers", scored, rank)
    if head and sizes.has("enable_confidence_head"):
        yield from (hidden + rank, 1)
