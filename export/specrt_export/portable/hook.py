"""What stands in for attention, masks and caches while a model is traced.

transformers lets a caller name the functions that compute attention and masks, and pass a cache
object. `Hook` and `Buffers` emit `Attention` and `TensorScatter` of ONNX opset 24, so that one hook
serves every model that uses that interface.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.onnx.ops import symbolic, symbolic_multi_out

from specrt.errors import ExportError
from specrt.geometry import ATTENTION, BASE, CONV, FACTORS, RECURRENT, SHARED, STATE, LayerMemory
from specrt_export.portable.experts_function import ACTIVATIONS, EXPERTS
from specrt_export.portable.state_function import DOMAIN, RECURRENCE

NAME = "specrt"

OPSET = 24


class _State(NamedTuple):
    """What a layer takes for its state, and hands on to the function that reads and changes it."""

    cache: Any
    """A `Probe`, or `Buffers`."""
    layer: int


class Recurrence(NamedTuple):
    """How a layer's state changes with each token: S = exp(g) S + k u, and y = S q.

    u is beta v, or by the delta rule beta (v - exp(g) S k) (Yang et al., Gated Delta Networks,
    arXiv:2412.06464).
    Shapes: q, k [B, S, key heads, D]; v [B, S, H, E]; g, beta [B, S, H]; S [H, D, E].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    """Its logarithm, g."""
    beta: Tensor
    delta: bool
    scale: float = 1.0
    """What queries are multiplied by."""
    epsilon: float = 0.0
    """Where it is not 0, queries and keys x are divided by sqrt(sum(x * x) + epsilon)."""

    @property
    def memory(self) -> LayerMemory:
        """What a layer remembers of it."""
        heads, key_heads = int(self.value.shape[2]), int(self.key.shape[2])
        sizes = int(self.key.shape[3]), int(self.value.shape[3])
        return LayerMemory(RECURRENT, heads, *sizes, key_heads=key_heads)


class _Empty:
    """The questions about length that transformers asks a cache; the graph's answer is `start`."""

    is_compileable = False

    def __init__(self, layers: int, length: int | torch.SymInt) -> None:
        self.is_sliding = self.is_linear = self.is_dummy = [False] * layers
        self.length = length

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    def get_recurrent_state(self, layer: int, **_: Any) -> _State:
        return _State(self, layer)

    def update_recurrent_state(self, *_: Any, **__: Any) -> None:
        return None

    def get_query_offset(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, *_: Any) -> tuple[int | torch.SymInt, int]:
        return self.length, 0

    def get_max_length(self, *_: Any) -> int | torch.SymInt:
        return self.length

    def get_max_cache_shape(self, *_: Any) -> int | torch.SymInt:
        return self.length


class Probe(_Empty):
    """A cache that keeps what each layer shows it."""

    def __init__(self, layers: int, length: int) -> None:
        super().__init__(layers, length)
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self.keys: list[Tensor] = []
        self.others: list[tuple[int, LayerMemory]] = []
        """What layers remember besides, in the order in which they ran."""

    def update_conv_state(
        self, new: Tensor, layer: int, conv_kernel_size: int = 0, **_: Any
    ) -> Tensor:
        """Note the channels and taps of a layer's convolution; return inputs that begin a row."""
        memory = LayerMemory(CONV, key_width=int(new.shape[1]), window=conv_kernel_size)
        self.others.append((layer, memory))
        return torch.nn.functional.pad(new, (conv_kernel_size - 1, 0))

    def recur(self, layer: int, one: Recurrence) -> Tensor:
        """Note how a layer's state changes; return outputs of the right shape."""
        self.others.append((layer, one.memory))
        return one.value

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep the layer's keys and values."""
        self.pairs[layer] = key, value
        self.keys.append(key)
        return key, value

    def memories(
        self, hook: Hook, layers: int, model_type: str, forgetful: Collection[int] = ()
    ) -> tuple[LayerMemory, ...]:
        """Return what the layers remember, after a pass in which `hook` saw them attend.

        Layers that `forgetful` names keep nothing.
        Raises: ExportError for other layers that were not seen to, and for one that shares keys
            within another window than their owner's, or a block of attention with other layers.
        """
        own = self.others + [(layer, LayerMemory(ATTENTION)) for layer in hook.read]
        own.sort(key=lambda one: one[0])
        for layer in set(range(layers)) - {layer for layer, _ in own} - set(forgetful):
            raise ExportError(
                f"layer {layer} of {model_type} remembers in another way than through "
                "transformers' attention interface, its convolutions or its recurrent states; the "
                "portable graph needs a memory for each layer"
            )
        hook.index = {(one.kind, layer): index for index, (layer, one) in enumerate(own)}
        return tuple([
            self._attention(hook, layer, model_type) if one.kind == ATTENTION else one
            for layer, one in own
        ])  # fmt: skip

    def _attention(self, hook: Hook, layer: int, model_type: str) -> LayerMemory:
        key, value = hook.read[layer]
        heads, window = int(key.shape[1]), hook.windows[layer]
        owners = [at for at, shown in self.pairs.items() if shown[0] is key and shown[1] is value]
        if owners and owners[0] != layer:
            owner = owners[0]
            if owner not in hook.windows:
                raise ExportError(
                    f"{model_type} shares a block of attention between layers, layer {owner} among "
                    "them; the portable graph needs one for each layer: export another model"
                )
            if window != hook.windows[owner]:
                raise ExportError(
                    f"layer {layer} of {model_type} reads the keys of layer {owner} within a "
                    f"window of {window}, and that one within {hook.windows[owner]} (0 is none); a "
                    "layer that shares has its owner's window"
                )
            return LayerMemory(SHARED, owner=hook.index[ATTENTION, owner])
        return LayerMemory(ATTENTION, heads, int(key.shape[3]), int(value.shape[3]), window)


