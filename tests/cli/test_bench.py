"""`specrt bench`: outputs are compared before any speed is reported."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from cli.conftest import Run
from specrt.bundle import read_manifest

pytestmark = pytest.mark.usefixtures("opened")


def measure_once(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Let a function return what its first call did."""
    honest, found = resolve_name(place), list[Any]()

    def once(*given: Any, **named: Any) -> Any:
        if not found:
            found.append(honest(*given, **named))
        return found[0]

    monkeypatch.setattr(place.replace(":", "."), once)


def test_bench_prints_a_table_or_the_same_as_json(
    cli: Run, codelet: Path, two_prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_once(monkeypatch, "specrt.cli.bench:compare_configurations")
    prose = tmp_path / "more.jsonl"
    prose.write_text('{"prompt": "Once", "category": "prose"}\n' * 3, encoding="utf-8")
    files = ("--prompts", two_prompts, "--prompts", prose, "--limit", 1)
    options = (*files, "--max-tokens", 8, "--gammas", "2,0", "--repeats", 2,
               "--drafter", "model,none", "--drafter", "none")  # fmt: skip
    ran = cli("bench", codelet, *options, "--markdown")
    assert ran.status == 0
    assert all(line.startswith("bench: ") for line in ran.err.splitlines())
    assert "outputs identical to plain decoding: 2 compared" in ran.out
    assert "| prose 1 | 0 |" in ran.out
    assert "{" not in ran.out
    found = json.loads(cli("bench", codelet, *options, "--json").out)
    assert (found["name"], found["precision"], found["repeats"]) == ("codelet", "fp32", 2)
    assert found["sampling"]["max_tokens"] == 8
    assert found["outputs"] == {
        "compared": 2, "undrafted": 0, "differing": 0, "differences": [],
    }  # fmt: skip
    assert [(t["category"], t["prompts"]) for t in found["tasks"]] == [
        (two_prompts.stem, 1), ("prose", 1), ("all", 2),
    ]  # fmt: skip
    for task in found["tasks"]:
        plain, drafting = task["results"]
        assert [(r["gamma"], r["drafter"]) for r in (plain, drafting)] == [
            (0, "none"), (2, "model"),
        ]  # fmt: skip
        # Repeats, and tokens after the prefill's.
        assert plain["emitted"] == drafting["emitted"] == task["prompts"] * 2 * 7
        assert (plain["drafted"], plain["speedup"]["median"]) == (0, 1.0)
        assert drafting["drafted"] > 0
    assert found["memory"]["peak_bytes"] > found["memory"]["weight_bytes"] > 0


@pytest.mark.usefixtures("believe_everything")
def test_no_speed_where_outputs_differ_unless_nothing_is_promised(
    cli: Run, codelet: Path, two_prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("--prompts", two_prompts, "--max-tokens", 12, "--gammas", "4", "--repeats", 1)
    ran = cli("bench", codelet, *few, "--temperature", "0.9")
    assert (ran.status, ran.out) == (1, "")
    assert "outputs differ from plain decoding" in ran.err
    assert f"specrt verify {codelet} --prompts {two_prompts}" in ran.err
    manifest = read_manifest(codelet)
    half = replace(manifest.target, precision="fp16", head="int8", backend="ort-cuda")
    changed = replace(manifest, target=half)
    monkeypatch.setattr("specrt.cli.bench.read_manifest", lambda _: changed)
    ran = cli("bench", codelet, *few)
    assert ran.status == 0
    assert "of 2 outputs differ from plain decoding, where the plain pass's best two" in ran.out
    found = json.loads(cli("bench", codelet, *few, "--json").out)["outputs"]
    assert found["differing"] == len(found["differences"]) > 0
    assert all(d["margin"] > 0 for d in found["differences"])


def test_rows_structures_and_verifiers(cli: Run, codelet: Path, two_prompts: Path) -> None:
    options = ("--prompts", two_prompts, "--max-tokens", 6, "--repeats", 1, "--gammas", "0,2")
    found = json.loads(cli("bench", codelet, *options, "--rows", "1", "--json").out)["throughput"]
    assert [(t["rows"], t["gamma"], t["same"], t["completions"]) for t in found] == [
        (1, 0, 2, 2), (1, 2, 2, 2),
    ]  # fmt: skip
    sampled = ("--temperature", 0.9, "--top-p", 0.95, "--seed", 3, "--verifier", "rejection")
    found = json.loads(cli("bench", codelet, *options, *sampled, "--json").out)
    assert (found["sampling"]["top_p"], found["sampling"]["verifier"]) == (0.95, "rejection")
    assert found["outputs"]["compared"] == 0
    assert any("outputs not compared" in sentence for sentence in found["verdict"])
    pytest.importorskip("llguidance", reason="needs the structured extra")
    ran = cli("bench", codelet, *options, "--regex", "([a-z]+ ){40}", "--json")
    found = json.loads(ran.out)["structure"]
    assert [(cost["gamma"], cost["pairs"]) for cost in found] == [(0, 2), (2, 2)]
    assert found[0]["tokens_per_round"] == {"free": 1.0, "structured": 1.0}


@pytest.mark.parametrize(
    ("calls", "options"),
    [
        (("specrt.bench.measure.PromptRunner", "run", 2), ()),
        (("specrt.generator.Generator", "generate_many", 4), ("--rows", "1")),
        (("specrt.generator.Generator", "generate", 10), ("--regex", "([a-z]+ ){40}")),
    ],
)
def test_ctrl_c_leaves_a_table_of_what_was_measured(
    cli: Run, codelet: Path, two_prompts: Path, monkeypatch: pytest.MonkeyPatch,
    calls: tuple[str, str, int], options: tuple[str, ...],
) -> None:  # fmt: skip
    if "--regex" in options:
        pytest.importorskip("llguidance", reason="needs the structured extra")
    place, name, whole = calls
    honest = getattr(resolve_name(place), name)
    made = itertools.count(1)

    def interrupted(*given: Any, **named: Any) -> Any:
        if next(made) == limit + 1:
            raise KeyboardInterrupt
        return honest(*given, **named)

    few = ("--prompts", two_prompts, "--max-tokens", 6, "--gammas", "0,2", "--repeats", 2)
    monkeypatch.setattr(f"{place}.{name}", interrupted)
    limit = whole
    ran = cli("bench", codelet, *few, *options, "--json")
    assert (ran.status, "interrupted" in ran.err) == (130, True)
    assert "tokens" in ran.out
    if not options:
        (task,) = json.loads(ran.out)["tasks"]
        assert (task["prompts"], [row["rounds"] > 0 for row in task["results"]]) == (1, [True] * 2)
    made, limit = itertools.count(1), 1
    ran = cli("bench", codelet, *few, *options)
    assert (ran.status, ran.out) == (130, "")


def test_kernels_are_measured_without_prompts(
    cli: Run, codelet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_once(monkeypatch, "specrt_export.check.roofline:measure_kernels")
    ran = cli("bench", codelet, "--kernels", "--repeats", 1, "--threads", 1, "--json")
    assert ran.status == 0
    found = json.loads(ran.out)
    assert [w["width"] for w in found["widths"]][:4] == [1, 2, 3, 5]
    assert "{" not in cli("bench", codelet, "--kernels", "--repeats", 1, "--threads", 1).out
    assert "--limit" in cli("bench", codelet, "--kernels", "--limit", 2).refusal
    assert "--kernels" in cli("bench", codelet).refusal


def test_kernels_without_onnx_are_refused_with_the_remedy(
    cli: Run, codelet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "specrt_export.check.roofline", raising=False)
    monkeypatch.setitem(sys.modules, "onnx", None)
    refusal = cli("bench", codelet, "--kernels").refusal
    assert "onnx;" in refusal
    assert "`make setup`" in refusal
