"""`specrt pull`, `list` and `rm`, and names in place of paths, against a hub on this machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from specrt.bundle import read_manifest
from specrt.cli.cache import bundle_of
from specrt.cli.names import HubName, checkpoint_source, hub_name
from specrt.errors import SpecrtError
from specrt_export.checkpoint.hub_cache import repository
from support.bundles import listed
from support.loopback_hub import LoopbackHub, served

MODEL = {"config.json": b'{"model_type": "llama", "max_position_embeddings": 64}'}
MODEL |= {"tokenizer.json": b"{}", "model.safetensors": bytes(1000)}
NAMES = ("org/tiny", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B")
BYTES = sum(map(len, MODEL.values()))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    monkeypatch.chdir(tmp_path)
    models = dict.fromkeys(NAMES, MODEL)
    models["org/gguf"] = {"a-Q8_0.gguf": b"GGUF1", "a-IQ3_M.gguf": b"GGUF2"}
    with served(LoopbackHub(models)) as hub:
        for key, value in {"HF_ENDPOINT": hub.address, "NO_PROXY": "127.0.0.1"}.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield hub


def test_a_pair_is_pulled_listed_and_removed(cli: Run, hub: LoopbackHub) -> None:
    pulled = cli("pull", "qwen3-1.7b", "org/gguf:Q8_0")
    assert pulled.status == 0
    assert [line.split(": ")[0] for line in pulled.out.splitlines()] == [
        "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B", "org/gguf:Q8_0",
    ]  # fmt: skip
    assert "downloading 0.0 MB: Qwen/Qwen3-1.7B and Qwen/Qwen3-0.6B and org/gguf" in pulled.err
    sent = len(hub.sent)
    assert cli("pull", "qwen3-1.7b").out.splitlines() == pulled.out.splitlines()[:2]
    assert len(hub.sent) == sent
    rows = {row["name"]: row for row in map(json.loads, cli("list", "--json").out.splitlines())}
    assert (rows["qwen3-1.7b"]["weight_bytes"], rows["qwen3-1.7b"]["whole"]) == (2 * BYTES, True)
    assert (rows["qwen3-8b"]["weight_bytes"], rows["qwen3-8b"]["whole"]) == (BYTES, False)
    assert rows["org/gguf"]["whole"]
    lines = {line.split()[0]: line for line in cli("list").out.splitlines()}
    assert "in part" in lines["qwen3-8b"]
    assert cli("pull", "qwen3-4b").status == 0
    assert "asked about at a terminal only; add --yes" in cli("rm", "qwen3-1.7b").err
    removed = cli("rm", "qwen3-1.7b", "--yes")
    assert f"removed qwen3-1.7b: 0.0 MB ({BYTES + 40} bytes)" in removed.out
    assert "Qwen/Qwen3-0.6B stays: qwen3-4b uses it" in removed.err
    assert not repository("Qwen/Qwen3-1.7B").exists()
    assert f"({2 * BYTES + 80} bytes)" in cli("rm", "qwen3-4b", "--yes").out
    assert "(5 bytes)" in cli("rm", "org/gguf:Q8_0", "--yes").out
    assert "nothing of qwen3-1.7b is here" in cli("rm", "qwen3-1.7b", "--yes").refusal


def test_what_is_asked_is_done_only_after_yes(
    cli: Run, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("pull", "org/tiny")
    asked = []
    monkeypatch.setattr("specrt.cli.models.click.confirm", lambda *_, **__: asked.append(1))
    assert cli("rm", "org/tiny", terminal=True).status == 0
    assert asked == [1]
    assert not repository("org/tiny").exists()


@pytest.fixture
def built(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The recipes that were built, by a builder that leaves bundles of no engines."""
    plans: list[Any] = []

    def build(plan: Any, place: Path, **_: object) -> list[str]:
        plans.append(plan)
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        listed(place)
        return []

    monkeypatch.setattr("specrt.cli.cache.build_bundle", build)
    monkeypatch.setattr("specrt.doctor.missing_exporter", lambda: None)
    return plans


