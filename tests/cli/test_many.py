"""`specrt generate --n` and `--prompts`: several completions, those that each would be alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.ran import Run
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.speculation.pool import Models
from specrt.text import ChatTemplate, Tokenizer
from support.rows import packed
from support.toy import TableEngine, byte_level, near

TEXTS = ["abc", "the thing", "ż", "x" * 40, "in"]


def opened(folder: Path, rows: int) -> Generator:
    tokenizer = Tokenizer(byte_level(folder))
    target = TableEngine(4, vocab=tokenizer.size)
    draft = near(target, 5, 0.7)
    models = Models(packed(target, rows), packed(draft, rows), tuple(range(9)), 4)
    return Generator(models, tokenizer)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator:
    """What the command opens: two rows of toy engines."""
    monkeypatch.setattr("specrt.cli.generate.load", lambda *_, **__: opened(tmp_path, 2))
    return opened(tmp_path, 2)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": text}) for text in TEXTS]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def steady(told: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a clock or a neighbour decides."""
    keys = ("text", "token_ids", "finish_reason", "stop_reason", "seed")
    return {key: told[key] for key in keys}


def test_completions_of_a_prompt_come_under_their_numbers(
    cli: Run, toy: Generator, tmp_path: Path
) -> None:
    asked = ("--prompt", "the", "--max-tokens", 9, "--temperature", 1.0, "--seed", 3, "--n", 2)
    ran = cli("generate", tmp_path, *asked)
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=3, n=2)
    ((first, second),) = toy.generate_many(["the"], params)
    assert first.text != second.text
    assert (ran.status, ran.out) == (0, f"[1]\n{first.text}\n[2]\n{second.text}\n")
    assert ran.err.count("[9 tokens, ") == ran.err.count("\n") == 2
    told = json.loads(cli("generate", tmp_path, *asked, "--json").out)
    assert list(told) == ["completions"]
    assert [steady(one) for one in told["completions"]] == [
        steady(one.to_json()) for one in (first, second)
    ]


def test_a_file_gives_a_line_for_each_prompt_in_order(
    cli: Run, toy: Generator, tmp_path: Path, prompts: Path
) -> None:
    asked = ("--prompts", prompts, "--max-tokens", 9, "--seed", 3)
    ran = cli("generate", tmp_path, *asked)
    assert (ran.status, ran.err) == (0, "")
    told = [json.loads(line) for line in ran.out.splitlines()]
    assert [one["prompt"] for one in told] == TEXTS
    params = SamplingParams(max_tokens=9, seed=3)
    alone = [toy.generate(text, params).to_json() for text in TEXTS]
    assert [steady(one) for one in told] == [steady(one) for one in alone]
    ran = cli("generate", tmp_path, *asked, "--n", 2, "--temperature", 1.0)
    told = [json.loads(line) for line in ran.out.splitlines()]
    assert [one["prompt"] for one in told] == TEXTS
    assert all(list(one) == ["prompt", "completions"] for one in told)
    assert all(len({c["text"] for c in one["completions"]}) == 2 for one in told)


def test_a_file_may_hold_messages(
    cli: Run, toy: Generator, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate("<{{ messages[0].content }}>", {})
    monkeypatch.setattr("specrt.text.read_template", lambda _: template)
    ran = cli("generate", tmp_path, "--prompts", prompts, "--max-tokens", 5, "--chat")
    told = [json.loads(line)["token_ids"] for line in ran.out.splitlines()]
    params = SamplingParams(max_tokens=5)
    assert told == [toy.generate(f"<{text}>", params).token_ids for text in TEXTS]


NOTHING_LEFT = (
    *(part for byte in b"abc" for part in ("--allowed-token-id", byte)),
    *("--no-repeat-ngram", 1, "--max-tokens", 2),
)


def test_a_completion_that_fails_stops_no_other(
    cli: Run, toy: Generator, tmp_path: Path, prompts: Path
) -> None:
    ran = cli("generate", tmp_path, "--prompts", prompts, *NOTHING_LEFT)
    told = [json.loads(line) for line in ran.out.splitlines()]
    assert (ran.status, ran.err) == (1, "")
    assert [one["finish_reason"] for one in told] == ["error", *["length"] * 4]
    assert "no token is left" in told[0]["error"]
    assert all("error" not in one for one in told[1:])
    ran = cli("generate", tmp_path, "--prompt", "abc", "--n", 2, *NOTHING_LEFT)
    assert (ran.status, ran.out) == (1, "[1]\n\n[2]\n\n")
    assert ran.err.count("specrt: completion") == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--prompt", "a", "--n", 3), "n is 3, and this bundle was built for 2 at once"),
        (("--prompt", "a", "--n", 0), "n is 0; expected a whole number of 1 or more"),
        (("--prompt", "a", "--prompts", "f"), "--prompt-ids and --prompts, not several"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl cannot be read"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    cli: Run, toy: Generator, tmp_path: Path, options: tuple[object, ...], told: str
) -> None:
    assert told in cli("generate", tmp_path, *options).refusal


def test_a_prompt_that_cannot_be_completed_stops_no_other(
    cli: Run, toy: Generator, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    texts = ["a", "x" * 300, "b"]
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts), "utf-8")
    ran = cli("generate", tmp_path, "--prompts", path, "--max-tokens", 5)
    first, second, third = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.status == 1
    assert ran.err.startswith(f"specrt: {path}:2: the prompt has 300 tokens")
    assert ran.err.count("\n") == 1
    assert (second["prompt"], second["finish_reason"]) == (texts[1], "error")
    assert "context of this bundle is 256" in second["error"]
    params = SamplingParams(max_tokens=5)
    for entry, text in ((first, "a"), (third, "b")):
        assert entry["token_ids"] == toy.generate(text, params).token_ids
    assert "gamma 99" in cli("generate", tmp_path, "--prompts", path, "--gamma", 99).refusal
