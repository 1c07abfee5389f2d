"""`specrt verify`: speculative output is compared with plain output, token for token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.conftest import Run


@pytest.mark.usefixtures("opened")
def test_verify_finds_identical_output(cli: Run, codelet: Path, two_prompts: Path) -> None:
    options = ("--prompts", two_prompts, "--max-tokens", 12, "--gammas", "0,2,5")
    ran = cli("verify", codelet, *options)
    assert ran.status == 0
    assert ran.out == "48 tokens, 2 prompts at each gamma of 2, 5: identical to plain decoding\n"
    found = json.loads(cli("verify", codelet, *options, "--json").out)
    assert found.pop("drafted") > 0
    assert found == {
        "prompts": 2, "tokens": 48, "tolerance": 1e-3, "divergences": [], "unexplained": 0,
    }  # fmt: skip
    # Where nothing was drafted nothing is proved.
    short = ("--max-tokens", 2, "--gammas", "4", "--drafter", "ngram", "--json")
    ran = cli("verify", codelet, "--prompts", two_prompts, *short)
    assert (ran.status, ran.out) == (2, "")
    assert "drafted nothing at gamma 4, so nothing was verified" in ran.err.splitlines()[-1]


@pytest.mark.usefixtures("believe_everything", "opened")
def test_a_wrong_verifier_is_caught(cli: Run, codelet: Path, two_prompts: Path) -> None:
    options = ("--prompts", two_prompts, "--max-tokens", 12, "--gammas", "4")
    ran = cli("verify", codelet, *options)
    assert ran.status == 1
    assert "NOT EXPLAINED by rounding" in ran.out
    # With a tolerance above every margin the same divergences count as near-ties.
    ran = cli("verify", codelet, *options, "--tolerance", 100, "--json")
    found = json.loads(ran.out)
    assert (ran.status, found["unexplained"], len(found["divergences"]) > 0) == (0, 0, True)
    first = found["divergences"][0]
    assert first["margin"] > 1e-3
