"""What `load` refuses, and what `LLM` adds to a generator: vLLM's names, forms and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
from specrt.errors import CapacityError, RequestError
from specrt.generator import Generator
from specrt.loading import LLM
from specrt.params import SamplingParams
from specrt.text import Tokenizer
from support.rows import packed
from support.toy import TableEngine, generator, near


@pytest.fixture
def opened(tokenizer: Tokenizer) -> Generator:
    target = TableEngine(4, vocab=tokenizer.size)
    engines: Any = packed(target, 3), packed(near(target, 5, 0.7), 3)
    return generator(*engines, tokenizer)


@pytest.fixture
def llm(opened: Generator, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr("specrt.loading.load", lambda *_, **__: opened)
    return LLM(Path("bundle"), num_speculative_tokens=3)


def test_prompts_share_rows_and_each_has_its_completions(llm: LLM, opened: Generator) -> None:
    prompts: list[Any] = ["one", "another", [1, 2, 3], "the last"]
    params = [
        SamplingParams(max_tokens=9 + i, temperature=0.8, seed=i, n=1 + i % 3) for i in range(4)
    ]
    outputs = llm.generate(prompts, params)
    found = opened.generate_many(prompts, params, gamma=3)
    assert [[(one.index, one.token_ids) for one in output.outputs] for output in outputs] == [
        [(c.index, c.token_ids) for c in many] for many in found
    ]
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3"]
    assert [output.prompt for output in outputs] == ["one", "another", None, "the last"]
    assert all(output.completion.speculation.gamma == 3 for output in outputs)
    assert outputs[0].outputs[0].cumulative_logprob is None
    assert llm.generate([]) == []


def test_a_prompt_has_the_forms_that_vllm_takes(llm: LLM, opened: Generator) -> None:
    params = SamplingParams(max_tokens=8)
    ids = opened.tokenizer.encode("hello")
    expected = opened.generate("hello", params).token_ids
    forms: tuple[Any, ...] = (
        "hello", ["hello"], [ids], ids, np.array(ids), {"prompt": "hello"}, [{"prompt": "hello"}],
        {"prompt_token_ids": ids},
    )  # fmt: skip
    for form in forms:
        (output,) = llm.generate(form, params)
        assert (output.prompt_token_ids, output.outputs[0].token_ids) == (ids, expected)


def test_log_probabilities_are_those_of_the_completions(llm: LLM) -> None:
    asked = {"max_tokens": 7, "n": 2, "temperature": 1.0, "seed": 3}
    (output,) = llm.generate("hello", SamplingParams(**asked, logprobs=2, prompt_logprobs=1))
    assert len(output.prompt_logprobs or []) == len(output.prompt_token_ids)
    first, second = output.outputs
    assert first.token_ids != second.token_ids
    for one in (first, second):
        assert one.logprobs is not None
        total = sum(e[t].logprob for t, e in zip(one.token_ids, one.logprobs, strict=True))
        assert one.cumulative_logprob == pytest.approx(total)
        assert total < 0


FEW = SamplingParams(max_tokens=3)


def test_all_of_them_are_checked_before_any_work(llm: LLM, opened: Generator) -> None:
    both = {"prompt": "a", "prompt_token_ids": [1]}
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (["a", "b"], [FEW, SamplingParams(n=4)], RequestError, "n is 4"),
        (["a", "b"], [FEW], RequestError, "2 prompts and 1 sampling params"),
        (["a", [1] * 300], FEW, CapacityError, "300 tokens"),
        (["a", [10**6]], FEW, RequestError, "not in the vocabulary"),
        (None, FEW, RequestError, "prompts is None; expected text, token ids"),
        ([None], FEW, RequestError, "a prompt is None; expected text or token ids"),
        ({"text": "a"}, FEW, RequestError, "has the keys 'text'; expected 'prompt'"),
        (both, FEW, RequestError, "a prompt has the keys"),
    ]
    for prompts, params, error, told in wrong:
        with pytest.raises(error, match=told):
            llm.generate(prompts, params)
    target: Any = opened.models.target
    assert target.passes == []


def test_threads_out_of_range_are_refused(codelet: Path) -> None:
    for threads in (0, 1.5, 10**6):
        with pytest.raises(RequestError, match=r"threads is .* expected a whole number from 1 to"):
            specrt.load(codelet, threads=threads)  # type: ignore[arg-type]
