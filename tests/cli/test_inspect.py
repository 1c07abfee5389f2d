"""`specrt inspect` and `specrt doctor`."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import Run
from support.kernels import instruction_sets


def test_inspect_shows_the_manifest_and_the_memory(cli: Run, codelet: Path, engines: Path) -> None:
    checkpoints = engines / "codelet" / "checkpoint"
    ran, text = cli("inspect", codelet, "--json"), cli("inspect", codelet)
    assert (ran.status, ran.err, text.status, text.err) == (0, "", 0, "")
    found = json.loads(ran.out)
    memory = found.pop("memory")
    assert found == json.loads((codelet / "manifest.json").read_text(encoding="utf-8"))
    assert found["versions"]["kernels"] in text.out
    for what in ("ends at", "starts with"):
        assert re.search(rf"{what} +token 0 '<.*end.*>'", text.out), text.out
    for name in found["files"]:
        assert name in text.out
    for role, origin in found["origins"].items():
        ((name, sha256),) = origin["files"].items()
        weights = checkpoints / role / name
        assert sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()
        assert f"{role}: {origin['formats']}" in text.out
        assert re.search(rf"{name}, sha256 {sha256}", text.out)
    assert memory["weight_bytes"] == sum(found[m]["weight_bytes"] for m in ("target", "draft"))
    assert memory["total_bytes"] == memory["weight_bytes"] + memory["kv_bytes"]


def test_doctor_gives_remedies(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "torch" else real(n))
    ran, text = cli("doctor", "--json"), cli("doctor")
    assert (ran.status, text.status, text.err) == (0, 0, "")
    found = json.loads(ran.out)
    assert list(found) == ["machine", "libraries", "abilities"]
    assert "ok  run ort-cpu bundles" in text.out
    assert "--  torch" in text.out
    torch = next(f for f in found["libraries"] if f["name"] == "torch")
    assert (torch["works"], torch["remedy"]) == (False, "make setup-export")


@pytest.mark.parametrize("name", ["scalar", "sse"])
def test_kernels_that_are_forced_are_named_or_refused(codelet: Path, name: str) -> None:
    """In a process of its own: the choice is made once."""
    both = ["doctor"], ["generate", str(codelet), "--prompt", "a", "--max-tokens", "2"]
    code = f"import sys; from specrt.cli import run; sys.exit(max(map(run, {[*both]})))"
    ran = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True,
        env={**os.environ, "SPECRT_KERNELS": name},
    )  # fmt: skip
    (line,) = [line for line in ran.stdout.splitlines() if "CPU kernels" in line]
    if name == "scalar":
        assert "forced by SPECRT_KERNELS" in line
        assert ran.returncode == 0, ran.stderr
        return
    for text in (line, ran.stderr):
        assert f"'{name}'" in text
        assert all(known in text for known in instruction_sets())
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
