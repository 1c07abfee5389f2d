"""Weights in other files are found as `onnx` finds them, read from where they were hashed only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from engine.conftest import MAX_LENGTH, MAX_WIDTH
from specrt.engine.backends import open_engine
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.cuda_engine import OrtCudaEngine
from specrt.engine.ort.onnx_file import files_of, mapped_weights
from specrt.errors import BundleError, EngineError
from specrt.geometry import Geometry
from specrt.held_file import HeldFile, hold_folder
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu


@pytest.mark.parametrize("name", ["fp32 1", "int8 1", "cuda"])
def test_weights_are_those_that_onnx_reads(compiled: Callable[[str], Path], name: str) -> None:
    path = compiled(name)
    graph = onnx.load(path).graph
    known = {t.name: (t.data_type, numpy_helper.to_array(t).tobytes()) for t in graph.initializer}
    found = mapped_weights(path, hold_folder(path.parent))
    assert len(found) > 10
    assert all(known[w.name] == (w.type, w.array.tobytes()) for w in found)


def external(name: str, location: str, length: int = 8, offset: int = 0) -> TensorProto:
    tensor = TensorProto(name=name, data_type=1, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("length", length), ("offset", offset)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def graph(*weights: TensorProto, constant: TensorProto | None = None) -> onnx.GraphProto:
    nodes = [helper.make_node("Constant", [], ["c"], value=constant)] if constant else []
    return helper.make_graph(nodes, "g", [], [], list(weights))


def write(folder: Path, made: onnx.GraphProto) -> Path:
    (folder / "engine.data").write_bytes(bytes(range(16)))
    (folder / "engine.onnx").write_bytes(helper.make_model(made).SerializeToString())
    return folder / "engine.onnx"


@pytest.mark.parametrize(
    "location", ["../engine.data", "/etc/passwd", "other.data", "", "./engine.data", "engine.onnx/"]
)
def test_weights_elsewhere_are_refused(tmp_path: Path, location: str) -> None:
    path = write(tmp_path, graph(external("a", "engine.data"), external("b", location)))
    for reader in (mapped_weights, files_of):
        with pytest.raises(EngineError, match=r"needs the file .*build the bundle again"):
            reader(path, hold_folder(tmp_path))


def test_weights_that_are_hidden_or_too_long_are_refused(tmp_path: Path) -> None:
    weight = external("a", "engine.data")
    branch = helper.make_node("If", ["c"], ["y"], then_branch=graph(weight), else_branch=graph())
    function = helper.make_function(
        "d", "f", [], ["c"], [helper.make_node("Constant", [], ["c"], value=weight)], []
    )
    models = [
        graph(constant=weight), helper.make_graph([branch], "g", [], []),
        *(graph(external("a", "engine.data", *place)) for place in ((8, 9), (4, 0), (8, -1))),
    ]  # fmt: skip
    for one in models:
        with pytest.raises(EngineError, match="is not a sound graph"):
            mapped_weights(write(tmp_path, one), hold_folder(tmp_path))
    path = write(tmp_path, graph())
    path.write_bytes(helper.make_model(graph(), functions=[function]).SerializeToString())
    with pytest.raises(EngineError, match="is not a sound graph"):
        files_of(path, hold_folder(tmp_path))


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damage_is_an_error_of_ours(tmp_path: Path, data: st.DataObject) -> None:
    path = write(tmp_path, graph(external("a", "engine.data"), constant=external("b", "x")))
    whole = bytearray(path.read_bytes())
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        whole[at] = data.draw(st.integers(0, 255))
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with suppress(EngineError):
        mapped_weights(path, hold_folder(tmp_path))


def test_a_cpu_reads_what_was_held_whatever_has_its_name_now(
    tmp_path: Path, engines: Path, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = engines / "codelet"
    source = pair / "portable" / "draft.onnx", pair / "checkpoint" / "draft"
    compile_ort_cpu(*source, tmp_path / "it", MAX_LENGTH)
    path = tmp_path / "it" / "engine.onnx"

    def logits(files: Mapping[str, HeldFile] | None = None) -> bytes:
        spec = EngineSpec("ort-cpu", path, geometry, 1, MAX_LENGTH, MAX_WIDTH, held=files)
        engine = open_engine(spec)
        try:
            return bytes(engine.forward([[1, 2, 3]], 0).logits.tobytes())
        finally:
            engine.close()

    held, known = hold_folder(path.parent), logits()
    other = tmp_path / "other"
    other.write_bytes(bytes(len(held["engine.data"].data)))
    other.replace(path.with_name("engine.data"))
    assert logits(held) == known
    assert logits() != known
    with monkeypatch.context() as machine:
        machine.setattr("tempfile.tempdir", str(tmp_path / "no"))
        assert logits(held) == known
    for name, file in held.items():  # as in the caches of hubs
        (tmp_path / f"blob {name}").write_bytes(bytes(file.data))
        path.with_name(name).unlink()
        path.with_name(name).symlink_to(tmp_path / f"blob {name}")
    assert logits() == known


def test_what_a_library_opens_by_its_name_is_compared_afterwards(
    compiled: Callable[[str], Path], geometry: Geometry, tmp_path: Path
) -> None:
    for name in ("engine.onnx", "engine.data"):
        (tmp_path / name).write_bytes(compiled("cuda").with_name(name).read_bytes())
    path, held = tmp_path / "engine.onnx", hold_folder(tmp_path)
    spec = EngineSpec("ort-cuda", path, geometry, 1, MAX_LENGTH, MAX_WIDTH, held=held)
    OrtCudaEngine(spec, "cpu").close()
    (tmp_path / "other").write_bytes(path.with_name("engine.data").read_bytes())
    (tmp_path / "other").replace(path.with_name("engine.data"))
    with pytest.raises(BundleError, match=r"engine\.data was replaced while it was opened"):
        OrtCudaEngine(spec, "cpu")
    held.pop("engine.data")
    with pytest.raises(EngineError, match=r"needs the file 'engine\.data'"):
        OrtCudaEngine(spec, "cpu")
