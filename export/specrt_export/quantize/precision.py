"""What the weights of one model are stored as."""

from __future__ import annotations

from dataclasses import dataclass

STORAGE = ("fp32", "fp16", "bf16")
INTEGER = ("int8", "int4")
PRECISIONS = (*STORAGE, *INTEGER)

BLOCKS = (32, 64, 128)
"""Weights along the inner axis that share a scale: what a recipe may ask for."""

SMALLEST_BLOCK = 16
"""Of a weight that no asked block divides; TensorRT and MatMulNBits take no smaller ones."""

_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4}
_SCALE_BITS = 32


@dataclass(frozen=True)
class Precision:
    """One model's weights: the layers', the embedding table's and the last projection's.

    With int4 layers, embedding and head are int8 unless told otherwise. KL divergence of codelet's
    target in nats: int4 throughout 0.032, int8 ends 0.022, fp32 ends 0.022. A head of 16384 x 1024
    takes 12 % longer in int8 for 5 tokens on one core, about 4 % of the pass of its 222 M model.
    """

    layers: str = "fp32"
    embedding: str = "fp32"
    head: str = "fp32"
    block: int = 0
    """Of int8 and int4; 0 where neither is used."""

    @classmethod
    def of(cls, layers: str, embedding: str = "", head: str = "", block: int = 0) -> Precision:
        """Fill in what was left out."""
        ends = "int8" if layers == "int4" else layers
        made = (layers, embedding or ends, head or ends)
        return cls(*made, block=(block or BLOCKS[0]) if set(made) & set(INTEGER) else 0)

    @property
    def names(self) -> tuple[str, str, str]:
        """The three precisions."""
        return self.layers, self.embedding, self.head

    @property
    def rewrites(self) -> bool:
        """Whether any weight is stored otherwise than as fp32."""
        return set(self.names) != {"fp32"}

    @property
    def quantizes(self) -> bool:
        """Whether any weight becomes whole numbers."""
        return bool(set(self.names) & set(INTEGER))

    def disk_bytes(self, end: bool) -> float:
        """Return the bytes that a weight takes on disk while an engine is built.

        Whole numbers and their scales lie in the quantized graph's folder and in the engine; what
        is stored as fp16 or bf16 is also fp32 in between. `end` is for a table of vocabulary size,
        which may be stored twice.
        """
        if not self.rewrites:
            return 4
        bits = 0.0
        for name in {self.embedding, self.head} if end else {self.layers}:
            if name in INTEGER:
                bits += 2 * (_BITS[name] + _SCALE_BITS / self.block)
            else:
                bits += 2 * _BITS[name] + _BITS["fp32"]
        return bits / 8
