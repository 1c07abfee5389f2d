"""`specrt verify` and `specrt bench`: outputs are compared before anything is claimed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cli.ran import Run
from specrt.verify import Verdict

RATES = ("tokens_per_second", "ttft_ms", "itl_ms", "round_ms", "draft_ms", "verify_ms",
         "outside_us")  # fmt: skip
COUNTS = ("gamma", "rounds", "drafted", "evaluated", "accepted", "emitted", "acceptance_rate",
          "draft_yield", "tokens_per_round")  # fmt: skip


@pytest.fixture
def believe_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the verifier: whatever was drafted is accepted."""

    def accept(drafted: Sequence[int], choose: Callable[[int], int]) -> Verdict:
        return Verdict(len(drafted), choose(len(drafted)))

    monkeypatch.setattr("specrt.target.match", accept)


def test_verify_finds_identical_output(cli: Run, codelet: Path, two_prompts: Path) -> None:
    options = ("--prompts", two_prompts, "--max-tokens", 12, "--gammas", "0,2,5")
    ran = cli("verify", codelet, *options)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == "48 tokens of 2 prompts at gamma 2, 5: identical to plain decoding\n"
    found = json.loads(cli("verify", codelet, *options, "--json").out)
    assert found == {
        "prompts": 2, "tokens": 48, "tolerance": 1e-3, "divergences": [], "unexplained": 0,
    }  # fmt: skip


@pytest.mark.usefixtures("believe_everything")
def test_verify_fails_on_a_verifier_that_accepts_all(
    cli: Run, codelet: Path, two_prompts: Path
) -> None:
    options = ("--prompts", two_prompts, "--max-tokens", 24, "--gammas", "4")
    ran = cli("verify", codelet, *options)
    assert ran.status == 1
    assert "NOT EXPLAINED by rounding" in ran.out
    assert "unexplained" in ran.out.splitlines()[-1]
    ran = cli("verify", codelet, *options, "--json")
    found = json.loads(ran.out)
    assert (ran.status, found["unexplained"] > 0) == (1, True)
    first = found["divergences"][0]
    assert first["margin"] > found["tolerance"]
    assert first["plain_token"] != first["speculative_token"]
    # With a tolerance above every margin the same divergences count as near-ties.
    assert cli("verify", codelet, *options, "--tolerance", 100).status == 0


def test_verify_needs_something_to_compare(cli: Run, codelet: Path, two_prompts: Path) -> None:
    said = cli("verify", codelet, "--prompts", two_prompts, "--gammas", "0").refusal
    assert "nothing to compare" in said


def test_bench_ends_with_one_line_of_json(cli: Run, codelet: Path, two_prompts: Path) -> None:
    options = ("--prompts", two_prompts, "--max-tokens", 8, "--gammas", "2", "--repeats", 2)
    ran = cli("bench", codelet, *options)
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert "speedup" in ran.out
    assert "Outputs identical" in ran.out
    found = json.loads(lines[-1])
    assert set(found) == {
        "bundle", "machine", "threads", "prompts", "max_tokens", "repeats", "outputs_identical",
        "repetition", "results",
    }  # fmt: skip
    assert (found["prompts"], found["max_tokens"], found["repeats"]) == (2, 8, 2)
    assert found["outputs_identical"] is True
    plain, drafting = found["results"]
    for row in (plain, drafting):
        assert set(row) == {
            *COUNTS,
            *RATES,
            "acceptance_by_position",
            "speedup",
            "speedup_spread",
        }
        assert row["tokens_per_second"] > 0
        assert row["emitted"] == 2 * 2 * 7  # prompts, repeats, tokens after the prefill's
    assert (plain["gamma"], plain["drafted"], plain["speedup"]) == (0, 0, 1.0)
    assert drafting["gamma"] == 2
    low, high = drafting["speedup_spread"]
    assert low <= drafting["speedup"] <= high


def test_bench_prints_nothing_but_json_on_request(
    cli: Run, codelet: Path, two_prompts: Path
) -> None:
    options = ("--max-tokens", 4, "--gammas", "1", "--repeats", 1, "--limit", 1, "--json")
    ran = cli("bench", codelet, "--prompts", two_prompts, *options)
    assert ran.out.count("\n") == 1
    assert json.loads(ran.out)["prompts"] == 1


@pytest.mark.usefixtures("believe_everything")
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_bench_gives_no_speed_when_outputs_differ(
    cli: Run, codelet: Path, two_prompts: Path, options: tuple[str, ...]
) -> None:
    ran = cli("bench", codelet, "--prompts", two_prompts, "--max-tokens", 24, "--gammas", "4",
              "--repeats", 1, *options)  # fmt: skip
    assert (ran.status, ran.out) == (1, "")
    assert "outputs differ from plain decoding, so no speed is reported" in ran.err
    assert f"specrt verify {codelet} --prompts {two_prompts}" in ran.err


@pytest.mark.parametrize("verb", ["verify", "bench"])
def test_wrong_requests_are_refused(
    cli: Run, codelet: Path, two_prompts: Path, tmp_path: Path, verb: str
) -> None:
    prompts = ("--prompts", two_prompts)
    assert "Missing option '--prompts'" in cli(verb, codelet).refusal
    assert "--gammas is '2;3'" in cli(verb, codelet, *prompts, "--gammas", "2;3").refusal
    assert "gamma 9" in cli(verb, codelet, *prompts, "--gammas", "9").refusal
    assert "cannot be read" in cli(verb, codelet, "--prompts", tmp_path / "none").refusal
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert "holds no prompts" in cli(verb, codelet, "--prompts", empty).refusal


def test_bench_refuses_what_does_not_fit_the_context(
    cli: Run, codelet: Path, two_prompts: Path
) -> None:
    said = cli("bench", codelet, "--prompts", two_prompts, "--max-tokens", 2048).refusal
    assert "do not fit the context of 2048" in said
