"""vLLM's names over a bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import specrt
from specrt.errors import RequestError
from specrt.generator import Generator

PARAMS = specrt.SamplingParams(max_tokens=8)


def test_it_completes_one_prompt_or_several(codelet: Path, generator: Generator) -> None:
    text = "def area(radius):\n"
    ids = generator.tokenizer.encode(text)
    expected = generator.generate(text, PARAMS, gamma=2)
    with specrt.LLM(model=codelet, num_speculative_tokens=2, threads=1) as llm:
        for prompts in (text, [text], [ids], ids, np.array(ids)):
            (output,) = llm.generate(prompts, PARAMS)  # type: ignore[arg-type]
            assert output.prompt_token_ids == ids
            assert output.outputs[0].token_ids == expected.token_ids
            assert output.outputs[0].text == expected.text
            assert output.completion.speculation.gamma == 2
        two = llm.generate([text, "import os\n"], [PARAMS, specrt.SamplingParams(max_tokens=3)])
        assert [len(o.outputs[0].token_ids) for o in two] == [8, 3]
        assert [o.prompt for o in two] == [text, "import os\n"]
        with pytest.raises(RequestError, match="2 prompts and 1 sampling params"):
            llm.generate([text, text], [PARAMS])
        with pytest.raises(RequestError, match="expected text, token ids"):
            llm.generate(None, PARAMS)  # type: ignore[arg-type]
        ids = two[0].prompt_token_ids
        for prompts in ({"prompt": text}, [{"prompt": text}], {"prompt_token_ids": ids}):
            (same,) = llm.generate(prompts, PARAMS)  # type: ignore[arg-type]
            assert same.outputs[0].token_ids == two[0].outputs[0].token_ids
        for wrong in ({"text": text}, {"prompt": text, "prompt_token_ids": ids}, [None]):
            with pytest.raises(RequestError, match="a prompt "):
                llm.generate(wrong, PARAMS)  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", 10**6])
def test_threads_out_of_range_are_refused(codelet: Path, threads: object) -> None:
    with pytest.raises(RequestError, match=r"threads is .* expected a whole number from 1 to"):
        specrt.load(codelet, threads=threads)  # type: ignore[arg-type]
