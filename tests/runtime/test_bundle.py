"""A bundle that is not what was built is refused by name, with what to run."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrt.bundle import Bundle, hash_file
from specrt.errors import BundleError
from specrt.geometry import Geometry
from specrt.manifest import FORMAT, Manifest, ModelRecord, read_manifest

GEOMETRY = Geometry(2, 4, 2, 8, 300, 64, (0, 16))
FILES = {
    "target/engine.onnx": b"target engine",
    "draft/engine.onnx": b"draft engine",
    "tokenizer.json": b"{}",
    "empty.json": b"",
}


def record(role: str) -> ModelRecord:
    return ModelRecord(f"{role}/engine.onnx", GEOMETRY, "llama", 1000, 4000, 4, {"rope": "2/2"})


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "pair"
    for name, data in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    manifest = Manifest(
        format=FORMAT,
        name="pair",
        backend="ort-cpu",
        precision="fp32",
        batch=1,
        max_length=64,
        prefill=16,
        gammas=(0, 2, 4),
        gamma=4,
        eos_token_ids=(2,),
        bos_token_id=None,
        target=record("target"),
        draft=record("draft"),
        versions={"onnxruntime": "1"},
        device={"machine": platform.machine()},
        source="0" * 64,
        files={name: hash_file(folder / name) for name in FILES},
    )
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    return folder


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def refusal(folder: Path) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_what_was_written_is_read(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    assert opened.manifest == read_manifest(bundle)
    assert opened.manifest.target == record("target")
    assert opened.manifest.gammas == (0, 2, 4)
    assert opened.manifest.max_width == 16
    assert opened.manifest.kv_bytes() == 2 * (2 * 2 * 1 * 2 * 64 * 8 * 4)
    assert opened.file("tokenizer.json").read_bytes() == b"{}"


def test_a_bundle_without_a_draft_is_read(bundle: Path) -> None:
    edit(bundle, lambda m: m.update(draft=None))
    assert Bundle.open(bundle).manifest.draft is None


def test_a_field_from_a_later_version_of_the_same_format_is_passed_over(bundle: Path) -> None:
    edit(bundle, lambda m: m.update(costs={}))
    assert Bundle.open(bundle).manifest == read_manifest(bundle)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    said = refusal(tmp_path / "nowhere")
    assert f"{tmp_path / 'nowhere'} does not exist" in said
    assert "make engines" in said


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    said = refusal(tmp_path)
    assert f"{tmp_path} is not a bundle: it has no manifest.json" in said
    assert "specrt build RECIPE" in said


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '{"name": "pair"}', '{"format": 1', "\xff{}"]
)
def test_a_manifest_that_cannot_be_read_is_named(bundle: Path, text: str) -> None:
    (bundle / "manifest.json").write_bytes(text.encode("latin-1"))
    said = refusal(bundle)
    assert f"{bundle / 'manifest.json'} cannot be read" in said
    assert "specrt build RECIPE" in said


@pytest.mark.parametrize("written", [FORMAT + 1, 99, "1", None])
def test_a_newer_format_is_refused_with_both_numbers(bundle: Path, written: object) -> None:
    edit(bundle, lambda m: m.update(format=written))
    said = refusal(bundle)
    assert f"has bundle format {written}, and this specrt reads up to {FORMAT}" in said
    assert "upgrade specrt" in said


def test_a_newer_format_is_refused_before_its_fields_are_read(bundle: Path) -> None:
    (bundle / "manifest.json").write_text(f'{{"format": {FORMAT + 1}}}')
    assert "upgrade specrt" in refusal(bundle)


KEYS = sorted(set(Manifest.__dataclass_fields__) - {"format"})


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named(bundle: Path, key: str) -> None:
    edit(bundle, lambda m: m.pop(key))
    said = refusal(bundle)
    assert f"{bundle / 'manifest.json'} is not a complete manifest" in said
    assert key in said
    assert "specrt build RECIPE" in said


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m["target"].pop("geometry"), "geometry"),
        (lambda m: m["target"]["geometry"].pop("kv_heads"), "kv_heads"),
        (lambda m: m["draft"].update(shape=1), "shape"),
        (lambda m: m["files"]["tokenizer.json"].pop("sha256"), "sha256"),
        (lambda m: m.update(gammas=["four"]), "four"),
        (lambda m: m.update(files=[]), "list"),
    ],
)
def test_a_key_missing_or_wrong_further_in_is_named(
    bundle: Path, change: Callable[[dict[str, Any]], object], named: str
) -> None:
    edit(bundle, change)
    said = refusal(bundle)
    assert "is not a complete manifest" in said
    assert named in said


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    said = refusal(bundle)
    assert f"{bundle / name} is missing; build the bundle again with `specrt build" in said


def test_a_file_that_is_a_folder_is_named(bundle: Path) -> None:
    (bundle / "tokenizer.json").unlink()
    (bundle / "tokenizer.json").mkdir()
    assert str(bundle / "tokenizer.json") in refusal(bundle)


@pytest.mark.parametrize("name", ["target/engine.onnx", "draft/engine.onnx"])
def test_a_truncated_file_is_named_with_both_sizes(bundle: Path, name: str) -> None:
    data = FILES[name]
    (bundle / name).write_bytes(data[:-1])
    said = refusal(bundle)
    assert f"{bundle / name} has {len(data) - 1} bytes, expected {len(data)}" in said
    assert "specrt build RECIPE" in said


@pytest.mark.parametrize("name", [name for name, data in FILES.items() if data])
@pytest.mark.parametrize("place", ["first", "last"])
def test_one_altered_byte_is_found(bundle: Path, name: str, place: str) -> None:
    data = bytearray(FILES[name])
    data[0 if place == "first" else -1] ^= 1
    (bundle / name).write_bytes(data)
    said = refusal(bundle)
    assert f"{bundle / name} is not the file that was built (sha256 " in said
    assert "specrt build RECIPE" in said


@pytest.mark.parametrize("machine", ["aarch64-elsewhere", None])
def test_another_machine_is_named_with_this_one(bundle: Path, machine: str | None) -> None:
    edit(bundle, lambda m: m.update(device={"machine": machine}))
    said = refusal(bundle)
    assert f"was built for {machine}, and this machine is {platform.machine()}" in said
    assert "specrt build RECIPE" in said


def test_files_larger_than_one_read_are_hashed_whole(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"a" * (3 << 20))
    whole = hash_file(path)
    with path.open("r+b") as stream:
        stream.seek((2 << 20) + 5)
        stream.write(b"b")
    assert whole.bytes == hash_file(path).bytes == 3 << 20
    assert whole.sha256 != hash_file(path).sha256