class Buffers(_Empty):
    """The fixed KV buffers of the graph contract, written at `start` of each row.

    They hold what attention reads. Where that is more than a layer shows its cache (latents of
    multi-head latent attention, DeepSeek-V2, arXiv:2405.04434), `attended` writes it.
    """

    def __init__(
        self, buffers: Mapping[str, Tensor], start: Tensor,
        index: Mapping[tuple[str, int], int] | None = None, layers: int = 0,
    ) -> None:  # fmt: skip
        lengths = [one.shape[2] for name, one in buffers.items() if name.startswith("key.")]
        super().__init__(layers or len(lengths), lengths[0] if lengths else 1)
        self.start = start
        self.written = {name: one for name, one in buffers.items() if name != BASE}
        self._index, self._base = index or {}, buffers.get(BASE)

    def _name(self, buffer: str, kind: str, layer: int) -> str:
        return f"{buffer}.{self._index.get((kind, layer), layer)}"

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, Hkv, S, D] into the layer's buffers [B, Hkv, M, D]."""
        names = [self._name(one, ATTENTION, layer) for one in ("key", "value")]
        for name, new in zip(names, (key, value), strict=True):
            buffer = self.written[name]
            if (buffer.shape[1], buffer.shape[3]) != (new.shape[1], new.shape[3]):
                return key, value
        return self._write(names[0], key), self._write(names[1], value)

    def update_conv_state(
        self, new: Tensor, layer: int, conv_kernel_size: int = 0, **_: Any
    ) -> Tensor:
        """Write new inputs [B, C, S] of a convolution into the layer's ring [B, 1, R, C].

        Position p lies at p mod R. Returns what the convolution reads, [B, C, taps - 1 + S]: zeros
        stand for what lies before the row.
        """
        name = self._name(CONV, CONV, layer)
        ring = self.written[name]
        batch, channels, width = new.shape
        length = torch.tensor(ring.shape[2])
        rows = new.transpose(1, 2).unsqueeze(1)
        self.written[name] = scattered(ring, rows, self.start % length, "circular")
        before = conv_kernel_size - 1
        places = self.start.unsqueeze(1) + torch.arange(-before, width)
        read = symbolic(
            "GatherND",
            [self.written[name].squeeze(1), (places % length).unsqueeze(-1)],
            {"batch_dims": 1},
            dtype=new.dtype,
            shape=(batch, width + before, channels),
            version=OPSET,
        )
        there = (places >= 0).unsqueeze(-1)
        return torch.where(there, read, torch.zeros(())).transpose(1, 2)

    def attended(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return the buffers that attention reads, given what a layer calls it with."""
        if any(key is buffer for buffer in self.written.values()):
            return key, value
        names = [self._name(one, ATTENTION, layer) for one in ("key", "value")]
        return self._write(names[0], key), self._write(names[1], value)

    def recur(self, layer: int, one: Recurrence) -> Tensor:
        """Return what a layer reads of its state, [B, S, H, E], which it changes."""
        names = [self._name(buffer, RECURRENT, layer) for buffer in (STATE, FACTORS)]
        memory = [self.written[name] for name in names]
        read, *written = symbolic_multi_out(
            f"{DOMAIN}::{RECURRENCE}",
            [one.query, one.key, one.value, one.decay, one.beta, *memory, self.start, self._base],
            {"delta": int(one.delta), "scale": one.scale, "epsilon": one.epsilon},
            dtypes=[torch.float32] * 3,
            shapes=[one.value.shape, *(tensor.shape for tensor in memory)],
            version=1,
        )
        self.written.update(zip(names, written, strict=True))
        return read

    def _write(self, name: str, new: Tensor) -> Tensor:
        self.written[name] = scattered(self.written[name], new, self.start, "linear")
        return self.written[name]


def scattered(buffer: Tensor, new: Tensor, start: Tensor, mode: str) -> Tensor:
    """Return a buffer [B, heads, M, width] into which `new` is written from `start` of each row."""
    return symbolic(
        "TensorScatter",
        [buffer, new, start],
        {"axis": -2, "mode": mode},
        dtype=buffer.dtype,
        shape=buffer.shape,
        version=OPSET,
    )


@dataclass(frozen=True)
class TracedSource:
    """What a traced pass knows of the sources of its rows."""

    length: Tensor | None
    """Positions [B] of each that are not padding; None where none is."""
    keys: Sequence[Tensor] = ()
    """The cross keys of each layer, by which a decoder's attention to a source is known."""


class Hook:
    """The attention and mask functions of one traced forward pass."""

    def __init__(self) -> None:
        self.windows: dict[int, int] = {}
        """Per layer of a decoder that attended, how many latest keys it sees; 0 for all."""
        self.read: dict[int, tuple[Tensor, Tensor]] = {}
        """Per layer of a decoder that attended, the keys and values that it read."""
        self.cache: Buffers | None = None
        self.index: dict[tuple[str, int], int] = {}
        """Where memories are in the geometry, by kind and layer; where the layer is, by default."""
        self.heads = 0
        """Query heads of the layers that attended."""
        self.positions: Tensor | None = None
        self.source: TracedSource | None = None
        self._masks: dict[int, Tensor] = {}
        self._seen: dict[int, Tensor] = {}
        self._rules: dict[int, Callable[..., Tensor]] = {}
        self._source_masks: list[Tensor] = []
        self._biased: list[tuple[Tensor, Tensor, Tensor]] = []
        self.biases: list[Tensor] = []
        """The relative position biases of the pass, made for the positions of each row."""

    def begin(
        self, positions: Tensor | None, source: TracedSource | None = None,
        cache: Buffers | None = None,
    ) -> None:  # fmt: skip
        """Start a forward pass whose tokens sit at `positions` [B, S], or one over a source.

        `cache` holds the keys and values that its layers attend to, where there is one.
        """
        self.cache = cache
        self.positions = positions
        self.source = source
        self._masks, self._seen, self._source_masks = {}, {}, []
        self._biased, self.biases = [], []

    def mask(
        self,
        kv_length: int | torch.SymInt,
        mask_function: Callable[..., Tensor],
        local_size: int | None = None,
        q_length: int | torch.SymInt = 1,
        **_: Any,
    ) -> Tensor | None:
        """Return the additive mask [B, 1, S, M], computed once for each window.

        Of attention to a source it is [B, 1, S, E]; None where all of it is seen.
        """
        from transformers.masking_utils import bidirectional_mask_function

        if self.source is not None and mask_function is cast(Any, bidirectional_mask_function):
            return self._source_mask(q_length, kv_length)
        assert self.positions is not None, "begin() comes before the model runs"
        window = local_size or 0
        if local_size != 0:  # made by models without windows, for layers that they do not have
            self._rules[window] = mask_function
        if window not in self._masks:
            query = self.positions.unsqueeze(1).unsqueeze(-1)
            seen = visible(query, torch.arange(cast(int, kv_length)), window)
            self._seen[window] = seen
            self._masks[window] = hidden_unless(seen)
        return self._masks[window]

    def _source_mask(self, queries: int | torch.SymInt, width: int | torch.SymInt) -> Tensor | None:
        assert self.source is not None
        if self.source.length is None:
            return None
        if not self._source_masks:
            seen = torch.arange(cast(int, width)) < self.source.length.unsqueeze(1)
            seen = seen.unsqueeze(1).unsqueeze(1)
            # ONNX Runtime takes no mask that is to be repeated for each query.
            mask = hidden_unless(seen).expand(-1, -1, cast(int, queries), -1)
            self._source_masks = [mask, seen]
        return self._source_masks[0]

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
        mask: Tensor | None = None,
        scaling: float | None = None,
        softcap: float | None = None,
        **extra: Any,
    ) -> tuple[Tensor, None]:
        """Emit `Attention` on query [B, H, S, D] and cached keys and values; return [B, S, H, D].

        Raises: ExportError for a term of the attention that the operator does not have.
        """
        for term in ("s_aux", "indices", "attention_mask"):
            if extra.get(term) is not None:
                raise _another_term(module, term)
        mask = self._checked(module, query, key, value, mask, extra.get("position_bias"))
        attributes: dict[str, Any] = {}
        if scaling is not None:
            attributes["scale"] = float(scaling)
        if softcap:
            attributes["softcap"] = float(softcap)
        shape = (*query.shape[:3], value.shape[-1])
        if self.source is None or not self._crosses(key):
            self.heads = int(query.shape[1])
            if self.cache is not None:
                key, value = self.cache.attended(key, value, int(module.layer_idx))  # type: ignore[arg-type]
        inputs = [query, key, value, *([] if mask is None else [mask])]
        out = symbolic(
            "Attention", inputs, attributes, dtype=query.dtype, shape=shape, version=OPSET
        )
        return out.transpose(1, 2), None

    def _checked(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
        mask: Tensor | None, bias: Tensor | None,
    ) -> Tensor | None:  # fmt: skip
        """Return the mask of a call, the bias of relative positions in it.

        Raises: ExportError for a mask or a bias that the model made itself.
        """
        if self._crosses(key):
            # A model that has biases makes zeros for a source, where it has no such table.
            if bias is not None and getattr(module, "has_relative_attention_bias", True):
                raise _another_term(module, "position_bias")
            own = self._source_mask(query.shape[2], key.shape[2])
            if mask is not None and mask is not own:
                raise _own_mask(module)
            return own
        if self.source is not None and self.positions is None:
            if mask is not self._source_mask(query.shape[2], key.shape[2]):
                raise _own_mask(module)
            seen = self._source_masks[1] if self._source_masks else None
        else:
            window = self._window(module, mask)
            layer = int(module.layer_idx)  # type: ignore[arg-type]
            self.windows[layer], self.read[layer] = window, (key, value)
            seen = self._seen.get(window)
        return mask if bias is None else self._with_bias(module, seen, bias)

    def _crosses(self, key: Tensor) -> bool:
        return self.source is not None and any(key is one for one in self.source.keys)

    def _with_bias(self, module: torch.nn.Module, seen: Tensor | None, bias: Tensor) -> Tensor:
        """Return the additive mask [B, H, S, M] of a bias, computed once for all layers."""
        if not any(bias is made for made in self.biases):
            raise _another_term(module, "position_bias")
        if seen is None:
            return bias
        for of, where, made in self._biased:
            if of is bias and where is seen:
                return made
        made = hidden_unless(seen, bias)
        self._biased.append((bias, seen, made))
        return made

    def _window(self, module: torch.nn.Module, mask: Tensor | None) -> int:
        for window, built in self._masks.items():
            if built is mask:
                return window
        raise _own_mask(module)


