"""What lowering leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx

from specrt_export.lower.stored import Stored


@dataclass(frozen=True)
class Lowered:
    """A lowered graph, its weights, and per rewrite how many of how many places it took."""

    model: onnx.ModelProto
    weights: dict[str, Stored]
    fused: dict[str, str]


@dataclass(frozen=True)
class Counts:
    """What the rewrites found, as `n/of`."""

    said: dict[str, str] = field(default_factory=dict)

    def __setitem__(self, name: str, counts: tuple[int, int]) -> None:
        self.said[name] = "/".join(map(str, counts))
