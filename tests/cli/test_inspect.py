"""`specrt inspect` and `specrt doctor`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from cli.conftest import Run
from specrt.bundle import Bundle


def test_inspect_shows_the_manifest_and_the_memory(cli: Run, codelet: Path) -> None:
    ran, text = cli("inspect", codelet, "--json"), cli("inspect", codelet)
    assert (ran.status, ran.err, text.status, text.err) == (0, "", 0, "")
    found = json.loads(ran.out)
    memory = found.pop("memory")
    assert found == json.loads((codelet / "manifest.json").read_text(encoding="utf-8"))
    manifest = Bundle.open(codelet).manifest
    for name, record in manifest.files.items():
        assert name in text.out
        assert f"{record.bytes:,}" in text.out
    assert manifest.draft is not None
    assert memory == {
        "weight_bytes": manifest.target.weight_bytes + manifest.draft.weight_bytes,
        "kv_bytes": 2 * 4 * 2048 * sum(
            m.geometry.layers * m.geometry.kv_heads * m.geometry.head_dim
            for m in (manifest.target, manifest.draft)
        ),
        "total_bytes": memory["weight_bytes"] + memory["kv_bytes"],
    }  # fmt: skip


def test_doctor_gives_remedies(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else real(name)
    )
    ran, text = cli("doctor", "--json"), cli("doctor")
    assert (ran.status, text.status, text.err) == (0, 0, "")
    found = json.loads(ran.out)
    heads = [line for line in text.out.splitlines() if not line.startswith(" ")]
    assert heads == list(found) == ["machine", "libraries", "abilities"]
    assert "ok  run ort-cpu bundles" in text.out
    assert "--  torch" in text.out
    torch = next(f for f in found["libraries"] if f["name"] == "torch")
    assert (torch["works"], torch["remedy"]) == (False, 'pip install "specrt[export]"')
    exports = next(f for f in found["abilities"] if f["name"] == "export checkpoints")
    assert (exports["works"], exports["found"]) == (False, "no")
