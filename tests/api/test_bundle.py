"""A bundle that is not what was built is refused by name, with what to run."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


GONE = object()


def edit(folder: Path, place: str, value: Any) -> None:
    """Put a value at a place in the manifest, named by its keys; take it out where it is GONE."""
    path = folder / "manifest.json"
    data = holder = json.loads(path.read_text())
    *outer, last = place.split(" ")
    for key in outer:
        holder = holder[int(key) if isinstance(holder, list) else key]
    if value is GONE:
        del holder[last]
    else:
        holder[int(last) if isinstance(holder, list) else last] = value
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


def test_what_was_written_is_read(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # opening imports no engine library
    opened = Bundle.open(bundle)
    assert opened.manifest == read_manifest(bundle)
    assert opened.manifest.target == record("target")
    assert opened.manifest.gammas == (0, 2, 4)
    assert opened.manifest.max_width == 16
    assert opened.manifest.kv_bytes() == 2 * (2 * 2 * 1 * 2 * 64 * 8 * 4)
    assert opened.file("tokenizer.json").read_bytes() == b"{}"
    edit(bundle, "costs", {})  # a field of a later version of this format
    assert Bundle.open(bundle).manifest == opened.manifest
    edit(bundle, "draft", None)
    edit(bundle, "gamma", 0)
    assert Bundle.open(bundle).manifest.draft is None


def test_what_is_no_bundle_is_named(bundle: Path) -> None:
    said = refusal(bundle / "nowhere")
    assert f"{bundle / 'nowhere'} does not exist" in said
    assert "make engines" in said
    place = bundle / "manifest.json"
    place.write_text(f'{{"format": {FORMAT + 1}}}')  # refused before its fields are read
    said = refusal(bundle)
    assert f"has bundle format {FORMAT + 1}, and this specrt reads up to {FORMAT}" in said
    assert "upgrade specrt" in said
    for text in (
        *("", "{", "[]", "3", "null", '{"name": "pair"}', '{"format": 1', "\xff{}"),
        "[" * 100_000, '{"format": ' + "1" * 5000 + "}",
    ):  # fmt: skip
        place.write_bytes(text.encode("latin-1"))
        assert f"{place} cannot be read" in rebuild(bundle)
    place.unlink()
    assert f"{bundle} is not a bundle: it has no manifest.json" in rebuild(bundle)
    os.mkfifo(place)  # which is not waited for
    assert "manifest.json cannot be read (it is no file)" in rebuild(bundle)


@pytest.mark.parametrize("name", ["target/engine.onnx", "empty.json"])
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


ENTRY = {"bytes": 1, "sha256": ""}
WRONG: list[tuple[str, Any, str]] = [
    *((key, GONE, key) for key in sorted(Manifest.__dataclass_fields__) if key != "format"),
    *(("format", value, f"format is {value!r}; expected a whole number from 1 to {FORMAT}")
      for value in (0, -1, True, "1", None, 1.0, [1])),
    ("device machine", "vax", f"was built for vax, and this machine is {platform.machine()}"),
    ("device", {}, "was built for None, and this machine is"),
    ("target geometry", GONE, "geometry"),
    ("target geometry kv_heads", GONE, "kv_heads"),
    ("draft shape", 1, "shape"),
    ("files tokenizer.json sha256", GONE, "sha256"),
    ("gammas", ["four"], "four"),
    ("files", [], "files is []; expected an object"),
    ("batch", 0, "batch is 0; expected a whole number from 1 to 1000000000"),
    ("batch", True, "batch is True; expected a whole number"),
    ("target geometry layers", 10**9,
     "target.geometry.layers is 1000000000; expected a whole number from 1 to 10000"),
    ("gammas", [2, 4], "gammas is (2, 4); expected 0 among them"),
    ("gamma", 3, "gamma is 3; expected one of (0, 2, 4)"),
    ("prefill", 65, "asks for passes of 65; expected up to 64"),
    ("target geometry windows", [0],
     "target.geometry.windows has 1 entries; expected one for each of 2 layers"),
    ("draft geometry kv_heads", 3,
     "draft.geometry.kv_heads is 3; expected a divisor of heads, 4"),
    ("eos_token_ids", [2, 300], "eos_token_ids is (2, 300); expected ids bel"),
    ("bos_token_id", 300, "bos_token_id is 300; expected an id below 300"),
    ("files tokenizer.json", GONE, "files lacks 'tokenizer.json'; expected it"),
    ("draft engine", "tokenizer", "files lacks 'tokenizer'; expected it"),
    *((f"files {name}", ENTRY, f"files names {name!r}; expected a place inside the bundle")
      for name in ("/etc/passwd", "a/../../b", "")),
    ("files a\0", ENTRY, "a key of files is 'a\\x00'; expected up to 255 printable characters"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "told"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_value_is_named(bundle: Path, place: str, value: Any, told: str) -> None:
    edit(bundle, place, value)
    assert told in rebuild(bundle)


ANYTHING: tuple[object, ...] = (
    *(None, True, -1, 1.5, float("nan"), 10**30, "", "a\0b", "\ud800", "9" * 10_000),
    *([], [None], [-1], [1.5], [True], ["x"], {}, {"x": 1}, {"\n": "x"}),
)


def places(value: Any, outer: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the place of everything inside a JSON value, and what is there."""
    for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
        yield f"{outer}{key}", inside
        if isinstance(inside, dict | list):
            yield from places(inside, f"{outer}{key} ")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), value=st.sampled_from(ANYTHING))
def test_every_field_is_held_to_its_type(bundle: Path, data: st.DataObject, value: object) -> None:
    path = bundle / "manifest.json"
    text = path.read_text()
    place, before = data.draw(st.sampled_from([*places(json.loads(text))]))
    edit(bundle, place, value)
    said = ""
    try:
        Bundle.open(bundle)
    except BundleError as error:
        said = str(error)
    path.write_text(text)
    optional = (int, type(None)) if place in ("bos_token_id", "gamma", "draft") else ()
    assert said or type(value) in (type(before), *optional)
    assert "\n" not in said
    assert len(said) < len(str(bundle)) + 500


def test_files_larger_than_one_read_are_hashed_whole(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"a" * (3 << 20))
    whole = hash_file(path)
    with path.open("r+b") as stream:
        stream.seek((2 << 20) + 5)
        stream.write(b"b")
    assert whole.bytes == hash_file(path).bytes == 3 << 20
    assert whole.sha256 != hash_file(path).sha256
