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
from specrt.speculation.pool import Models
from specrt.text import ChatTemplate, Tokenizer
from support.rows import packed
from support.toy import TableEngine, byte_level, near
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
    ran = cli("generate", codelet, *asked)
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
    assert found["ttft_ms"] > 0
    assert found["itl_ms"] > 0
    assert found["tokens_per_second"] > 0


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


@pytest.mark.usefixtures("opened")
def test_logprobs_are_in_the_json(cli: Run, codelet: Path) -> None:
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


OPTIONS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "penalties": (
        ["--repetition-penalty", 1.3, "--presence-penalty", 0.5, "--frequency-penalty", 0.25],
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    ),
    "ngram": (["--no-repeat-ngram", 3], {"no_repeat_ngram_size": 3}),
    "bias": (
        ["--logit-bias", "50=-2.5", "--logit-bias", "300=4"],
        {"logit_bias": {50: -2.5, 300: 4.0}},
    ),
    "words": (["--bad-word", "name"], {"bad_words": ["name"]}),
    "typical": (
        ["--typical-p", 0.8, "--temperature", 0.9, "--seed", 3],
        {"typical_p": 0.8, "temperature": 0.9, "seed": 3},
    ),
}


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(("asked", "params"), OPTIONS.values(), ids=OPTIONS)
def test_options_are_those_of_the_library_and_gamma_changes_nothing(
    cli: Run, codelet: Path, generator: Generator, asked: list[Any], params: dict[str, Any]
) -> None:
    wanted = generator.generate(PROMPT, SamplingParams(max_tokens=48, **params), gamma=0)
    plain = generator.generate(PROMPT, SamplingParams(max_tokens=48), gamma=0)
    assert wanted.token_ids != plain.token_ids, "the option does something"
    for gamma in (3, "auto"):
        said = ["--prompt", PROMPT, "--max-tokens", 48, "--gamma", gamma, "--json", *asked]
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


def two_rows(folder: Path) -> Generator:
    tokenizer = Tokenizer(byte_level(folder))
    target = TableEngine(4, vocab=tokenizer.size)
    draft = near(target, 5, 0.7)
    models = Models(packed(target, 2), packed(draft, 2), tuple(range(9)), 4)
    return Generator(models, tokenizer)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator:
    """What the command opens: two rows of toy engines."""
    monkeypatch.setattr("specrt.cli.generate.load", lambda *_, **__: two_rows(tmp_path))
    return two_rows(tmp_path)


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
