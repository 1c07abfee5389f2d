"""Fold, name and strip a traced graph, so that it is small, readable and the same every time."""

from __future__ import annotations

import ast
from collections import Counter

import onnx_ir as ir
from onnx_ir.passes import common as passes
from onnxscript.optimizer import fold_constants

SCOPES = "pkg.torch.onnx.name_scopes"
"""Where torch.onnx leaves the module path of a node."""

INT64_MAX = 2**63 - 1

SPELLED_ITEMS = 4
"""Constants of at most so many items are named by their value."""


def tidy(model: ir.Model, layers: int) -> None:
    """Fold constants, merge repeated nodes, and name everything after the model's modules."""
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
    name_contract(model.graph, layers)
    passes.ClearMetadataAndDocStringPass()(model)


def drop_no_ops(graph: ir.Graph) -> None:
    """Remove `x * 1.0` and `x[0:]`, which models with options turned off leave behind."""
    for node in graph:
        if _is_no_op(node):
            kept = node.inputs[0]
            assert kept is not None
            ir.convenience.replace_all_uses_with(node.outputs[0], kept)
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


def name_contract(graph: ir.Graph, layers: int) -> None:
    """Give inputs and outputs the names of the graph contract, and nothing else."""
    pairs = [f"{kind}.{layer}" for layer in range(layers) for kind in ("key", "value")]
    for value, name in zip(graph.inputs, ("input_ids", "start", "rows", *pairs), strict=True):
        value.name = name
        value.metadata_props.clear()
    written = [f"present_{name}" for name in pairs]
    for value, name in zip(graph.outputs, ("logits", "argmax", *written), strict=True):
        value.name = name
        value.metadata_props.clear()
