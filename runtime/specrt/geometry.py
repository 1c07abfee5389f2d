"""The shape of one model as its engine sees it: what a graph, a manifest and a KV buffer share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from specrt.schema import Count, Span, read


@dataclass(frozen=True)
class Geometry:
    """The fixed sizes of one decoder.

    Shapes: a KV buffer is [batch, kv_heads, max_length, head_dim], two a layer.
    """

    layers: Annotated[int, Span(1, 10**4)]
    heads: Count
    """Query heads; `kv_heads` of them are shared by groups."""
    kv_heads: Count
    head_dim: Count
    vocab_size: Count
    max_positions: Count
    """Positions the model was trained for; no engine is built longer."""
    windows: tuple[int, ...]
    """Per layer, the number of latest keys a query sees; 0 where it sees all."""

    def to_json(self) -> dict[str, Any]:
        """Return the geometry as plain JSON types."""
        return {**asdict(self), "windows": list(self.windows)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Geometry:
        """Read what `to_json` wrote; raises ValueError on anything else."""
        return read(cls, data, "geometry")

    def kv_bytes(self, batch: int, max_length: int, item_bytes: int) -> int:
        """Return the bytes all KV buffers of this model take."""
        return 2 * self.layers * batch * self.kv_heads * max_length * self.head_dim * item_bytes
