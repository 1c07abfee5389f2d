"""A bundle of plans from `specrt.load` to text: all but NVIDIA's libraries is the runtime's own."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import specrt
from specrt.bundle import Bundle
from specrt.cli import run
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.errors import EngineError
from specrt.params import Gamma, SamplingParams
from specrt.tuning.tuning_record import read_tuning
from support.gpu_double import ALWAYS, LOST, POSITIONS, Site, table_pair
from support.toy import TableEngine, plain

PROMPT = list(range(40, 75))  # more than two chunks of a prompt
NEW = 40
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True)


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


TRT, RTX, ORT = "tensorrt", "tensorrt-rtx", "ort-cpu"


@pytest.mark.parametrize(
    ("backend", "other", "form", "drafter"),
    [
        (TRT, TRT, "native", "model"),
        (TRT, RTX, "native", "cascade"),
        (TRT, TRT, "decomposed", "model"),
        (ORT, TRT, "native", "model"),
        (TRT, ORT, "native", "cascade"),
        (TRT, "", "native", "ngram"),
    ],
)
def test_greedy_text_is_plain_decoding(
    site: Site, ran: list[int], backend: str, other: str, form: str, drafter: str
) -> None:
    target, draft = table_pair(memory=1)  # texts repeat, for lookup to find something
    wanted = plain(target, PROMPT, POSITIONS)
    folder = site.bundle(target, draft if other else None, backends=(backend, other), form=form)
    params = replace(PARAMS, max_tokens=POSITIONS)  # up to the end of the KV buffers
    whole = form == "native" and ORT not in (backend, other) and drafter != "ngram"
    gammas: list[Gamma] = [0, 3, 8, *["auto"] * (backend == other)]
    with specrt.load(folder, text_memory_bytes=0) as generator:  # one prompt for all gammas
        assert isinstance(generator.models.target, TableEngine) is (backend == ORT)
        for gamma in gammas:
            ran.clear()
            found = generator.generate(PROMPT, params, gamma=gamma, drafter=drafter)
            assert found.token_ids == wanted
            if gamma != "auto":
                assert max(ran, default=0) <= gamma
                assert bool(ran) is (whole and gamma > 0)
                assert not gamma or found.speculation.accepted > 0
    assert len(site.devices) == 1


def test_passes_of_several_kv_lengths_give_the_same_text(site: Site, ran: list[int]) -> None:
    target, draft = table_pair()
    folder = site.bundle(target, draft, kv_lengths=(40, 64, 100, POSITIONS))
    with specrt.load(folder) as generator:
        for gamma in (0, 3, 8):
            params = replace(PARAMS, max_tokens=POSITIONS)
            found = generator.generate(PROMPT, params, gamma=gamma)
            assert found.token_ids == plain(target, PROMPT, POSITIONS)
    assert {3, 8} <= set(ran)


@pytest.mark.parametrize(
    ("call", "number", "gamma"),
    [
        ("cudaGraphLaunch", 5, 0),
        ("cudaStreamSynchronize", 5, 4),
    ],
)
def test_a_lost_device_keeps_what_was_emitted(
    site: Site, call: str, number: int, gamma: int
) -> None:
    """The number says which of the calls from the first token on fails."""
    target, draft = table_pair()
    with specrt.load(site.bundle(target, draft)) as generator:
        stream = generator.stream(PROMPT, PARAMS, gamma=gamma)
        emitted = list(next(stream).token_ids)
        site.cuda.fail(call, number, LOST)
        with pytest.raises(EngineError, match="the device is lost") as told:
            emitted.extend(token for chunk in stream for token in chunk.token_ids)
        assert "\n" not in str(told.value)
        assert stream.completion.token_ids == emitted
        assert emitted == plain(target, PROMPT, len(emitted))
        with pytest.raises(EngineError, match="lost"):
            generator.generate(PROMPT, PARAMS, gamma=8)


def test_memory_that_is_missing_in_mid_stream_is_told(site: Site) -> None:
    target, draft = table_pair()
    with specrt.load(site.bundle(target, draft)) as generator:
        stream = generator.stream(PROMPT, PARAMS, gamma=4)
        next(stream)
        size, site.cuda.size = site.cuda.size, 0
        with pytest.raises(EngineError, match=r"scores: 0\.00 MiB are needed .*max_length"):
            stream.finish()
        assert site.cuda.calls["cudaGetLastError"], "the error is cleared"
        site.cuda.size = size  # there is enough of it again
        found = generator.generate(PROMPT, PARAMS, gamma=4)
        assert found.token_ids == plain(target, PROMPT, NEW)


def test_what_does_not_open_closes_what_did(site: Site) -> None:
    folder = site.bundle(*table_pair())
    site.cuda.fail("deserialize_cuda_engine", 2)
    with pytest.raises(EngineError, match="cannot open"):
        specrt.load(folder)
    site.hold_closed()
    with specrt.load(folder) as generator:
        generator.generate(PROMPT, PARAMS, gamma=4)


def test_scores_that_are_no_numbers_end_a_text_and_not_the_engine(site: Site) -> None:
    target, draft = table_pair()
    site.changes["target"] = lambda plan: setattr(plan, "broken_at", [len(PROMPT) + 20])
    with specrt.load(site.bundle(target, draft)) as generator:
        for gamma in range(9):
            stream = generator.stream(PROMPT, PARAMS, gamma=gamma)
            with pytest.raises(EngineError, match="NaN"):
                list(stream)
            found = stream.completion.token_ids
            assert 20 - gamma <= len(found) <= 20
            assert found == plain(target, PROMPT, len(found))


@pytest.mark.parametrize("captures", [True, False])
def test_a_user_reads_what_was_captured(
    site: Site, capsys: pytest.CaptureFixture[str], captures: bool
) -> None:
    """In the line of statistics, the JSON, the notices, and what `tune` leaves for `inspect`."""
    folder = site.bundle(*table_pair(), gammas=(0, 2))
    if not captures:
        site.cuda.fail("cudaStreamEndCapture", ALWAYS)
    ask = ["generate", str(folder), "--prompt", "the sea", "--max-tokens", "20", "--gamma", "2"]
    assert run([*ask, "--json"]) == 0
    graphs = json.loads(capsys.readouterr().out)["cuda_graphs"]
    assert (graphs["captured"] > 0, graphs["refusals"] == []) == (captures, captures)
    assert run(ask) == 0
    assert f"CUDA graphs: {graphs['captured']}" in capsys.readouterr().err
    prompts = folder.with_suffix(".jsonl")
    prompts.write_text('{"prompt": "a b c"}\n')
    assert run([*ask[:2], "--prompts", str(prompts), *ask[4:]]) == 0
    assert ("kernel by kernel" in capsys.readouterr().err) is not captures
    with specrt.load(folder) as generator:
        assert generator.notices == ()
        generator.generate(PROMPT, PARAMS, gamma=2)
        assert any("kernel by kernel" in notice for notice in generator.notices) is not captures
    assert run(["tune", str(folder), "--quick"]) == 0
    assert ("note: rounds of gamma 2" in capsys.readouterr().err) is not captures
    assert run(["inspect", str(folder)]) == 0
    assert ("rounds of gamma 2" in capsys.readouterr().out) is not captures


def test_the_commands_run_on_plans(
    site: Site, tmp_path: Path, ran: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """`verify` finds equal gammas, and `tune` keeps costs that are used."""
    folder, prompts = site.bundle(*table_pair(0.9), gammas=(0, 1, 3)), tmp_path / "prompts.jsonl"
    texts = ("the thing in the sea", "a b c d")
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    verify = ["verify", str(folder), "--prompts", str(prompts), "--max-tokens", "40", "--json"]
    assert run([*verify, "--gammas", "1,3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["divergences"], found["drafted"] > 50) == ([], True)
    assert set(ran) == {1, 3}
    assert run(["tune", str(folder), "--quick"]) == 0
    kept, ignored = read_tuning(Bundle.open(folder), len(os.sched_getaffinity(0)))
    assert kept is not None, ignored
    assert kept.cuda_graphs is not None
    assert kept.cuda_graphs.captured > 3
    capsys.readouterr()
    assert run(["inspect", str(folder)]) == 0
    assert f"CUDA graphs: {kept.cuda_graphs.captured}" in capsys.readouterr().out
    with specrt.load(folder) as generator:
        assert generator.notices == ()
        assert generator.models.costs == kept.costs
