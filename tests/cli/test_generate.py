"""`specrt generate`: text on stdout, one line of statistics on stderr, JSON on request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from scheduler.support import rows
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.text.chat_template import ChatTemplate
from specrt.text.tokenizer import Tokenizer
from support.rows import packed

PROMPT = "def fibonacci(n):\n"
GREEDY = ("--temperature", 0)
STATISTICS = re.compile(
    r"\[12 tokens, \d+ tokens/s, (?:estimated \d+\.\d times plain decoding(?:, slower)?, )?"
    r"TTFT \d+\.\d ms \| cascade, gamma 2: \d+ rounds, "
    r"\d\.\d\d tokens per round, acceptance rate [01]\.\d\d \| length\]\n"
)


@pytest.fixture
def toy(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Generator:
    """What the command opens: two rows of toy engines."""
    made = rows(packed, 2, tokenizer)
    monkeypatch.setattr(made, "close", lambda: None)
    monkeypatch.setattr("specrt.cli.generate.load", lambda *_, **__: made)
    return made


def test_text_and_one_line_of_statistics(cli: Run, codelet: Path, generator: Generator) -> None:
    ran = cli("generate", codelet, "--prompt", PROMPT, "--max-tokens", 12, "--gamma", 2, *GREEDY)
    expected = generator.generate(PROMPT, SamplingParams(max_tokens=12))
    assert (ran.status, ran.out) == (0, expected.text + "\n")
    assert STATISTICS.fullmatch(ran.err)


@pytest.mark.usefixtures("opened")
def test_sources_of_a_prompt(cli: Run, codelet: Path, generator: Generator, tmp_path: Path) -> None:
    def text(*args: object, stdin: bytes = b"") -> str:
        ran = cli("generate", codelet, "--max-tokens", 6, *GREEDY, *args, stdin=stdin)
        assert ran.status == 0, ran.err
        return ran.out

    path = tmp_path / "prompt.py"
    path.write_text(PROMPT, encoding="utf-8")
    numbers = ",".join(map(str, generator.tokenizer.encode(PROMPT)))
    expected = text("--prompt", PROMPT)
    assert text("--prompt-file", path) == text("--prompt-ids", numbers) == expected
    assert text(stdin=PROMPT.encode()) == text("-p", "-", stdin=PROMPT.encode()) == expected
    # An empty prompt starts from BOS.
    assert text("--prompt", "") == text() == text("--prompt-ids", "0")


LARK = 'start: "[" /[0-9]/+ "]"'
OPTIONS: list[tuple[list[str], dict[str, Any]]] = [
    (["--repetition-penalty", "1.3", "--presence-penalty", "0.5", "--frequency-penalty", "0.25",
      "--no-repeat-ngram", "3", "--bad-word", "name", "--logit-bias", "50=-2.5",
      "--logit-bias", "300=4", "--typical-p", "0.8", "--temperature", "0.9", "--seed", "3",
      "--ignore-eos", "--stop", "a", "--stop", "b c", "--stop-token-id", "7"],
     {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25,
      "no_repeat_ngram_size": 3, "bad_words": ["name"], "logit_bias": {50: -2.5, 300: 4.0},
      "typical_p": 0.8, "temperature": 0.9, "seed": 3, "ignore_eos": True, "stop": ("a", "b c"),
      "stop_token_ids": (7,)}),
    (["--json-schema", ' {"type": "object"}'], {"json_schema": ' {"type": "object"}'}),
    (["--json-schema", '@{"type": "object"}'], {"json_schema": '{"type": "object"}'}),
    (["--json-schema", "true"], {"json_schema": True}),
    (["--regex", "[0-9]{3}-[0-9]{4}"], {"regex": "[0-9]{3}-[0-9]{4}"}),
    (["--choice", "yes", "--choice", "no, é"], {"choice": ["yes", "no, é"]}),
    (["--grammar", f"@{LARK}"], {"grammar": LARK}),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "options"), OPTIONS, ids=range(len(OPTIONS)))
def test_options_are_those_of_the_library(
    cli: Run, toy: Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str],
    options: dict[str, Any],
) -> None:  # fmt: skip
    given: list[SamplingParams] = []

    def stream(_: Any, params: SamplingParams, **how: Any) -> Any:
        given.append(params)
        return honest("the", SamplingParams(max_tokens=1))

    honest = toy.stream
    monkeypatch.setattr(toy, "stream", stream)
    if asked[1].startswith("@"):  # in a file
        path = tmp_path / "constraint"
        path.write_text(asked[1][1:], encoding="utf-8")
        asked = [asked[0], str(path)]
    assert cli("generate", tmp_path, "--prompt", "a", "--max-tokens", 9, *asked).status == 0
    assert given == [SamplingParams(max_tokens=9, **options)]


@pytest.mark.parametrize("several", [(), ("--n", 2)])
def test_ctrl_c_leaves_one_line(
    cli: Run, toy: Generator, tmp_path: Path, several: tuple[object, ...]
) -> None:
    target: Any = toy.models.target
    honest = target.forward_rows

    def interrupted(feeds: Any) -> Any:
        if len(target.passes) == 6:
            raise KeyboardInterrupt
        return honest(feeds)

    target.forward_rows = interrupted
    asked = ("--prompt", "the", "--max-tokens", 40, "--gamma", 0, "--json", *several)
    ran = cli("generate", tmp_path, *asked)
    assert (ran.status, ran.err) == (130, "specrt: interrupted\n" if several else "")
    told = [json.loads(line) for line in ran.out.splitlines()]
    assert [(len(one["token_ids"]), one["finish_reason"]) for one in told] == (
        [] if several else [(6, None)]
    )


def test_one_note_where_the_context_has_no_room_for_the_limit(
    cli: Run, toy: Generator, tmp_path: Path
) -> None:
    context, asked = toy.models.target.max_length, ("--ignore-eos", "--max-tokens")
    path = written(tmp_path, ["the", "in", "abc"])
    for source in (("--prompt", "the"), ("--prompt", "the", "--n", 3), ("--prompts", path)):
        ran = cli("generate", tmp_path, *source, *asked, 10 * context)
        notes = [line for line in ran.err.splitlines() if line.startswith("note: ")]
        assert (ran.status, len(notes)) == (0, 1)
        assert f"the context of {context}" in notes[0]
        assert "note" not in cli("generate", tmp_path, *source, *asked, 2).err


@pytest.mark.usefixtures("opened")
def test_a_comparison_measures_plain_decoding(
    cli: Run, codelet: Path, generator: Generator
) -> None:
    asked = ("generate", codelet, "--prompt", PROMPT, "--max-tokens", 20, "--compare")
    for how in (("--gamma", 3), ("--drafter", "ngram", "--seed", 2)):
        ran = cli(*asked, *how)
        assert ran.status == 0
        *_, line = ran.err.splitlines()
        assert re.fullmatch(
            r"\[measured: \d+\.\d\d times plain decoding( \(.* in \d turns\))?(, slower)?, "
            r"\d+ tokens/s with drafts, \d+ without; the same text, token for token\]", line,
        ), line  # fmt: skip
    found = json.loads(cli(*asked, "--gamma", 3, "--json").out)["comparison"]
    assert found["least"] <= found["speedup"] <= found["most"]
    assert "nothing to compare" in cli(*asked, "--drafter", "none").err
    for other in (("--n", 2), ("--gamma", 0), ("--verifier", "rejection"), ("--remote", "ws://a")):
        assert "leave" in cli(*asked, *other).refusal


@pytest.mark.usefixtures("opened", "believe_everything")
def test_a_comparison_of_other_texts_tells_no_speed(cli: Run, codelet: Path) -> None:
    ran = cli("generate", codelet, "--prompt", PROMPT, *GREEDY, "--max-tokens", 20, "--gamma", 4,
              "--drafter", "model", "--compare")  # fmt: skip
    assert ran.status == 2
    assert "so no speed is reported; run `specrt verify" in ran.err
    assert "measured" not in ran.err


@pytest.mark.usefixtures("opened")
def test_a_terminal_shows_the_prompt_before_its_text(
    cli: Run, codelet: Path, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("generate", codelet, "--prompt", PROMPT, *GREEDY, "--max-tokens", 6)
    text = cli(*asked).out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli(*asked).out == PROMPT + text
    monkeypatch.delenv("NO_COLOR")
    assert cli(*asked).out == f"\x1b[2m{PROMPT}\x1b[0m{text}"
    assert json.loads(cli(*asked, "--json").out)["text"] + "\n" == text


@pytest.mark.usefixtures("toy")
def test_one_reason_for_both_drafters_of_a_cascade(cli: Run, tmp_path: Path) -> None:
    asked = ("--max-tokens", 2, "--gamma", "auto", "--drafter", "cascade")
    ran = cli("generate", tmp_path, "--prompt", "a", *asked)
    assert ran.err.count("nothing was found to propose") == 1


def written(folder: Path, texts: list[str]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in texts), encoding="utf-8")
    return path


def steady(told: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a clock or a neighbour decides."""
    keys = ("text", "token_ids", "finish_reason", "stop_reason", "seed")
    return {key: told[key] for key in keys}


