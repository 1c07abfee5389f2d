"""The sizes of a decoder, read off its config: its matrices, norms and biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrt.bundle import CHAIN_HEAD, HEADS
from specrt.errors import CheckpointError, did_you_mean
from specrt.geometry import Geometry
from specrt_export.checkpoint.checkpoint import named_head
from specrt_export.checkpoint.config_number import whole_number

DECODER = "engine"
"""What the engine of a decoder is called: its file, and its figures in JSON."""


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
    defaults: tuple[tuple[str, int], ...] = ()
    """Sizes that a config.json may leave out."""
    head_dim: int = 0
    """The size of a head where the config has none; 0 for hidden size over heads."""
    tied: bool = False
    """Whether embedding and head are one table, where the config does not say."""


ARCHITECTURES = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "qwen2": Architecture(query_bias=True),
    "qwen3": Architecture(head_norms=True, head_dim=128),
    "phi3": Architecture(),
    "smollm3": Architecture(tied=True),
    "gemma3_text": Architecture(
        norms=4,
        head_norms=True,
        rotations=2,
        tied=True,
        head_dim=256,
        defaults=(("vocab_size", 262208), ("num_attention_heads", 8), ("num_key_value_heads", 4)),
    ),
}
"""The model types whose sizes are known, held to transformers' own models by the tests."""


@dataclass(frozen=True)
class Matrix:
    """A weight [rows, columns] of an engine; `role` is layers, embedding or head."""

    role: str
    rows: int
    columns: int


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
class ModelShape:
    """The sizes of one decoder, read off its config."""

    model_type: str
    geometry: Geometry
    hidden: int
    intermediate: int
    rotary: int
    """Dimensions of a head that are rotated."""
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    half: bool
    """Whether the checkpoint is in fp16 or bf16."""
    scored: int
    """Entries of the vocabulary that are scored: all, but for some drafts."""
    head: str = ""
    """The format of a head, which reads what its target leaves; empty of a model."""

    @classmethod
    def from_config(
        cls, config: dict[str, Any], where: Path, *, others: tuple[str, ...] = ()
    ) -> ModelShape:
        """Read the sizes off a config.json, or off its text part.

        Raises: CheckpointError naming the key that is not known, or the model type and those that
            are, and `others` that are read elsewhere.
        """
        config = {**config, **config["text_config"]} if "text_config" in config else config
        if named_head(config):
            config = {**config, **config.get("transformer_layer_config", {})}
        kind = config.get("model_type")
        known = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
        if known is None:
            names = (*ARCHITECTURES, *others)
            raise CheckpointError(
                f"{where}: model_type is {kind!r}; sizes are known of {', '.join(names)}"
                f"{did_you_mean(str(kind), names)}; build the recipe to see what it takes"
            )

        def number(key: str, default: int | None = None) -> int:
            return whole_number(config, key, where, dict(known.defaults).get(key, default))

        heads, hidden = number("num_attention_heads"), number("hidden_size")
        head_dim = number("head_dim", known.head_dim or hidden // heads)
        partial = config.get("partial_rotary_factor") or 1.0
        window = config.get("sliding_window") or 0
        layers, trained = number("num_hidden_layers"), number("max_position_embeddings", 2048)
        return cls(
            model_type=str(kind),
            geometry=Geometry.uniform(
                layers=layers,
                heads=heads,
                kv_heads=number("num_key_value_heads", heads),
                head_dim=head_dim,
                vocab_size=number("vocab_size"),
                # With two sets of angles only that of short texts is built.
                max_positions=number("original_max_position_embeddings", trained),
                windows=(window,) * layers,
            ),
            hidden=hidden,
            intermediate=number("intermediate_size"),
            rotary=int(head_dim * partial),
            tied=bool(config.get("tie_word_embeddings", known.tied)),
            attention_bias=bool(config.get("attention_bias")) or known.query_bias,
            mlp_bias=bool(config.get("mlp_bias")),
            half=is_half(config),
            scored=number("draft_vocab_size", number("vocab_size")),
            head=named_head(config) or "",
        )

    @property
    def parameters(self) -> int:
        """Return the weights of the model, a tied table once."""
        table = self.geometry.vocab_size * self.hidden
        matrices = sum(m.rows * m.columns for m in self.matrices() if m.role == "layers")
        own = not self.tied or self.head != "" or self.scored != self.geometry.vocab_size
        return matrices + table + own * self.scored * self.hidden + sum(self.vectors())

    def engines(self, max_length: int) -> dict[str, EngineShape]:
        """Return what the file of each engine holds: there is one."""
        angles = max_length * (self.rotary // 2)
        tables = (angles,) * (2 * ARCHITECTURES[self.model_type].rotations)
        return {DECODER: EngineShape(tuple(self.matrices()), tuple(self.vectors()), tables)}

    def matrices(self) -> Iterator[Matrix]:
        """Yield the matrices of an engine: projections that read the same input are one."""
        g, hidden = self.geometry, self.hidden
        for layer, own in enumerate(g.memories):
            queries, keys = g.heads * own.key_width, own.kv_heads * own.key_width
            # The feature next to each token, where a head reads pairs.
            beside = hidden if HEADS.get(self.head) == CHAIN_HEAD and not layer else 0
            yield Matrix("layers", queries + 2 * keys, hidden + beside)
            yield Matrix("layers", hidden, queries)
            yield Matrix("layers", 2 * self.intermediate, hidden)
            yield Matrix("layers", hidden, self.intermediate)
        yield Matrix("embedding", g.vocab_size, hidden)
        yield Matrix("head", self.scored, hidden)

    def vectors(self) -> Iterator[int]:
        """Yield the sizes of norms and biases."""
        g, known = self.geometry, ARCHITECTURES[self.model_type]
        for own in g.memories:
            joined = (g.heads + 2 * own.kv_heads) * own.key_width
            yield from (self.hidden,) * known.norms
            yield from (own.key_width,) * (2 * known.head_norms)
            yield from (joined,) * self.attention_bias
            yield from (self.hidden,) * (self.attention_bias and not known.query_bias)
            yield from (2 * self.intermediate, self.hidden) * self.mlp_bias
        yield self.hidden
