"""`specrt bench --rows`, and with a structure: what rows at once come to, and structures cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cli.ran import Run
from specrt_export.builder import build
from specrt_export.recipe import read_recipe


@pytest.fixture(scope="module")
def two_rows(tmp_path_factory: pytest.TempPathFactory, engines: Path) -> Path:
    out = tmp_path_factory.mktemp("rows") / "bundle"
    recipe = read_recipe(engines / "codelet" / "recipe.toml")
    options = replace(recipe.engine, batch=2, max_length=128, prefill=64, gammas=(1, 2))
    build(replace(recipe, engine=options), out)
    return out


def test_rows_are_compared_with_fewer(cli: Run, two_rows: Path, two_prompts: Path) -> None:
    options = ("--prompts", two_prompts, "--max-tokens", 6, "--repeats", 1, "--gammas", "0,2")
    ran = cli("bench", two_rows, *options, "--rows", "2,1")
    assert (ran.status, ran.err) == (0, "")
    assert "2 prompts, read and completed so many at once" in ran.out
    assert "over 1 row, gamma 0" in ran.out
    found = json.loads(ran.out.splitlines()[-1])["throughput"]
    assert [(t["rows"], t["gamma"]) for t in found] == [(1, 0), (2, 0), (1, 2), (2, 2)]
    assert all(t["same"] == t["completions"] == 2 for t in found)
    assert found[0]["gain"]["median"] == found[2]["gain"]["median"] == 1.0
    ran = cli("bench", two_rows, *options, "--rows", "1", "--json")
    assert len(ran.out.splitlines()) == 1


def test_a_structure_is_compared_with_free_text(cli: Run, codelet: Path, two_prompts: Path) -> None:
    pytest.importorskip("llguidance", reason="needs the structured extra")
    options = ("--prompts", two_prompts, "--max-tokens", 12, "--repeats", 1, "--gammas", "0,2")
    ran = cli("bench", codelet, *options, "--regex", "([a-z]+ ){40}")
    assert (ran.status, ran.err) == (0, "")
    assert "2 prompts, freely and within the structure" in ran.out
    found = json.loads(ran.out.splitlines()[-1])["structure"]
    assert [(cost["gamma"], cost["pairs"]) for cost in found] == [(0, 2), (2, 2)]
    assert all(cost["ratio"]["median"] > 0 for cost in found)
    assert found[0]["tokens_per_round"] == {"free": 1.0, "structured": 1.0}
    ran = cli("bench", codelet, *options, "--regex", "()")
    assert ran.status == 2
    assert "nothing to time" in ran.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rows", "0"), "--rows is '0'; expected numbers of 1 or more, as 1,2,4"),
        (("--rows", "two"), "--rows is 'two'; expected numbers"),
        (("--rows", "1,3"), "3 rows at once: this bundle was built for 1 to 2; build with"),
        (("--rows", "1", "--drafter", "model,ngram"), "--rows is measured with one drafter, not 2"),
        (("--rows", "1", "--regex", "a+"), "--rows measures rows, and a structure what it costs"),
        (("--regex", "a+", "--choice", "a"), "regex and choice were given; expected one of them"),
        (("--rows", "1", "--gammas", "7"), "gamma 7 is not among those this bundle was built for"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    cli: Run, two_rows: Path, two_prompts: Path, options: tuple[str, ...], said: str
) -> None:
    ran = cli("bench", two_rows, "--prompts", two_prompts, "--max-tokens", 4, *options)
    assert ran.status == 2
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1
