"""A bundle is whole or not there: built the same twice, never half-made, refused with a reason."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

import specrt
from specrt.bundle import Bundle
from specrt.errors import BuildError, CheckpointError, ExportError, RequestError, SpecrtError
from specrt.params import SamplingParams
from specrt_export.builder import atomic_folder, build, is_fresh
from specrt_export.portable.graph import GEOMETRY
from specrt_export.recipe import Recipe, read_recipe


def hashes(bundle: Path) -> dict[str, str]:
    return {name: f.sha256 for name, f in Bundle.open(bundle).manifest.files.items()}


def leftovers(out: Path) -> list[str]:
    """Whatever lies beside a bundle."""
    return sorted(p.name for p in out.parent.iterdir() if p != out) if out.parent.exists() else []


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def complete(bundle: Path, gamma: int | None = None) -> list[int]:
    with specrt.load(bundle, threads=1) as generator:
        return generator.generate(
            "def f(x):\n", SamplingParams(max_tokens=8), gamma=gamma
        ).token_ids


def test_building_twice_gives_the_same_files(small: Path, out: Path) -> None:
    recipe = read_recipe(small)
    stages: list[tuple[str, float]] = []
    build(recipe, out, lambda stage, done: stages.append((stage, done)))
    build(recipe, out.with_name("again"))
    first, second = Bundle.open(out).manifest, Bundle.open(out.with_name("again")).manifest
    assert first == second
    assert set(first.files) == {
        "target/engine.onnx", "target/engine.data", "draft/engine.onnx", "draft/engine.data",
        "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    }  # fmt: skip
    assert (first.gammas, first.gamma, first.max_width) == ((0, 1, 3), 3, 64)
    assert [stage for stage, _ in stages] == [
        "read checkpoints", "compile target", "check target", "compile draft", "check draft",
        "write manifest",
    ]  # fmt: skip
    shares = [done for _, done in stages]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert leftovers(out) == ["again"]
    assert complete(out) == complete(out, gamma=0)


def test_a_bundle_is_stale_once_what_it_was_built_from_changes(small: Path, out: Path) -> None:
    recipe = read_recipe(small)
    assert not is_fresh(recipe, out)
    build(recipe, out)
    assert is_fresh(recipe, out)

    small.write_text(small.read_text(encoding="utf-8") + "# a comment\n", encoding="utf-8")
    assert is_fresh(read_recipe(small), out)
    assert not is_fresh(replace(recipe, engine=replace(recipe.engine, gamma=1)), out)

    graph = small.parent / "draft.onnx"
    data = graph.read_bytes()
    graph.write_bytes(data + b"\x00")
    assert not is_fresh(recipe, out)
    graph.write_bytes(data)
    assert is_fresh(recipe, out)

    weights = small.parent / "target" / "model.safetensors"
    facts = weights.stat()
    os.utime(weights, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert not is_fresh(recipe, out)
    os.utime(weights, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert is_fresh(recipe, out)

    (out / "draft" / "engine.data").unlink()
    assert not is_fresh(recipe, out)


SLOW_BUILD = """
import sys, time
from pathlib import Path
from specrt_export.builder import build
from specrt_export.recipe import read_recipe

def hook(stage, done):
    if stage == "check draft":
        print("there", flush=True)
        time.sleep(60)

