"""Attention of a head in training, whose drafts begin at many places of a text at once.

    draft that begins at s, position k    sees the text's keys 0 .. s, and its own of 1 .. k

Own keys are one for each draft and position, so their scores are products of rows, not a matrix.
Source: training-time test of EAGLE-3, arXiv:2503.01840.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "specrt_unrolled"


class UnrolledKeys:
    """Keys and values of a text and, behind them, of each position of the drafts that begin in it.

    Has the one verb of transformers' caches that its layers call.
    """

    def __init__(self) -> None:
        self._layers: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Any, Any]:
        """Add those of a position; return all so far, the text's first."""
        pairs = self._layers.setdefault(layer, [])
        pairs.append((keys, values))
        return tuple(key for key, _ in pairs), tuple(value for _, value in pairs)


def attend_unrolled(config: Any) -> None:
    """Let layers of a configuration attend to `UnrolledKeys`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    config._attn_implementation = NAME


def _attend(
    module: Any, query: Tensor, keys: tuple[Tensor, ...], values: tuple[Tensor, ...],
    seen: Tensor | None, *, scaling: float, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend to the text, causally where `seen` is None, and to what each draft has of its own.

    Shapes: query [B, H, Q, D]; keys and values [B, G, S, D], then [B, G, Q, D] each; seen
        [B, 1, Q, S] bool -> [B, Q, H, D].
    """
    if seen is None:
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, keys[0], values[0], is_causal=True, scale=scaling, enable_gqa=True
        )
        return attended.transpose(1, 2), None
    batch, heads, count, width = query.shape
    query = query.view(batch, keys[0].shape[1], -1, count, width) * scaling  # [B, G, H/G, Q, D]
    shared = query @ keys[0].unsqueeze(2).transpose(-1, -2)
    least = torch.finfo(shared.dtype).min
    own = [(query * key.unsqueeze(2)).sum(-1, keepdim=True) for key in keys[1:]]
    scores = torch.cat([shared.masked_fill(~seen.unsqueeze(2), least), *own], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    attended = weights[..., : shared.shape[-1]] @ values[0].unsqueeze(2)
    for number, value in enumerate(values[1:], shared.shape[-1]):
        attended = attended + weights[..., number, None] * value.unsqueeze(2)
    return attended.view(batch, heads, count, width).transpose(1, 2), None
