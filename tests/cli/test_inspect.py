"""`specrt inspect` and `specrt doctor`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from cli.conftest import Run


def test_inspect_shows_the_manifest_and_the_memory(cli: Run, codelet: Path) -> None:
    ran, text = cli("inspect", codelet, "--json"), cli("inspect", codelet)
    assert (ran.status, ran.err, text.status, text.err) == (0, "", 0, "")
    found = json.loads(ran.out)
    memory = found.pop("memory")
    assert found == json.loads((codelet / "manifest.json").read_text(encoding="utf-8"))
    for name in found["files"]:
        assert name in text.out
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