def _another_term(module: torch.nn.Module, term: str) -> ExportError:
    return ExportError(
        f"{type(module).__name__} adds {term!r} to its attention, which ONNX's "
        "Attention operator has no place for; this model does not export"
    )


def _own_mask(module: torch.nn.Module) -> ExportError:
    return ExportError(
        f"{type(module).__name__} builds its attention mask itself, not through transformers' "
        "mask interface; this model does not export"
    )


def hidden_unless(seen: Tensor, value: Tensor | None = None) -> Tensor:
    """Return what is added to scores: `value` or 0 where a key is seen, else the least.

    Never a sum of both, which overflows in fp16.
    """
    unseen = torch.full((), torch.finfo(torch.float32).min, dtype=torch.float32)
    return torch.where(seen, torch.zeros(()) if value is None else value, unseen)


def visible(query: Tensor, key: Tensor, window: int) -> Tensor:
    """Return whether a query position sees a key position; window 0 sees all before it."""
    seen = key <= query
    return seen & (key > query - window) if window else seen


def causal_conv(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    **_: Any,
) -> Tensor:  # fmt: skip
    """Return the outputs [B, C, S] of a convolution over inputs [B, C, taps - 1 + S].

    In place of `causal_conv1d_fn` of transformers, which computes more and cuts it off.
    """
    from transformers.activations import ACT2FN

    groups = weight.shape[0]
    made = torch.nn.functional.conv1d(hidden, weight.unsqueeze(1), bias, groups=groups)
    return made if activation is None else cast(Tensor, ACT2FN[activation](made))


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: _State,
    use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the outputs [B, S, H, E] of the gated delta rule.

    In place of `torch_chunk_gated_delta_rule` of transformers.
    """
    epsilon = 1e-6 if use_qk_l2norm_in_kernel else 0.0
    scale = float(query.shape[3]) ** -0.5
    one = Recurrence(query, key, value, g, beta, delta=True, scale=scale, epsilon=epsilon)
    return initial_state.cache.recur(initial_state.layer, one), None


def state_space(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,  # noqa: N803
    initial_states: _State, D: Tensor | None = None, dt_bias: Tensor | None = None,  # noqa: N803
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, inf), **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the outputs [B, S, H, E] of a state space model.

    In place of `mamba2_chunk_scan` of transformers (Dao and Gu, Transformers are SSMs,
    arXiv:2405.21060).
    """
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    if dt_limit[0] > 0.0 or dt_limit[1] < inf:
        dt = torch.clamp(dt, *dt_limit)
    one = Recurrence(C, B, hidden_states, A * dt, dt, delta=False)
    read = initial_states.cache.recur(initial_states.layer, one)
    return read if D is None else read + hidden_states * D.unsqueeze(-1), None


