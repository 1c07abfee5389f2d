"""The features of a target on the device: kept by its passes, read by its head's."""

from __future__ import annotations

from collections.abc import Sequence

from specrt.engine.tensorrt.device import Memory
from specrt.engine.tensorrt.engine_record import FEATURE, PassShape
from specrt.engine.tensorrt.passes import PlanPass

ITEM_BYTES = 4
"""Of a number: features are fp32."""


class FeatureBuffer:
    """What a target leaves at each position for its head, next to its KV buffers.

    A pass writes its features to one place, so that it can be captured, and they are copied to
    their positions after it. Nothing of them comes to the host.

    Where the target has not been a head keeps the states that it goes on from: the target's next
    pass begins there, and overwrites them.
    Shapes: [batch, max_length, width] f32.
    """

    def __init__(self, memory: Memory, batch: int, max_length: int, width: int) -> None:
        self.width, self.max_length = width, max_length
        self.bytes = ITEM_BYTES * width
        """Of one position."""
        self._device = memory.device
        self._address = memory.take(batch * max_length * self.bytes, "features")

    def before(self, bound: PlanPass, starts: Sequence[int], width: int) -> None:
        """Copy nothing: a target reads no features."""

    def after(self, bound: PlanPass, starts: Sequence[int], shape: PassShape) -> None:
        """Keep the features of a pass at its positions."""
        size = shape.width * self.bytes
        for row, start in enumerate(starts):
            self._device.copy(self._at(row, start), bound.states[FEATURE] + row * size, size)

    def read(self, to: int, starts: Sequence[int], width: int) -> None:
        """Copy the features of some positions of each row, [batch, width], to where a pass reads.

        The positions are those of a pass that fits into the KV buffers, so they are here.
        """
        size = width * self.bytes
        for row, start in enumerate(starts):
            self._device.copy(to + row * size, self._at(row, start), size)

    def write(self, row: int, position: int, source: int) -> None:
        """Put a head's state where the feature of a position will be."""
        self._device.copy(self._at(row, position), source, self.bytes)

    def _at(self, row: int, position: int) -> int:
        return self._address + (row * self.max_length + position) * self.bytes
