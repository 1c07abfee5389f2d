"""A bundle of plans from `specrt.load` to text: all but NVIDIA's libraries is the runtime's own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import specrt
from engine.tensorrt_site import GAMMAS, LENGTH, Site, pair
from specrt.bundle import Bundle
from specrt.cli import run
from specrt.engine.tensorrt import engine_record
from specrt.engine.tensorrt.engine import OpenedEngine
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.errors import EngineError
from specrt.params import Gamma, SamplingParams
from specrt.system import Survey
from specrt.tuning.tuning_record import read_tuning
from support.cuda_double import LOST
from support.tensorrt_double import EngineDouble
from support.toy import TableEngine, plain

PROMPT = list(range(40, 75))  # more than two chunks of a prompt
NEW = 60
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True)
WHOLE = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
DRAFTERS = ("model", "ngram", "cascade", "none")
SOME: list[Gamma] = [0, 1, 4, 8, "auto"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The gammas of whole rounds."""
    gammas: list[int] = []
    whole = CapturedRounds.run

    def noted(self: CapturedRounds, *given: Any) -> Any:
        gammas.append(given[-1])
        return whole(self, *given)

    monkeypatch.setattr(CapturedRounds, "run", noted)
    return gammas


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = ("the thing in the sea", "a b c d", "the the the", "0123456789")
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_plain_decoding(site: Site, drafter: str, ran: list[int]) -> None:
    target, draft = pair(memory=1)  # texts repeat, for lookup to find something
    wanted = plain(target, PROMPT, LENGTH)
    with specrt.load(site.bundle(target, draft)) as generator:
        for gamma in SOME:  # up to the end of the KV buffers
            ran.clear()
            found = generator.generate(PROMPT, WHOLE, gamma=gamma, drafter=drafter)
            assert found.token_ids == wanted
            if gamma == "auto":
                continue
            assert max(ran, default=0) <= gamma
            assert bool(ran) is (drafter in ("model", "cascade") and gamma > 0)
            if drafter in ("ngram", "cascade") and gamma:
                assert found.speculation.sources["ngram"][0] > 0


@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_sampled_text_uses_no_whole_round(site: Site, verifier: str, ran: list[int]) -> None:
    target, draft = pair()
    form = "native" if verifier == "match" else "decomposed"
    params = SamplingParams(
        max_tokens=NEW, ignore_eos=True, temperature=0.8, seed=5, verifier=verifier
    )
    with specrt.load(site.bundle(target, draft, form=form, candidates=8)) as generator:
        generator.generate(PROMPT, params, gamma="auto")  # measures costs, whole rounds too
        ran.clear()
        alone = generator.generate(PROMPT, params, gamma=0)
        for drafter, gamma in (("model", 3), ("ngram", 1), ("cascade", "auto"), ("none", 8)):
            found = generator.generate(PROMPT, params, gamma=gamma, drafter=drafter)
            assert len(found.token_ids) == NEW
            if verifier == "match":
                assert found.token_ids == alone.token_ids
        assert ran == []


@pytest.mark.parametrize(
    ("backends", "form", "draft"),
    [
        (("tensorrt", "tensorrt"), "decomposed", True),
        (("ort-cpu", "tensorrt"), "native", True),
        (("tensorrt", "ort-cpu"), "native", True),
        (("tensorrt", "tensorrt"), "native", False),
        (("tensorrt", "tensorrt-rtx"), "native", True),
    ],
)
def test_every_pair_of_backends_gives_the_same_text(
    site: Site, backends: tuple[str, str], form: str, draft: bool
) -> None:
    target, other = pair()
    folder = site.bundle(target, other if draft else None, backends=backends, form=form)
    with specrt.load(folder) as generator:
        models = generator.models
        kinds = [isinstance(each, TableEngine) for each in (models.target, models.draft)]
        assert kinds == [name == "ort-cpu" for name in backends]
        whole = draft and form == "native" and "ort-cpu" not in backends
        assert (models.rounds is not None) is whole
        wanted = plain(target, PROMPT, NEW)
        for gamma in SOME:
            assert generator.generate(PROMPT, PARAMS, gamma=gamma).token_ids == wanted
    assert len(site.devices) == 1


def test_nothing_is_left_of_many_openings(site: Site) -> None:
    folder = site.bundle(*pair())
    for number in range(6):
        generator = specrt.load(folder)
        generator.generate(PROMPT, PARAMS, gamma=number)
        device, engines = site.devices[-1], [generator.models.target, generator.models.draft]
        if number % 2:  # in either order
            engines.reverse()
        for engine, closed in zip(engines, (0, 1), strict=True):
            assert isinstance(engine, OpenedEngine)
            engine.close()
            engine.close()
            assert device.closed == closed
        generator.close()
        site.hold_closed()
    assert len(site.devices) == 6


