"""`specrt verify` and `specrt bench`: outputs are compared before anything is claimed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cli.ran import Run
from specrt.bundle import Manifest, read_manifest
from specrt.speculation.round import Verdict
from specrt.system import measure_bandwidth


@pytest.fixture(autouse=True)
def _read_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    little = partial(measure_bandwidth, array_bytes=1 << 20, reads=2)
    monkeypatch.setattr("specrt.cli.bench.measure_bandwidth", little)


@pytest.fixture
def believe_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the verifier: whatever was drafted is accepted."""

    def accept(drafted: Sequence[int], choose: Callable[[int], int]) -> Verdict:
        return Verdict(len(drafted), choose(len(drafted)))

    monkeypatch.setattr("specrt.speculation.target.match", accept)
    monkeypatch.setattr(
        "specrt.speculation.target.match_greedy",
        lambda drafted, best: accept(drafted, best.__getitem__),
    )


def test_verify_finds_identical_output(cli: Run, codelet: Path, two_prompts: Path) -> None:
    options = ("--prompts", two_prompts, "--max-tokens", 12, "--gammas", "0,2,5")
    ran = cli("verify", codelet, *options)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == "48 tokens of 2 prompts at gamma 2, 5: identical to plain decoding\n"
    found = json.loads(cli("verify", codelet, *options, "--json").out)
    assert found.pop("drafted") > 0
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


