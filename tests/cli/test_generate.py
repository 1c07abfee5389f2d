"""`specrt generate`: text on stdout, one line of statistics on stderr, JSON on request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.ran import Run
from specrt.cli.generate import read_prompt
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams

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


def test_an_empty_prompt_starts_from_bos(cli: Run, codelet: Path) -> None:
    assert ids_of(cli, codelet, "--prompt", "") == ids_of(cli, codelet, "--prompt-ids", "0")
    assert ids_of(cli, codelet, stdin=b"") == ids_of(cli, codelet, "--prompt-ids", "0")


def test_a_stop_string_ends_the_text_before_it(cli: Run, codelet: Path) -> None:
    whole = json.loads(cli("generate", codelet, "--prompt", PROMPT, "--json").out)["text"]
    stop = whole[30:34]
    ran = cli("generate", codelet, "--prompt", PROMPT, "--json", "--stop", stop, "--stop", "\0")
    found = json.loads(ran.out)
    assert found["text"] == whole[: whole.index(stop)]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)


def test_a_stop_token_ends_the_text(cli: Run, codelet: Path) -> None:
    whole = ids_of(cli, codelet, "--prompt", PROMPT)
    ran = cli("generate", codelet, "--prompt", PROMPT, "--json", "--stop-token-id", whole[6])
    found = json.loads(ran.out)
    assert found["token_ids"] == whole[: whole.index(whole[6]) + 1]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", whole[6])


def test_the_models_end_stops_unless_ignored(
    cli: Run, codelet: Path, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ids_of(cli, codelet, "--prompt", PROMPT)
    opened = Generator(generator.models, generator.tokenizer, [whole[4]])
    monkeypatch.setattr(opened, "close", lambda: None)
    monkeypatch.setattr("specrt.cli.generate.load", lambda bundle, **_: opened)
    ran = cli("generate", codelet, "--prompt", PROMPT, "--json")
    assert json.loads(ran.out)["token_ids"] == whole[: whole.index(whole[4]) + 1]
    assert json.loads(ran.out)["finish_reason"] == "stop"
    assert json.loads(ran.out)["stop_reason"] is None
    assert ids_of(cli, codelet, "--prompt", PROMPT, "--ignore-eos") == whole


def test_a_seed_that_was_drawn_is_told(cli: Run, codelet: Path) -> None:
    warm = ("generate", codelet, "--prompt", PROMPT, "--temperature", 1.2, "--max-tokens", 8)
    drawn = json.loads(cli(*warm, "--json").out)
    again = json.loads(cli(*warm, "--json", "--seed", drawn["seed"]).out)
    assert again["token_ids"] == drawn["token_ids"]


def test_threads_and_the_long_name_of_gamma_are_taken(cli: Run, codelet: Path) -> None:
    options = ("--prompt", PROMPT, "--max-tokens", 10, "--json", "--threads", 1)
    ran = cli("generate", codelet, *options, "--num-speculative-tokens", 5)
    assert json.loads(ran.out)["speculation"]["gamma"] == 5


def test_chat_is_refused_where_there_is_no_template(cli: Run, codelet: Path) -> None:
    said = cli("generate", codelet, "--prompt", "hello", "--chat").refusal
    assert str(codelet) in said
    assert "no chat template" in said


def test_no_prompt_at_a_terminal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    with pytest.raises(RequestError, match="no prompt; give --prompt TEXT"):
        read_prompt(None, None, None)


def test_text_that_is_not_utf8_is_refused(cli: Run, codelet: Path, tmp_path: Path) -> None:
    path = tmp_path / "latin.py"
    path.write_bytes("# caf\xe9".encode("latin-1"))
    said = cli("generate", codelet, "--prompt-file", path).refusal
    assert f"{path} is not UTF-8: byte 0xe9 at offset 5" in said
    said = cli("generate", codelet, stdin=b"ab\xff").refusal
    assert "standard input is not UTF-8: byte 0xff at offset 2" in said


REFUSALS = [
    (["--prompt-ids", "1,x"], "--prompt-ids is '1,x'; expected numbers, as 1,2,3"),
    (["--prompt-ids", "5,8192"], "token id 8192 is not in the vocabulary of 0 to 8191"),
    (["--prompt-ids", ",".join(["7"] * 2049)], "the context of this bundle is 2048"),
    (["--prompt-file", "/nowhere"], "/nowhere cannot be read: No such file or directory"),
    (["--prompt", "a", "--prompt-ids", "1"], "one of --prompt, --prompt-file, --prompt-ids"),
    (["--prompt-ids", "1,2", "--chat"], "--chat needs a text prompt"),
    (["--gamma", 9], "0, 1, 2, 3, 4, 5, 6, 7, 8"),
    (["--gamma", "three"], "'three' is neither a whole number nor auto"),
    (["--max-tokens", 0], "max_tokens is 0; expected a whole number of 1 or more"),
    (["--temperature", "nan"], "temperature is nan"),
    (["--stop", ""], "stop holds an empty string"),
    (["--threads", 0], "0 is not in the range"),
    (["--verifier", "typical"], "'typical' is not one of 'match', 'rejection'"),
    (["--promt", "a"], "--prompt"),
    (["--logit-bias", "5=much"], "'5=much' is not a bias; expected a token id and a number"),
    (["--logit-bias", "99999=1"], "logit_bias holds 99999; expected ids of the vocabulary"),
    (["--min-tokens", 9, "--max-tokens", 8], "min_tokens is 9; expected up to max_tokens, 8"),
    (["--logprobs", 2], "--logprobs needs --json"),
    (["--json", "--logprobs", 21], "logprobs is 21; expected a whole number from 0 to 20"),
    (["--json-schema", "/nowhere.json"], "/nowhere.json cannot be read: No such file"),
    (["--json-schema", ""], "--json-schema is empty; expected a file, a schema, or true"),
    (["--regex", "a", "--choice", "b"], "regex and choice were given; expected one of them"),
]


@pytest.mark.parametrize(("options", "expected"), REFUSALS, ids=str)
def test_a_wrong_option_is_one_line(
    cli: Run, codelet: Path, options: list[object], expected: str
) -> None:
    prompt = [] if any(str(o).startswith("--prompt") for o in options) else ["--prompt", "a"]
    assert expected in cli("generate", codelet, *prompt, *options).refusal


@pytest.mark.parametrize(("word", "near"), [("genrate", "generate"), ("benhc", "bench")])
def test_an_unknown_command_names_the_nearest(cli: Run, word: str, near: str) -> None:
    assert f"unknown command {word!r}; did you mean {near!r}?" in cli(word).refusal


def test_help_lists_every_command(cli: Run) -> None:
    ran = cli("--help")
    assert ran.status == 0
    assert cli() == ran
    for name in ("generate", "build", "export", "inspect", "verify", "bench", "doctor"):
        assert f"\n  {name} " in ran.out


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


@pytest.mark.parametrize(("asked", "params"), OPTIONS.values(), ids=OPTIONS)
def test_options_are_those_of_the_library_and_gamma_changes_nothing(
    cli: Run, codelet: Path, generator: Generator, asked: list[Any], params: dict[str, Any]
) -> None:
    wanted = generator.generate(PROMPT, SamplingParams(max_tokens=48, **params), gamma=0)
    plain = generator.generate(PROMPT, SamplingParams(max_tokens=48), gamma=0)
    assert wanted.token_ids != plain.token_ids, "the option does something"
    for gamma in (0, 3, "auto"):
        said = ["--prompt", PROMPT, "--max-tokens", 48, "--gamma", gamma, "--json", *asked]
        found = json.loads(cli("generate", codelet, *said).out)
        assert found["token_ids"] == wanted.token_ids


ITEMS = '{"type": "integer", "minimum": 0, "maximum": 99}'
SCHEMA = (
    f'{{"properties": {{"n": {{"type": "array", "items": {ITEMS}, "maxItems": 4}}}}, '
    '"required": ["n"], "type": "object", "additionalProperties": false}'
)
LARK, GBNF = 'start: "[" /[0-9]/+ "]"', 'root ::= "[" [0-9]+ "]"'


@pytest.mark.parametrize("in_a_file", [False, True])
@pytest.mark.parametrize("gamma", [0, "auto"])
def test_a_schema_is_the_value_or_a_file(
    cli: Run, codelet: Path, tmp_path: Path, in_a_file: bool, gamma: object
) -> None:
    pytest.importorskip("llguidance", reason="needs the structured extra")
    path = tmp_path / "schema.json"
    path.write_text(SCHEMA, encoding="utf-8")
    given = str(path) if in_a_file else f" {SCHEMA}"
    said = ["--json-schema", given, "--prompt", PROMPT, "--gamma", gamma, "--json"]
    done = json.loads(cli("generate", codelet, *said, "--max-tokens", 200).out)
    assert done["finish_reason"] == "stop"
    numbers = json.loads(done["text"])["n"]
    assert len(numbers) <= 4
    assert all(isinstance(number, int) and 0 <= number <= 99 for number in numbers)


@pytest.mark.parametrize(
    ("asked", "option", "pattern"),
    [
        (["--json-schema", "true"], {"json_schema": True}, None),
        (["--regex", "[0-9]{3}-[0-9]{4}"], {"regex": "[0-9]{3}-[0-9]{4}"}, "[0-9]{3}-[0-9]{4}"),
        (["--choice", "yes", "--choice", "no, é"], {"choice": ["yes", "no, é"]}, "yes|no, é"),
        (["--choice", "one"], {"choice": ["one"]}, "one"),
        (["--grammar", LARK], {"grammar": LARK}, r"\[[0-9]+\]"),
        (["--grammar", GBNF], {"grammar": GBNF}, r"\[[0-9]+\]"),
    ],
    ids=str,
)
def test_constraints_are_those_of_the_library(
    cli: Run, codelet: Path, generator: Generator, tmp_path: Path, asked: list[str],
    option: dict[str, Any], pattern: str | None,
) -> None:  # fmt: skip
    pytest.importorskip("llguidance", reason="needs the structured extra")
    if asked[0] == "--grammar":
        path = tmp_path / "grammar"
        path.write_text(asked[1], encoding="utf-8")
        asked = ["--grammar", str(path)]
    wanted = generator.generate(PROMPT, SamplingParams(max_tokens=24, **option), gamma=0)
    ran = cli("generate", codelet, "--prompt", PROMPT, "--max-tokens", 24, "--json", *asked)
    done = json.loads(ran.out)
    assert done["token_ids"] == wanted.token_ids
    if pattern and done["finish_reason"] == "stop":
        assert re.fullmatch(pattern, done["text"])