def experts(module: Any, hidden: Tensor, named: Tensor, shares: Tensor) -> Tensor:
    """Return what some experts of a layer make of each token, [T, H].

    Shapes: hidden [T, H]; named, shares [T, slots].
    Raises: ExportError for experts that are not gated by an activation that the kernels have.
    """
    from transformers.activations import ACT2FN
    from transformers.integrations.moe import _default_apply_gate

    own = getattr(module, "act_fn", None)
    kind = torch.nn.SiLU if own is torch.nn.functional.silu else type(own)
    activation = next((a for name, a in ACTIVATIONS.items() if kind is type(ACT2FN[name])), None)
    is_gated = module.has_gate and type(module)._apply_gate is _default_apply_gate
    is_plain = module.is_concatenated and not (
        module.has_bias or module.is_transposed or module.has_post_expert_norm
    )
    if activation is None or not (is_gated and is_plain):
        raise ExportError(
            f"{type(module).__name__} has experts of a kind that the portable graph does not have; "
            f"expected gated ones with {' or '.join(EXPERTS)}, without biases. Export a dense model"
        )
    return symbolic(
        f"{DOMAIN}::{EXPERTS[activation]}",
        [hidden, named, shares, module.gate_up_proj, module.down_proj],
        {"experts": int(module.gate_up_proj.shape[0])},
        dtype=hidden.dtype,
        shape=hidden.shape,
        version=1,
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv,
    "mamba2_chunk_scan": state_space,
    "torch_chunk_gated_delta_rule": gated_delta,
}
"""Functions that transformers' modules call by name, and what is traced in their place."""


@contextmanager
def replaced(model: torch.nn.Module) -> Iterator[None]:
    """Let a model's modules call `FUNCTIONS` meanwhile."""
    homes = {sys.modules[type(module).__module__] for module in model.modules()}
    own = [
        (home, name, vars(home)[name]) for home in homes for name in FUNCTIONS if name in vars(home)
    ]
    try:
        for home, name, _ in own:
            setattr(home, name, FUNCTIONS[name])
        yield
    finally:
        for home, name, function in own:
            setattr(home, name, function)


@contextmanager
def installed(hook: Hook) -> Iterator[str]:
    """Register a hook with transformers and yield its name; nothing of it stays after."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registries: list[tuple[Any, Callable[..., Any]]] = [
        (ALL_ATTENTION_FUNCTIONS, hook.attention),
        (ALL_MASK_ATTENTION_FUNCTIONS, hook.mask),
        (ALL_EXPERTS_FUNCTIONS, experts),
    ]
    for registry, function in registries:
        registry.register(NAME, function)
    try:
        yield NAME
    finally:
        for registry, _ in registries:
            registry._global_mapping.pop(NAME, None)