def test_a_name_is_fetched_and_built_once(hub: LoopbackHub, built: list[Any]) -> None:
    for name in ("org/tiny", "hf.co/org/tiny", "https://huggingface.co/org/tiny"):
        place = bundle_of(Path(name))
        asked = hub.asked
        assert read_manifest(place)
        assert place.name.startswith("tiny-")
    assert [plan.target.checkpoint for plan in built] == ["org/tiny"]
    pair = bundle_of(Path("qwen3-1.7b"))
    assert hub.asked > asked
    assert built[1].draft.checkpoint == "Qwen/Qwen3-0.6B"
    assert built[1].engine.precision == "int4"
    asked = hub.asked
    assert bundle_of(Path("qwen3-1.7b")) == pair
    assert (hub.asked, len(built)) == (asked, 2)
    with pytest.raises(SpecrtError, match=r"--draft is 'org/tiny', and qwen3-1.7b is not a check"):
        bundle_of(Path("qwen3-1.7b"), Path("org/tiny"))
    own = listed(Path("engines/build/qwen3-1.7b"))
    assert bundle_of(Path("qwen3-1.7b")) == own
    assert bundle_of(Path("org/tiny"), Path("Qwen/Qwen3-0.6B")) != place
    assert built[2].draft.checkpoint == "Qwen/Qwen3-0.6B"


def test_nothing_is_fetched_where_nothing_can_build_it(
    cli: Run, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrt.doctor.missing_exporter", lambda: "torch")
    for name in ("org/tiny", "qwen3-0.6b", "org/gguf:Q8_0"):
        assert "needs torch" in cli("generate", name, "--prompt", "a").refusal
    assert "needs torch" in cli("build", "qwen3-0.6b").refusal
    assert hub.sent == []


PATHS = ("here/model", "/abs/model", "./org/model", "a/b/c", "codelet", "org/m.gguf", "../org/m")
HUB = {
    "org/model": HubName("org/model"),
    "hf.co/org/model:Q4_K_M": HubName("org/model", "Q4_K_M"),
    "https://huggingface.co/org/model-GGUF": HubName("org/model-GGUF"),
    "org/model:Q8_0": HubName("org/model", "Q8_0"),
}


def test_what_is_a_name_and_what_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    assert {name: hub_name(name) for name in PATHS} == dict.fromkeys(PATHS)
    assert {name: hub_name(name) for name in HUB} == HUB
    assert checkpoint_source("qwen3-1.7b") == "Qwen/Qwen3-1.7B"
    for name in ("qwen3-1.7b", "org/model"):  # a folder wins
        Path(name).mkdir(parents=True)
        assert hub_name(name) is None
        assert checkpoint_source(name) == name


def test_mistyped_names_are_refused_with_the_nearest(cli: Run, hub: LoopbackHub) -> None:
    assert "did you mean 'qwen3-4b'?" in cli("pull", "qwen3-4").refusal
    assert "did you mean 'qwen3-4b'?" in cli("generate", "qwen34b", "--prompt", "a").refusal
    assert "did you mean 'Qwen/Qwen3-0.6B'?" in cli("pull", "Qwen/Qwen3-06B").refusal
    assert "there is org/gguf:Q8_0" in cli("pull", "org/gguf:Q4_K_M").refusal
    assert "name one, there is org/gguf:Q8_0" in cli("pull", "hf.co/org/gguf").refusal
    assert hub.sent == []


LEAN = """
import sys
from importlib.abc import MetaPathFinder

class Hiding(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"huggingface_hub", "filelock", "ml_dtypes", "onnx", "torch"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hiding())
from specrt.cli import run
status = run(["list"]), run(["rm", "qwen3-4b", "--yes"]), run(["pull", "qwen3-4b"])
sys.exit(status != (0, 2, 2))
"""


def test_listing_needs_nothing_but_the_runtime(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAN], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "qwen3-4b" in done.stdout
    nothing, install = done.stderr.splitlines()
    assert "nothing of qwen3-4b is here" in nothing
    assert "needs huggingface_hub: `pip install huggingface_hub`" in install
