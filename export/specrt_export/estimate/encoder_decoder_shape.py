"""The sizes of an encoder-decoder's three engines, read off its config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

from specrt.geometry import Geometry
from specrt_export.checkpoint.config_number import whole_number
from specrt_export.checkpoint.task import UNBOUNDED
from specrt_export.estimate.model_shape import DECODER, EngineShape, Matrix, is_half

ENCODER, CROSS = "encoder", "cross"


@dataclass(frozen=True)
class EncoderDecoderFamily:
    """What encoder-decoders of one model type have next to projections, norms and tables."""

    biases: bool = True
    """Whether projections and norms have biases."""
    key_bias: bool = True
    """Whether projections of keys have one, where others do: else none of them are joined."""
    embedding_norm: bool = False
    """Whether embeddings are normed."""
    final_norm: bool = False
    """Whether what leaves a stack of layers is normed."""
    positions: str = "learned"
    """`learned`, `sinusoidal` (which no checkpoint holds), or `relative` biases."""
    offset: int = 0
    """Rows of a table of positions before the first."""
    relative_each: bool = False
    """Whether every layer has relative biases of its own, not the first alone."""
    logits_bias: bool = False
    """Whether logits have a bias."""
    speech: bool = False
    """Whether a source is log-mel features, which two convolutions read."""


FAMILIES = {
    "t5": EncoderDecoderFamily(biases=False, final_norm=True, positions="relative"),
    "umt5": EncoderDecoderFamily(
        biases=False, final_norm=True, positions="relative", relative_each=True
    ),
    "mt5": EncoderDecoderFamily(biases=False, final_norm=True, positions="relative"),
    "bart": EncoderDecoderFamily(embedding_norm=True, offset=2),
    "mbart": EncoderDecoderFamily(embedding_norm=True, final_norm=True, offset=2),
    "plbart": EncoderDecoderFamily(embedding_norm=True, offset=2),
    "blenderbot": EncoderDecoderFamily(final_norm=True),
    "blenderbot-small": EncoderDecoderFamily(embedding_norm=True),
    "pegasus": EncoderDecoderFamily(final_norm=True, positions="sinusoidal"),
    "m2m_100": EncoderDecoderFamily(final_norm=True, positions="sinusoidal", offset=2),
    "marian": EncoderDecoderFamily(positions="sinusoidal", logits_bias=True),
    "whisper": EncoderDecoderFamily(key_bias=False, final_norm=True, speech=True),
}
"""The model types whose sizes are known, held to what is built of them by the tests."""

_FUSED = ("gated-silu", "gated-gelu")
"""Gates that the CPU kernels compute with their projections."""


@dataclass(frozen=True)
class Stack:
    """The layers of an encoder or a decoder."""

    layers: int
    heads: int
    inner: int
    """Of the feed-forward layers."""
    positions: int
    """Rows of its table of positions, or the greatest distance that relative biases tell apart."""
    vocab_size: int
    """0 where features are read."""


@dataclass(frozen=True)
class EncoderDecoderShape:
    """The sizes of one encoder-decoder, read off its config."""

    model_type: str
    width: int
    head_dim: int
    encoder: Stack
    decoder: Stack
    encodes: bool
    """Whether it has an encoder; a draft without one reads its target's."""
    features: int
    """Channels of a source of features; 0 where a source is token ids."""
    trained_source: int
    """Positions of a source that its encoder was trained for."""
    trained_length: int
    tied: bool
    """Whether the decoder's embedding and head are one table."""
    shared_embedding: bool
    """Whether the encoder's embedding is the decoder's."""
    gate: str
    """The kind of a gated feed-forward layer; empty of one without a gate."""
    buckets: int
    """Of relative biases."""
    half: bool
    """Whether the checkpoint is in fp16 or bf16."""

    mixes: ClassVar[bool] = False

    @classmethod
    def from_config(cls, config: dict[str, Any], where: Path) -> EncoderDecoderShape:
        """Read the sizes off a config.json of one of `FAMILIES`.

        Raises: CheckpointError naming a key that is not known.
        """
        kind = str(config.get("model_type"))
        family = FAMILIES[kind]

        def number(key: str, default: int | None = None) -> int:
            return whole_number(config, key, where, default)

        relative = family.positions == "relative"
        width, vocab_size = number("d_model"), number("vocab_size")
        scored = number("decoder_vocab_size", vocab_size)
        table = 0 if relative or family.speech else number("max_position_embeddings", 1024)
        if relative:
            layers, heads, inner = number("num_layers"), number("num_heads"), number("d_ff")
            reach = number("relative_attention_max_distance", 128)
            encoder = Stack(layers, heads, inner, reach, vocab_size)
            layers = number("num_decoder_layers", layers)
            decoder = Stack(layers, heads, inner, reach, vocab_size)
        else:
            ends = {"encoder": "source", "decoder": "target"}
            encoder, decoder = (
                Stack(
                    number(f"{part}_layers"),
                    number(f"{part}_attention_heads"),
                    number(f"{part}_ffn_dim"),
                    (table or number(f"max_{end}_positions")) + family.offset,
                    0 if part == "encoder" and family.speech else size,
                )
                for (part, end), size in zip(ends.items(), (vocab_size, scored), strict=True)
            )
        gate = str(config.get("feed_forward_proj", ""))
        return cls(
            model_type=kind,
            width=width,
            head_dim=number("d_kv", 64) if relative else width // decoder.heads,
            encoder=encoder,
            decoder=decoder,
            encodes=config.get("architectures") != ["WhisperForCausalLM"],
            features=number("num_mel_bins") if family.speech else 0,
            trained_source=UNBOUNDED if relative else encoder.positions - family.offset,
            trained_length=UNBOUNDED if relative else decoder.positions - family.offset,
            # transformers says the second of T5 1.1, and that it ties what it holds twice.
            tied=bool(config.get("tie_word_embeddings", True))
            and bool(config.get("scale_decoder_outputs", True)),
            shared_embedding=bool(config.get("share_encoder_decoder_embeddings", True)),
            gate=gate if gate.startswith("gated") else "",
            buckets=number("relative_attention_num_buckets", 32) if relative else 0,
            half=is_half(config),
        )

    @property
    def geometry(self) -> Geometry:
        """Return the sizes of the decoder."""
        return Geometry.uniform(
            layers=self.decoder.layers,
            heads=self.decoder.heads,
            kv_heads=self.decoder.heads,
            head_dim=self.head_dim,
            vocab_size=self.decoder.vocab_size,
            max_positions=self.trained_length,
            windows=(0,) * self.decoder.layers,
        )

    @property
    def frames(self) -> int:
        """Return the frames of a source of features; the second convolution halves them."""
        return 2 * self.trained_source if self.features else 0

    @property
    def intermediate(self) -> int:
        """Return the widest feed-forward layer of the decoder."""
        return self.decoder.inner

    @property
    def hidden(self) -> int:
        """Return the width of the decoder."""
        return self.width

    @property
    def parameters(self) -> int:
        """Return the weights of the model, a shared table once; what is computed is none."""
        return self.parameters_of(self.encodes)

    def parameters_of(self, encodes: bool) -> int:
        """Return the weights with the encoder's, or without them for a draft that shares it."""
        shapes = [self._cross(), self._decoder()] + [self._encoder()] * encodes
        matrices = [m for shape in shapes for m in shape.matrices]
        total = sum(m.rows * m.columns for m in matrices if m.role == "layers")
        total += sum(sum(shape.vectors) for shape in shapes)
        table = self.decoder.vocab_size * self.width
        total += table + table * (not self.tied)
        if encodes and not self.shared_embedding:
            total += self.encoder.vocab_size * self.width
        stacks = [self.decoder] + [self.encoder] * encodes
        if self._family.positions == "learned":
            total += sum(stack.positions * self.width for stack in stacks)
        if self._family.positions == "relative":  # the encoder's are among its vectors
            total += self._biases(self.decoder) * self.buckets * self.decoder.heads
        return total

    @property
    def _family(self) -> EncoderDecoderFamily:
        return FAMILIES[self.model_type]

    def engines(self, max_length: int, *, encodes: bool = True) -> dict[str, EngineShape]:
        """Return what the file of each engine holds, the encoder's where there is one."""
        decoder = self._decoder()
        tables = self._tables(self.decoder, max_length)
        decoder = EngineShape(decoder.matrices, decoder.vectors, tables)
        found = {CROSS: self._cross(), DECODER: decoder}
        return {ENCODER: self._encoder(), **found} if encodes and self.encodes else found

    def source_activations(self, positions: int) -> int:
        """Return the numbers that reading a source keeps at once: its encoder's, or cross keys'.

        Scores of one layer are [heads, positions, positions], and so is a bias.
        """
        stack, one = self.encoder, self._inner(self.encoder)
        relative = self._family.positions == "relative"
        scores = stack.heads * positions * (2 if relative else 1)
        products = 3 * stack.inner + 3 * one + 3 * self.width
        layer = positions * (scores + products) + 2 * self.frames * self.width
        pairs = 2 * self.decoder.layers * self.decoder.heads * self.head_dim
        return max(layer, positions * (2 * pairs + self.width))

    def _encoder(self) -> EngineShape:
        stack, family = self.encoder, self._family
        matrices, vectors = [], list[int]()
        if family.speech:
            vectors += [self.width * self.features * 3, self.width]
            vectors += [self.width * self.width * 3, self.width]
        for _ in range(stack.layers):
            matrices += [*self._attention(stack), *self._feed_forward(stack)]
            vectors += [*self._attention_biases(stack), *self._feed_forward_biases(stack)]
            vectors += self._norms(2)
        if stack.vocab_size:
            matrices.append(Matrix("embedding", stack.vocab_size, self.width))
        vectors += self._norms(family.embedding_norm + family.final_norm)
        vectors += [self.buckets * stack.heads] * self._biases(stack)
        tables = () if family.positions == "relative" else self._tables(stack, 0)
        return EngineShape(tuple(matrices), tuple(vectors), tables)

    def _cross(self) -> EngineShape:
        """Return the keys and values of a source: all layers read the same hidden states."""
        stack = self.decoder
        one, biases = stack.heads * self.head_dim, self._family.biases
        if self._family.key_bias:
            joined = 2 * stack.layers * one
            return EngineShape((self._of_layers(joined),), (joined,) * biases)
        return EngineShape(
            (self._of_layers(one),) * (2 * stack.layers), (one,) * (stack.layers * biases)
        )

    def _decoder(self) -> EngineShape:
        stack, family = self.decoder, self._family
        one = stack.heads * self.head_dim
        matrices, vectors = [], list[int]()
        for _ in range(stack.layers):
            matrices += [
                *self._attention(stack), self._of_layers(one), Matrix("layers", self.width, one),
                *self._feed_forward(stack),
            ]  # fmt: skip
            vectors += [*self._attention_biases(stack), *self._feed_forward_biases(stack)]
            vectors += [one, self.width] * family.biases
            vectors += self._norms(3)
        matrices.append(Matrix("embedding", stack.vocab_size, self.width))
        matrices.append(Matrix("head", stack.vocab_size, self.width))
        vectors += self._norms(family.embedding_norm + family.final_norm)
        vectors += [stack.vocab_size] * family.logits_bias
        return EngineShape(tuple(matrices), tuple(vectors))

    def _tables(self, stack: Stack, max_length: int) -> tuple[int, ...]:
        """Return the tables that positions are looked up in.

        Relative biases of a decoder are one by distance, up to where the last bucket begins.
        """
        if self._family.positions != "relative":
            return (stack.positions * self.width,)
        exact = self.buckets // 2
        last = exact * (stack.positions / exact) ** ((self.buckets - 1 - exact) / exact)
        return (stack.heads * min(max_length, ceil(last) + 1),) * self._biases(stack)

    def _biases(self, stack: Stack) -> int:
        """Return how many layers have relative biases of their own."""
        if self._family.positions != "relative":
            return 0
        return stack.layers if self._family.relative_each else 1

    def _of_layers(self, rows: int) -> Matrix:
        return Matrix("layers", rows, self.width)

    def _attention(self, stack: Stack) -> Iterator[Matrix]:
        one = self._inner(stack)
        if self._family.key_bias:
            yield self._of_layers(3 * one)
        else:
            yield from (self._of_layers(one),) * 3
        yield Matrix("layers", self.width, one)

    def _inner(self, stack: Stack) -> int:
        """Return the width of all heads; but for T5 it is the model's."""
        relative = self._family.positions == "relative"
        return stack.heads * self.head_dim if relative else self.width

    def _attention_biases(self, stack: Stack) -> list[int]:
        if not self._family.biases:
            return []
        one = self._inner(stack)
        return [3 * one, self.width] if self._family.key_bias else [one, one, self.width]

    def _feed_forward(self, stack: Stack) -> Iterator[Matrix]:
        if self.gate in _FUSED:
            yield self._of_layers(2 * stack.inner)
        else:
            yield from (self._of_layers(stack.inner),) * (2 if self.gate else 1)
        yield Matrix("layers", self.width, stack.inner)

    def _feed_forward_biases(self, stack: Stack) -> list[int]:
        return [stack.inner, self.width] * self._family.biases

    def _norms(self, count: int) -> list[int]:
        return [self.width] * (count * (1 + self._family.biases))
