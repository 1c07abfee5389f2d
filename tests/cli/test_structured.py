"""The options of `specrt generate` that keep a text to a structure, over the real pair."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli.ran import Run
from specrt.generator import Generator
from specrt.params import SamplingParams

pytest.importorskip("llguidance", reason="needs the structured extra")

PROMPT = "numbers = "
ITEMS = '{"type": "integer", "minimum": 0, "maximum": 99}'
SCHEMA = f'{{"type": "array", "items": {ITEMS}, "maxItems": 4}}'
CLOSED = '"type": "object", "additionalProperties": false'
LARK, GBNF = 'start: "[" /[0-9]/+ "]"', 'root ::= "[" [0-9]+ "]"'


def written(folder: Path, text: str) -> str:
    path = folder / "given"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("in_a_file", [False, True])
@pytest.mark.parametrize("gamma", [0, "auto"])
def test_a_schema_is_given_or_a_file(
    cli: Run, codelet: Path, tmp_path: Path, in_a_file: bool, gamma: object
) -> None:
    schema = f'{{"properties": {{"n": {SCHEMA}}}, "required": ["n"], {CLOSED}}}'
    given = written(tmp_path, schema) if in_a_file else f" {schema}"
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
def test_options_are_those_of_the_library(
    cli: Run, codelet: Path, generator: Generator, tmp_path: Path, asked: list[str],
    option: dict[str, Any], pattern: str | None,
) -> None:  # fmt: skip
    if asked[0] == "--grammar":
        asked = ["--grammar", written(tmp_path, asked[1])]
    wanted = generator.generate(PROMPT, SamplingParams(max_tokens=24, **option), gamma=0)
    ran = cli("generate", codelet, "--prompt", PROMPT, "--max-tokens", 24, "--json", *asked)
    done = json.loads(ran.out)
    assert done["token_ids"] == wanted.token_ids
    if pattern and done["finish_reason"] == "stop":
        assert re.fullmatch(pattern, done["text"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--json-schema", "/nowhere.json"], "/nowhere.json cannot be read: No such file"),
        (["--json-schema", ""], "--json-schema is empty"),
        (["--json-schema", "{"], "json_schema is no JSON: "),
        (["--json-schema", "false"], "json_schema admits nothing"),
        (["--json-schema", '{"not": {}}'], "json_schema has 'not' at #, which cannot be enforced"),
        (["--json-schema", '{"type": "strin"}'], "cannot be enforced: Invalid type: strin"),
        (["--regex", "(a"], "regex cannot be enforced: unclosed group"),
        (["--regex", ""], "regex is ''; expected a text"),
        (["--choice", ""], "choice holds an empty string"),
        (["--grammar", "/nowhere.lark"], "/nowhere.lark cannot be read"),
        (["--regex", "a", "--choice", "b"], "regex and choice were given; expected one of them"),
        (["--regex", "a", "--ignore-eos"], "regex and ignore_eos were given"),
        (["--regex", "ab", "--min-tokens", 20], "no token is left that the request allows"),
    ],
    ids=str,
)
def test_bad_values_are_one_line(cli: Run, codelet: Path, asked: list[Any], said: str) -> None:
    ran = cli("generate", codelet, "--prompt", PROMPT, *asked)
    assert (ran.status, said in ran.err, ran.err.count("\n")) == (2, True, 1), ran


def test_a_file_that_is_no_text_is_refused(cli: Run, codelet: Path, tmp_path: Path) -> None:
    path = tmp_path / "given"
    path.write_bytes(b"start: \xff")
    for option in ("--grammar", "--json-schema"):
        assert "is not UTF-8" in cli("generate", codelet, "--prompt", PROMPT, option, path).refusal