def test_completions_come_under_their_numbers(cli: Run, toy: Generator, tmp_path: Path) -> None:
    asked = ("--prompt", "the", "--max-tokens", 9, "--temperature", 1.0, "--seed", 3, "--n", 2)
    ran = cli("generate", tmp_path, *asked)
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=3, n=2)
    ((first, second),) = toy.generate_many(["the"], params)
    assert first.text != second.text
    assert (ran.status, ran.out) == (0, f"[1]\n{first.text}\n[2]\n{second.text}\n")
    assert ran.err.count("[9 tokens, ") == ran.err.count("\n") == 2
    told = json.loads(cli("generate", tmp_path, *asked, "--json").out)
    assert [*map(steady, told["completions"])] == [steady(c.to_json()) for c in (first, second)]


def test_control_tokens_of_a_prompt(
    cli: Run, toy: Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsed where the prompt is plain text and nothing forbids it; never in a message."""
    template = ChatTemplate("{{ messages[0].content }}</s>", {})
    monkeypatch.setattr("specrt.text.chat_template.read_template", lambda _: template)
    path = written(tmp_path, ["a</s>"])
    for options, tokens in (([], 2), (["--no-parse-special"], 5), (["--chat"], 6)):
        for source in (("--prompt", "a</s>"), ("--prompts", path)):
            asked = (*source, *options, "--max-tokens", 1, "--json")
            assert json.loads(cli("generate", tmp_path, *asked).out)["prompt_tokens"] == tokens


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
    assert "context of this bundle is 128" in told[1]["error"]
    assert (ran.status, ran.err.count("\n")) == (1, 1)
    assert ran.err.startswith(f"specrt: {path}:2: ")
    ran = cli("generate", tmp_path, "--prompt", "abc", "--n", 2, *options)
    assert (ran.status, ran.err.count("specrt: completion")) == (1, 2)


def test_texts_of_one_run_are_drafted_in_the_next(cli: Run, codelet: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts"
    asked = ("generate", codelet, "--prompt", PROMPT, "--max-tokens", 24, "--gamma", 4)
    asked = (*asked, *GREEDY, "--drafter", "ngram", "--json")

    def ran(*more: object) -> tuple[str, list[str]]:
        found = json.loads(cli(*asked, *more).out)
        return found["text"], list(found["speculation"]["sources"])

    text, sources = ran("--text-memory-file", file)
    assert "memory" not in sources
    assert ran("--no-text-memory") == (text, sources)
    again, sources = ran("--text-memory-file", file)
    assert again == text
    assert "memory" in sources
    both = ("--text-memory-file", file, "--no-text-memory")
    for command in (asked, ("chat", codelet)):
        assert "--no-text-memory were given" in cli(*command, *both).refusal
    refused = cli(*asked, "--text-memory-file", file, "--remote", "ws://a").refusal
    assert "--remote were given" in refused
    file.write_bytes(file.read_bytes()[:-3])
    assert "is damaged" in cli(*asked, "--text-memory-file", file).refusal
