"""A bundle of plans from `specrt.load` to text: all but NVIDIA's libraries is the runtime's own."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import specrt
from specrt.cli import run
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.errors import EngineError
from specrt.params import Gamma, SamplingParams
from support.gpu_double import ALWAYS, POSITIONS, Site, table_pair
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
