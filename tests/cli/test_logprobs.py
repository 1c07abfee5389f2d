"""`specrt generate --logprobs`: in the JSON object, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.ran import Run

PROMPT = "def fibonacci(n):\n"


def test_json_tells_them(cli: Run, codelet: Path) -> None:
    asked = ("--prompt", PROMPT, "--max-tokens", 6, "--gamma", 2, "--json")
    ran = cli("generate", codelet, *asked, "--logprobs", 2, "--prompt-logprobs", 0)
    assert (ran.status, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert len(found["logprobs"]) == 6
    for token, entry in zip(found["token_ids"], found["logprobs"], strict=True):
        assert len(entry) in (2, 3)
        told = entry[str(token)]
        assert told.keys() == {"logprob", "rank", "decoded_token"}
        assert told["rank"] == 1  # greedy
        assert told["logprob"] <= 0
    assert "".join(e[str(t)]["decoded_token"] for t, e in zip(
        found["token_ids"], found["logprobs"], strict=True
    )) == found["text"]  # fmt: skip
    assert len(found["prompt_logprobs"]) == found["prompt_tokens"]
    assert found["prompt_logprobs"][0] is None
    assert all(len(entry) == 1 for entry in found["prompt_logprobs"][1:])


@pytest.mark.parametrize("option", ["--logprobs", "--prompt-logprobs"])
def test_they_are_not_looked_for_where_nothing_shows_them(
    cli: Run, codelet: Path, option: str
) -> None:
    ran = cli("generate", codelet, "--prompt", PROMPT, option, 2)
    assert ran.status != 0
    assert ran.out == ""
    assert f"{option} needs --json" in ran.err


@pytest.mark.parametrize("value", [-1, 21])
def test_numbers_out_of_range_are_refused(cli: Run, codelet: Path, value: int) -> None:
    ran = cli("generate", codelet, "--prompt", PROMPT, "--json", f"--logprobs={value}")
    assert ran.status != 0
    assert f"logprobs is {value}; expected a whole number from 0 to 20, or None" in ran.err
