"""Plans of real models: what TensorRT made of them, layer by layer and kernel by kernel."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from compile.plans import CANDIDATES, GAMMAS, Planned, make
from lower.lowering import MAX_LENGTH
from shared import nightly_but
from specrt.engine.tensorrt.library import Library
from specrt.errors import BuildError
from specrt.geometry import Geometry
from specrt_export.compile import tensorrt_compiler
from specrt_export.lower.lazy_tensor import WEIGHTS
from specrt_export.portable.graph import geometry_of, read_graph

Plans = Callable[..., Planned]
Source = Callable[[str], tuple[Path, Path]]

NIGHTLY = pytest.mark.nightly
EXPORTED = [f"{name}-{kind}" for name in ("llama3", "qwen3", "gemma3")
            for kind in ("fp16", "int8", "int4")]  # fmt: skip


@contextmanager
def parsed(library: Library, graph: Path) -> Iterator[Any]:
    """Parse a graph with the library itself; give the network."""
    module = library.module
    builder = module.Builder(library.logger)
    network = builder.create_network(0)
    parser = module.OnnxParser(network, library.logger)
    said = parser.parse_from_file(str(graph))
    errors = [parser.get_error(at).desc() for at in range(parser.num_errors)]
    assert said, errors
    assert not errors
    yield network


def layers(network: Any, kind: str) -> list[Any]:
    """Return the layers of a kind."""
    found = (network.get_layer(at) for at in range(network.num_layers))
    return [layer for layer in found if layer.type.name == kind]


def origin(network: Any, tensor: Any) -> str:
    """Return the name of what a tensor is a cast or a copy of."""
    makers = {
        layer.get_output(0).name: layer
        for layer in layers(network, "CAST") + layers(network, "IDENTITY")
    }
    while tensor.name in makers:
        tensor = makers[tensor.name].get_input(0)
    return str(tensor.name)


def caches(geometry: Geometry) -> list[str]:
    return sorted(geometry.buffers)


@pytest.mark.parametrize(
    "case",
    [
        "draft-int8",
        "draft-int4",
        *(pytest.param(f"draft-{kind}", marks=NIGHTLY) for kind in ("fp16", "fp8")),
        *(pytest.param(f"target-{kind}", marks=NIGHTLY) for kind in ("fp16", "int8", "int4")),
        *(pytest.param(case, marks=[NIGHTLY, pytest.mark.export]) for case in EXPORTED),
    ],
)
def test_a_plan_computes_in_place_and_its_record_says_what_was_made(
    plans: Plans, source: Source, library: Library, case: str
) -> None:
    """Two cache updates a layer, each straight from an input of the graph, at `start`.

    Attention is one kernel a layer: of a vector where there is one token, else of a matrix.
    Fewer than 4 query heads have no kernel for a vector; heads of 8, the zoo's, none for a matrix.
    """
    name, precision = case.split("-")
    made, geometry = plans(name, precision), geometry_of(read_graph(source(name)[0]))
    with parsed(library, made.graph) as network:
        updates = layers(network, "KV_CACHE_UPDATE")
        assert all(update.get_input(0).is_network_input for update in updates)
        assert sorted(update.get_input(0).name for update in updates) == caches(geometry)
        assert {origin(network, update.get_input(2)) for update in updates} == {"start"}
        for update in updates:
            written = update.get_output(0)
            assert written.is_network_output
            assert written.name == f"present_{update.get_input(0).name}"
            assert tuple(written.shape) == tuple(update.get_input(0).shape)
        masks = [layer.get_input(3) for layer in layers(network, "ATTENTION_INPUT")]
        assert len(masks) == geometry.layers
        assert all(mask is not None for mask in masks)
        # The last axis is the whole buffer, and layers that see as far as each other share a mask.
        assert {tuple(mask.shape)[::3] for mask in masks} == {(1, MAX_LENGTH)}
        seen = Counter(mask.name for mask in masks)
    windows = [memory.window for memory in geometry.memories]
    assert sorted(seen.values()) == sorted(Counter(windows).values())
    record, target = made.record, made.role == "target"
    verify = [(f"verify {gamma}", gamma + 1, gamma + 1) for gamma in GAMMAS]
    expected = [("prefill", 32, max(GAMMAS) + 1 if target else 1), ("decode", 1, 1)]
    expected += verify if target else [("catch-up", 2, 1)]
    assert [(p.name, p.width.most, p.rows.most) for p in record.profiles] == expected
    assert [one.profile for one in record.compiled] == [name for name, _, _ in expected]
    assert record.sha256 == hashlib.sha256(made.plan.read_bytes()).hexdigest()
    assert (record.form, record.confidence) == ("native", not target)
    assert (record.candidates, record.messages) == (CANDIDATES, ())
    one = "gemv" if geometry.heads >= 4 else "gemm"
    many = "gemm" if geometry.memories[0].key_width >= 16 else "none"
    for compiled in record.compiled:
        assert compiled.launches
        assert compiled.activation_bytes
        wanted = one if compiled.profile == "decode" else many
        assert compiled.attention == wanted, compiled.profile
        fused = [kernel for kernel in compiled.kernels if "_mha" in kernel.name]
        assert sum(kernel.count for kernel in fused) == geometry.layers * (wanted != "none")
        # The int4 product after an attention that is taken apart may need its weight written out.
        apart = precision == "int4" and wanted == "none"
        assert compiled.dequantising <= apart * geometry.layers, compiled
    # Whatever layouts the profiles want; the constants of TensorRT's own take the rest.
    if name == "target":
        assert record.weight_bytes < 1.02 * made.graph.with_name(WEIGHTS).stat().st_size


@pytest.mark.export
@pytest.mark.parametrize("case", nightly_but(["lfm2"], ["gemma4", "lfm2", "minicpm3"]))
def test_layers_that_remember_in_other_ways_have_their_buffers(
    plans: Plans, source: Source, library: Library, case: str
) -> None:
    made, geometry = plans(case, "fp16"), geometry_of(read_graph(source(case)[0]))
    with parsed(library, made.graph) as network:
        updates = layers(network, "KV_CACHE_UPDATE")
        assert sorted(update.get_input(0).name for update in updates) == caches(geometry)
        for update in updates:
            one = geometry.buffers[update.get_input(0).name]
            assert tuple(update.get_output(0).shape) == (1, one.heads, MAX_LENGTH, one.width)
    assert made.record.form == "native"
    assert made.plan.is_file()


def test_what_tensorrt_would_not_take_is_not_compiled(
    source: Source, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few heads need leave to be taken apart."""
    monkeypatch.setattr(tensorrt_compiler, "mark_decomposable", lambda graph: None)
    with pytest.raises(BuildError, match=r"2 query heads.* TRT_decomposable"):
        make(source("draft"), "draft", "fp16", tmp_path / "linted", library)
    assert not (tmp_path / "linted" / "engine.plan").exists()
