"""Plans are really built, by tensorrt-rtx, which needs no GPU for it; or nothing is left."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compile.plans import PROFILES, nothing
from lower.lowering import Case
from specrt.engine.tensorrt.engine_record import BuildSetting, read_engine_record, summary
from specrt.engine.tensorrt.library import FLAVOURS, Library
from specrt.errors import BuildError
from specrt_export.compile.monitor import CancelledError, Progress
from specrt_export.compile.network import profiles
from specrt_export.compile.plan_builder import (
    PlanReport,
    Room,
    TimingCache,
    Weights,
    build_plan,
    memory_warning,
    need,
)
from specrt_export.lower.lazy_tensor import ENGINE, WEIGHTS
from specrt_export.recipe.recipe_tables import PlanOptions

RTX, ENTERPRISE = "tensorrt-rtx", "tensorrt"
MIB = 1 << 20


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "draft")


def build(
    case: Case, library: Library, out: Path, progress: Progress = nothing, **more: Any
) -> PlanReport:
    """Build every profile of a draft."""
    graph, options = case.lowered.folder / ENGINE, PlanOptions(candidates=16)
    return build_plan(graph, out, library, PROFILES, options, progress, **more)


def test_a_plan_is_what_the_record_and_the_options_say(
    draft: Case, library: Library, tmp_path: Path
) -> None:
    told: list[tuple[str, float]] = []
    out = tmp_path / "model.plan"
    report = build(draft, library, out, lambda *said: told.append(said))
    plan, record = out.read_bytes(), report.record
    assert plan.startswith(b"vtrt")
    assert (record.plan_bytes, record.sha256) == (len(plan), hashlib.sha256(plan).hexdigest())
    assert record.capabilities == ("8.0", "8.6", "8.9", "12.0", "12.1")
    assert (record.compute, record.form, record.candidates) == ("fp16", "native", 16)
    assert record.weight_bytes > 1 << 20
    assert left(tmp_path) == ["model.plan"]
    assert "times kernels on the device" in report.timing_cache
    activation = {one.profile: one.activation_bytes for one in record.compiled}
    assert activation["prefill"] > activation["decode"]
    (tmp_path / "engine.json").write_text(record.to_json())
    assert read_engine_record(tmp_path / "engine.json") == record
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert told[-1] == ("plan built", 1.0)
    stages = {stage for stage, _ in told}
    assert {f"profile {p.name} ({at + 1} of 3)" for at, p in enumerate(PROFILES)} <= stages
    options = {"weight_streaming": True, "capabilities": ("8.9", "12.0", "8.9")}
    few = one_profile(draft, library, out, **options).record
    assert BuildSetting("capabilities", "8.9, 12.0, 8.9") in few.settings
    assert ("weight_streaming", "True") in summary(few)
    assert few.capabilities == ("8.9", "12.0")


def one_profile(case: Case, library: Library, out: Path, **settings: Any) -> PlanReport:
    """Build one profile of a draft."""
    options, graph = PlanOptions(candidates=16, **settings), case.lowered.folder / ENGINE
    return build_plan(graph, out, library, PROFILES[1:2], options, nothing)


def first(model: onnx.ModelProto, kind: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == kind)


def counted_lengths(model: onnx.ModelProto) -> None:
    """The form that TensorRT's parser takes and forgets."""
    node = first(model, "Attention")
    del node.input[3:]
    node.input.extend(["", "", "", "start"])


def cast_before_cache(model: onnx.ModelProto) -> None:
    node = first(model, "TensorScatter")
    twice = helper.make_node("Mul", [node.input[0], "one.half"], ["scaled"], name="scaled")
    model.graph.initializer.append(numpy_helper.from_array(np.float16(1), "one.half"))
    node.input[0] = "scaled"
    model.graph.node.insert(list(model.graph.node).index(node), twice)


def crossed_caches(model: onnx.ModelProto) -> None:
    one, other = [n for n in model.graph.node if n.op_type == "TensorScatter"][:2]
    one.input[0], other.input[0] = other.input[0], one.input[0]


def written_elsewhere(model: onnx.ModelProto) -> None:
    """A cache that is copied instead of updated: the runtime binds one buffer to both names."""
    node = first(model, "TensorScatter")
    node.CopyFrom(helper.make_node("Identity", [node.input[0]], list(node.output), name=node.name))


def surplus_output(model: onnx.ModelProto) -> None:
    mask = first(model, "Attention").input[3]
    model.graph.output.append(helper.make_tensor_value_info(mask, TensorProto.FLOAT16, None))


def left_as(name: str, source: str, kind: int, model: onnx.ModelProto) -> None:
    """Say something under the name of what target and head hand over."""
    read = first(model, "Attention").input[0] if source == "queries" else source
    model.graph.node.append(helper.make_node("Identity", [read], [name], name=name))
    model.graph.output.append(helper.make_tensor_value_info(name, kind, None))


