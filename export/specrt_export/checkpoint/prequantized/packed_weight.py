"""A quantized weight of a folder: the tensors that make it, and its rows in codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrt.errors import CheckpointError
from specrt_export.checkpoint.codes import FP8, Codes, Floats, TensorOrigin
from specrt_export.checkpoint.safetensors_file import WeightBytes, map_array
from specrt_export.precision import ENGINE_BLOCKS, SMALLEST_BLOCK

Order = NDArray[np.int64]


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of one layer, by the last part of their names."""

    name: str
    tensors: Mapping[str, WeightBytes]

    def tensor(
        self, part: str, types: Sequence[str], *shapes: tuple[int, ...], rank: int = 0
    ) -> WeightBytes:
        """Return a tensor of one of some types and shapes, or of a number of axes.

        Raises: CheckpointError.
        """
        found = self.tensors.get(part)
        if found is None:
            first = next(iter(self.tensors.values()))
            raise CheckpointError(
                f"{first.file.parent} holds {self.name} in codes and no {self.name}.{part}; fetch "
                "the checkpoint again, with all its parts"
            )
        if found.dtype not in types:
            raise self.wrong(part, f"is stored as {found.dtype}; expected {' or '.join(types)}")
        if shapes and found.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self.wrong(part, f"has shape {list(found.shape)}; expected {wanted}")
        if rank and (len(found.shape) != rank or 0 in found.shape):
            axes = "axis" if rank == 1 else "axes"
            raise self.wrong(part, f"has shape {list(found.shape)}; expected {rank} {axes}")
        return found

    def array(self, part: str) -> NDArray[Any]:
        """Map a tensor."""
        return map_array(self.tensors[part])

    def wrong(self, part: str, what: str) -> CheckpointError:
        """Return what says that a tensor does not fit those next to it."""
        return CheckpointError(
            f"{self.tensors[part].file}: {self.name}.{part} {what}. Check that config.json and "
            "weights are of one checkpoint, and fetch both again"
        )


Rows = Callable[[LayerTensors, int, int], NDArray[Any]]
"""Returns something of the rows from a first to a last, one of them along the first axis."""


class WeightLayout(NamedTuple):
    """Where in its tensors a weight has its codes, scales and zeros."""

    part: str
    """The tensor that holds the codes."""
    codes: Rows
    """[n, K]: whole numbers raised, so that 0 is the least; bits of floats. Both without sign."""
    scales: Rows
    """[n, groups] fp32."""
    zeros: Rows | None = None
    """[n, groups], raised as the codes are; None where all are in the middle."""
    groups: str = ""
    """The tensor that holds the group of each input, if there is one."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] of a folder in codes; a `CodedWeight`."""

    module: LayerTensors
    layout: WeightLayout
    shape: tuple[int, ...]
    precision: str
    """See `CodedWeight`."""
    group: int
    """Inputs that share a scale in the file."""
    kind: str
    """What the file's own kind calls its format."""

    @property
    def name(self) -> str:
        """See `CodedWeight`."""
        return f"{self.module.name}.weight"

    @property
    def origin(self) -> TensorOrigin:
        """See `CodedWeight`."""
        part = self.layout.part
        return TensorOrigin(self.module.tensors[part].file, f"{self.module.name}.{part}", self.kind)

    @cached_property
    def inputs(self) -> Order | None:
        """See `CodedWeight`: with activation order the inputs of one group are apart.

        Raises: CheckpointError for groups that there are not.
        """
        part, count = self.layout.groups, self.shape[1]
        if not part:
            return None
        groups = self._stated()
        if (groups < 0).any() or (groups >= -(-count // self.group)).any():
            raise self.module.wrong(
                part,
                f"names groups {groups.min()} to {groups.max()}; expected 0 to "
                f"{-(-count // self.group) - 1}",
            )
        order = np.argsort(groups, kind="stable")
        return None if (order == np.arange(count)).all() else order

    @cached_property
    def _groups(self) -> Order:
        """The group of each column of the codes [K]."""
        if not self.layout.groups:
            return np.arange(self.shape[1]) // self.group
        return np.sort(self._stated())

    def _stated(self) -> Order:
        stored = self.module.array(self.layout.groups)
        return (stored.view(np.int32) if stored.dtype == np.uint32 else stored).astype(np.int64)

    @cached_property
    def block(self) -> int:
        """See `CodedWeight`: a longer group becomes several blocks of one scale.

        Raises: CheckpointError where no block of an engine divides the groups.
        """
        groups = self._groups
        for block in ENGINE_BLOCKS:
            if len(groups) % block == 0:
                cut = groups.reshape(-1, block)
                if (cut == cut[:, :1]).all():
                    return block
        raise self.module.wrong(
            self.layout.groups or self.layout.part,
            f"has {len(groups)} inputs in groups of {self.group}; expected multiples of "
            f"{SMALLEST_BLOCK} in each",
        )

    @cached_property
    def centred(self) -> bool:
        """Whether every zero is in the middle of the codes."""
        if self.layout.zeros is None:
            return True
        return bool((self.layout.zeros(self.module, 0, self.shape[0]) == self._middle).all())

    @property
    def _middle(self) -> np.uint8:
        return np.uint8(8 if self.precision == "int4" else 128)

    def codes(self, begin: int, end: int) -> Codes:
        """See `CodedWeight`."""
        codes = self.layout.codes(self.module, begin, end)
        if self.precision == "fp8" and np.isnan(codes.view(FP8).astype(np.float32)).any():
            raise self._infinite(begin, end)
        if self.inputs is not None:
            codes = codes[:, self.inputs]
        first = self._groups[:: self.block]
        scales = self.layout.scales(self.module, begin, end)
        if not np.isfinite(scales).all():
            raise self._infinite(begin, end)
        zeros = None
        if self.precision.startswith("int"):
            if self.centred:
                codes = (codes - self._middle).view(np.int8)
            elif self.layout.zeros is not None:
                zeros = self.layout.zeros(self.module, begin, end)[:, first]
        return Codes(
            self.precision,
            np.ascontiguousarray(codes),
            np.ascontiguousarray(scales[:, first]),
            None if zeros is None else np.ascontiguousarray(zeros),
        )

    def _infinite(self, begin: int, end: int) -> CheckpointError:
        return self.module.wrong(
            self.layout.part, f"comes to numbers that are not finite, in rows {begin} to {end - 1}"
        )

    def floats(self, begin: int, end: int) -> Floats:
        """See `CodedWeight`."""
        values = self.codes(begin, end).floats()
        if self.inputs is None:
            return values
        placed = np.empty_like(values)
        placed[:, self.inputs] = values
        return placed

    def check(self) -> None:
        """Refuse groups that no engine holds.

        Raises: CheckpointError.
        """
        _ = self.inputs, self.block
