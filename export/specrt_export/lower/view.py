"""A mutable view of an ONNX graph: who makes a value, who reads it, what is constant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from specrt_export.lower.lazy_tensor import LazyTensor


class GraphView:
    """Index over one `ModelProto` that rewrites go through.

    Nodes are appended in any order, and the nodes they replace stay until `tidy` drops what no
    output needs and sorts the rest; a rewrite ends with it.
    Weights are initializers whose bytes lie elsewhere; `stored` says how to read them.
    """

    def __init__(
        self, model: onnx.ModelProto, stored: Mapping[str, LazyTensor] | None = None
    ) -> None:
        self.model = model
        self.graph = model.graph
        self._stored = dict(stored or {})
        self._constants = {t.name: t for t in self.graph.initializer}
        self._outputs = {o.name for o in self.graph.output}
        self._fresh = 0
        self._reindex()

    def _reindex(self) -> None:
        self._maker: dict[str, onnx.NodeProto] = {}
        self._readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.graph.node:
            self._index(node)

    def _index(self, node: onnx.NodeProto) -> None:
        for name in filter(None, node.output):
            self._maker[name] = node
        for name in filter(None, node.input):
            self._readers[name].append(node)

    def nodes(self, *op_types: str) -> list[onnx.NodeProto]:
        """Return the nodes of some operators, in graph order; of all when none is named."""
        return [n for n in self.graph.node if not op_types or n.op_type in op_types]

    def maker(self, name: str, op_type: str | None = None) -> onnx.NodeProto | None:
        """Return the node that makes a value, if it has the asked operator."""
        node = self._maker.get(name)
        return node if node is not None and op_type in (None, node.op_type) else None

    @property
    def outputs(self) -> Set[str]:
        """The names of the graph's outputs."""
        return self._outputs

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """Return the nodes that read a value."""
        return self._readers[name]

    def only_reader(self, name: str, op_type: str) -> onnx.NodeProto | None:
        """Return the single node that reads a value, if it has the asked operator."""
        readers = self._readers[name]
        if len(readers) != 1 or name in self._outputs:
            return None
        return readers[0] if readers[0].op_type == op_type else None

    def constant(self, name: str) -> NDArray[Any] | None:
        """Return the array of an initializer held in the graph itself, else None."""
        tensor = self._constants.get(name)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return None
        return numpy_helper.to_array(tensor)

    def scalar(self, name: str) -> float | None:
        """Return a one-element constant as a float, else None."""
        array = self.constant(name)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None

    def stored(self, name: str) -> LazyTensor | None:
        """Return the weight of a name, else None."""
        return self._stored.get(name)

    def weights(self) -> dict[str, LazyTensor]:
        """Return the weights that the graph's initializers stand for."""
        names = [t.name for t in self.graph.initializer if t.name in self._stored]
        return {name: self._stored[name] for name in names}

    def attributes(self, node: onnx.NodeProto) -> dict[str, Any]:
        """Return the attributes that a node states."""
        return {a.name: helper.get_attribute_value(a) for a in node.attribute}

    def depends_on(self, name: str, sources: Iterable[str], *, shapes: bool = True) -> bool:
        """Tell whether a value is computed from any of some inputs, or from their `shapes`."""
        wanted, seen, stack = set(sources), set[str](), [name]
        while stack:
            value = stack.pop()
            if value in wanted:
                return True
            if value in seen:
                continue
            seen.add(value)
            node = self._maker.get(value)
            if node is not None and (shapes or node.op_type != "Shape"):
                stack.extend(node.input)
        return False

    def fresh(self, hint: str) -> str:
        """Return a value name that is not in use."""
        self._fresh += 1
        return f"specrt.{hint}.{self._fresh}"

    def add_constant(self, hint: str, array: NDArray[Any]) -> str:
        """Add an initializer and return its name."""
        tensor = numpy_helper.from_array(np.require(array, requirements="C"), self.fresh(hint))
        self.graph.initializer.append(tensor)
        self._constants[tensor.name] = tensor
        return tensor.name

    def add_stored(self, stored: LazyTensor) -> str:
        """Add a weight, unless one of its name is there, and return its name."""
        if stored.name not in self._constants:
            tensor = onnx.TensorProto(
                name=stored.name,
                data_type=stored.onnx_type,
                dims=stored.shape,
                data_location=onnx.TensorProto.EXTERNAL,
            )
            self.graph.initializer.append(tensor)
            self._constants[stored.name] = tensor
            self._stored[stored.name] = stored
        return stored.name

    def add(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str] | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Append a node and return its first output; `outputs` may name existing values."""
        names = list(outputs) if outputs is not None else [self.fresh(op_type.lower())]
        for name in filter(None, names):
            self._retire(name)
        node = helper.make_node(op_type, list(inputs), names, domain=domain, **attributes)
        self.graph.node.append(node)
        self._index(self.graph.node[-1])
        return names[0]

    def inline(
        self, function: onnx.FunctionProto, inputs: Sequence[str], outputs: Sequence[str]
    ) -> list[str]:
        """Append the nodes of a function; return what they make."""
        names = dict(zip(function.input, inputs, strict=True))
        names |= zip(function.output, outputs, strict=True)
        for node in function.node:
            values = self.attributes(node)
            if node.op_type == "Constant":
                array = np.array(*values.values())
                kind = np.int64 if array.dtype.kind == "i" else np.float32
                names[node.output[0]] = self.add_constant(node.output[0], array.astype(kind))
                continue
            made = [names.setdefault(name, self.fresh(name)) for name in node.output]
            self.add(node.op_type, [names[i] for i in node.input], made, node.domain, **values)
        return [names[o] for node in function.node for o in node.output]

    def _retire(self, name: str) -> None:
        """Take a value away from the node that made it, so that another may make it."""
        node = self._maker.pop(name, None)
        if node is not None:
            node.output[list(node.output).index(name)] = self.fresh("retired")

    def rename(self, name: str) -> str:
        """Give a value another name, so that another node may make this one; return that name."""
        node, renamed = self._maker.pop(name), self.fresh(name)
        node.output[list(node.output).index(name)] = renamed
        self._maker[renamed] = node
        for reader in self._readers.pop(name, []):
            reader.input[:] = [renamed if one == name else one for one in reader.input]
            self._readers[renamed].append(reader)
        return renamed

    def replace(self, old: str, new: str) -> None:
        """Let every reader of a value read another one."""
        for node in self._readers.pop(old, []):
            for index, name in enumerate(node.input):
                if name == old:
                    node.input[index] = new
            self._readers[new].append(node)
        if old in self._outputs:
            self.add("Identity", [new], outputs=[old])

    def add_output(self, value: onnx.ValueInfoProto) -> None:
        """Make a value an output of the graph, after the others."""
        self.graph.output.append(value)
        self._outputs.add(value.name)

    def require_domain(self, domain: str, version: int) -> None:
        """Import an operator domain once."""
        if all(o.domain != domain for o in self.model.opset_import):
            self.model.opset_import.append(helper.make_opsetid(domain, version))

    def tidy(self) -> onnx.ModelProto:
        """Drop what no output needs, sort the nodes, and return the model."""
        nodes = list(self._needed())
        del self.graph.node[:]
        self.graph.node.extend(nodes)
        used = {name for node in nodes for name in node.input} | self._outputs
        initializers = [t for t in self.graph.initializer if t.name in used]
        del self.graph.initializer[:]
        self.graph.initializer.extend(initializers)
        self._constants = {t.name: t for t in self.graph.initializer}
        del self.graph.value_info[:]
        self._reindex()
        return self.model

    def _needed(self) -> Iterator[onnx.NodeProto]:
        """Yield the nodes the outputs depend on, makers before readers."""
        maker = {o: n for n in self.graph.node for o in n.output if o}
        done: set[int] = set()
        stack = [(maker[o.name], False) for o in reversed(self.graph.output) if o.name in maker]
        while stack:
            node, expanded = stack.pop()
            if id(node) in done:
                continue
            if expanded:
                done.add(id(node))
                yield node
                continue
            stack.append((node, True))
            stack.extend((maker[i], False) for i in reversed(node.input) if i in maker)


OLDEST = 21

_OLDEST_IR = 10


def stamp_oldest_opset(model: onnx.ModelProto) -> int:
    """Lower the standard opset to 21 where no operator needs more; return the version.

    ONNX Runtime 1.23, the last for Python 3.10, refuses opset 24. A graph whose attention was
    fused holds nothing newer than opset 21.
    """
    return stamp_opset(model, OLDEST)


def stamp_opset(model: onnx.ModelProto, version: int) -> int:
    """Lower the standard opset to a version where no operator needs more; return what it is."""
    stamp = next(o for o in model.opset_import if o.domain in ("", "ai.onnx"))
    nodes = [n for n in model.graph.node if n.domain in ("", "ai.onnx")]
    if all(_exists(n.op_type, version) for n in nodes):
        for node in nodes:
            _drop_newer_attributes(node, version)
        stamp.version = version
        model.ir_version = _OLDEST_IR
    return int(stamp.version)


def _exists(op_type: str, version: int) -> bool:
    # ONNX Runtime registers this one in the standard domain, outside the standard.
    if op_type == "SimplifiedLayerNormalization":
        return True
    return onnx.defs.has(op_type, version, "")


def _drop_newer_attributes(node: onnx.NodeProto, version: int) -> None:
    if not onnx.defs.has(node.op_type, version, ""):
        return
    known = onnx.defs.get_schema(node.op_type, version, "").attributes
    attributes = [a for a in node.attribute if a.name in known]
    del node.attribute[:]
    node.attribute.extend(attributes)


@dataclass(frozen=True)
class Lowered:
    """A lowered graph, its weights, and per rewrite how many of how many places it took."""

    model: onnx.ModelProto
    weights: dict[str, LazyTensor]
    fused: dict[str, str]


@dataclass(frozen=True)
class Counts:
    """What the rewrites found, as `n/of`."""

    ratios: dict[str, str] = field(default_factory=dict)

    def __setitem__(self, name: str, counts: tuple[int, int]) -> None:
        self.ratios[name] = "/".join(map(str, counts))
