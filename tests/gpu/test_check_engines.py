"""The checks of engines pass on engines that work, and fail on those broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpucheck import bench, checks, experiments, inside
from gpucheck.bare import Bare, Caches, inputs, shapes_of
from gpucheck.codelet import every
from gpucheck.models import codelet_source
from gpucheck.place import MAX_LENGTH, Place
from gpucheck.rehearsal import TOLERANCE, Stage, TableReference, rehearse
from gpucheck.step import CheckError, Facts
from gpucheck.timing import interleaved, ratio

from runtime.numpy_device import NumpyDevice
from runtime.tensorrt_double import NumpyPlan, geometry_of, record_of
from runtime.toy import TableEngine, byte_level, near
from specrt.engine.ort_cuda import OrtCudaEngine
from specrt.engine.tensorrt.engine_record import Profile, Range
from specrt.engine.tensorrt.plan import ITEM_BYTES, Tensor
from specrt.generator import Generator
from specrt.speculation.pool import Models
from specrt.text import Tokenizer
from specrt.tuning import measure_costs
from specrt_export.compile.ort_cuda_compiler import compile_ort_cuda
from specrt_export.portable.graph import GraphRun


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_all_pass_where_nothing_is_broken(stage: Stage) -> None:
    found = rehearse(stage)
    assert {name for name, facts in found.items() if not facts["passed"]} == set()
    assert found["aliasing"]["bound_in_place"]
    assert found["rounds"]["rounds"] == 20


Break = Callable[[Any], None]


def shifted_scores(engine: Any) -> None:
    plan, run = engine.model.plan, engine.model.plan.run

    def wrong(addresses: Any, width: int, rows: int) -> None:
        run(addresses, width, rows)
        logits = plan._array(addresses["logits"], np.float32, (1, rows, plan.vocab))
        logits += np.linspace(0, 1, plan.vocab, dtype=np.float32) * (width > 1)

    plan.run = wrong


def stale_keys(engine: Any) -> None:
    """The second token of a pass is not written where something was before."""
    plan, update = engine.model.plan, engine.model.plan._update

    def wrong(at: Any, fed: Any, start: Any) -> Any:
        cache = plan._unpacked(plan._cache(at["key.0"]))[0, 0, :, 0]
        if fed.shape[1] > 1 and cache[start[0] + 1] > 0:
            fed[0, 1] = int(cache[start[0] + 1]) - 1
        return update(at, fed, start)

    plan.update = plan._update = wrong


def foreign_alias(engine: Any) -> None:
    engine.model.plan.renamed = {"present_key.1": "key.0"}


def written_elsewhere(engine: Any) -> None:
    """A pass behind another leaves one buffer as it was."""
    plan, run = engine.model.plan, engine.model.plan.run

    def wrong(addresses: Any, width: int, rows: int) -> None:
        cache = plan._cache(addresses["value.1"])
        before = cache.copy()
        run(addresses, width, rows)
        if before.any():
            cache[:] = before

    plan.run = wrong


def forgetful(engine: Any) -> None:
    """One buffer of each opening is never given back."""
    engine._memory._taken = [t for t in engine._memory._taken if t[2] != "KV buffers"]


def unchecked(engine: Any) -> None:
    forward = engine.forward
    engine.forward = lambda tokens, start, rows=None: forward(
        tokens, min(max(start, 0), engine.max_length - np.shape(tokens)[1]), rows
    )


CHECKS: dict[str, Callable[[Stage, Callable[..., Any]], Facts]] = {
    "logits": lambda s, o: checks.logits(o(True), TableReference(s.table), TOLERANCE),
    "rollback": lambda s, o: checks.rollback(o),
    "limit": lambda s, o: checks.limit(o(True), TableReference(s.table), TOLERANCE),
    "aliasing": lambda s, o: inside.aliasing(o(True)),
    "memory": lambda s, o: checks.memory(o, s.free, 0),
}


@pytest.mark.parametrize(
    ("check", "broken", "said"),
    [
        ("logits", shifted_scores, "argmax|away from the reference"),
        ("rollback", stale_keys, "over stale keys and fresh ones differ"),
        ("limit", shifted_scores, "near the limit"),
        ("limit", unchecked, "was not refused"),
        ("aliasing", foreign_alias, "writes other inputs"),
        ("aliasing", written_elsewhere, "was not written in place"),
        ("memory", forgetful, "bytes were not given back"),
    ],
)
def test_each_fails_on_an_engine_that_is_broken(
    stage: Stage, check: str, broken: Break, said: str
) -> None:
    def opened(capture: bool) -> Any:
        engine = stage.target(capture)
        broken(engine)
        return engine

    with pytest.raises(CheckError, match=said):
        CHECKS[check](stage, opened)


def test_replays_that_differ_from_launches_are_told(stage: Stage) -> None:
    def opened(capture: bool) -> Any:
        engine = stage.target(capture)
        if capture:
            shifted_scores(engine)
        return engine

    with pytest.raises(CheckError, match=r"replayed and launched passes differ|argmax"):
        checks.replays(opened)


def test_rounds_that_differ_from_their_passes_are_told(stage: Stage) -> None:
    target, draft = stage.target(), stage.draft()
    singly = draft.forward
    draft.forward = lambda tokens, start, rows=None: singly(tokens, max(0, start - 1), rows)
    with pytest.raises(CheckError, match="gamma 1: a round drafted"):
        inside.rounds(target, draft, (1,))


def test_both_forms_have_to_be_there_and_agree(stage: Stage) -> None:
    native, other = stage.target(), stage.target(form="decomposed")
    with pytest.raises(CheckError, match="both plans are native"):
        inside.forms(native, native, TOLERANCE)
    with pytest.raises(CheckError, match="not updated in place"):
        inside.aliasing(other)
    shifted_scores(other)
    with pytest.raises(CheckError, match="spread apart"):
        inside.forms(native, other, TOLERANCE)


def test_a_device_that_computes_nothing_is_told(stage: Stage) -> None:
    def opened(capture: bool) -> Any:
        engine = stage.target(capture)
        engine.model.plan.run = lambda addresses, width, rows: None
        return engine

    with pytest.raises(CheckError, match="all alike"):
        checks.replays(opened)


def test_every_check_is_run_whatever_the_first_says() -> None:
    def off() -> Facts:
        raise CheckError("off", {"by": 2})

    with pytest.raises(CheckError, match="a: off; c: off") as failed:
        every({"a": off, "b": dict, "c": off})
    assert {name: one["passed"] for name, one in failed.value.facts.items()} == {
        "a": False, "b": True, "c": False,
    }  # fmt: skip
    assert failed.value.facts["a"]["by"] == 2


LENGTH, WIDTH = 128, 64


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], OrtCudaEngine]:
    """Codelet's draft for ort-cuda, opened on the CPU provider."""
    out, source = tmp_path_factory.mktemp("cpu"), codelet_source("draft")
    made = compile_ort_cuda(source.graph, source.weights, out, LENGTH, captured=9)
    return lambda capture: OrtCudaEngine(
        out / "engine.onnx", made.geometry, batch=1, max_length=LENGTH, max_width=WIDTH,
        device="cpu", capture=capture,
    )  # fmt: skip