build(read_recipe(Path(sys.argv[1])), Path(sys.argv[2]), hook)
"""


def test_a_killed_build_leaves_the_bundle_and_the_next_sweeps_up(small: Path, out: Path) -> None:
    recipe = read_recipe(small)
    build(recipe, out)
    before = hashes(out)
    command = [sys.executable, "-c", SLOW_BUILD, str(small), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        process.send_signal(signal.SIGKILL)
    (left,) = leftovers(out)
    assert left.startswith(f".small.{process.pid}.")
    assert left.endswith(".part")
    assert hashes(out) == before
    assert complete(out)
    build(recipe, out)
    assert leftovers(out) == []
    assert hashes(out) == before


def test_a_build_killed_while_renaming_gives_its_bundle_back(out: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    moved = out.parent / f".small.{dead.pid}.a1b2c3d4.old"
    moved.mkdir(parents=True)
    (moved / "manifest.json").write_text("the old one", encoding="utf-8")
    with pytest.raises(KeyboardInterrupt), atomic_folder(out):
        raise KeyboardInterrupt
    assert (out / "manifest.json").read_text(encoding="utf-8") == "the old one"
    assert leftovers(out) == []


def test_what_a_live_build_writes_is_left_alone(out: Path) -> None:
    other = out.parent / f".small.{os.getppid()}.a1b2c3d4.part"
    other.mkdir(parents=True)
    with atomic_folder(out) as folder:
        (folder / "file").touch()
    assert leftovers(out) == [other.name]
    assert (out / "file").exists()


@contextmanager
def unchanged(out: Path) -> Iterator[None]:
    """Hold that a bundle is as it was, with nothing beside it."""
    before = hashes(out)
    yield
    assert hashes(out) == before
    assert leftovers(out) == []


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file grow past a size; what writes more is refused as by a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_fills_while_an_engine_is_written_loses_nothing(small: Path, out: Path) -> None:
    recipe = read_recipe(small)
    build(recipe, out)
    told = r"target/engine\.data could not be written, with \d+ MiB free on its disk"
    with unchanged(out), largest_file(1 << 20), pytest.raises(BuildError, match=told):
        build(recipe, out)


def test_a_disk_that_fills_while_the_rest_is_written_loses_nothing(
    small: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = read_recipe(small)
    build(recipe, out)

    def full(source: Path, place: Path) -> None:
        # As shutil.copyfile does it: the source first, then what was being written.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(place))

    monkeypatch.setattr(shutil, "copyfile", full)
    with unchanged(out), pytest.raises(BuildError, match=r"No space left .*\.part/.* is as it was"):
        build(recipe, out)


def test_a_disk_that_is_too_small_is_refused_before_any_work(
    small: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 9 << 20))
    stages: list[str] = []
    with pytest.raises(BuildError, match=r"has 9 MiB free, and the build needs about \d+ MiB"):
        build(read_recipe(small), out, lambda stage, done: stages.append(stage))
    assert stages == ["read checkpoints"]
    assert leftovers(out) == []


def refusal(recipe: Recipe, out: Path, kind: type[SpecrtError]) -> str:
    """Build what must be refused; return why, once nothing was left behind."""
    with pytest.raises(kind) as refused:
        build(recipe, out)
    assert not out.exists()
    assert leftovers(out) == []
    said = str(refused.value)
    assert "\n" not in said
    return said


def test_a_draft_of_another_vocabulary_is_refused(small: Path, out: Path) -> None:
    vocabulary: dict[str, int] = {}

    def swap(data: dict[str, Any]) -> None:
        vocabulary.update(data["model"]["vocab"])
        a, b = (next(t for t, i in vocabulary.items() if i == index) for index in (300, 301))
        data["model"]["vocab"][a], data["model"]["vocab"][b] = 301, 300

    edited(small.parent / "draft" / "tokenizer.json", swap)
    a, b = (next(t for t, i in vocabulary.items() if i == index) for index in (300, 301))
    said = refusal(read_recipe(small), out, CheckpointError)
    assert f"differ at token id 300: {a!r} in" in said
    assert f"{b!r} in {small.parent / 'draft'}" in said


def add_token(data: dict[str, Any]) -> None:
    token = {**data["added_tokens"][0], "id": 8192, "content": "<|one too many|>"}
    data["added_tokens"].append(token)


def test_a_tokenizer_larger_than_its_model_is_refused(small: Path, out: Path) -> None:
    for role in ("target", "draft"):
        edited(small.parent / role / "tokenizer.json", add_token)
    said = refusal(read_recipe(small), out, CheckpointError)
    assert "token id 8192 ('<|one too many|>'), but the model has vocab_size 8192" in said


def test_a_tokenizer_larger_than_a_lone_model_is_refused(draftless: Recipe, out: Path) -> None:
    edited(draftless.folder / "target" / "tokenizer.json", add_token)
    said = refusal(draftless, out, CheckpointError)
    assert "token ids up to 8192" in said
    assert "8192" in said


def test_a_target_alone_decodes_plainly(draftless: Recipe, out: Path, small: Path) -> None:
    build(draftless, out)
    manifest = Bundle.open(out).manifest
    assert (manifest.gammas, manifest.gamma, manifest.draft) == (tuple(range(9)), 0, None)
    assert not (out / "draft").exists()
    assert complete(out) == complete(out, gamma=0)
    with (
        specrt.load(out) as generator,
        pytest.raises(RequestError, match=r"gamma 9 .*built for: 0"),
    ):
        generator.generate("x", gamma=9)


def test_truncated_weights_are_refused(small: Path, out: Path) -> None:
    weights = small.parent / "draft" / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 100)
    said = refusal(read_recipe(small), out, CheckpointError)
    assert str(weights) in said
    assert "it is truncated" in said


def test_a_missing_graph_is_refused_with_the_command_that_makes_it(small: Path, out: Path) -> None:
    (small.parent / "draft.onnx").unlink()
    said = refusal(read_recipe(small), out, BuildError)
    assert f"{small.parent / 'draft.onnx'} does not exist; make it with `specrt export " in said
    assert "remove `draft.graph`" in said


def test_a_graph_that_is_none_is_refused(small: Path, out: Path) -> None:
    path = small.parent / "draft.onnx"
    path.write_bytes(b"not a graph at all")
    assert f"{path} is not an ONNX graph" in refusal(read_recipe(small), out, ExportError)
    path.write_bytes(b"")
    assert "does not describe its geometry" in refusal(read_recipe(small), out, ExportError)


def test_a_missing_checkpoint_is_refused(small: Path, out: Path) -> None:
    shutil.rmtree(small.parent / "target")
    small.write_text(
        small.read_text(encoding="utf-8").replace('"target"', '"./target"', 1), encoding="utf-8"
    )
    assert "target" in refusal(read_recipe(small), out, CheckpointError)


def test_a_checkpoint_without_tokenizer_is_refused(small: Path, out: Path) -> None:
    (small.parent / "target" / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refusal(read_recipe(small), out, CheckpointError)


def test_a_context_longer_than_the_models_is_refused(small: Path, out: Path) -> None:
    text = small.read_text(encoding="utf-8").replace("max_length = 128", "max_length = 2049")
    small.write_text(text, encoding="utf-8")
    said = refusal(read_recipe(small), out, BuildError)
    assert "max_length 2049 is more than the 2048 positions" in said


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_context_too_long_for_either_is_refused_before_any_work(
    small: Path, out: Path, role: str
) -> None:
    graph = onnx.load(small.parent / f"{role}.onnx", load_external_data=False)
    for entry in graph.metadata_props:
        if entry.key == GEOMETRY:
            entry.value = json.dumps({**json.loads(entry.value), "max_positions": 100})
    (small.parent / f"{role}.onnx").write_bytes(graph.SerializeToString())
    stages: list[str] = []
    told = f"max_length 128 is more than the 100 positions {small.parent / role} was trained for"
    with pytest.raises(BuildError, match=re.escape(told)):
        build(read_recipe(small), out, lambda stage, done: stages.append(stage))
    assert stages == ["read checkpoints"]
    assert leftovers(out) == []


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        (None, (0,)),
        ({}, (0,)),
        ({"eos_token_id": 5}, (5,)),
        ({"eos_token_id": [0, 5, 7]}, (0, 5, 7)),
        ({"eos_token_id": None, "bos_token_id": None}, (0,)),
    ],
    ids=["no file", "nothing said", "one", "several", "null"],
)
def test_ends_come_from_the_generation_config_or_the_config(
    draftless: Recipe, out: Path, settings: dict[str, Any] | None, ends: tuple[int, ...]
) -> None:
    path = draftless.folder / "target" / "generation_config.json"
    if settings is None:
        path.unlink()
    else:
        path.write_text(json.dumps(settings), encoding="utf-8")
    build(draftless, out)
    manifest = Bundle.open(out).manifest
    assert manifest.eos_token_ids == ends
    assert manifest.bos_token_id == 0
    assert ("generation_config.json" in manifest.files) == (settings is not None)


def test_a_generation_config_that_is_not_json_is_refused(draftless: Recipe, out: Path) -> None:
    (draftless.folder / "target" / "generation_config.json").write_text("{", encoding="utf-8")
    assert "generation_config.json is not JSON" in refusal(draftless, out, CheckpointError)
