"""Turns a checkpoint into its portable graph, or refuses the model by name before any work."""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common as passes
from onnxscript.optimizer import fold_constants

from specrt.errors import ExportError
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.scored_entries import model_entries
from specrt_export.checkpoint.task import classes_for, task_of
from specrt_export.heads.head_checkpoint import HeadCheckpoint
from specrt_export.heads.head_formats import HEAD_FORMATS
from specrt_export.portable import experts_function, state_function
from specrt_export.portable.attachment import UNATTACHED, ExportedGraph, attach, save_graph
from specrt_export.portable.encoder_decoder import trace_encoder_decoder
from specrt_export.portable.graph import ATTACHED, GEOMETRY, MODEL_TYPE, PART, part_path
from specrt_export.portable.hook import FUNCTIONS
from specrt_export.portable.trace import Traced, quiet, trace

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

LENGTH_DEPENDENT = ("dynamic", "su")

RECURRENT_TYPES = frozenset((
    "falcon_mamba", "jamba", "kimi_linear", "mamba", "minimax", "recurrent_gemma", "rwkv", "xlstm",
    "zamba",
))  # fmt: skip
"""Whose states decay by channel, or change by a rule of their own."""
ALIBI_TYPES = frozenset(("bloom", "mpt"))

BLOCK_SPARSE = "block_sparse"

DEFAULT_ATTENTION = {"bigbird_pegasus": BLOCK_SPARSE}
"""What the attention_type of a config is that leaves it out."""

INSTEAD = "Export a decoder whose layers all use softmax attention over a KV cache"