CALLS = {
    "cudaGraphLaunch": 5, "cudaStreamSynchronize": 5, "execute_async_v3": 1, "cudaMemcpyAsync": 1,
    "cudaStreamBeginCapture": 1,
}  # fmt: skip
"""Calls, and which of them fails, counted from the first token on."""


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("gamma", [0, 4])
def test_a_lost_device_keeps_what_was_emitted(site: Site, call: str, gamma: int) -> None:
    target, draft = pair()
    with specrt.load(site.bundle(target, draft)) as generator:
        stream = generator.stream(PROMPT, PARAMS, gamma=gamma)
        emitted = list(next(stream).token_ids)
        site.cuda.fail(call, CALLS[call], LOST)
        with pytest.raises(EngineError, match="the device is lost") as told:
            emitted.extend(token for chunk in stream for token in chunk.token_ids)
        assert "\n" not in str(told.value)
        assert stream.completion.token_ids == emitted
        assert emitted == plain(target, PROMPT, len(emitted))
        for again in (gamma, 8):
            with pytest.raises(EngineError, match="lost"):
                generator.generate(PROMPT, PARAMS, gamma=again)


def test_memory_that_is_missing_in_mid_stream_is_told(site: Site) -> None:
    target, draft = pair()
    with specrt.load(site.bundle(target, draft)) as generator:
        stream = generator.stream(PROMPT, PARAMS, gamma=4)
        next(stream)
        size, site.cuda.size = site.cuda.size, 0
        with pytest.raises(EngineError, match=r"cannot allocate .* are free on the GPU"):
            stream.finish()
        site.cuda.size = size  # there is enough of it again
        found = generator.generate(PROMPT, PARAMS, gamma=4)
        assert found.token_ids == plain(target, PROMPT, NEW)


@pytest.mark.parametrize(
    ("call", "number"),
    [("deserialize_cuda_engine", 1), ("deserialize_cuda_engine", 2), ("cudaMalloc", 2),
     ("cudaMalloc", 4)],
)  # fmt: skip
def test_what_does_not_open_closes_what_did(site: Site, call: str, number: int) -> None:
    folder = site.bundle(*pair())
    site.cuda.fail(call, number)
    with pytest.raises(EngineError, match=r"cannot (open|allocate)"):
        specrt.load(folder)
    assert len(site.devices) == 1
    site.hold_closed()
    with specrt.load(folder) as generator:
        generator.generate(PROMPT, PARAMS, gamma=4)


def test_scores_that_are_no_numbers_end_a_text_and_not_the_engine(site: Site) -> None:
    target, draft = pair()
    folder = site.bundle(target, draft, broken_at=(len(PROMPT) + 20,))
    with specrt.load(folder) as generator:
        for gamma in GAMMAS:
            stream = generator.stream(PROMPT, PARAMS, gamma=gamma)
            with pytest.raises(EngineError, match="NaN"):
                list(stream)
            found = stream.completion.token_ids
            assert 20 - gamma <= len(found) <= 20
            assert found == plain(target, PROMPT, len(found))


# The commands


Printed = Callable[..., Any]


@pytest.fixture
def printed(prompts: Path, capsys: pytest.CaptureFixture[str]) -> Printed:
    """Runs a command over the prompts, and returns the JSON that it prints."""

    def ran(status: int, *command: str) -> Any:
        verb, folder, *options = command
        given = [verb, folder, "--prompts", str(prompts), "--json", *options]
        assert run(given) == status
        return json.loads(capsys.readouterr().out)

    return ran


def test_verify_finds_gammas_identical_and_tells_of_a_target_that_rounds_otherwise(
    site: Site, printed: Printed, ran: list[int]
) -> None:
    folder = str(site.bundle(*pair(0.9)))
    found = printed(0, "verify", folder, "--gammas", "3,8")
    assert found["divergences"] == []
    assert found["drafted"] > 50
    assert set(ran) >= {3, 8}

    def wrong(engine: EngineDouble) -> None:
        tell = engine.tell

        def told(at: Any, logits: Any) -> None:
            tell(at, logits)
            if logits.shape[1] == 4:
                engine.array(at["argmax"], "int64", (1, 1))[:] ^= 1

        engine.tell = told  # type: ignore[method-assign]

    site.changes["target"] = wrong
    assert printed(1, "verify", folder, "--gammas", "3")["unexplained"] > 0


def test_tune_keeps_costs_that_are_used_afterwards(
    site: Site, prompts: Path, ran: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = site.bundle(*pair(0.9), gammas=(0, 1, 4))
    assert run(["tune", str(folder), "--quick", "--prompts", str(prompts)]) == 0
    assert "written to" in capsys.readouterr().out
    assert set(ran) == {1, 4}
    with specrt.load(folder) as generator:
        assert generator.notices == ()
        assert generator.models.measure is not None
        costs = generator.models.measure(generator.models)
    kept, ignored = read_tuning(Bundle.open(folder), len(os.sched_getaffinity(0)))
    assert ignored is None
    assert kept is not None
    assert kept.costs == costs
    assert len(costs.verify_ns) == len(costs.draft_ns) == 5
    assert all(costs.draft_ns[1:])
    assert list(costs.verify_ns) == sorted(costs.verify_ns)


def test_a_machine_without_a_gpu_is_one_line(
    site: Site, prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = site.bundle(*pair())
    monkeypatch.setattr(engine_record, "survey", lambda: Survey(problem="no NVIDIA driver"))
    assert run(["verify", str(folder), "--prompts", str(prompts)]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert "runs on an NVIDIA GPU only: no NVIDIA driver" in shown.err
