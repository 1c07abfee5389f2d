"""Reading a checkpoint's headers: single, sharded, linked, damaged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from specrt.errors import CheckpointError
from specrt_export.checkpoint import Checkpoint

Entry = tuple[str, list[int], int]


def write_shard(path: Path, tensors: Mapping[str, Entry], missing: int = 0, **changes: Any) -> None:
    """Write a safetensors file of zeros; `changes` replace header entries, `missing` bytes lack."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({**header, **changes}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end - missing))


ONE: dict[str, Entry] = {"a.weight": ("BF16", [2, 3], 12), "b.weight": ("F32", [4], 16)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


def test_a_single_file_is_described(folder: Path) -> None:
    file = folder / "model.safetensors"
    write_shard(file, ONE)
    checkpoint = Checkpoint.open(folder)
    begin = file.stat().st_size - 28
    a, b = checkpoint.weights["a.weight"], checkpoint.weights["b.weight"]
    assert checkpoint.config == {"model_type": "llama"}
    assert (a.file, a.dtype, a.shape, a.offset, a.bytes) == (file, "BF16", (2, 3), begin, 12)
    assert (b.dtype, b.shape, b.offset, b.bytes) == ("F32", (4,), begin + 12, 16)
    assert set(checkpoint.weights) == {"a.weight", "b.weight"}


def test_shards_are_gathered_through_links(folder: Path, tmp_path_factory: Any) -> None:
    blobs = tmp_path_factory.mktemp("blobs")
    index = {}
    for number, (name, entry) in enumerate(ONE.items()):
        write_shard(blobs / f"{number}", {name: entry})
        shard = f"model-{number}.safetensors"
        (folder / shard).symlink_to(blobs / f"{number}")
        index[name] = shard
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    weights = Checkpoint.open(folder).weights
    assert {name: weight.file.name for name, weight in weights.items()} == index


def test_config_only_needs_no_weights(folder: Path) -> None:
    assert Checkpoint.open(folder, config_only=True).weights == {}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"a.weight": "gone.safetensors"}, r"gone\.safetensors is missing; fetch"),
        ({"a.weight": "here.safetensors", "c": "here.safetensors"}, "places c in here.*not hold"),
        ({"a.weight": "../here.safetensors"}, r"'\.\./here\.safetensors'; expected a bare file"),
        ({}, "no weight_map"),
    ],
)
def test_a_wrong_index_is_named(folder: Path, index: dict[str, str], message: str) -> None:
    write_shard(folder / "here.safetensors", ONE)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"missing": 1}, r"b\.weight ends at byte \d+ of \d+: it is truncated.*fetch it again"),
        ({"a.weight": {"dtype": "F32"}}, r"the entry of a\.weight is malformed"),
        (
            {"a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            r"a\.weight F32\[2\] spans bytes 0 to 4",
        ),
        (
            {"a.weight": {"dtype": "F32", "shape": [-1], "data_offsets": [8, 4]}},
            r"spans bytes 8 to 4",
        ),
        (
            {"a.weight": {"dtype": "Q4", "shape": [2], "data_offsets": [0, 1]}},
            "stored as Q4; expected one of",
        ),
    ],
)
def test_a_damaged_file_is_named(folder: Path, change: dict[str, Any], message: str) -> None:
    write_shard(folder / "model.safetensors", ONE, **change)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(folder)
    assert str(folder / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\1\2", b"\xff" * 8 + b"{}", b"\2" + bytes(7) + b"{]"])
def test_no_header_is_damage(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        Checkpoint.open(folder)


def test_pickles_are_refused_by_name(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*run code.*save_pretrained"):
        Checkpoint.open(folder)


def test_no_weights_at_all_is_said(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither.*--config-only"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "has no config.json"), ("{", "cannot be read as JSON"), ("[]", "holds a list")],
)
def test_a_wrong_config_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)


def test_a_missing_folder_is_no_hub_name(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no folder .*gone.*hub name looks like"):
        Checkpoint.open(folder / "gone")
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        Checkpoint.open(folder / "config.json")
    with pytest.raises(CheckpointError, match="revision 'v1' given with the local folder"):
        Checkpoint.open(folder, revision="v1")