@pytest.fixture
def held() -> GraphRun:
    source = codelet_source("draft")
    return GraphRun(source.graph, source.weights)


def test_real_numbers_of_another_backend_pass(
    on_cpu: Callable[[bool], OrtCudaEngine], held: GraphRun
) -> None:
    found = checks.logits(on_cpu(True), held, checks.TOLERANCES["fp16"])
    assert 0 < found["largest_relative_error"] < checks.TOLERANCES["fp16"]
    assert checks.limit(on_cpu(True), held, checks.TOLERANCES["fp16"])["passes"][0] == [7, 7]
    assert checks.rollback(on_cpu)["largest_difference"] == 0
    assert checks.replays(on_cpu)["passes"] > 5


def test_fp16_does_not_pass_for_fp32(
    on_cpu: Callable[[bool], OrtCudaEngine], held: GraphRun
) -> None:
    with pytest.raises(CheckError, match="away from the reference"):
        checks.logits(on_cpu(True), held, checks.TOLERANCES["fp32"])


def completing(table: TableEngine, folder: Path, gammas: tuple[int, ...]) -> Generator:
    models = Models(table, near(table, 2, 0.9), gammas, measure=measure_costs)
    return Generator(models, Tokenizer(byte_level(folder)))


def test_passes_and_completions_are_measured(
    place: Place, tmp_path: Path, code_prompts: Path
) -> None:
    table = TableEngine(vocab=300, max_length=2048, memory=8)
    asked = replace(place, gammas=(1, 2, 4), prompts=2)
    timed = bench.time_passes(table, asked)
    assert set(timed["host_ms"]) == {"1", "2", "3", "5"}
    pair = completing(table, tmp_path, (0, 1, 2, 4))
    found = bench.complete(pair, asked, "fp16")
    assert found["0"]["speedup"] == 1.0
    assert {"1", "2", "4"} <= found.keys()
    assert 1 <= found["4"]["tokens_per_round"] <= 5
    assert found["4"]["round_us"] > found["4"]["outside_us"] > 0


def test_a_plan_is_held_to_the_bandwidth(stage: Stage, place: Place) -> None:
    timed = bench.time_passes(stage.target(), place)
    assert timed["device_ms"].keys() == {"1", "2", "5"}
    source = codelet_source("draft")
    built: Any = type("Built", (), {"read_bytes": 10**9, "geometry": source.geometry,
                                    "max_length": 2048})  # fmt: skip
    timed["device_ms"]["1"]["median"] = 2.0
    found = bench.held_to(1e12, timed, built)
    assert (found["bound_ms"], found["decode_of_bound"]) == (1.0, 0.5)