def check_support(config: Mapping[str, Any]) -> None:
    """Hold a checkpoint's config.json against what the portable graph can express.

    Raises: ExportError naming the model type, the reason and what would work.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ExportError("config.json has no model_type; expected one that transformers knows")
    for find in (_layers, _positions, _known, _interface, _experts, _blocks):
        reason = find(kind, config)
        if reason:
            raise ExportError(f"{kind} cannot be exported: {reason}")


def _layers(kind: str, config: Mapping[str, Any]) -> str | None:
    if kind in RECURRENT_TYPES:
        return (
            "its layers change their state by another rule than the gated delta rule or one decay "
            f"of each head. {INSTEAD}, or a state that changes by one of these"
        )
    if isinstance(config.get("decoder"), Mapping):
        return (
            "its encoder and its decoder have a config each. Export an encoder-decoder that has "
            "one, such as T5, BART, Marian or Whisper"
        )
    if "text_config" in config:
        return f"it is one part of a multimodal model. {INSTEAD}, such as its text model alone"
    return None


def _positions(kind: str, config: Mapping[str, Any]) -> str | None:
    if kind in ALIBI_TYPES or config.get("alibi"):
        return (
            "it adds ALiBi position terms to its attention, which the portable graph's mask does "
            "not carry. Export a model with rotary or learned positions"
        )
    for rope in _ropes(config):
        if rope in LENGTH_DEPENDENT:
            return (
                f"its rope type {rope!r} changes all frequencies once a text grows past a length, "
                "and keys already written would be wrong. Export a variant with a fixed rope, "
                "such as the model's short-context version"
            )
    return None


def _ropes(config: Mapping[str, Any]) -> set[str]:
    """Return every rope type named, also where a config has one for each kind of layer."""
    types: set[str] = set()
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if isinstance(value, Mapping):
            for one in (value, *(v for v in value.values() if isinstance(v, Mapping))):
                types.update(str(one[k]) for k in ("rope_type", "type") if k in one)
    return types


def _known(kind: str, config: Mapping[str, Any]) -> str | None:
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        if config.get("auto_map"):
            return (
                "it runs code from its own checkpoint (auto_map), which specrt does not execute. "
                f"Export a model that transformers {__version__} has itself"
            )
        return (
            f"transformers {__version__} does not know this model type; check model_type, or "
            "install a transformers that has it"
        )
    if task_of(config) is None:
        return (
            "transformers has no model of this type that continues a text, or makes one of a text "
            f"or of speech. {INSTEAD}"
        )
    return None


def _interface(kind: str, config: Mapping[str, Any]) -> str | None:
    model, conditioned, names = _class_of(kind, config)
    called = names & {"ALL_ATTENTION_FUNCTIONS", *FUNCTIONS}
    if not (called or getattr(model, "_supports_attention_backend", False) or conditioned):
        return (
            f"transformers' {model.__name__} computes attention itself, not through the "
            f"attention interface that the exporter replaces. {INSTEAD}"
        )
    return None


def _class_of(kind: str, config: Mapping[str, Any]) -> tuple[Any, bool, Set[str]]:
    """Return the class of a model, whether it reads a source, and the names of its module."""
    import transformers

    task = task_of(config)
    assert task is not None, "a type that has none was refused"
    model: Any = getattr(transformers, classes_for(task.name)[kind][0])
    return model, task.conditioned, vars(sys.modules[model.__module__]).keys()


def _experts(kind: str, config: Mapping[str, Any]) -> str | None:
    model, _, names = _class_of(kind, config)
    if "use_experts_implementation" in names or config.get("is_moe") is False:
        return None
    parts = (config, *(part for part in config.values() if isinstance(part, Mapping)))
    for key, count in ((key, part.get(key)) for part in parts for key in EXPERT_COUNTS):
        if isinstance(count, int) and count > 1:
            return (
                f"it is a mixture of experts ({key} is {count}), and transformers' "
                f"{model.__name__} computes them itself, not through the experts interface that "
                "the exporter replaces. Export a dense model of its family"
            )
    return None


def _blocks(kind: str, config: Mapping[str, Any]) -> str | None:
    # Seen in its config alone: such an encoder attends to all of a source that is short.
    if config.get("attention_type", DEFAULT_ATTENTION.get(kind)) == BLOCK_SPARSE:
        return (
            "its encoder attends to blocks of a long source, and to all of a short one "
            f'(attention_type is {BLOCK_SPARSE!r}). Set it to "original_full" in config.json, or '
            "export another model"
        )
    return None


SCOPES = "pkg.torch.onnx.name_scopes"
"""Where torch.onnx leaves the module path of a node."""

INT64_MAX = 2**63 - 1

SPELLED_ITEMS = 4
"""Constants of at most so many items are named by their value."""


def tidy(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Fold constants, merge repeated nodes, and name everything after the model's modules.

    `inputs` and `outputs` are the names of the graph contract.
    """
    # Not the whole optimizer: its rewrite rules take time in the square of the graph's size.
    fold_constants(model, onnx_shape_inference=False)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.DeduplicateInitializersPass()(model)
    drop_no_ops(model.graph)
    passes.IdentityEliminationPass()(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.RemoveUnusedNodesPass()(model)
    name_nodes(model.graph)
    name_constants(model.graph)
    name_contract(model.graph, inputs, outputs)
    passes.ClearMetadataAndDocStringPass()(model)


def drop_no_ops(graph: ir.Graph) -> None:
    """Remove `x * 1.0` and `x[0:]`, which models with options turned off leave behind."""
    for node in graph:
        if _is_no_op(node):
            source = node.inputs[0]
            assert source is not None
            node.outputs[0].replace_all_uses_with(source, replace_graph_outputs=True)
            graph.remove(node, safe=True)


def _is_no_op(node: ir.Node) -> bool:
    constants = [_item(value) for value in node.inputs[1:]]
    if node.op_type == "Mul":
        factor = node.inputs[1]
        # One of any rank could widen what it multiplies.
        return constants == [1.0] and factor is not None and factor.shape == ir.Shape([])
    if node.op_type == "Slice":
        return [constants[0], constants[1], *constants[3:]] == [0, INT64_MAX, 1]
    return False


def _item(value: ir.Value | None) -> int | float | None:
    tensor = value.const_value if value is not None else None
    if tensor is None or tensor.size != 1:
        return None
    item: int | float = tensor.numpy().item()
    return item


def name_nodes(graph: ir.Graph) -> None:
    """Name each node, and what it makes, `module.path/Op`; count up where that repeats."""
    seen: Counter[str] = Counter()
    for node in graph:
        path = _module(node)
        name = f"{path}/{node.op_type}" if path else node.op_type
        seen[name] += 1
        node.name = name if seen[name] == 1 else f"{name}_{seen[name]}"
        for index, output in enumerate(node.outputs):
            output.name = node.name if index == 0 else f"{node.name}.{index}"


def _module(node: ir.Node) -> str:
    scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
    # The last scope is the operation; the first two are the contract and the model themselves.
    modules = [scope for scope in scopes[:-1] if scope.startswith("model.")]
    return modules[-1].removeprefix("model.") if modules else ""


def name_constants(graph: ir.Graph) -> None:
    """Name small constants by what they hold, `INT64[1,-1]` or `FLOAT(0.0)`; count the others."""
    large = 0
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        # A dot marks a buffer of the model, named already.
        if tensor is None or value.name is None or "." in value.name:
            continue
        array = tensor.numpy()
        if array.ndim < 2 and array.size <= SPELLED_ITEMS:
            items = ",".join(str(item) for item in array.flat)
            name = tensor.dtype.name + (f"[{items}]" if array.ndim else f"({items})")
        else:
            name, large = f"constant_{large}", large + 1
        graph.initializers.pop(value.name)
        value.name = tensor.name = name
        graph.initializers.add(value)


def name_contract(graph: ir.Graph, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give inputs and outputs the names of the graph contract, and nothing else."""
    for values, names in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, name in zip(values, names, strict=True):
            value.name = name
            value.metadata_props.clear()


FORMAT = "1"

IR_VERSION = 11

EXPORTERS = ("torch", "transformers", "onnx-ir", "onnxscript")
"""Distributions whose versions can change the graph."""


def export_graph(
    checkpoint: Checkpoint,
    out: Path,
    *,
    head: HeadCheckpoint | None = None,
    progress: Callable[[str], None] | None = None,
) -> ExportedGraph:
    """Write the portable graph of a checkpoint to `out`, replacing what is there.

    Of an encoder-decoder that is its decoder's; those of its encoder and its cross keys and values
    are written next to it.
    A checkpoint opened with `config_only` gives a graph for `attach_graph` to complete. With a
    `head` the graph has the feature that it reads; its weights are among the checkpoint's then.
    Raises: ExportError if the model cannot be exported, CheckpointError if its weights do not fit.
    """
    tell = progress or (lambda stage: None)
    check_support(checkpoint.config)
    task = task_of(checkpoint.config)
    assert task is not None, "a checkpoint that has none was refused"
    tell("trace")
    if not task.conditioned:
        traced = trace(checkpoint.folder, head, model_entries(checkpoint))
        return _finish(traced, checkpoint, out, tell)
    decoder, *others = trace_encoder_decoder(checkpoint.folder, task)
    parts = [_finish(one, checkpoint, part_path(out, one.facts[PART]), tell) for one in others]
    return replace(_finish(decoder, checkpoint, out, tell), parts=tuple(parts))


def export_head(
    head: HeadCheckpoint, checkpoint: Checkpoint, out: Path, positions: int
) -> ExportedGraph:
    """Write the portable graph of a head, whose weights `checkpoint` has, to `out`.

    Raises: ExportError if it cannot be exported, CheckpointError if its weights do not fit.
    """
    trace_head = HEAD_FORMATS[head.KIND].part("trace")
    return _finish(trace_head(head, positions), checkpoint, out, lambda stage: None)


def _finish(
    traced: Traced, checkpoint: Checkpoint, out: Path, tell: Callable[[str], None]
) -> ExportedGraph:
    tell("tidy")
    with quiet():
        tidy(traced.model, traced.inputs, traced.outputs)
    detach(traced.model, traced.optional)
    describe(traced)
    # Through the serialised form, whose nodes are in the order of what they read.
    model = _proto(ir.from_proto(_proto(traced.model)))
    experts_function.stack_experts(model)
    for function in (
        state_function.function(),
        *map(experts_function.function, experts_function.EXPERTS),
    ):
        state_function.define(model, function)
    if checkpoint.weights:
        tell("attach")
        attach(model, checkpoint)
    tell("save")
    return save_graph(model, out)


def detach(model: ir.Model, optional: Mapping[str, NDArray[np.float32]]) -> None:
    """Give each weight of a traced graph a place still to be filled in, or its value."""
    for value in model.graph.initializers.values():
        if value.const_value is None:
            assert value.name is not None
            if value.name in optional:
                value.const_value = ir.tensor(optional[value.name], name=value.name)
                continue
            assert value.shape is not None
            shape = ir.Shape(value.shape)
            value.const_value = ir.ExternalTensor(
                UNATTACHED, None, None, ir.DataType.FLOAT, shape=shape, name=value.name
            )
    model.metadata_props[ATTACHED] = "false"


def describe(traced: Traced) -> None:
    """Write what a build has to know about the graph into its metadata."""
    model = traced.model
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "specrt", None
    model.graph.name = traced.model_type
    model.metadata_props.update(
        {
            "specrt.format": FORMAT,
            GEOMETRY: json.dumps(asdict(traced.geometry)),
            MODEL_TYPE: traced.model_type,
            "specrt.exporter": json.dumps(exporter()),
            **traced.facts,
        }
    )


def exporter() -> dict[str, str]:
    """Return the versions of what shapes a graph, without build tags such as `+cpu`."""
    return {name: version(name).partition("+")[0] for name in EXPORTERS}


def _proto(model: ir.Model) -> onnx.ModelProto:
    """Serialise a model without the shapes of what lies between its inputs and outputs."""
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]
    return proto
