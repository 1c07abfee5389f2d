"""A bundle that is not what was built is refused with one line that names the file and a remedy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.ran import Run

FILES = (
    "target/engine.onnx",
    "draft/engine.data",
    "tokenizer.json",
)


@pytest.fixture
def copy(codelet: Path, tmp_path: Path) -> Path:
    """A copy of codelet that a test may break."""
    return Path(shutil.copytree(codelet, tmp_path / "copy"))


def refused(cli: Run, bundle: Path) -> str:
    said: str = cli("generate", bundle, "--prompt", "a").refusal
    return said


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_what_was_built_is_named(cli: Run, copy: Path, name: str) -> None:
    path, data = copy / name, bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    altered = refused(cli, copy)
    path.write_bytes(data[:-1])
    truncated = refused(cli, copy)
    path.unlink()
    missing = refused(cli, copy)
    assert f"{path} is not the file that was built" in altered
    assert f"{path} has {len(data) - 1} bytes, expected {len(data)}" in truncated
    assert f"{path} is missing" in missing
    assert all("specrt build" in line for line in (altered, truncated, missing))


def rewritten(copy: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    path = copy / "manifest.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    return copy


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data.update(format=99), "bundle format 99"),
        (lambda data: data["device"].update(machine="vax"), "was built for vax"),
        (lambda data: data.pop("target"), "manifest.json is not a complete manifest"),
        (lambda data: data.pop("files"), "manifest.json is not a complete manifest"),
    ],
)
def test_a_manifest_of_something_else_is_refused(
    cli: Run, copy: Path, change: Callable[[dict[str, Any]], object], expected: str
) -> None:
    assert expected in refused(cli, rewritten(copy, change))


def test_a_manifest_that_is_not_json_is_refused(cli: Run, copy: Path) -> None:
    (copy / "manifest.json").write_bytes(b"{\xff")
    assert "manifest.json cannot be read" in refused(cli, copy)


def test_a_manifest_that_is_a_pipe_is_not_waited_for(
    cli: Run, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waited_for(*_: object, **__: object) -> str:
        raise AssertionError("the pipe was read")

    place = copy / "manifest.json"
    place.unlink()
    os.mkfifo(place)
    monkeypatch.setattr(Path, "read_text", waited_for)
    assert "manifest.json cannot be read (it is no file)" in refused(cli, copy)


def test_a_folder_without_manifest_is_refused(cli: Run, tmp_path: Path) -> None:
    assert f"{tmp_path} is not a bundle: it has no manifest.json" in refused(cli, tmp_path)
    assert "does not exist; build one with `make engines`" in refused(cli, tmp_path / "none")


@pytest.mark.parametrize("verb", ["inspect", "verify", "bench"])
def test_every_verb_refuses_a_damaged_bundle(
    cli: Run, copy: Path, two_prompts: Path, verb: str
) -> None:
    (copy / "target/engine.data").unlink()
    prompts = () if verb == "inspect" else ("--prompts", two_prompts)
    assert "target/engine.data is missing" in cli(verb, copy, *prompts).refusal
