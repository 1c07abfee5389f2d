"""Traces a decoder into an ONNX graph with the shape of its weights, and none of their bytes.

What the model computes attention with meanwhile is in `hook`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.onnx.ops import symbolic

from specrt.errors import ExportError, reason_of
from specrt.geometry import BASE, Geometry, is_ring
from specrt_export.checkpoint.task import normalized
from specrt_export.heads.head_checkpoint import HeadCheckpoint
from specrt_export.heads.head_formats import HEAD_FORMATS
from specrt_export.portable.fake_model import LONG_ROPE, StoredWeights, build, faked
from specrt_export.portable.hook import OPSET, Buffers, Hook, Probe, installed, replaced

# Example sizes, all different, so that no two symbols can be taken for one.
BATCH, WIDTH, LENGTH, ROWS, RING = 2, 5, 64, 3, 24


UNCOUNTED = 1 << 20
"""Positions of a model that was trained for no certain number of them."""

NO_NUMBER = -1
"""The argmax of a row of logits that holds a NaN."""


@dataclass(frozen=True)
class Traced:
    """A raw graph: parameters have shapes, computed buffers have values."""

    model: ir.Model
    geometry: Geometry
    model_type: str
    inputs: tuple[str, ...]
    """The names of the graph contract, in order."""
    outputs: tuple[str, ...]
    facts: dict[str, str] = field(default_factory=dict)
    """What a graph says of itself besides."""
    optional: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """What a weight is where a checkpoint does not hold it."""


def contract(
    geometry: Geometry, *, reads: Sequence[str] = (), makes: Sequence[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a decoder's inputs and outputs, with what it reads and makes besides."""
    written = [f"present_{name}" for name in geometry.buffers]
    base = (BASE,) if geometry.recurs else ()
    inputs = "input_ids", "start", "rows", *reads, *geometry.inputs, *base
    return inputs, ("logits", "argmax", *makes, *written)


def trace(
    folder: Path, head: HeadCheckpoint | None = None, entries: NDArray[np.int64] | None = None
) -> Traced:
    """Trace the model that `folder`'s config.json describes, with the feature that `head` reads.

    `entries` are the ids that a draft scores, where these are not all.
    Raises: ExportError if the model does not fit the graph contract, or does not trace.
    """
    return traced(folder, lambda: _trace(folder, head, entries))


T = TypeVar("T")


def traced(folder: Path, trace: Callable[[], T]) -> T:
    """Return what a trace of the model in a folder comes to.

    Raises: ExportError in place of whatever its code raises.
    """
    try:
        return trace()
    except ExportError:
        raise
    # A model's own code runs here, and the exporter's; either raises what it likes.
    except Exception as error:
        cause = error.__cause__
        while cause is not None and not isinstance(cause, ExportError):
            cause = cause.__cause__
        if cause is not None:  # a refusal of ours, from within the exporter
            raise cause from None
        raise ExportError(
            f"the model in {folder} does not trace ({reason_of(error)}); export another model, or "
            "report its config.json"
        ) from error


def _trace(folder: Path, head: HeadCheckpoint | None, entries: NDArray[np.int64] | None) -> Traced:
    mode, hook = FakeTensorMode(), Hook()
    with quiet(), installed(hook) as name:
        model, buffers = build(folder, mode)
        check_positions(model)
        if entries is not None:
            with faked(mode):
                project_on(model, len(entries))
        stored = StoredWeights.of(model, mode, buffers)
        if entries is not None:
            buffers["entries"] = looked_up(entries)
            model.register_buffer("entries", mode.from_tensor(buffers["entries"]))
        model.config._attn_implementation = model.config._experts_implementation = name
        with mode, replaced(model):
            geometry = measure(model, hook)
        hook.check_masks()
        feature = None
        if head is not None:
            with faked(mode):
                feature = HEAD_FORMATS[head.KIND].part("feature")(head.config)
            stored.names.update({f"feature.{n}": n for n, _ in feature.named_parameters()})
        with mode:
            inputs = head.config.inputs if head else ()
            decoder = Decoder(model, hook, feature, inputs, maps=entries is not None).eval()
            with replaced(model):
                graph = export_module(decoder, geometry)
    fill(graph, stored.names, buffers)
    inputs_of, outputs = contract(geometry, makes=("feature",) if head is not None else ())
    kind, facts = str(model.config.model_type), stored.facts(graph)
    return Traced(graph, geometry, kind, inputs_of, outputs, facts, stored.optional)


def check_positions(model: Any, replaced: Collection[Any] = ()) -> None:
    """Refuse a model that numbers its positions otherwise than the graph does.

    `replaced` are the modules that look up positions as the graph has them.
    Raises: ExportError.
    """
    for module in model.modules():
        numbers = hasattr(module, "create_position_ids_from_input_ids")
        if numbers and not any(module is one for one in replaced):
            raise ExportError(
                f"{type(model).__name__} numbers positions from its padding token on; expected a "
                "decoder that numbers them from 0. Export another model"
            )


