"""Reading a checkpoint's headers: single, sharded, linked, damaged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from specrt.errors import CheckpointError
from specrt_export.checkpoint.checkpoint import Checkpoint

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


def test_what_shards_hold_counts_whatever_their_index_names(folder: Path) -> None:
    """So transformers reads them; a tensor of one value may be in two."""
    for number, entry in enumerate((("F32", [4], 16), ("F32", [4], 16), ("F32", [2], 8))):
        write_shard(folder / f"{number}.safetensors", {"both": entry, f"own.{number}": entry})
    for last in (1, 2):
        names = {f"own.{number}": f"{number}.safetensors" for number in range(last)}
        text = json.dumps({"weight_map": {**names, "both": f"{last}.safetensors"}})
        (folder / INDEX).write_text(text)
        if last == 1:
            assert set(Checkpoint.open(folder).weights) == {"both", "own.0", "own.1"}
    with pytest.raises(
        CheckpointError, match=r"0\.safet.* and 2\.safetensors both hold both, with"
    ):
        Checkpoint.open(folder)


WHOLE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
INDEX = "model.safetensors.index.json"
DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "short": ({"missing": 1}, r"b\.weight ends at byte \d+ of \d+: it is truncated.*fetch it ag"),
    "no shape": ({"a.weight": {"dtype": "F32"}}, r"the entry of a\.weight is malformed"),
    "span": ({"a.weight": {**WHOLE, "data_offsets": [0, 4]}}, r"a\.weight F32\[2\] spans bytes 0"),
    "type": ({"a.weight": {**WHOLE, "dtype": "Q4"}}, "stored as Q4; expected one of"),
}


@pytest.mark.parametrize(("change", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named(folder: Path, change: dict[str, Any], message: str) -> None:
    write_shard(folder / "model.safetensors", ONE, **change)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{message}"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", "\x7f" * 8 + "{}", r"model\.safetensors is damaged"),
        ("model.safetensors", "\2" + "\0" * 7 + "{]", r"model\.safetensors is damaged"),
        (INDEX, '{"weight_map": {"a": "gone.safetensors"}}', r"gone\.safe.* is missing; fetch"),
        (INDEX, '{"weight_map": {"c": "here.safetensors"}}', "places c in here.*not hold"),
        (INDEX, '{"weight_map": {"a": "../x.safetensors"}}', r"'\.\./x\..*expected a bare file"),
        ("pytorch_model.bin", "", r"pytorch_model\.bin.*run code.*save_pretrained"),
        ("config.json", "{", "cannot be read as JSON"),
        ("config.json", "[]", "holds a list"),
        ("adapter_config.json", "{}", r"adapter_config\.json.*merge_and_unload"),
    ],
)
def test_what_is_no_checkpoint_is_named(
    folder: Path, name: str, content: str, message: str
) -> None:
    write_shard(folder / "here.safetensors", ONE)
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)


def test_a_missing_folder_is_no_hub_name(folder: Path) -> None:
    assert Checkpoint.open(folder, config_only=True).weights == {}
    with pytest.raises(CheckpointError, match=r"no folder .*gone.*hub name looks like"):
        Checkpoint.open(folder / "gone")
    with pytest.raises(CheckpointError, match="revision 'v1' given with the local folder"):
        Checkpoint.open(folder, revision="v1")
    near = folder.with_name(f"{folder.name}x")
    with pytest.raises(CheckpointError, match=rf"no folder {near} .did you mean {folder}\?."):
        Checkpoint.open(near)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        Checkpoint.open(folder)
