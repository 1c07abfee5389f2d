"""The verbs on a bundle whose prompts are sources: what they answer, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from cli.conftest import Run
from specrt.bench.measure import configurations, measure
from specrt.cli.bench import BenchRequest, bench_rows, encode
from specrt.engine.protocol import ConditionedEngine
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import AUTO, SamplingParams
from specrt.prompts import prompt_reader
from specrt.text.prompt_file import PromptRecord
from specrt.text.tokenizer import Tokenizer
from specrt.tuning.pass_timer import measure_costs
from specrt.tuning.sweep import PLAIN, Candidate, SweepPlan, check_prompts, sweep
from support.conditioned import conditioned_models, greedy_text, reader

VERBS = ("generate", "verify", "chat", "collect")
TEXTS = ["one two", "ab", "the sea and the sea and the sea", "zz zz zz zz"]


@pytest.fixture
def sources(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Generator:
    """A toy that reads sources, which verbs find in place of any bundle."""
    made = reader(tokenizer, 2)
    monkeypatch.setattr(made, "close", lambda: None)
    for verb in VERBS:
        monkeypatch.setattr(f"specrt.cli.{verb}.load", lambda *_, **__: made)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path


def test_what_makes_no_sense_of_a_source_is_one_line(
    cli: Run, sources: Generator, codelet: Path, file: Path, tmp_path: Path
) -> None:
    is_one = "this bundle is an encoder-decoder"
    prompt = ("--prompt", "ab")
    said = cli("generate", codelet, *prompt, "--chat").refusal
    assert is_one in said
    assert "leave --chat out" in said
    said = cli("generate", codelet, *prompt, "--num-beams", 4).refusal
    assert "beams are not speculated on" in said
    said = cli("generate", codelet, *prompt, "--prompt-logprobs", 1, "--json").refusal
    assert "--prompt-logprobs is 1" in said
    assert is_one in cli("chat", codelet).refusal
    assert is_one in cli("collect", codelet, "--prompts", file, "--out", tmp_path / "t").refusal
    assert not (tmp_path / "t").exists()


def test_a_bundle_of_speech_takes_no_text(
    cli: Run, sources: Generator, codelet: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speech = replace(sources.models, features=(3, 8))
    monkeypatch.setattr(sources, "reader", prompt_reader(speech, sources.tokenizer))
    assert "use `specrt transcribe" in cli("generate", codelet, "--prompt", "ab").refusal
    assert "use `specrt transcribe" in cli("verify", codelet, "--prompts", file).refusal
    monkeypatch.setattr("specrt.cli.bench.load", lambda *_, **__: sources)
    assert "use `specrt transcribe" in cli("bench", codelet, "--prompts", file).refusal


RECORDS = [PromptRecord(text, place=f"line {n}") for n, text in enumerate(TEXTS, 1)]


def test_bench_times_texts_of_sources(tokenizer: Tokenizer) -> None:
    made = reader(tokenizer, 2)
    params = SamplingParams(max_tokens=24)
    ids = encode(made, RECORDS, params)
    compared = configurations([0, 2, AUTO], ["model", "ngram"])
    samples = measure(made, ids, compared, params, repeats=1)
    for each in samples.values():
        for sample, text in zip(each, TEXTS, strict=True):
            assert list(sample.tokens) == greedy_text(made, tokenizer.encode(text), 24)
    assert any(sample.counts.drafted for sample in samples[compared[1]])
    request = BenchRequest(RECORDS, [0, 2], [], params, 1)
    rows = bench_rows(made, request, [1, 2], lambda share: None)
    assert all(row[-1] == "4 of 4" for row in rows.rows)
    with pytest.raises(RequestError, match="line 1: the prompt is ''"):
        encode(made, [PromptRecord("", place="line 1")], params)
    with pytest.raises(RequestError, match=r"prompt of 1 tokens and 200 more"):
        encode(made, RECORDS, SamplingParams(max_tokens=200))


def test_costs_are_measured_and_settings_compared_on_sources(tokenizer: Tokenizer) -> None:
    models = conditioned_models(tokenizer.size, 2)
    costs = measure_costs(models, tokenizer, clock=count(step=10**6).__next__)
    assert costs.plain_ns > 0
    for engine in (models.target, models.draft):
        assert isinstance(engine, ConditionedEngine)
        assert engine.conditioned[0][0] == 0  # type: ignore[attr-defined]
    prompts = [tokenizer.encode(text) for text in TEXTS]
    check_prompts([models.decoder_start] * len(prompts), 65)  # no source takes room of the text's
    with pytest.raises(RequestError, match="room for 252 tokens"):
        check_prompts([models.decoder_start] * len(prompts), 63)
    candidates = (PLAIN, Candidate("model", 2), Candidate("ngram", AUTO))
    found = sweep(models, tokenizer, prompts, SweepPlan(candidates, 4, 20, 1))
    assert all(setting.emitted > 0 for setting in found.settings())
