"""Make a transformers model speak the portable graph's attention and KV cache.

transformers lets a caller name the functions that compute attention and masks, and pass a
cache object. The three here emit `Attention` and `TensorScatter` of ONNX opset 24, so one
hook serves every decoder that uses that interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.onnx.ops import symbolic

from specrt.errors import ExportError

NAME = "specrt"

OPSET = 24


class _Empty:
    """The questions about length that transformers asks a cache; the graph's answer is `start`."""

    is_compileable = False

    def __init__(self, layers: int, length: int | torch.SymInt) -> None:
        self.is_sliding = [False] * layers
        self.length = length

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_query_offset(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, *_: Any) -> tuple[int | torch.SymInt, int]:
        return self.length, 0

    def get_max_length(self, *_: Any) -> int | torch.SymInt:
        return self.length

    def get_max_cache_shape(self, *_: Any) -> int | torch.SymInt:
        return self.length


class Probe(_Empty):
    """A cache that stores nothing and remembers the shapes it was shown."""

    def __init__(self, layers: int, length: int) -> None:
        super().__init__(layers, length)
        self.shapes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Remember the layer's shapes."""
        self.shapes[layer] = (tuple(key.shape), tuple(value.shape))
        return key, value


class Buffers(_Empty):
    """The fixed KV buffers of the graph contract, written at `start` of each row."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], start: Tensor) -> None:
        super().__init__(len(pairs), pairs[0][0].shape[2])
        self.start = start
        self.pairs = list(pairs)

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, Hkv, S, D] into the layer's buffers [B, Hkv, M, D]."""
        old_key, old_value = self.pairs[layer]
        self.pairs[layer] = (self._scatter(old_key, key), self._scatter(old_value, value))
        return self.pairs[layer]

    def _scatter(self, buffer: Tensor, new: Tensor) -> Tensor:
        return symbolic(
            "TensorScatter",
            [buffer, new, self.start],
            {"axis": -2, "mode": "linear"},
            dtype=buffer.dtype,
            shape=buffer.shape,
            version=OPSET,
        )


class Hook:
    """The attention and mask functions of one traced forward pass."""

    def __init__(self) -> None:
        self.windows: dict[int, int] = {}
        """Per layer that attended, how many latest keys it sees; 0 for all."""
        self.heads = 0
        """Query heads of the layers that attended."""
        self.positions: Tensor | None = None
        self._masks: dict[int, Tensor] = {}
        self._rules: dict[int, Callable[..., Tensor]] = {}

    def begin(self, positions: Tensor) -> None:
        """Start a forward pass whose tokens sit at `positions` [B, S]."""
        self.positions = positions
        self._masks = {}

    def mask(
        self,
        kv_length: int | torch.SymInt,
        mask_function: Callable[..., Tensor],
        local_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> Tensor:
        """Return the additive mask [B, 1, S, M], computed once for each window."""
        assert self.positions is not None, "begin() comes before the model runs"
        window = local_size or 0
        self._rules[window] = mask_function
        if window not in self._masks:
            query = self.positions.unsqueeze(1).unsqueeze(-1)
            seen = visible(query, torch.arange(cast(int, kv_length)), window)
            unseen = torch.full((), torch.finfo(dtype).min, dtype=dtype)
            self._masks[window] = torch.where(seen, torch.zeros((), dtype=dtype), unseen)
        return self._masks[window]

    def check_masks(self) -> None:
        """Hold the masks made against the rules the model gave for them, at every edge.

        Raises: ExportError if a model attends in another way than causally within a window.
        """
        for window, rule in self._rules.items():
            near = {edge + step for edge in (2, window, 2 * window) for step in range(-2, 3)}
            index = torch.tensor(sorted(near - {-2, -1}))
            query, key = index.unsqueeze(1), index.unsqueeze(0)
            if not torch.equal(rule(0, 0, query, key), visible(query, key, window)):
                raise ExportError(
                    "the model's attention mask is neither causal nor a sliding window (it may be "
                    "chunked or bidirectional); this model does not export"
                )

    def attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **extra: Any,
    ) -> tuple[Tensor, None]:
        """Emit `Attention` on query [B, H, S, D] and cached keys and values; return [B, S, H, D].

        Raises: ExportError for a term of the attention that the operator does not have.
        """
        for term in ("s_aux", "position_bias", "indices"):
            if extra.get(term) is not None:
                raise ExportError(
                    f"{type(module).__name__} adds {term!r} to its attention, which ONNX's "
                    "Attention operator has no place for; this model does not export"
                )
        self.windows[int(module.layer_idx)] = self._window(module, mask)  # type: ignore[arg-type]
        self.heads = int(query.shape[1])
        attributes: dict[str, Any] = {}
        if scaling is not None:
            attributes["scale"] = float(scaling)
        if softcap:
            attributes["softcap"] = float(softcap)
        shape = (*query.shape[:3], value.shape[-1])
        inputs = [query, key, value, mask]
        out = symbolic(
            "Attention", inputs, attributes, dtype=query.dtype, shape=shape, version=OPSET
        )
        return out.transpose(1, 2), None

    def _window(self, module: torch.nn.Module, mask: Tensor | None) -> int:
        for window, made in self._masks.items():
            if made is mask:
                return window
        raise ExportError(
            f"{type(module).__name__} builds its attention mask itself, not through transformers' "
            "mask interface; this model does not export"
        )


def visible(query: Tensor, key: Tensor, window: int) -> Tensor:
    """Return whether a query position sees a key position; window 0 sees all before it."""
    seen = key <= query
    return seen & (key > query - window) if window else seen


@contextmanager
def installed(hook: Hook) -> Iterator[str]:
    """Register a hook with transformers and yield its name; nothing of it stays after."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, hook.attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, hook.mask)
    try:
        yield NAME
    finally:
        for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            registry._global_mapping.pop(NAME, None)
