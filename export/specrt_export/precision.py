"""What the weights of one model are stored as."""

from __future__ import annotations

from dataclasses import dataclass

STORAGE = ("fp32", "fp16", "bf16")


SCALED = ("int8", "int4", "fp8")
"""Those whose weights share scales."""


PRECISIONS = (*STORAGE, *SCALED)


STORED = "stored"
"""What a recipe calls the codes and scales of a quantized checkpoint, kept as they are."""


BLOCKS = (32, 64, 128)
"""Weights along the inner axis that share a scale: what a recipe may ask for."""


SMALLEST_BLOCK = 16
"""Of a weight that no asked block divides; TensorRT and MatMulNBits take no smaller ones."""

ENGINE_BLOCKS = (*reversed(BLOCKS), SMALLEST_BLOCK)
"""Weights that share a scale in an engine, the most first."""


def fitting_block(inner: int, largest: int) -> int:
    """Return the largest block up to the asked one that divides an inner size; 0 if none does.

    A whole row is one that fits.
    """
    if largest == inner:
        return inner
    return next((b for b in ENGINE_BLOCKS if b <= largest and inner % b == 0), 0)


PER_ROW = ("int8", "fp8")
"""What TensorRT multiplies fast with one scale for each row only."""


BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4, "fp8": 8, "fp4": 4}
"""Of a weight, without scales."""


_SCALE_BITS = 32


AUTO_BITS = "auto"
"""What a recipe calls bits that are chosen for each part of a model."""


@dataclass(frozen=True)
class BitBound:
    """What bits that are chosen must keep to: one of both."""

    max_kl: float | None = None
    """Most nats of KL divergence from the checkpoint, a mean over positions."""
    max_bytes: int | None = None
    """Most bytes of the engine's weights."""


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
    """Weights that share a scale; 0 where none do."""
    per_row: bool = False
    """Whether weights of 8 bits share one scale for each row, whatever `block` says."""
    positive: bool = False
    """Whether scales of int4 are positive: TensorRT's parser refuses others."""
    symmetric: bool = True
    """Whether blocks of int4 have no zeros."""
    calibrated: bool = False
    """Whether codes of int4 are found with error feedback on a text, not each for itself."""
    auto: tuple[str, ...] = ()
    """Roles, of `layers` and `head`, whose weights are int4 or int8 as a bound asks for."""

    @classmethod
    def of(
        cls, layers: str, embedding: str = "", head: str = "", block: int = 0,
        *, per_row: bool = False, calibrated: bool = False, auto: bool = False,
        symmetric: bool = True,
    ) -> Precision:  # fmt: skip
        """Fill in what was left out; with `per_row` (TensorRT) only int4 has blocks."""
        layers = layers or STORAGE[0]
        free = ("layers", *(() if head else ("head",))) if auto else ()
        ends = "int8" if layers == "int4" else layers
        names = (layers, embedding or ends, head or ends)
        shared = {name for name in names if name in SCALED}
        calibrated = calibrated and "int4" in (names[0], names[2])
        if per_row:
            blocked = "int4" in shared
            return cls(
                *names, block=(block or BLOCKS[-1]) if blocked else 0,
                per_row=bool(shared & set(PER_ROW)) or auto, positive=blocked,
                calibrated=calibrated, auto=free, symmetric=symmetric,
            )  # fmt: skip
        block = (block or BLOCKS[0]) if shared else 0
        return cls(*names, block=block, calibrated=calibrated, auto=free, symmetric=symmetric)

    def block_of(self, name: str, inner: int) -> int:
        """Return how many weights of a row of `inner` share a scale in one of the precisions."""
        return inner if self.per_row and name in PER_ROW else self.block

    @property
    def names(self) -> tuple[str, str, str]:
        """The three precisions."""
        return self.layers, self.embedding, self.head

    @property
    def most(self) -> str:
        """The largest that a weight of the layers may be stored as."""
        return "int8" if self.auto else self.layers

    @property
    def rewrites(self) -> bool:
        """Whether any weight is stored otherwise than its checkpoint or fp32 says."""
        return not set(self.names) <= {"fp32", STORED}

    @property
    def keeps(self) -> bool:
        """Whether weights stay as a quantized checkpoint has them."""
        return self.layers == STORED

    @property
    def quantizes(self) -> bool:
        """Whether any weights share scales."""
        return bool(set(self.names) & set(SCALED))

    def disk_bytes(self, end: bool) -> float:
        """Return the bytes that a weight takes on disk while an engine is built.

        Codes and their scales lie in the quantized graph's folder and in the engine, and those
        that were calibrated also where a killed build would find them; what
        is stored as fp16 or bf16 is also fp32 in between. `end` is for a table of vocabulary size,
        which may be stored twice.
        """
        if not self.rewrites:
            return 4
        bits = 0.0
        for name in {self.embedding, self.head} if end else {self.most}:
            if name in SCALED:
                # The best of several trials is kept while the next runs.
                copies = (3 if self.calibrated and name == "int4" else 2) + 3 * bool(self.auto)
                bits += copies * (BITS[name] + _SCALE_BITS / (self.block or BLOCKS[0]))
            else:
                bits += 2 * BITS[name] + BITS["fp32"]
        return bits / 8
