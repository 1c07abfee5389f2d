"""What `load` refuses, and what `LLM` adds to a generator: vLLM's names, forms and numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
from scheduler.support import rows
from specrt.completion import Chunk
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.llm import LLM
from specrt.params import SamplingParams
from specrt.text.tokenizer import Tokenizer
from support.rows import packed


@pytest.fixture
def opened(tokenizer: Tokenizer) -> Generator:
    return rows(packed, 3, tokenizer)


@pytest.fixture
def llm(opened: Generator, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr("specrt.llm.load", lambda *_, **__: opened)
    return LLM(Path("bundle"), num_speculative_tokens=3)


def test_a_prompt_has_the_forms_that_vllm_takes(llm: LLM, opened: Generator) -> None:
    params = SamplingParams(max_tokens=8)
    ids = opened.tokenizer.encode("hello")
    expected = opened.generate("hello", params).token_ids
    forms: tuple[Any, ...] = (
        "hello", ["hello"], [ids], np.array(ids), [np.array(ids)],
        [{"prompt": "hello"}], {"prompt_token_ids": ids},
    )  # fmt: skip
    for form in forms:
        (output,) = llm.generate(form, params)
        assert (output.prompt_token_ids, output.outputs[0].token_ids) == (ids, expected)


def test_what_is_printed_is_short_and_nothing_is_lost(llm: LLM) -> None:
    params = SamplingParams(max_tokens=90, ignore_eos=True, logprobs=20, prompt_logprobs=2)
    (output,) = llm.generate([[1, 2, 3] * 12], params)
    done = output.completion
    chunk = Chunk("a" * 1000, [1] * 9, logprobs=done.logprobs)
    wide = SamplingParams(choice=["abc" * 100] * 90, logit_bias=dict.fromkeys(range(900), 1.0))
    assert repr(SamplingParams(n=3, seed=4)) == "SamplingParams(n=3, seed=4)"
    for record in (
        output, output.outputs[0], done, done.speculation, done.timings, chunk, wide, params,
    ):  # fmt: skip
        told = repr(record)
        assert len(told) < 700
        assert told.startswith(f"{type(record).__name__}(")
        assert "\n" not in told
    told = repr(done)
    assert all(word in told for word in ("length", f"seed={done.seed}", "acceptance_rate="))
    assert (len(done.token_ids), len(done.speculation.log)) == (90, len(done.timings.arrivals) - 1)


def test_all_of_them_are_checked_before_any_work(llm: LLM, opened: Generator) -> None:
    few = SamplingParams(max_tokens=3)
    both = {"prompt": "a", "prompt_token_ids": [1]}
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (["a", "b"], [few, replace(few, verifier="x")], RequestError, "verifier is 'x'"),
        (["a", "b"], [few], RequestError, "2 prompts and 1 sampling params"),
        (both, few, RequestError, "a prompt has the keys .* expected 'prompt'"),
    ]
    for prompts, params, error, told in wrong:
        with pytest.raises(error, match=told):
            llm.generate(prompts, params)
    target: Any = opened.models.target
    assert target.passes == []
    outputs = llm.generate(["a", [1] * 300, "\udcff"], few)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "error"]
    assert "prompts[1]: the prompt has 300 tokens" in str(outputs[1].outputs[0].error)
    assert outputs[2].prompt_token_ids == []


def test_threads_out_of_range_are_refused(codelet: Path) -> None:
    for threads in (0, 1.5, 10**6):
        with pytest.raises(RequestError, match=r"threads is .* expected a whole number from 1 to"):
            specrt.load(codelet, threads=threads)  # type: ignore[arg-type]
