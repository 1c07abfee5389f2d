"""Bundles built from GGUF files, target and draft."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf", exc_type=ImportError)

from click.testing import CliRunner

import specrt
from portable.zoo import BARE, exported
from specrt.cli.export import command as export
from specrt.cli.generate import command as generate
from specrt.errors import CheckpointError, SpecrtError
from specrt.params import SamplingParams
from specrt.text.tokenizer import Tokenizer
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.portable import exporter
from specrt_export.portable.attachment import attach_graph, is_attached
from specrt_export.recipe.recipe import read_recipe
from support import gguf_files
from support.builds import build
from support.gguf_files import SCORED_VOCABULARY, brain, half, write_model

pytestmark = pytest.mark.export


@pytest.fixture
def target(tmp_path: Path) -> Any:
    """A model whose weights fp16 holds, in a folder with a draft."""
    model = gguf_files.wide("llama").to(torch.float16).to(torch.float32)
    values: dict[str, Any] = {"vocabulary": SCORED_VOCABULARY}
    write_model(tmp_path / "target.gguf", model, half, **values)
    write_model(tmp_path / "draft.gguf", gguf_files.wide("qwen3"), brain, **values)
    return model


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Return the likeliest tokens, one after another, up to the EOS token."""
    with torch.no_grad():
        for _ in range(count):
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-count:]


def test_files_in_place_of_a_bundle_give_transformers_text(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first use builds, the second finds what the first left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("specrt.cli.build.tune_quickly", lambda _: (None, None))

    def recorded(checkpoint: Checkpoint, out: Path) -> Any:
        kind = checkpoint.config["model_type"]
        return attach_graph(exported(f"gguf-{kind}{BARE}").graph, checkpoint, out)

    monkeypatch.setattr(exporter, "export_graph", recorded)
    files = [str(tmp_path / "target.gguf"), "--draft", str(tmp_path / "draft.gguf")]
    asked = ["--prompt", "hello world, the", "--max-tokens", "40", "--ignore-eos", "--json"]
    made = []
    for gamma in ("0", "3"):
        line = [*files, *asked, "--gamma", gamma, "--threads", "1"]
        ran = CliRunner().invoke(generate, line, obj=False)
        assert ran.exit_code == 0, ran.output
        made.append(json.loads(ran.stdout)["token_ids"])
        assert ("compare target with transformers" in ran.stderr) == (gamma == "0")
        assert (f"`rm -r {tmp_path}/cache/specrt/" in ran.stderr) == (gamma == "0")
    (out,) = (tmp_path / "cache" / "specrt" / "bundles").glob("[!.]*")
    ids = Tokenizer(out / "tokenizer.json").encode("hello world, the")
    assert ids[0] == 1
    assert made == [greedy(target, ids, 40)] * 2


@pytest.mark.parametrize("recorded", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_graph_of_a_file_has_no_weights_and_builds_where_nothing_exports(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    command = [str(tmp_path / "target.gguf"), "--out", str(tmp_path / "graph.onnx")]
    refused = CliRunner().invoke(export, command)
    assert isinstance(refused.exception, SpecrtError)
    assert "--config-only" in str(refused.exception)
    if recorded:
        shutil.copyfile(exported(f"gguf-llama{BARE}").graph, tmp_path / "graph.onnx")
    else:
        assert CliRunner().invoke(export, [*command, "--config-only"]).exit_code == 0
    assert not is_attached(tmp_path / "graph.onnx")
    monkeypatch.setitem(sys.modules, "specrt_export.portable.exporter", None)
    monkeypatch.setattr("specrt.doctor.missing_exporter", lambda: "torch")
    recipe, stages = tmp_path / "recipe.toml", list[str]()
    for name, engine in (("target", "max_length = 128\nprefill = 32\n"), ("draft", "")):
        source = f'[target]\ncheckpoint = "{name}.gguf"\ngraph = "graph.onnx"\n'
        recipe.write_text(f"{source}[engine]\n{engine}", encoding="utf-8")
        plan = read_recipe(recipe)
        if name == "draft":
            with pytest.raises(CheckpointError, match=r"holds no weight|of one model"):
                build(plan, tmp_path / "other")
        else:
            build(plan, tmp_path / "bundle", lambda stage, _: stages.append(stage))
    assert {"attach target", "compare target with transformers"} <= set(stages)
    assert "export target" not in stages
    with specrt.load(tmp_path / "bundle", threads=1) as generator:
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        text = generator.generate([7, 8, 9], params).token_ids
    assert text == greedy(target, [7, 8, 9], 20)
