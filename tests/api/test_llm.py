"""vLLM's names over a bundle of several rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import specrt.loading
from specrt.errors import CapacityError, RequestError
from specrt.generator import Generator
from specrt.loading import LLM, Prompt, RequestOutput
from specrt.params import SamplingParams
from specrt.speculation.pool import Models
from specrt.text import Tokenizer
from support.rows import PackedTable, packed
from support.toy import TableEngine, near


@pytest.fixture
def generator(tokenizer: Tokenizer) -> Generator:
    target = TableEngine(4, vocab=tokenizer.size)
    draft = near(target, 5, 0.7)
    models = Models(packed(target, 3), packed(draft, 3), tuple(range(9)), 4)
    return Generator(models, tokenizer)


@pytest.fixture
def llm(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr(specrt.loading, "load", lambda *_, **__: generator)
    return LLM(Path("bundle"), num_speculative_tokens=3)


def ids(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def test_prompts_share_rows_and_each_has_its_completions(llm: LLM, generator: Generator) -> None:
    prompts: list[Prompt] = ["one", "another", [1, 2, 3], "the last"]
    params = [
        SamplingParams(max_tokens=9 + i, temperature=0.8, seed=i, n=1 + i % 3) for i in range(4)
    ]
    outputs = llm.generate(prompts, params)
    target = generator.models.target
    assert isinstance(target, PackedTable)
    assert max(map(len, target.passes)) == 3
    found = generator.generate_many(prompts, params, gamma=3)
    assert ids(outputs) == [[c.token_ids for c in many] for many in found]
    assert [[one.index for one in output.outputs] for output in outputs] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0],
    ]
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3"]
    assert [output.prompt for output in outputs] == ["one", "another", None, "the last"]
    for output in outputs:
        assert [c.text for c in output.completions] == [one.text for one in output.outputs]
        assert output.completion is output.completions[0]
        assert output.completion.speculation.gamma == 3
        assert output.prompt_logprobs is None
        assert output.outputs[0].logprobs is None
        assert output.outputs[0].cumulative_logprob is None


def test_log_probabilities_are_those_of_the_completions(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=7, n=2, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1
    )
    (output,) = llm.generate("hello", params)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    first, second = output.outputs
    assert first.token_ids != second.token_ids
    for one in (first, second):
        assert one.logprobs is not None
        pairs = list(zip(one.token_ids, one.logprobs, strict=True))
        assert all(len(entry) in (2, 3) for entry in one.logprobs)
        total = sum(entry[token].logprob for token, entry in pairs)
        assert one.cumulative_logprob == pytest.approx(total)
        assert total < 0


def test_one_that_fails_harms_no_other(llm: LLM) -> None:
    def fails(tokens: list[int], scores: Any) -> Any:
        return scores[:3] if len(tokens) > 4 else scores

    params = [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, logits_processors=(fails,)),
        SamplingParams(max_tokens=9, logprobs=0),
    ]
    prompts = ["ab", "ab", "cd"]
    good, bad, other = (output.outputs[0] for output in llm.generate(prompts, params))
    assert bad.finish_reason == "error"
    assert bad.error
    assert (good.error, other.error) == (None, None)
    assert good.token_ids == llm.generate("ab", params[0])[0].outputs[0].token_ids
    assert other.token_ids == llm.generate("cd", params[2])[0].outputs[0].token_ids


def test_all_of_them_are_checked_before_any_work(llm: LLM, generator: Generator) -> None:
    few, many = SamplingParams(max_tokens=3), SamplingParams(n=4)
    for prompts, params, error, said in (
        (["a", "b"], [few, many], RequestError, "n is 4"),
        (["a", "b"], [few], RequestError, "2 prompts and 1 sampling params"),
        (["a", [1] * 300], few, CapacityError, "300 tokens"),
        (["a", [10**6]], few, RequestError, "not in the vocabulary"),
    ):
        with pytest.raises(error, match=said):
            llm.generate(prompts, params)  # type: ignore[arg-type]
    target = generator.models.target
    assert isinstance(target, PackedTable)
    assert target.passes == []
    assert llm.generate([]) == []
