"""`specrt generate`: text on stdout, one line of statistics on stderr, JSON on request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

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


def test_plain_decoding_says_nothing_of_speculation(cli: Run, codelet: Path) -> None:
    ran = cli("generate", codelet, "--prompt", PROMPT, "--max-tokens", 4, "--gamma", 0)
    assert re.fullmatch(r"\[4 tokens, \d+ tokens/s, TTFT \d+\.\d ms \| length\]\n", ran.err)


def test_json_has_the_promised_keys_and_consistent_numbers(cli: Run, codelet: Path) -> None:
    asked = ("--prompt", PROMPT, "--max-tokens", 20, "--seed", 5, "--gamma", 2, "--json")
    ran = cli("generate", codelet, *asked)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.count("\n") == 1
    found = json.loads(ran.out)
    types = {
        "text": str, "token_ids": list, "prompt_tokens": int, "cached_tokens": int,
        "finish_reason": str,
        "stop_reason": type(None), "seed": int, "ttft_ms": float, "itl_ms": float,
        "tokens_per_second": float, "speculation": dict,
    }  # fmt: skip
    assert {key: type(value) for key, value in found.items()} == types
    counts = found["speculation"]
    names = ("gamma", "rounds", "drafted", "evaluated", "accepted", "emitted")
    rates = ("acceptance_rate", "draft_yield", "tokens_per_round")
    assert {key: type(value) for key, value in counts.items()} == {
        **dict.fromkeys(names, int),
        **dict.fromkeys(rates, float),
        "drafter": str,
        "fallback": type(None),
        "sources": dict,
    }
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


def test_a_seed_repeats_a_sample(cli: Run, codelet: Path) -> None:
    warm = ("--prompt", PROMPT, "--temperature", 1.2, "--top-k", 40)
    first = ids_of(cli, codelet, *warm, "--seed", 1)
    assert ids_of(cli, codelet, *warm, "--seed", 1) == first
    assert ids_of(cli, codelet, *warm, "--seed", 1, "--gamma", 0) == first
    assert ids_of(cli, codelet, *warm, "--seed", 2) != first


def test_a_seed_that_was_drawn_is_told(cli: Run, codelet: Path) -> None:
    warm = ("generate", codelet, "--prompt", PROMPT, "--temperature", 1.2, "--max-tokens", 8)
    drawn = json.loads(cli(*warm, "--json").out)
    again = json.loads(cli(*warm, "--json", "--seed", drawn["seed"]).out)
    assert again["token_ids"] == drawn["token_ids"]


def test_the_verifier_may_be_chosen(cli: Run, codelet: Path) -> None:
    greedy = ids_of(cli, codelet, "--prompt", PROMPT)
    assert ids_of(cli, codelet, "--prompt", PROMPT, "--verifier", "rejection") == greedy
    warm = (
        "--prompt",
        PROMPT,
        "--temperature",
        1.0,
        "--seed",
        3,
        "--verifier",
        "rejection",
        "--gamma",
        2,
    )
    assert ids_of(cli, codelet, *warm) == ids_of(cli, codelet, *warm)


def test_threads_and_the_long_name_of_gamma_are_taken(cli: Run, codelet: Path) -> None:
    options = ("--prompt", PROMPT, "--max-tokens", 10, "--json", "--threads", 1)
    ran = cli("generate", codelet, *options, "--num-speculative-tokens", 5)
    assert json.loads(ran.out)["speculation"]["gamma"] == 5


def test_non_ascii_text_is_kept(cli: Run, codelet: Path, generator: Generator) -> None:
    text = 'name = "żółw — 🐢"\n'
    assert (
        ids_of(cli, codelet, stdin=text.encode())
        == generator.generate(text, SamplingParams(max_tokens=10)).token_ids
    )


def test_chat_is_refused_where_there_is_no_template(cli: Run, codelet: Path) -> None:
    said = cli("generate", codelet, "--prompt", "hello", "--chat").refusal
    assert str(codelet) in said
    assert "no chat template" in said
    said = cli("generate", codelet, "--prompt-ids", "1,2", "--chat").refusal
    assert "--chat needs a text prompt" in said


def test_two_sources_of_a_prompt_are_refused(cli: Run, codelet: Path, tmp_path: Path) -> None:
    said = cli("generate", codelet, "--prompt", "a", "--prompt-ids", "1").refusal
    assert "one of --prompt, --prompt-file, --prompt-ids and --prompts" in said


def test_no_prompt_at_a_terminal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    with pytest.raises(RequestError, match="no prompt; give --prompt TEXT"):
        read_prompt(None, None, None)


@pytest.mark.parametrize("ids", ["", "1,x", "1,,2", "1.5", "1 2"])
def test_ids_that_are_not_numbers_are_refused(cli: Run, codelet: Path, ids: str) -> None:
    said = cli("generate", codelet, "--prompt-ids", ids).refusal
    assert f"--prompt-ids is {ids!r}; expected numbers, as 1,2,3" in said


@pytest.mark.parametrize("token", [8192, -1])
def test_ids_outside_the_vocabulary_are_refused(cli: Run, codelet: Path, token: int) -> None:
    said = cli("generate", codelet, "--prompt-ids", f"5,{token}").refusal
    assert f"token id {token} is not in the vocabulary of 0 to 8191" in said


def test_a_prompt_longer_than_the_context_is_refused(cli: Run, codelet: Path) -> None:
    said = cli("generate", codelet, "--prompt-ids", ",".join(["7"] * 2049)).refusal
    assert "2049 tokens" in said
    assert "2048" in said


def test_a_gamma_that_was_not_built_is_refused(cli: Run, codelet: Path) -> None:
    said = cli("generate", codelet, "--prompt", "a", "--gamma", 9).refusal
    assert "gamma 9" in said
    assert "0, 1, 2, 3, 4, 5, 6, 7, 8" in said


def test_text_that_is_not_utf8_is_refused(cli: Run, codelet: Path, tmp_path: Path) -> None:
    path = tmp_path / "latin.py"
    path.write_bytes("# caf\xe9".encode("latin-1"))
    said = cli("generate", codelet, "--prompt-file", path).refusal
    assert f"{path} is not UTF-8: byte 0xe9 at offset 5" in said
    said = cli("generate", codelet, stdin=b"ab\xff").refusal
    assert "standard input is not UTF-8: byte 0xff at offset 2" in said


def test_a_prompt_file_that_is_not_there_is_refused(
    cli: Run, codelet: Path, tmp_path: Path
) -> None:
    said = cli("generate", codelet, "--prompt-file", tmp_path / "none.txt").refusal
    assert "none.txt cannot be read: No such file or directory" in said
    assert "Is a directory" in cli("generate", codelet, "--prompt-file", tmp_path).refusal


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--max-tokens", "0", "max_tokens is 0; expected a whole number of 1 or more"),
        ("--temperature", "-1", "temperature is -1.0; expected a number of 0 or more"),
        ("--temperature", "nan", "temperature is nan"),
        ("--top-p", "0", "top_p is 0.0; expected a number above 0, up to 1"),
        ("--min-p", "2", "min_p is 2.0; expected a number from 0 to 1"),
        ("--top-k", "-5", "top_k is -5"),
        ("--stop", "", "stop holds an empty string"),
        ("--gamma", "three", "'three' is neither a whole number nor auto"),
        ("--threads", "0", "0 is not in the range"),
        ("--verifier", "typical", "'typical' is not one of 'match', 'rejection'"),
    ],
)
def test_an_option_out_of_range_is_refused(
    cli: Run, codelet: Path, option: str, value: str, told: str
) -> None:
    assert told in cli("generate", codelet, "--prompt", "a", option, value).refusal


def test_an_unknown_option_names_the_nearest(cli: Run, codelet: Path) -> None:
    said = cli("generate", codelet, "--promt", "a").refusal
    assert "No such option" in said
    assert "--prompt" in said


@pytest.mark.parametrize(("word", "near"), [("genrate", "generate"), ("benhc", "bench")])
def test_an_unknown_command_names_the_nearest(cli: Run, word: str, near: str) -> None:
    assert f"unknown command {word!r}; did you mean {near!r}?" in cli(word).refusal


def test_help_lists_every_command(cli: Run) -> None:
    ran = cli("--help")
    assert ran.status == 0
    assert cli() == ran
    for name in ("generate", "build", "export", "inspect", "verify", "bench", "doctor"):
        assert f"\n  {name} " in ran.out
