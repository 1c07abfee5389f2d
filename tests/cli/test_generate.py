"""`specrt generate`: text on stdout, one line of statistics on stderr, JSON on request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli.ran import Run
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.text import ChatTemplate, Tokenizer
from support.rows import packed
from support.toy import TableEngine, near
from support.toy import generator as generator_of

PROMPT = "def fibonacci(n):\n"
STATISTICS = re.compile(
    r"\[12 tokens, \d+ tokens/s, TTFT \d+\.\d ms \| model, gamma 2: \d+ rounds, "
    r"\d\.\d\d tokens per round, acceptance rate [01]\.\d\d \| length\]\n"
)


def test_text_goes_to_stdout_and_one_line_to_stderr(
    cli: Run, codelet: Path, generator: Generator
) -> None:
    ran = cli("generate", codelet, "--prompt", PROMPT, "--max-tokens", 12, "--gamma", 2)
    expected = generator.generate(PROMPT, SamplingParams(max_tokens=12))
    assert (ran.status, ran.out) == (0, expected.text + "\n")
    assert STATISTICS.fullmatch(ran.err)


@pytest.mark.usefixtures("opened")
def test_json_has_the_promised_keys_and_consistent_numbers(cli: Run, codelet: Path) -> None:
    asked = ("--prompt", PROMPT, "--max-tokens", 20, "--seed", 5, "--gamma", 2, "--json")
    ran = cli("generate", codelet, *asked, "--logprobs", 2, "--prompt-logprobs", 0)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.count("\n") == 1
    found = json.loads(ran.out)
    counts = found["speculation"]
    assert counts["sources"] == {
        "model": {"drafted": counts["drafted"], "accepted": counts["accepted"]}
    }
    assert found["seed"] == 5
    assert len(found["token_ids"]) == 20
    assert counts["gamma"] == 2
    assert counts["emitted"] == 19  # all but the prefill's
    assert counts["accepted"] <= counts["evaluated"] <= counts["drafted"] <= 3 * counts["rounds"]
    assert counts["emitted"] == counts["accepted"] + counts["rounds"]
    assert counts["acceptance_rate"] == round(counts["accepted"] / counts["evaluated"], 4)
    assert counts["draft_yield"] == round(counts["accepted"] / counts["drafted"], 4)
    assert counts["tokens_per_round"] == round(counts["emitted"] / counts["rounds"], 4)
    assert min(found["ttft_ms"], found["itl_ms"], found["tokens_per_second"]) > 0
    entries = [e[str(t)] for t, e in zip(found["token_ids"], found["logprobs"], strict=True)]
    assert all(e.keys() == {"logprob", "rank", "decoded_token"} for e in entries)
    assert "".join(e["decoded_token"] for e in entries) == found["text"]
    assert len(found["prompt_logprobs"]) == found["prompt_tokens"]
    assert all(len(entry) == 1 for entry in found["prompt_logprobs"][1:])


def ids_of(cli: Run, codelet: Path, *args: object, stdin: bytes = b"") -> list[int]:
    ran = cli("generate", codelet, "--max-tokens", 10, "--json", *args, stdin=stdin)
    assert ran.status == 0, ran.err
    ids: list[int] = json.loads(ran.out)["token_ids"]
    return ids


@pytest.mark.usefixtures("opened")
def test_every_source_of_a_prompt_gives_the_same_text(
    cli: Run, codelet: Path, generator: Generator, tmp_path: Path
) -> None:
    path = tmp_path / "prompt.py"
    path.write_text(PROMPT, encoding="utf-8")
    numbers = ",".join(map(str, generator.tokenizer.encode(PROMPT)))
    expected = ids_of(cli, codelet, "--prompt", PROMPT)
    assert ids_of(cli, codelet, "--prompt-file", path) == expected
    assert ids_of(cli, codelet, "--prompt-ids", numbers) == expected
    assert ids_of(cli, codelet, stdin=PROMPT.encode()) == expected
    for given in (("--prompt", ""), ()):  # an empty prompt starts from BOS
        assert ids_of(cli, codelet, *given) == ids_of(cli, codelet, "--prompt-ids", "0")


@pytest.mark.usefixtures("opened")
def test_a_stop_string_or_token_ends_the_text(cli: Run, codelet: Path) -> None:
    asked = ("generate", codelet, "--prompt", PROMPT, "--json")
    whole = json.loads(cli(*asked).out)
    text, ids = whole["text"], whole["token_ids"]
    found = json.loads(cli(*asked, "--stop", text[30:34], "--stop", "\0").out)
    assert found["text"] == text[: text.index(text[30:34])]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", text[30:34])
    found = json.loads(cli(*asked, "--stop-token-id", ids[6]).out)
    assert found["token_ids"] == ids[: ids.index(ids[6]) + 1]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", ids[6])


def test_the_models_end_stops_unless_ignored(
    cli: Run, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TableEngine(4, vocab=tokenizer.size)
    whole = generator_of(target, None, tokenizer).generate("a", SamplingParams(max_tokens=9))
    ids = whole.token_ids
    monkeypatch.setattr(
        "specrt.cli.generate.load",
        lambda *_, **__: generator_of(target, None, tokenizer, eos=[ids[4]]),
    )
    asked = ("generate", tmp_path, "--prompt", "a", "--max-tokens", 9, "--json")
    ended = json.loads(cli(*asked).out)
    assert ended["token_ids"] == ids[: ids.index(ids[4]) + 1]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", None)
    assert json.loads(cli(*asked, "--ignore-eos").out)["token_ids"] == ids


def test_a_seed_that_was_drawn_is_told(cli: Run, codelet: Path) -> None:
    counted = ("--threads", 1, "--num-speculative-tokens", 5)
    warm = (
        "generate",
        codelet,
        *counted,
        "--prompt",
        PROMPT,
        "--temperature",
        1.2,
        "--max-tokens",
        8,
    )
    drawn = json.loads(cli(*warm, "--json").out)
    assert drawn["speculation"]["gamma"] == 5
    again = json.loads(cli(*warm, "--json", "--seed", drawn["seed"]).out)
    assert again["token_ids"] == drawn["token_ids"]


OPTIONS = [
    ("--repetition-penalty 1.3 --presence-penalty 0.5 --frequency-penalty 0.25",
     {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}),
    ("--no-repeat-ngram 3 --bad-word name", {"no_repeat_ngram_size": 3, "bad_words": ["name"]}),
    ("--logit-bias 50=-2.5 --logit-bias 300=4", {"logit_bias": {50: -2.5, 300: 4.0}}),
    ("--typical-p 0.8 --temperature 0.9 --seed 3",
     {"typical_p": 0.8, "temperature": 0.9, "seed": 3}),
]  # fmt: skip


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(("asked", "params"), OPTIONS, ids=[asked for asked, _ in OPTIONS])
def test_options_are_those_of_the_library_and_gamma_changes_nothing(
    cli: Run, codelet: Path, generator: Generator, asked: str, params: dict[str, Any]
) -> None:
    wanted = generator.generate(PROMPT, SamplingParams(max_tokens=32, **params), gamma=0)
    plain = generator.generate(PROMPT, SamplingParams(max_tokens=32), gamma=0)
    assert wanted.token_ids != plain.token_ids, "the option does something"
    said = ["--prompt", PROMPT, "--max-tokens", 32, "--gamma", "auto", "--json", *asked.split()]
    found = json.loads(cli("generate", codelet, *said).out)
    assert found["token_ids"] == wanted.token_ids


SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
LARK, GBNF = 'start: "[" /[0-9]/+ "]"', 'root ::= "[" [0-9]+ "]"'


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(
    ("asked", "option", "pattern"),
    [
        (["--json-schema", f" {SCHEMA}"], {"json_schema": SCHEMA}, r"\{.*\}"),
        (["--json-schema", "@" + SCHEMA], {"json_schema": SCHEMA}, r"\{.*\}"),
        (["--json-schema", "true"], {"json_schema": True}, None),
        (["--regex", "[0-9]{3}-[0-9]{4}"], {"regex": "[0-9]{3}-[0-9]{4}"}, "[0-9]{3}-[0-9]{4}"),
        (["--choice", "yes", "--choice", "no, é"], {"choice": ["yes", "no, é"]}, "yes|no, é"),
        (["--choice", "one"], {"choice": ["one"]}, "one"),
        (["--grammar", "@" + LARK], {"grammar": LARK}, r"\[[0-9]+\]"),
        (["--grammar", "@" + GBNF], {"grammar": GBNF}, r"\[[0-9]+\]"),
    ],
    ids=str,
)
def test_constraints_are_those_of_the_library(
    cli: Run, codelet: Path, generator: Generator, tmp_path: Path, asked: list[str],
    option: dict[str, Any], pattern: str | None,
) -> None:  # fmt: skip
    pytest.importorskip("llguidance", reason="needs the structured extra")
    if asked[1].startswith("@"):  # in a file
        path = tmp_path / "constraint"
        path.write_text(asked[1][1:], encoding="utf-8")
        asked = [asked[0], str(path)]
    wanted = generator.generate(PROMPT, SamplingParams(max_tokens=24, **option), gamma=0)
    ran = cli("generate", codelet, "--prompt", PROMPT, "--max-tokens", 24, "--json", *asked)
    done = json.loads(ran.out)
    assert done["token_ids"] == wanted.token_ids
    if pattern and done["finish_reason"] == "stop":
        assert re.fullmatch(pattern, done["text"])


# --n and --prompts: several completions, those that each would be alone

TEXTS = ["abc", "the thing", "ż", "x" * 40, "in"]


@pytest.fixture
def toy(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Generator:
    """What the command opens: two rows of toy engines."""
    target = TableEngine(4, vocab=tokenizer.size)
    engines: Any = packed(target, 2), packed(near(target, 5, 0.7), 2)
    made = generator_of(*engines, tokenizer)
    monkeypatch.setattr(made, "close", lambda: None)
    monkeypatch.setattr("specrt.cli.generate.load", lambda *_, **__: made)
    return made


def written(folder: Path, texts: list[str]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts), encoding="utf-8")
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
    assert [*map(steady, told["completions"])] == [steady(c.to_json()) for c in (first, second)]


@pytest.mark.parametrize("chat", [False, True])
def test_a_file_gives_a_line_for_each_prompt_in_order(
    cli: Run, toy: Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    template = ChatTemplate("<{{ messages[0].content }}>", {})
    monkeypatch.setattr("specrt.text.read_template", lambda _: template)
    asked = ("--prompts", written(tmp_path, TEXTS), "--max-tokens", 9, "--seed", 3)
    ran = cli("generate", tmp_path, *asked, *(["--chat"] if chat else []))
    assert (ran.status, ran.err) == (0, "")
    told = [json.loads(line) for line in ran.out.splitlines()]
    assert [one["prompt"] for one in told] == TEXTS
    params = SamplingParams(max_tokens=9, seed=3)
    alone = [toy.generate(f"<{t}>" if chat else t, params).to_json() for t in TEXTS]
    assert [*map(steady, told)] == [*map(steady, alone)]
    ran = cli("generate", tmp_path, *asked, "--n", 2, "--temperature", 1.0)
    told = [json.loads(line) for line in ran.out.splitlines()]
    assert all(list(one) == ["prompt", "completions"] for one in told)
    assert all(len({c["text"] for c in one["completions"]}) == 2 for one in told)


def test_a_completion_that_fails_stops_no_other(cli: Run, toy: Generator, tmp_path: Path) -> None:
    few = " ".join(f"--allowed-token-id {byte}" for byte in b"abc")
    options = (*few.split(), "--no-repeat-ngram", 1, "--max-tokens", 2)
    texts = ["abc", "y" * 300, "b", "in"]
    path = written(tmp_path, texts)
    ran = cli("generate", tmp_path, "--prompts", path, *options)
    told = [json.loads(line) for line in ran.out.splitlines()]
    assert [one["prompt"] for one in told] == texts
    assert [one["finish_reason"] for one in told] == ["error", "error", "length", "length"]
    assert "no token is left" in told[0]["error"]
    assert "context of this bundle is 256" in told[1]["error"]
    assert ["error" in one for one in told] == [True, True, False, False]
    assert (ran.status, ran.err.count("\n")) == (1, 1)
    assert ran.err.startswith(f"specrt: {path}:2: the prompt has 300 tokens")
    ran = cli("generate", tmp_path, "--prompt", "abc", "--n", 2, *options)
    assert (ran.status, ran.out) == (1, "[1]\n\n[2]\n\n")
    assert ran.err.count("specrt: completion") == 2
