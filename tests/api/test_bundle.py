"""A bundle that is not what was built is refused by name, with what to run."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specrt.bundle import FORMAT, Bundle, Manifest
from specrt.errors import BundleError
from specrt.geometry import Geometry
from specrt.text.chat_template import read_template
from speech.folders import speech_folder
from support.bundles import listed


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return listed(tmp_path / "pair")


GONE = object()
BUILD = "build the bundle again with `specrt build RECIPE`"


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


def test_a_manifest_that_readers_may_take_for_another_is_refused(bundle: Path) -> None:
    place = bundle / "manifest.json"
    text = place.read_text()
    place.write_text(text.replace('"files":', '"files": {}, "files":', 1))
    assert "manifest.json cannot be read ('files' is there twice" in refusal(bundle)
    place.write_text(text)
    with place.open("r+b") as file:
        file.truncate(1 << 40)
    assert "manifest.json cannot be read (it has more than" in refusal(bundle)


def test_what_is_no_bundle_is_named(bundle: Path) -> None:
    nowhere = bundle / "nowhere"
    assert f"{nowhere} does not exist" in refusal(nowhere)
    place = bundle / "manifest.json"
    place.write_text(f'{{"format": {FORMAT + 1}}}')  # refused before its fields are read
    told = f"has bundle format {FORMAT + 1}, and this specrt reads up to {FORMAT}"
    assert told in refusal(bundle, "upgrade specrt")
    for text in ("", "[]", '{"format": 1', "\xff{}", "[" * 10**5, f'{{"format": {"1" * 5000}}}'):
        place.write_bytes(text.encode("latin-1"))
        assert f"{place} cannot be read" in refusal(bundle)
    place.unlink()
    assert f"{bundle} is not a bundle: it has no manifest.json" in refusal(bundle)
    (bundle / "config.json").touch()
    assert f"`specrt build --target {bundle}`" in refusal(bundle, "it is a checkpoint")
    os.mkfifo(place)  # which is not waited for
    assert "manifest.json cannot be read (it is a pipe, not a file)" in refusal(bundle)


def test_a_file_that_is_not_what_was_built_is_named(bundle: Path) -> None:
    path = bundle / "target/engine.onnx"
    for altered in (b"Target engine", b"target enginE"):
        path.write_bytes(altered)
        assert f"{path} is not the file that was built (sha256 " in refusal(bundle)
    path.write_bytes(b"")
    assert f"{path} has 0 bytes, expected 13" in refusal(bundle)
    path.unlink()
    assert f"{path} is missing" in refusal(bundle)


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template.jinja", "tokenizer_config.json", "generation_config.json"),
        *("target/engine.data", "draft/engine.data", "target/engine.json"),
    ],
)
def test_a_file_that_would_be_read_is_listed_or_refused(bundle: Path, name: str) -> None:
    path = bundle / name
    for put in (lambda: path.write_text("{}"), lambda: path.symlink_to("nowhere")):
        put()
        assert f"{path} is not in the list of manifest.json" in refusal(
            bundle, f"remove it, or {BUILD}"
        )
        if not name.startswith(("target", "draft")):
            with pytest.raises(BundleError, match="is not in the list"):
                read_template(bundle)
        path.unlink()
    for name in ("tuning.json", "notes.txt", "target/engine.kernels"):  # not read, or not trusted
        (bundle / name).write_text("anything")
    Bundle.open(bundle)


def test_what_was_hashed_is_what_is_read(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    file = opened.held["target/engine.onnx"]
    file.require_same()
    (bundle / "other").write_bytes(b"TARGET engine")
    (bundle / "other").replace(file.path)
    assert bytes(opened.beside("target/engine.onnx")["engine.onnx"].data) == b"target engine"
    with pytest.raises(BundleError, match="was replaced while it was opened"):
        file.require_same()


OF_ONE_SHAPE = {
    "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab_size": 300, "max_positions": 64,
    "windows": [0, 16],
}  # fmt: skip


def test_a_bundle_of_an_earlier_format_keeps_every_position(bundle: Path) -> None:
    edit(bundle, "format", 3)
    for role in ("target", "draft"):
        edit(bundle, f"{role} geometry", OF_ONE_SHAPE)
    manifest = Bundle.open(bundle).manifest
    assert manifest.target.geometry == Geometry.uniform(2, 4, 2, 8, 300, 64)
    assert manifest.kv_bytes() == 2 * (2 * 2 * (64 + 64) * 8 * 4)


WRONG: list[tuple[str, Any, str]] = [
    *((key, GONE, key) for key, field in sorted(Manifest.__dataclass_fields__.items())
      if key != "format" and field.default is field.default_factory),
    *(("format", value, f"format is {value!r}; expected a whole number from 1 to {FORMAT}")
      for value in (0, True, "1", 1.0)),
    ("device machine", "vax", f"was built for vax, and this machine is {platform.machine()}"),
    ("target geometry heads", GONE, "heads"),
    ("draft shape", 1, "shape"),
    ("files", [], "files is []; expected an object"),
    ("batch", 0, "batch is 0; expected a whole number from 1 to 1000000000"),
    ("batch", 65, "batch is 65; expected 1 to 64"),
    ("gammas", [2, 4], "gammas is (2, 4); expected 0 among them"),
    ("gamma", 3, "gamma is 3; expected one of (0, 2, 4)"),
    ("prefill", 65, "asks for passes of 65; expected up to 64"),
    ("target geometry", {**OF_ONE_SHAPE, "windows": [0]},
     "windows has 1 entries; expected one for each of 2 layers"),
    ("draft geometry heads", 3, "kv_heads is 2; expected a divisor of heads, 3"),
    ("draft geometry memories", [], "memories is empty; expected one for each layer"),
    ("draft geometry memories", [{"kind": "shared"}], "owner is 0; expected an earlier one"),
    ("draft geometry memories", [{"kind": "lent", "kv_heads": 1, "key_width": 7, "value_width": 7}],
     "reads what no layer of the target keeps"),
    ("draft geometry memories", [{"kind": "conv", "key_width": 4}], "window is 0; expected"),
    ("draft geometry memories", [{"kind": "dream"}], "kind is 'dream'; expected attention"),
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


OF_A_SOURCE: list[tuple[str, Any, str]] = [
    ("decoder_start", [1] * 65, "decoder_start has 65 tokens; expected up to max_length, 64"),
    ("decoder_start", [], "decoder_start is (); expected tokens with an encoder"),
    ("task", "text-generation", "expected 'automatic-speech-recognition', which is what the"),
    ("target encoder features", 0, "frames without features"),
    ("target encoder frames", 0, "features without frames"),
    ("target encoder encoder", "", "the target has no encoder of its own"),
    ("target encoder", None, "expected 'text-generation'"),
]


@pytest.mark.parametrize(("place", "value", "told"), OF_A_SOURCE, ids=range(len(OF_A_SOURCE)))
def test_a_wrong_value_of_an_encoder_decoder_is_named(
    tmp_path: Path, place: str, value: Any, told: str
) -> None:
    folder = speech_folder(tmp_path)
    Bundle.open(folder)
    edit(folder, place, value)
    assert told in refusal(folder)


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
    optional = (dict, type(None)) if place.endswith(" bits") else optional
    assert "\n" not in said if said else type(value) in (type(before), *optional)
    assert len(said) < len(str(bundle)) + 500
