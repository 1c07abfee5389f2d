"""What a build may replace, and what it must not be built from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specrt.errors import BuildError, CheckpointError
from specrt_export import builder as room
from specrt_export.builder import atomic_folder, build
from specrt_export.recipe import read_recipe


def put(out: Path, text: str) -> None:
    with atomic_folder(out) as folder:
        (folder / "manifest.json").write_text(text, encoding="utf-8")


def test_only_a_bundle_or_an_empty_folder_is_replaced(small: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years", encoding="utf-8")
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "link").symlink_to(home)
    for out in (home, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(BuildError, match=r"exists and is not a bundle; .*--out"):
            build(read_recipe(small), out)
    assert (home / "thesis.txt").read_text(encoding="utf-8") == "years"
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_what_a_build_reads_is_never_replaced(small: Path) -> None:
    (small.parent / "manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(BuildError, match="which the build reads"):
        build(read_recipe(small), small.parent)
    assert small.is_file()


@pytest.mark.parametrize("kind", ["graph", "calibration"])
def test_a_graph_or_a_text_inside_a_bundle_is_never_replaced(
    small: Path, engines: Path, out: Path, kind: str
) -> None:
    out.mkdir(parents=True)
    (out / "manifest.json").write_text("{}", encoding="utf-8")
    name = {"graph": "target.onnx", "calibration": "text.jsonl"}[kind]
    shutil.copy(engines / "codelet" / "calibration.jsonl", small.parent / "text.jsonl")
    shutil.move(small.parent / name, out / name)
    text = small.read_text(encoding="utf-8").replace("[engine]", '[engine]\nprecision = "int8"')
    text += '[quality]\ncalibration = "text.jsonl"\n'
    small.write_text(text.replace(f'"{name}"', f'"{out / name}"'), encoding="utf-8")
    with pytest.raises(BuildError, match=f"holds .*{name}, which the build reads"):
        build(read_recipe(small), out)
    assert (out / name).is_file()


@pytest.mark.parametrize("exchange", [True, False], ids=["in one step", "by two renames"])
def test_a_bundle_changes_places_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(room, "_exchange", lambda first, second: False)
    out = tmp_path / "m[1]"
    for text in ("first", "second", "third"):
        put(out, text)
        assert (out / "manifest.json").read_text(encoding="utf-8") == text
        assert [p.name for p in tmp_path.iterdir()] == ["m[1]"]


def test_a_rename_that_fails_gives_the_bundle_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "bundle"
    put(out, "first")
    rename, calls = Path.rename, []

    def second_fails(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(room, "_exchange", lambda first, second: False)
    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(KeyboardInterrupt):
        put(out, "second")
    assert (out / "manifest.json").read_text(encoding="utf-8") == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def test_two_builds_of_one_name_do_not_share_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    with atomic_folder(out) as first, atomic_folder(out) as second:
        assert first != second
        (first / "manifest.json").write_text("first", encoding="utf-8")
        (second / "manifest.json").write_text("second", encoding="utf-8")
    assert (out / "manifest.json").read_text(encoding="utf-8") == "first"


@pytest.mark.parametrize("suffix", ["part", "old"])
def test_what_a_bundle_with_a_longer_name_left_is_not_taken(tmp_path: Path, suffix: str) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f".llama3.{dead.pid}.{os.getpid()}.a1b2c3d4.{suffix}"
    left.mkdir()
    (left / "manifest.json").write_text("theirs", encoding="utf-8")
    with atomic_folder(tmp_path / "llama3") as folder:
        assert not (tmp_path / "llama3").exists()
        (folder / "manifest.json").write_text("mine", encoding="utf-8")
    assert (left / "manifest.json").read_text(encoding="utf-8") == "theirs"
    with atomic_folder(tmp_path / f"llama3.{dead.pid}"):
        pass
    assert (left / "manifest.json").exists(), "its owner is this process, which lives"


def test_a_graph_of_another_checkpoint_is_refused(small: Path, out: Path, engines: Path) -> None:
    other = engines / "codelet" / "portable" / "target.onnx"
    shutil.copyfile(other, small.parent / "target.onnx")
    with pytest.raises(CheckpointError, match=r"exported from another checkpoint .*specrt export"):
        build(read_recipe(small), out)
    assert not out.exists()


def test_a_checkpoint_saved_again_with_other_offsets_is_refused(small: Path, out: Path) -> None:
    weights = small.parent / "target" / "model.safetensors"
    data = weights.read_bytes()
    size = int.from_bytes(data[:8], "little")
    longer = data[8 : 8 + size] + b" " * 64
    weights.write_bytes(len(longer).to_bytes(8, "little") + longer + data[8 + size :])
    with pytest.raises(CheckpointError, match="exported from another checkpoint"):
        build(read_recipe(small), out)