def test_speculation_that_changes_the_text_is_told(
    place: Place, tmp_path: Path, code_prompts: Path
) -> None:
    table = TableEngine(vocab=300, max_length=2048, memory=8)
    forward = table.forward

    def wrong(tokens: Any, start: Any, rows: int | None = None) -> Any:
        done = forward(tokens, start, rows)
        if np.shape(tokens)[1] in (2, 5):
            done.argmax[:] = (done.argmax + 1) % 300
            done.logits[:] = np.roll(done.logits, 1, -1)
        return done

    table.forward = wrong  # type: ignore[method-assign]
    pair = completing(table, tmp_path, (0, 1, 4))
    with pytest.raises(CheckError, match="no near-tie"):
        bench.complete(pair, place, "fp16")


class TokenCaches(Caches):
    """KV buffers as plans in NumPy expect them: the token 0 everywhere."""

    def __init__(self, device: Any, plan: Any) -> None:
        self.places = {}
        for name, tensor in plan.tensors.items():
            if tensor.is_input and name.startswith(("key.", "value.")):
                size = int(np.prod(tensor.shape)) * ITEM_BYTES[tensor.type]
                self.places[name] = device.allocate(size, "KV")
                sign = 1 if name.startswith("key") else -1
                device.at(self.places[name], size).view(np.float16)[:] = sign


@pytest.fixture
def plans() -> tuple[Any, NumpyPlan, NumpyPlan]:
    device: Any = NumpyDevice(1 << 24)
    toy = TableEngine(vocab=29, max_length=MAX_LENGTH)
    sizes = [Range(width, width, width) for width in experiments.WIDTHS]
    record = record_of(tuple(Profile(f"width {s.most}", s, s) for s in sizes))
    made = [NumpyPlan(device, record, toy, geometry_of(toy)) for _ in range(2)]
    return device, made[0], made[1]


def test_two_plans_are_launched_in_turns(plans: tuple[Any, NumpyPlan, NumpyPlan]) -> None:
    device, base, other = plans
    caches = TokenCaches(device, base)
    found = experiments.compare(base, other, device, caches, experiments.BASE, 29, 2)
    assert found["scores_apart"] == 0
    assert {"width 1", "width 5"} <= found.keys()
    assert set(found["width 5"]["ms"]) == {"as it is", "changed"}
    assert all(graph.freed for graph in device.graphs)


def test_two_plans_that_disagree_are_told(plans: tuple[Any, NumpyPlan, NumpyPlan]) -> None:
    device, base, other = plans
    other.toy = TableEngine(seed=3, vocab=29, max_length=MAX_LENGTH)
    with pytest.raises(CheckError, match="spread apart"):
        experiments.compare(base, other, device, TokenCaches(device, base), experiments.BASE, 29, 1)


def test_a_bare_pass_gives_the_scores_of_its_tokens(
    plans: tuple[Any, NumpyPlan, NumpyPlan],
) -> None:
    device, base, _ = plans
    one = Bare(base, device, 1, shapes_of(5), TokenCaches(device, base))
    fed = inputs(5, 3, 29)
    one.feed(**fed)
    one.run()
    seen = np.concatenate([np.zeros(3, np.int64), fed["input_ids"][0]])
    wanted = [base.toy.row(seen[: 4 + at]) for at in range(5)]
    np.testing.assert_array_equal(one.logits(29)[0], wanted)


def test_turns_are_interleaved_and_ratios_taken_lap_by_lap() -> None:
    order: list[str] = []
    now = iter(range(0, 10**9, 1_000_000))
    times = interleaved(
        {name: lambda name=name: order.append(name) for name in "ab"},  # type: ignore[misc]
        3, lambda: next(now),
    )  # fmt: skip
    assert "".join(order) == "abbaabba"
    assert times == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert ratio([2, 4, 40], [1, 2, 10]) == 2


def test_each_extent_has_a_profile_of_its_own(plans: tuple[Any, NumpyPlan, NumpyPlan]) -> None:
    device, base, _ = plans
    variant = experiments.VARIANTS["filled"]
    sizes = [Range(width, width, width) for width, _ in variant.cases().values()]
    record = record_of(tuple(Profile(str(i), s, s) for i, s in enumerate(sizes)))
    cut = NumpyPlan(device, record, base.toy, base.geometry)
    cut.tensors = {**cut.tensors, "extent": Tensor((-1,), "int64", True)}
    caches = TokenCaches(device, base)
    found = experiments.compare(base, cut, device, caches, variant, 29, 1)
    cases = {f"width {w} of {e}" for w in experiments.WIDTHS for e in experiments.EXTENTS}
    assert cases <= found.keys()
    assert found["scores_apart"] == 0