def test_verify_takes_a_drafter(cli: Run, codelet: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied.jsonl"
    copied.write_text(json.dumps({"prompt": "import os\n" * 8}), encoding="utf-8")
    options = ("--prompts", copied, "--max-tokens", 12, "--gammas", "4", "--json")
    found = [json.loads(cli("verify", codelet, *options, "--drafter", d).out)["drafted"]
             for d in ("model", "ngram", "cascade")]  # fmt: skip
    assert min(found) > 0
    default = json.loads(cli("verify", codelet, *options).out)
    assert default["drafted"] == found[0], "the draft model is what a bundle is built for"
    assert "'none' is not one of" in cli("verify", codelet, *options, "--drafter", "none").refusal


def test_verify_that_drafted_nothing_has_proved_nothing(
    cli: Run, codelet: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text('{"prompt": "import"}', encoding="utf-8")
    options = ("--prompts", short, "--max-tokens", 2, "--gammas", "4", "--drafter", "ngram")
    for form in ((), ("--json",)):
        said = cli("verify", codelet, *options, *form).refusal
        assert "drafted nothing at gamma 4, so nothing was verified" in said


@pytest.mark.usefixtures("believe_everything")
def test_verify_without_room_for_the_draft_says_so_and_drafts_by_lookup(
    cli: Run, codelet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrt.loading.available_bytes", lambda: 1 << 20)
    copied = tmp_path / "copied.jsonl"
    body = "    def {0}(self, {1}):\n        return self.{1}\n"
    text = "class A:\n" + body.format("f", "a") + body.format("g", "b")
    copied.write_text(json.dumps({"prompt": text}), encoding="utf-8")
    options = ("--prompts", copied, "--max-tokens", 40, "--gammas", "4", "--json")
    ran = cli("verify", codelet, *options)
    assert ran.err.startswith("note: the draft model is not opened")
    found = json.loads(ran.out)
    assert found["drafted"] > 0
    assert (ran.status, found["unexplained"] > 0) == (1, True)


def test_bench_ends_with_one_line_of_json(cli: Run, codelet: Path, two_prompts: Path) -> None:
    options = ("--prompts", two_prompts, "--max-tokens", 8, "--gammas", "2", "--repeats", 2)
    ran = cli("bench", codelet, *options)
    assert (ran.status, ran.err) == (0, "")
    assert "speedup" in ran.out
    assert "outputs identical: 2 compared with plain decoding" in ran.out
    found = json.loads(ran.out.splitlines()[-1])
    assert (found["name"], found["precision"], found["repeats"]) == ("codelet", "fp32", 2)
    assert found["sampling"]["max_tokens"] == 8
    assert found["outputs"] == {"compared": 2, "differing": 0, "differences": []}
    (task,) = found["tasks"]
    assert (task["category"], task["prompts"]) == (two_prompts.stem, 2)
    plain, drafting = task["results"]
    for row in (plain, drafting):
        assert row["tokens_per_second"]["median"] > 0
        assert row["emitted"] == 2 * 2 * 7  # prompts, repeats, tokens after the prefill's
        assert row["speedup"]["low"] <= row["speedup"]["median"] <= row["speedup"]["high"]
        assert row["itl_ms"]["p50"] <= row["itl_ms"]["p95"]
    assert (plain["gamma"], plain["drafted"], plain["speedup"]["median"]) == (0, 0, 1.0)
    assert (drafting["gamma"], drafting["drafter"]) == (2, "model")
    assert drafting["drafted"] > 0
    assert found["memory"]["peak_bytes"] > found["memory"]["weight_bytes"] > 0
    assert found["bandwidth"]["threads"] == found["threads"]


def test_bench_prints_nothing_but_json_on_request(
    cli: Run, codelet: Path, two_prompts: Path
) -> None:
    options = ("--max-tokens", 4, "--gammas", "1", "--repeats", 1, "--limit", 1, "--json")
    ran = cli("bench", codelet, "--prompts", two_prompts, *options)
    assert ran.out.count("\n") == 1
    (task,) = json.loads(ran.out)["tasks"]
    assert task["prompts"] == 1


def test_bench_tells_classes_and_drafters_apart(
    cli: Run, codelet: Path, two_prompts: Path, tmp_path: Path
) -> None:
    prose = tmp_path / "more.jsonl"
    prose.write_text('{"prompt": "Once", "category": "prose"}\n' * 3, encoding="utf-8")
    files = ("--prompts", two_prompts, "--prompts", prose, "--limit", 2)
    ran = cli("bench", codelet, *files, "--max-tokens", 4, "--gammas", "2,0", "--repeats", 1,
              "--drafter", "model,none", "--drafter", "none", "--markdown")  # fmt: skip
    assert (ran.status, ran.err) == (0, "")
    assert "**prose**, 2 prompts" in ran.out
    assert "| gamma | drafter |" in ran.out
    found = json.loads(ran.out.splitlines()[-1])
    assert [(t["category"], t["prompts"]) for t in found["tasks"]] == [
        (two_prompts.stem, 2), ("prose", 2), ("all", 4),
    ]  # fmt: skip
    for task in found["tasks"]:
        assert [(r["gamma"], r["drafter"]) for r in task["results"]] == [(0, "none"), (2, "model")]
    only = cli("bench", codelet, *files, "--category", "prose", "--max-tokens", 4, "--gammas", "0",
               "--repeats", 1, "--json")  # fmt: skip
    assert [t["category"] for t in json.loads(only.out)["tasks"]] == ["prose"]


def test_bench_chooses_gammas_itself(cli: Run, codelet: Path, two_prompts: Path) -> None:
    options = ("--max-tokens", 4, "--repeats", 1, "--limit", 1, "--json")
    ran = cli("bench", codelet, "--prompts", two_prompts, *options)
    (task,) = json.loads(ran.out)["tasks"]
    assert [row["gamma"] for row in task["results"]] == [0, 2, 4, "auto"]


@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_bench_samples(cli: Run, codelet: Path, two_prompts: Path, verifier: str) -> None:
    options = ("--max-tokens", 12, "--gammas", "3", "--repeats", 1, "--temperature", 0.9,
               "--top-p", 0.95, "--seed", 3, "--verifier", verifier)  # fmt: skip
    ran = cli("bench", codelet, "--prompts", two_prompts, *options)
    assert (ran.status, ran.err) == (0, "")
    found = json.loads(ran.out.splitlines()[-1])
    assert (found["sampling"]["top_p"], found["sampling"]["verifier"]) == (0.95, verifier)
    assert found["outputs"]["compared"] == (2 if verifier == "match" else 0)
    assert ("outputs not compared" in ran.out) == (verifier == "rejection")


@pytest.mark.usefixtures("believe_everything")
@pytest.mark.parametrize("options", [(), ("--json",), ("--temperature", "0.9")])
def test_bench_gives_no_speed_when_outputs_differ(
    cli: Run, codelet: Path, two_prompts: Path, options: tuple[str, ...]
) -> None:
    ran = cli("bench", codelet, "--prompts", two_prompts, "--max-tokens", 24, "--gammas", "4",
              "--repeats", 1, *options)  # fmt: skip
    assert (ran.status, ran.out) == (1, "")
    assert "outputs differ from plain decoding" in ran.err
    assert "so no speed is reported" in ran.err
    assert f"specrt verify {codelet} --prompts {two_prompts}" in ran.err


@pytest.fixture
def target_says(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a benchmark think that its target is of another kind."""

    def says(**fields: Any) -> None:
        def changed(folder: Path) -> Manifest:
            manifest = read_manifest(folder)
            return replace(manifest, target=replace(manifest.target, **fields))

        monkeypatch.setattr("specrt.cli.bench.read_manifest", changed)

    return says


@pytest.mark.usefixtures("believe_everything")
@pytest.mark.parametrize("precision", ["int8", "int4", "fp16", "bf16"])
def test_bench_gives_no_speed_when_outputs_of_a_narrow_target_differ_on_a_cpu(
    cli: Run, codelet: Path, two_prompts: Path, precision: str, target_says: Callable[..., None]
) -> None:
    target_says(precision=precision)
    ran = cli("bench", codelet, "--prompts", two_prompts, "--max-tokens", 24, "--gammas", "4",
              "--repeats", 1)  # fmt: skip
    assert (ran.status, ran.out) == (1, "")
    assert "so no speed is reported" in ran.err


@pytest.mark.usefixtures("believe_everything")
@pytest.mark.parametrize(
    ("precision", "told"), [("fp16", "fp16 with a head of int8"), ("int8", "int8")]
)
def test_bench_where_nothing_is_promised_tells_how_many_outputs_differ(
    cli: Run, codelet: Path, two_prompts: Path, precision: str, told: str,
    target_says: Callable[..., None],
) -> None:  # fmt: skip
    target_says(precision=precision, head="int8", backend="ort-cuda")
    ran = cli("bench", codelet, "--prompts", two_prompts, "--max-tokens", 24, "--gammas", "4",
              "--repeats", 1)  # fmt: skip
    assert ran.status == 0
    assert f" {told}, draft " in ran.out
    assert "of 2 outputs differ from plain decoding, where the plain pass's best two" in ran.out
    found = json.loads(ran.out.splitlines()[-1])["outputs"]
    assert found["differing"] == len(found["differences"]) > 0
    assert all(d["margin"] > 0 for d in found["differences"])


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


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--max-tokens", 2048), "prompts.jsonl:1: a prompt of 9 tokens and 2048 more do not fit"),
        (("--max-tokens", 1), "Invalid value for '--max-tokens'"),
        (("--repeats", 0), "Invalid value for '--repeats'"),
        (("--limit", 0), "Invalid value for '--limit'"),
        (("--gammas", "2,autos"), "expected numbers and auto, as 0,2,4,auto"),
        (("--drafter", "modle"), "--drafter is 'modle'; did you mean 'model'?"),
        (("--category", "poetry"), "no prompt is of category 'poetry'"),
        (("--temperature", -1), "temperature is -1.0; expected a number of 0 or more"),
        (("--plot", "none/out.png"), "none/out.png cannot be written"),
        (("--plot", "out.gif"), "expected a name ending in .png, .svg or .pdf"),
        (("--json", "--markdown"), "--json and --markdown"),
    ],
)
def test_bench_refuses_before_it_measures(
    cli: Run, codelet: Path, two_prompts: Path, options: tuple[object, ...], told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr("specrt.cli.bench.measure", measured)
    assert told in cli("bench", codelet, "--prompts", two_prompts, *options).refusal


def test_bench_refuses_a_class_called_as_all_of_them(
    cli: Run, codelet: Path, two_prompts: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "all.jsonl"
    taken.write_text('{"prompt": "Once"}\n', encoding="utf-8")
    options = ("--max-tokens", 4, "--gammas", "2", "--repeats", 1, "--json")
    said = cli("bench", codelet, "--prompts", two_prompts, "--prompts", taken, *options).refusal
    assert "all.jsonl:1 is of category 'all'" in said
    assert "another name" in said
    alone = cli("bench", codelet, "--prompts", taken, *options)
    assert [t["category"] for t in json.loads(alone.out)["tasks"]] == ["all"]


def test_bench_names_a_prompt_without_tokens(
    cli: Run, codelet: Path, two_prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrt.text.Tokenizer.encode", lambda self, text, special=True: [])
    said = cli("bench", codelet, "--prompts", two_prompts).refusal
    assert "prompts.jsonl:1 has a prompt of no tokens" in said


def test_bench_draws(cli: Run, codelet: Path, two_prompts: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    path = tmp_path / "out.png"
    options = ("--max-tokens", 4, "--gammas", "2", "--repeats", 1, "--plot", path)
    assert cli("bench", codelet, "--prompts", two_prompts, *options).status == 0
    assert path.read_bytes().startswith(b"\x89PNG")
