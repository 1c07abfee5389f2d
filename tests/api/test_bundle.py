"""A bundle that is not what was built is refused by name, with what to run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specrt.bundle import FORMAT, Bundle, Geometry, Manifest, ModelRecord, hash_file, read_manifest
from specrt.errors import BundleError

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


def rebuild(folder: Path) -> str:
    """Return a refusal whose remedy is to build the bundle again."""
    said = refusal(folder)
    assert "specrt build RECIPE" in said
    return said


def test_what_was_written_is_read(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    assert opened.manifest == read_manifest(bundle)
    assert opened.manifest.target == record("target")
    assert opened.manifest.gammas == (0, 2, 4)
    assert opened.manifest.max_width == 16
    assert opened.manifest.kv_bytes() == 2 * (2 * 2 * 1 * 2 * 64 * 8 * 4)
    assert opened.file("tokenizer.json").read_bytes() == b"{}"
    edit(bundle, lambda m: m.update(costs={}))  # a field of a later version of this format
    assert Bundle.open(bundle).manifest == opened.manifest
    edit(bundle, lambda m: m.update(draft=None, gamma=0))
    assert Bundle.open(bundle).manifest.draft is None


def test_what_is_no_bundle_is_named(tmp_path: Path) -> None:
    said = refusal(tmp_path / "nowhere")
    assert f"{tmp_path / 'nowhere'} does not exist" in said
    assert "make engines" in said
    assert f"{tmp_path} is not a bundle: it has no manifest.json" in rebuild(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "3", "null", '{"name": "pair"}', '{"format": 1', "\xff{}"),
        pytest.param("[" * 100_000, id="deep"),
        pytest.param('{"format": ' + "1" * 5000 + "}", id="long number"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_named(bundle: Path, text: str) -> None:
    (bundle / "manifest.json").write_bytes(text.encode("latin-1"))
    assert f"{bundle / 'manifest.json'} cannot be read" in rebuild(bundle)


def test_a_manifest_that_is_a_pipe_is_not_waited_for(bundle: Path) -> None:
    (bundle / "manifest.json").unlink()
    os.mkfifo(bundle / "manifest.json")
    assert "manifest.json cannot be read (it is no file)" in rebuild(bundle)


def test_a_newer_format_is_refused_before_its_fields_are_read(bundle: Path) -> None:
    (bundle / "manifest.json").write_text(f'{{"format": {FORMAT + 1}}}')
    said = refusal(bundle)
    assert f"has bundle format {FORMAT + 1}, and this specrt reads up to {FORMAT}" in said
    assert "upgrade specrt" in said


@pytest.mark.parametrize("key", sorted(set(Manifest.__dataclass_fields__) - {"format"}))
def test_a_missing_key_is_named(bundle: Path, key: str) -> None:
    edit(bundle, lambda m: m.pop(key))
    said = rebuild(bundle)
    assert f"{bundle / 'manifest.json'} is not a complete manifest" in said
    assert key in said


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_what_was_built_is_named(bundle: Path, name: str) -> None:
    path, data = bundle / name, FILES[name]
    for place in (0, -1) if data else ():
        altered = bytearray(data)
        altered[place] ^= 1
        path.write_bytes(altered)
        assert f"{path} is not the file that was built (sha256 " in rebuild(bundle)
    path.write_bytes(data + b"x")
    assert f"{path} has {len(data) + 1} bytes, expected {len(data)}" in rebuild(bundle)
    path.unlink()
    assert f"{path} is missing" in rebuild(bundle)
    path.mkdir()
    assert str(path) in rebuild(bundle)


ANYTHING: tuple[object, ...] = (
    *(None, True, -1, 1.5, float("nan"), 10**30, "", "a\0b", "\ud800", "9" * 10_000),
    *([], [None], [-1], [1.5], [True], ["x"], {}, {"x": 1}, {"\n": "x"}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inside in items:
        yield (*path, key)
        if isinstance(inside, dict | list):
            yield from places(inside, (*path, key))


def outcome(folder: Path) -> str:
    try:
        Bundle.open(folder)
    except BundleError as error:
        return str(error)
    return ""


def test_every_field_is_held_to_its_type(bundle: Path) -> None:
    path = bundle / "manifest.json"
    text = path.read_text()
    refused = 0
    for *outer, last in places(json.loads(text)):
        if len(outer) > 1 and outer[0] in ("draft", "files") and outer[1] != "tokenizer.json":
            continue  # of the same type as `target`, or as the entry of tokenizer.json
        for value in ANYTHING:
            data = holder = json.loads(text)
            for key in outer:
                holder = holder[key]
            optional = ("bos_token_id", "gamma", "draft")
            kinds = (
                (type(holder[last]), int, type(None)) if last in optional else (type(holder[last]),)
            )
            holder[last] = value
            path.write_text(json.dumps(data))
            said = outcome(bundle)
            place = f"{[*outer, last]}: {value!r}"[:200]
            assert said or type(value) in kinds, place
            assert "\n" not in said, place
            assert len(said) < len(str(bundle)) + 500, place
            refused += bool(said)
    assert refused > 500


@pytest.mark.parametrize(
    ("change", "told"),
    [
        *((lambda m, v=value: m.update(format=v),
           f"format is {value!r}; expected a whole number from 1 to {FORMAT}")
          for value in (0, -1, True, "1", None, 1.0, [1])),
        (lambda m: m["device"].update(machine="vax"),
         f"was built for vax, and this machine is {platform.machine()}"),
        (lambda m: m["device"].clear(), "was built for None, and this machine is"),
        (lambda m: m["target"].pop("geometry"), "geometry"),
        (lambda m: m["target"]["geometry"].pop("kv_heads"), "kv_heads"),
        (lambda m: m["draft"].update(shape=1), "shape"),
        (lambda m: m["files"]["tokenizer.json"].pop("sha256"), "sha256"),
        (lambda m: m.update(gammas=["four"]), "four"),
        (lambda m: m.update(files=[]), "files is []; expected an object"),
        (lambda m: m.update(batch=0), "batch is 0; expected a whole number from 1 to 1000000000"),
        (lambda m: m.update(batch=True), "batch is True; expected a whole number"),
        (lambda m: m["target"]["geometry"].update(layers=10**9),
         "target.geometry.layers is 1000000000; expected a whole number from 1 to 10000"),
        (lambda m: m.update(gammas=[2, 4]), "gammas is (2, 4); expected 0 among them"),
        (lambda m: m.update(gamma=3), "gamma is 3; expected one of (0, 2, 4)"),
        (lambda m: m.update(prefill=65), "asks for passes of 65; expected up to 64"),
        (lambda m: m["target"]["geometry"].update(windows=[0]),
         "target.geometry.windows has 1 entries; expected one for each of 2 layers"),
        (lambda m: m["draft"]["geometry"].update(kv_heads=3),
         "draft.geometry.kv_heads is 3; expected a divisor of heads, 4"),
        (lambda m: m.update(eos_token_ids=[2, 300]), "eos_token_ids is (2, 300); expected ids bel"),
        (lambda m: m.update(bos_token_id=300), "bos_token_id is 300; expected an id below 300"),
        (lambda m: m["files"].pop("tokenizer.json"), "files lacks 'tokenizer.json'; expected it"),
        (lambda m: m["draft"].update(engine="tokenizer"), "files lacks 'tokenizer'; expected it"),
        (lambda m: m["files"].update({"/etc/passwd": {"bytes": 1, "sha256": ""}}),
         "files names '/etc/passwd'; expected a place inside the bundle"),
        (lambda m: m["files"].update({"a/../../b": {"bytes": 1, "sha256": ""}}),
         "files names 'a/../../b'; expected a place inside the bundle"),
        (lambda m: m["files"].update({"": {"bytes": 1, "sha256": ""}}),
         "files names ''; expected a place inside the bundle"),
        (lambda m: m["files"].update({"a\0": {"bytes": 1, "sha256": ""}}),
         "a key of files is 'a\\x00'; expected up to 255 printable characters"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_told_with_what_was_expected(
    bundle: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    edit(bundle, change)
    assert told in rebuild(bundle)


def test_opening_does_not_import_the_library(bundle: Path) -> None:
    code = (
        "import sys; from specrt.bundle import Bundle; Bundle.open(sys.argv[1]); "
        "assert 'onnxruntime' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(bundle)], check=True)


def test_files_larger_than_one_read_are_hashed_whole(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"a" * (3 << 20))
    whole = hash_file(path)
    with path.open("r+b") as stream:
        stream.seek((2 << 20) + 5)
        stream.write(b"b")
    assert whole.bytes == hash_file(path).bytes == 3 << 20
    assert whole.sha256 != hash_file(path).sha256