def trained_positions(config: Any) -> int:
    """Return how many positions a graph of the model serves."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == LONG_ROPE:
        return int(rope["original_max_position_embeddings"])
    # Without attention nothing counts positions.
    return int(getattr(config, "max_position_embeddings", None) or UNCOUNTED)


def measure(model: Any, hook: Hook) -> Geometry:
    """Run the model once on fake tensors and read off the geometry it really has.

    Raises: ExportError if a layer remembers in another way than the graph contract has.
    """
    config = model.config
    layers = int(normalized(config).num_layers)
    probe = Probe(layers, WIDTH)
    positions = torch.arange(WIDTH).unsqueeze(0)
    hook.begin(positions)
    model(
        input_ids=torch.zeros_like(positions),
        position_ids=positions,
        use_cache=True,
        **remembering(model, probe),
        **every_row(model),
    )
    memories = probe.memories(hook, layers, config.model_type, _forgetful(config))
    trained = trained_positions(config)
    return Geometry(hook.heads, config.vocab_size, trained, layers, memories)


def _forgetful(config: Any) -> list[int]:
    """Return the layers that mix no tokens, and so remember none."""
    kinds = getattr(config, "layers_block_type", None) or ()
    return [layer for layer, kind in enumerate(kinds) if kind in ("mlp", "moe")]


class Decoder(torch.nn.Module):
    """The graph contract as a module: tokens, start, rows and KV buffers in, logits out.

    With a `feature` it also returns what that makes of the states that enter the layers `inputs`;
    the number after the last layer's is for what leaves the last norm.
    """

    def __init__(
        self, model: Any, hook: Hook, feature: torch.nn.Module | None = None,
        inputs: Sequence[int] = (), *, maps: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = model
        self.hook = hook
        self.maps = maps
        self.feature = feature
        self.inputs = inputs
        self.layers = int(normalized(model.config).num_layers)

    def forward(
        self, input_ids: Tensor, start: Tensor, rows: Tensor, buffers: dict[str, Tensor]
    ) -> tuple[Any, ...]:
        """Run the model at positions start .. start + S.

        Shapes: input_ids [B, S], start [B], rows [R], buffers [B, heads, M, width]; returns
        logits [B, R, V], their argmax [B, R] (-1 for a row with a NaN), the feature [B, S, H] if
        there is one, and the buffers as written. Among buffers is the base [B] of states, if any.
        """
        with _entering(self.model, self.inputs) as states:
            logits, argmax, written = self._run(input_ids, start, rows, buffers)
        if self.feature is None:
            return logits, argmax, written
        return logits, argmax, self.feature([states[i] for i in self.inputs]), written

    def _run(
        self, input_ids: Tensor, start: Tensor, rows: Tensor, buffers: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        positions = start.unsqueeze(1) + torch.arange(input_ids.shape[1])
        cache = Buffers(buffers, start, self.hook.index, self.layers)
        self.hook.begin(positions, cache=cache)
        with rows_only(self.model, rows):
            logits = self.model(
                input_ids=input_ids,
                position_ids=positions,
                use_cache=True,
                **remembering(self.model, cache),
                **every_row(self.model),
            ).logits
        # Told here, where the row was just made: a device would have to read every logit again.
        return logits, best_ids(self.model, logits, self.maps), cache.written


def looked_up(entries: NDArray[np.int64]) -> Tensor:
    """Return the ids of entries, and for NO_NUMBER, which is looked up as the last, itself."""
    return torch.tensor([*entries.tolist(), NO_NUMBER])


def best_ids(model: Any, logits: Tensor, maps: bool) -> Tensor:
    """Return the ids [B, R] of the largest logits, -1 for a row with a NaN.

    Of a model that `maps` they are looked up among its `entries`.
    """
    entry = torch.where(logits.sum(-1).isnan(), NO_NUMBER, logits.argmax(-1))
    if not maps:
        return entry
    return symbolic(
        "Gather", [model.entries, entry], {"axis": 0}, dtype=torch.int64, shape=entry.shape,
        version=OPSET,
    )  # fmt: skip


def project_on(model: Any, count: int) -> None:
    """Give a model a last projection of so many entries.

    Raises: ExportError for one that has none.
    """
    whole = model.get_output_embeddings()
    if whole is None:
        raise ExportError(f"{type(model).__name__} has no output head to keep entries of")
    bias = getattr(whole, "bias", None) is not None
    model.set_output_embeddings(torch.nn.Linear(whole.in_features, count, bias=bias))


@contextmanager
def _entering(model: Any, inputs: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Gather the hidden states that enter some of the layers.

    Raises: ExportError for a model whose layers are not list of modules.
    """
    states: dict[int, Tensor] = {}
    if not inputs:
        yield states
        return
    count = model.config.num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if not lists and inputs != (count,):
        raise ExportError(
            f"{type(model).__name__} has no list of {count} layers for a head to read"
        )

    def keep(number: int) -> Callable[..., None]:
        def kept(_: Any, args: Any, options: Any) -> None:
            states[number] = args[0] if args else options["hidden_states"]

        return kept

    def keep_last(_: Any, __: Any, made: Any) -> None:
        states[count] = made[0]

    handles = [
        lists[0][i].register_forward_pre_hook(keep(i), with_kwargs=True)
        for i in {*inputs} - {count}
    ]
    handles.append(model.base_model.register_forward_hook(keep_last))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def rows_only(model: Any, rows: Tensor) -> Iterator[None]:
    """Give the model's head only the hidden states of `rows`.

    Not by `logits_to_keep`: indexing with a tensor becomes five operators, this one `Gather`.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise ExportError(f"{type(model).__name__} has no output head to take logits from")
    handle = head.register_forward_pre_hook(lambda _, args: (args[0].index_select(1, rows),))
    try:
        yield
    finally:
        handle.remove()


def remembering(model: Any, cache: Any) -> dict[str, Any]:
    """Return the option by which a model takes a cache, by the name that it has there."""
    names = signature(model.forward).parameters
    return {"cache_params" if "cache_params" in names else "past_key_values": cache}


def every_row(model: Any) -> dict[str, Any]:
    """Return the option by which a model takes no rows out itself, where it has one.

    A number of rows lets Gemma 4 cut the masks of layers that share keys.
    """
    named = "logits_to_keep" in signature(model.forward).parameters
    return {"logits_to_keep": slice(None)} if named else {}


def export_module(
    module: torch.nn.Module, geometry: Geometry, beside: Sequence[tuple[Tensor, str]] = ()
) -> ir.Model:
    """Trace a module of the graph contract.

    `beside` are examples [B, ., H] of what else it reads, and the name of their second dimension.
    """
    batch, width, length, rows = (torch.export.Dim(name) for name in "BSMR")
    buffers = example_buffers(geometry)
    dims = buffer_dims(geometry, batch, length)
    inputs: tuple[Any, ...] = (
        torch.zeros(BATCH, WIDTH, dtype=torch.int64),
        torch.zeros(BATCH, dtype=torch.int64),
        torch.zeros(ROWS, dtype=torch.int64),
        *(example for example, _ in beside),
    )
    named = [width if name == "S" else torch.export.Dim(name) for _, name in beside]
    shapes: tuple[Any, ...] = (
        {0: batch, 1: width}, {0: batch}, {0: rows}, *({0: batch, 1: dim} for dim in named),
    )  # fmt: skip
    return graph_of(module, (*inputs, buffers), (*shapes, dims))


def example_buffers(geometry: Geometry) -> dict[str, Tensor]:
    """Return the buffers of all memories that a module is traced with, and the base of states."""
    buffers = {
        name: torch.zeros(
            BATCH, one.heads, one.fixed or (RING if is_ring(name) else LENGTH), one.width
        )
        for name, one in geometry.inputs.items()
    }
    base = {BASE: torch.zeros(BATCH, dtype=torch.int64)} if geometry.recurs else {}
    return buffers | base


def buffer_dims(geometry: Geometry, batch: Any, length: Any) -> dict[str, dict[int, Any]]:
    """Return the symbolic dimensions of each buffer; rings have a length of their own."""
    ring = torch.export.Dim("P")
    dims = {
        name: {0: batch} | ({} if one.fixed else {2: ring if is_ring(name) else length})
        for name, one in geometry.inputs.items()
    }
    return dims | ({BASE: {0: batch}} if geometry.recurs else {})


def graph_of(module: torch.nn.Module, inputs: tuple[Any, ...], shapes: tuple[Any, ...]) -> ir.Model:
    """Trace a module, whose inputs' symbolic dimensions `shapes` names, into a graph."""
    program = torch.onnx.export(
        module,
        (*inputs, {}),  # a dict that comes last would be taken for arguments by name
        dynamo=True,
        opset_version=OPSET,
        dynamic_shapes=shapes,
        verbose=False,
        optimize=False,
    )
    assert program is not None
    return program.model


def fill(model: ir.Model, names: dict[str, str], buffers: dict[str, Tensor]) -> None:
    """Name parameters as a checkpoint does, and take their values; give buffers theirs."""
    initializers = model.graph.initializers
    for value in list(initializers.values()):
        assert value.name is not None
        initializers.pop(value.name)
        value.name = value.name.removeprefix("model.")
        if value.name in buffers:
            value.const_value = ir.tensor(buffers[value.name].numpy(), name=value.name)
        elif value.name in names:
            value.name, value.const_value = names[value.name], None
        else:
            raise ExportError(
                f"the model computes a constant {value.name} while it runs, which a trace "
                "without weights cannot evaluate; this model does not export"
            )
        initializers.add(value)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what the exporter's libraries say to their own developers."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
