"""A bundle that is not what was built is refused by name, with what to run."""

from __future__ import annotations

import hashlib
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
        format=FORMAT, name="pair", backend="ort-cpu", precision="fp32", batch=1, max_length=64,
        prefill=16, gammas=(0, 2, 4), gamma=4, eos_token_ids=(2,), bos_token_id=None,
        target=record("target"), draft=record("draft"), versions={"onnxruntime": "1"},
        device={"machine": platform.machine()}, source="0" * 64,
        files={name: hash_file(folder / name) for name in FILES},
    )  # fmt: skip
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    return folder


GONE = object()


def edit(folder: Path, place: str, value: Any) -> None:
    """Put a value at a place in the manifest, named by its keys; take it out where it is GONE."""
    path = folder / "manifest.json"
    data = holder = json.loads(path.read_text())
    *outer, last = [int(key) if key.isdigit() else key for key in place.split(" ")]
    for key in outer:
        holder = holder[key]
    holder[last] = value
    if value is GONE:
        del holder[last]
    path.write_text(json.dumps(data))


def refusal(folder: Path, remedy: str = "specrt build RECIPE") -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    said = str(caught.value)
    assert "\n" not in said
    assert remedy in said
    return said


def test_what_was_written_is_read(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # opening imports no engine library
    opened = Bundle.open(bundle)
    assert opened.manifest == read_manifest(bundle)
    assert (opened.manifest.target, opened.manifest.max_width) == (record("target"), 16)
    assert opened.manifest.kv_bytes() == 2 * (2 * 2 * 1 * 2 * 64 * 8 * 4)
    assert opened.file("tokenizer.json").read_bytes() == b"{}"
    edit(bundle, "costs", {})  # a field of a later version of this format
    assert Bundle.open(bundle).manifest == opened.manifest
    edit(bundle, "draft", None)
    edit(bundle, "gamma", 0)
    assert Bundle.open(bundle).manifest.draft is None


def test_what_is_no_bundle_is_named(bundle: Path) -> None:
    nowhere = bundle / "nowhere"
    assert f"{nowhere} does not exist" in refusal(nowhere, "make engines")
    place = bundle / "manifest.json"
    place.write_text(f'{{"format": {FORMAT + 1}}}')  # refused before its fields are read
    told = f"has bundle format {FORMAT + 1}, and this specrt reads up to {FORMAT}"
    assert told in refusal(bundle, "upgrade specrt")
    for text in ("", "[]", '{"format": 1', "\xff{}", "[" * 10**5, f'{{"format": {"1" * 5000}}}'):
        place.write_bytes(text.encode("latin-1"))
        assert f"{place} cannot be read" in refusal(bundle)
    place.unlink()
    assert f"{bundle} is not a bundle: it has no manifest.json" in refusal(bundle)
    os.mkfifo(place)  # which is not waited for
    assert "manifest.json cannot be read (it is no file)" in refusal(bundle)


def test_a_file_that_is_not_what_was_built_is_named(bundle: Path) -> None:
    path = bundle / "target/engine.onnx"
    for altered in (b"Target engine", b"target enginE"):
        path.write_bytes(altered)
        assert f"{path} is not the file that was built (sha256 " in refusal(bundle)
    path.write_bytes(b"")
    assert f"{path} has 0 bytes, expected 13" in refusal(bundle)
    path.unlink()
    assert f"{path} is missing" in refusal(bundle)


WRONG: list[tuple[str, Any, str]] = [
    *((key, GONE, key) for key in sorted(Manifest.__dataclass_fields__) if key != "format"),
    *(("format", value, f"format is {value!r}; expected a whole number from 1 to {FORMAT}")
      for value in (0, True, "1", 1.0)),
    ("device machine", "vax", f"was built for vax, and this machine is {platform.machine()}"),
    ("target geometry kv_heads", GONE, "kv_heads"),
    ("draft shape", 1, "shape"),
    ("files", [], "files is []; expected an object"),
    ("batch", 0, "batch is 0; expected a whole number from 1 to 1000000000"),
    ("gammas", [2, 4], "gammas is (2, 4); expected 0 among them"),
    ("gamma", 3, "gamma is 3; expected one of (0, 2, 4)"),
    ("prefill", 65, "asks for passes of 65; expected up to 64"),
    ("target geometry windows", [0], "windows has 1 entries; expected one for each of 2 layers"),
    ("draft geometry kv_heads", 3, "kv_heads is 3; expected a divisor of heads, 4"),
    ("eos_token_ids", [2, 300], "eos_token_ids is (2, 300); expected ids bel"),
    ("bos_token_id", 300, "bos_token_id is 300; expected an id below 300"),
    ("files tokenizer.json", GONE, "files lacks 'tokenizer.json'; expected it"),
    *((f"files {name}", {"bytes": 1, "sha256": ""}, f"files names {name!r}; expected a place insid")
      for name in ("/etc/passwd", "a/../../b", "")),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "told"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_value_is_named(bundle: Path, place: str, value: Any, told: str) -> None:
    edit(bundle, place, value)
    assert told in refusal(bundle)


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
    assert "\n" not in said if said else type(value) in (type(before), *optional)
    assert len(said) < len(str(bundle)) + 500


def test_files_larger_than_one_read_are_hashed_whole(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"a" * (3 << 20))
    assert hash_file(path).bytes == 3 << 20
    assert hash_file(path).sha256 == hashlib.sha256(b"a" * (3 << 20)).hexdigest()
