"""The lint held to TensorRT's own parser and builder, so that no rule can go stale."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from lint.test_rules import CASES, NAMES, Case, Graph, node, simple
from specrt.engine.tensorrt.library import Library, is_installed, open_library
from specrt_export.lint import lint
from specrt_export.lint.rules import OWN, UNSUPPORTED

BACKEND = "tensorrt-rtx"
pytestmark = pytest.mark.skipif(
    not is_installed(BACKEND), reason="needs TensorRT for RTX: `pip install tensorrt-rtx`"
)
KERNEL = re.compile(r"Name: (\S+), LayerType: \w+,.*TacticName: ([^,]+), StreamId")
Widths = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Tried:
    """What became of a graph: why it was refused, or its layers, kernels and plan."""

    refusal: str
    layers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The kind of each, and the tensors that it reads."""
    inputs: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    plan_bytes: int = 0


@pytest.fixture(scope="module")
def library() -> Library:
    return open_library(BACKEND)


def attempt(library: Library, graph: Graph | Path, widths: Widths) -> Tried:
    """Parse and build a graph, each profile with all open dimensions alike."""
    trt = library.module
    with library.messages() as log:
        builder = trt.Builder(library.logger)
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, library.logger)
        if isinstance(graph, Path):
            parsed = parser.parse_from_file(str(graph))
        else:
            parsed = parser.parse(graph.SerializeToString())
        if not parsed:
            said = [parser.get_error(i).desc() for i in range(parser.num_errors)]
            return Tried(" ".join([*said, *(m.text for m in log.messages if m.is_error)]))
        plan = builder.build_serialized_network(network, configured(trt, builder, network, widths))
        if plan is None:
            return Tried(" ".join(m.text for m in log.messages if m.is_error))
        lines = [line for m in log.messages for line in m.text.splitlines()]
    kernels = [match[1] for match in map(KERNEL.search, lines) if match and match[2].strip()]
    inputs = [network.get_input(i).dtype.name for i in range(network.num_inputs)]
    layers = []
    for layer in map(network.get_layer, range(network.num_layers)):
        read = map(layer.get_input, range(layer.num_inputs))
        layers.append((layer.type.name, tuple(t.name for t in read if t is not None)))
    return Tried("", tuple(layers), tuple(inputs), tuple(kernels), plan.nbytes)


def configured(trt: Any, builder: Any, network: Any, widths: Widths) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for width in widths:
        profile = builder.create_optimization_profile()
        for tensor in (network.get_input(i) for i in range(network.num_inputs)):
            if -1 in tensor.shape:
                shapes = [[w if d < 0 else d for d in tensor.shape] for w in width]
                profile.set_shape(tensor.name, *shapes)
        assert config.add_optimization_profile(profile) >= 0
    return config


Evidence = Callable[[Tried, Tried], bool]
EVIDENCE: dict[str, Evidence] = {
    # dropped: it builds, and what was asked for is in no layer
    "attention-lengths": lambda fault, _: "len" not in dict(fault.layers)["ATTENTION_INPUT"],
    "attention-causal": lambda fault, _: len(dict(fault.layers)["ATTENTION_INPUT"]) == 3,
    "operator-misread": lambda fault, repaired: fault.layers == repaired.layers,
    "opset": lambda fault, repaired: fault.layers == repaired.layers,
    "type-double": lambda fault, _: fault.inputs == ("FLOAT",),
    "type-overflow": lambda fault, repaired: fault.layers == repaired.layers,
    # slow: it builds, and launches or holds more
    "attention-mask-bool": lambda fault, repaired: len(fault.kernels) - len(repaired.kernels) >= 6,
    "quantized-blocks": lambda fault, repaired: len(fault.kernels) > len(repaired.kernels),
    "quantized-rows": lambda fault, _: len(fault.kernels) > 1,
    "weight-layout": lambda fault, repaired: (
        fault.plan_bytes - repaired.plan_bytes > 0.9 * 2 * 256 * 512
    ),
    "control-flow": lambda fault, _: "CONDITION" in dict(fault.layers),
}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_tensorrt_takes_the_repaired_graph_alone(library: Library, case: Case) -> None:
    repaired = attempt(library, case.repaired(), case.widths)
    assert repaired.refusal == ""
    fault = attempt(library, case.fault(), case.widths)
    if case.says:
        assert case.says in fault.refusal
    else:
        assert fault.refusal == ""
        assert EVIDENCE[case.rule](fault, repaired), (fault, repaired)
        # The repair of some rules removes what shows the fault; of the others nothing is left.
        assert not EVIDENCE[case.rule](repaired, repaired) or fault.layers == repaired.layers


def test_unsupported_operators_are_those_of_the_parser(library: Library) -> None:
    trt = library.module
    parser = trt.OnnxParser(
        trt.Builder(library.logger).create_network(0), library.logger
    )  # the network may go, the parser only answers
    names = {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == ""}
    assert {name for name in names if not parser.supports_operator(name)} == UNSUPPORTED
    assert all(parser.supports_operator(name) for name in OWN)


@pytest.mark.parametrize(
    ("place", "length", "rules"),
    [
        ("w.bin", 16, []),
        ("{folder}/w.bin", None, ["weight-outside"]),
        ("../graph/w.bin", None, ["weight-outside"]),
        ("missing.bin", None, ["weight-missing"]),
        ("short.bin", None, ["weight-size"]),
        ("w.bin", 8, ["weight-size"]),
    ],
)
def test_external_data(
    library: Library, tmp_path: Path, place: str, length: int | None, rules: list[str]
) -> None:
    folder = tmp_path / "graph"
    folder.mkdir()
    for name, count in (("graph/w.bin", 4), ("w.bin", 4), ("graph/short.bin", 3)):
        np.ones(count, np.float32).tofile(tmp_path / name)
    weight = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[4])
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=place.format(folder=folder))
    if length is not None:
        weight.external_data.add(key="length", value=str(length))
    graph = simple(node("Add", ["x", "w"], ["y"]), tensors=[weight])
    (folder / "m.onnx").write_bytes(graph.SerializeToString())
    assert [f.rule for f in lint(graph, folder=folder)] == rules
    assert bool(attempt(library, folder / "m.onnx", ((1, 4, 8),)).refusal) == bool(rules)