def without(prefix: str, model: onnx.ModelProto) -> None:
    for output in [o for o in model.graph.output if o.name.startswith(prefix)]:
        model.graph.output.remove(output)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (counted_lengths, "lost its mask"),
        (cast_before_cache, "reads 'scaled', which is not an input"),
        (crossed_caches, "KV update of '(key|value).0' gives 'present_(value|key).0'"),
        (written_elsewhere, "'key.0' has 0 KV updates"),
        (surplus_output, "has an output '.*' that the runtime does not know"),
        (partial(without, "argmax"), "has no output 'argmax'"),
        (partial(left_as, "feature", "queries", TensorProto.FLOAT16), "feature is of type HALF"),
        (
            partial(left_as, "state", "logits", TensorProto.FLOAT),
            "reads hidden of width 0 and leaves state of width 8192",
        ),
        (partial(without, "candidates"), "cuts out 0 candidates a row; the recipe says 16"),
    ],
)
def test_graphs_that_are_refused_or_silently_changed_are_caught(
    edit: Callable[[onnx.ModelProto], None], words: str, draft: Case, library: Library,
    tmp_path: Path,
) -> None:  # fmt: skip
    model = draft.model
    edit(model)
    draft.save(model)
    with pytest.raises(BuildError, match=words):
        one_profile(draft, library, tmp_path / "plan")
    assert left(tmp_path) == []


def test_a_file_that_is_missing_is_named(draft: Case, library: Library, tmp_path: Path) -> None:
    (draft.lowered.folder / WEIGHTS).unlink()
    with pytest.raises(BuildError, match=r"cannot parse .*engine\.data"):
        one_profile(draft, library, tmp_path / "plan")
    assert left(tmp_path) == []


def test_a_disk_that_is_full_leaves_what_was_there(
    draft: Case, library: Library, tmp_path: Path
) -> None:
    out = tmp_path / "model.plan"
    out.write_bytes(b"earlier")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(BuildError, match="could not be written, with"):
            one_profile(draft, library, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left(tmp_path) == ["model.plan"]
    assert out.read_bytes() == b"earlier"


def test_a_cancelled_build_ends(draft: Case, library: Library, tmp_path: Path) -> None:
    asked = iter(range(1000))
    with pytest.raises(CancelledError):
        build(draft, library, tmp_path / "p", cancelled=lambda: next(asked) > 40)
    assert left(tmp_path) == []


def test_timings_are_kept_beside_the_plan(tmp_path: Path) -> None:
    path, backend = tmp_path / "model.timing", SimpleNamespace(flavour=FLAVOURS[ENTERPRISE])
    for takes, read, note in (
        (True, b"", "begun"),
        (True, b"timed", "read and kept"),
        (False, b"", "begun anew, because model.timing is of another version or GPU"),
    ):
        config = MagicMock()
        config.set_timing_cache.side_effect = lambda data, _, takes=takes: takes or not data
        config.create_timing_cache.side_effect = lambda data: data
        config.get_timing_cache.return_value.serialize.return_value = b"timed"
        cache = TimingCache(backend, path)
        cache.attach(config)
        cache.keep(config)
        assert config.set_timing_cache.call_args.args[0] == read
        assert (path.read_bytes(), cache.note) == (b"timed", note)


MEASURED = [  # MiB: floats, codes, int4, gammas (None: prefill alone), peak
    (88, 0, 0, None, 478),
    (641, 0, 0, (4,), 2563),
    (0, 48, 0, (4,), 395),
    (0, 0, 142, (1, 4, 8), 896),
    (1, 3, 6, (1, 2, 4), 389),
    (2, 0, 0, (), 275),
]


def test_the_estimate_of_memory_is_above_what_was_measured_and_near() -> None:
    for floats, codes, halves, gammas, peak in MEASURED:
        made = profiles("target", 128, gammas or ())
        weights = Weights(floats * MIB, codes * MIB, halves * MIB)
        needed = need(weights, made if gammas is not None else made[:1], PlanOptions(), RTX)
        taken = peak * MIB - weights.stored  # mapped weights can be dropped
        assert taken <= needed.host_bytes <= 1.4 * taken + 140 * MIB
        assert needed.device_bytes == 0
        assert need(weights, made, PlanOptions(workspace_mib=5), ENTERPRISE).device_bytes > 0


def test_too_little_memory_is_a_warning_with_a_remedy(
    draft: Case, library: Library, tmp_path: Path
) -> None:
    needed = need(Weights(1 << 30, 0, 0), profiles("target", 128, ()), PlanOptions(), ENTERPRISE)
    both = needed.host_bytes + needed.device_bytes
    for room, backend, said in (
        (Room(1 << 20), RTX, "GiB of memory, and 1 MiB is free"),
        (Room(1 << 20), RTX, "tensorrt-rtx needs no GPU to build"),
        (Room(None, 512 << 20), ENTERPRISE, "of GPU memory, and 512 MiB is free"),
        (Room(both - 1, both, shared=True), ENTERPRISE, "of memory, and"),
    ):
        assert said in memory_warning(needed, room, backend)
    for enough in (Room(both), Room(None), Room(both, both, shared=True)):
        assert memory_warning(needed, enough, ENTERPRISE) == ""
    stages: list[str] = []
    build(draft, library, tmp_path / "p", lambda *told: stages.append(told[0]), room=Room(64 << 20))
    assert "warning: building this plan may take" in stages[0]
    assert (tmp_path / "p").is_file(), "all the same"
