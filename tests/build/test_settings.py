"""What generation_config.json says is held to the vocabulary, and the place to the disk."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from specrt.errors import BuildError, CheckpointError
from specrt_export.builder import build
from specrt_export.checkpoint import Checkpoint
from specrt_export.inputs import begin_token, check_inputs, end_tokens, find_inputs
from specrt_export.recipe import Recipe, read_recipe


def checkpoint(folder: Path, settings: object, **config: Any) -> Checkpoint:
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return Checkpoint(folder, {"vocab_size": 10, **config}, MappingProxyType({}))


@pytest.mark.parametrize(
    ("written", "read"), [(None, ()), (0, (0,)), (9, (9,)), ([], ()), ([3, 9], (3, 9))]
)
def test_a_text_ends_at_none_one_or_several_tokens(
    tmp_path: Path, written: object, read: tuple[int, ...]
) -> None:
    assert end_tokens(checkpoint(tmp_path, {"eos_token_id": written})) == read


def test_config_json_is_asked_where_there_is_no_other_setting(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, {}, eos_token_id=[4], bos_token_id=5)
    assert (end_tokens(found), begin_token(found)) == ((4,), 5)
    assert begin_token(checkpoint(tmp_path, {"bos_token_id": 0}, bos_token_id=5)) == 0
    assert begin_token(checkpoint(tmp_path, {})) is None


@pytest.mark.parametrize("value", ["x", {}, ["x"], True, 1.0, -1, 10, [2, 10], [[1]], [None]])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_an_end_that_is_no_token_is_named_with_its_file(
    tmp_path: Path, value: object, name: str
) -> None:
    wrong = value[-1] if isinstance(value, list) else value
    written = {"eos_token_id": value}
    one, other = (written, {}) if name == "generation_config.json" else ({}, written)
    with pytest.raises(CheckpointError) as refused:
        end_tokens(checkpoint(tmp_path, one, **other))
    said = str(refused.value)
    assert f"{tmp_path / name} has eos_token_id {wrong!r}" in said
    assert "expected token ids from 0 to 9" in said


@pytest.mark.parametrize("value", ["x", [1], {}, False, -1, 10])
def test_a_begin_that_is_no_token_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError) as refused:
        begin_token(checkpoint(tmp_path, {"bos_token_id": value}))
    assert f"generation_config.json has bos_token_id {value!r}" in str(refused.value)


def test_without_a_vocab_size_any_id_may_be_one(tmp_path: Path) -> None:
    assert end_tokens(checkpoint(tmp_path, {"eos_token_id": 99}, vocab_size=None)) == (99,)
    with pytest.raises(CheckpointError, match="expected token ids 0 or more"):
        end_tokens(checkpoint(tmp_path, {"eos_token_id": -1}, vocab_size=None))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "holds []; expected an object"),
        ("3", "holds 3; expected an object"),
        ("{", "is not JSON"),
        pytest.param("[" * 100_000, "is not JSON", id="deep"),
    ],
)
def test_a_damaged_generation_config_is_named(tmp_path: Path, text: str, told: str) -> None:
    found = checkpoint(tmp_path, {})
    path = tmp_path / "generation_config.json"
    path.write_text(text, encoding="utf-8")
    for ask in (end_tokens, begin_token):
        with pytest.raises(CheckpointError) as refused:
            ask(found)
        assert f"{path} {told}" in str(refused.value)
        assert "fetch it again" in str(refused.value)


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
def test_a_wrong_token_is_refused_before_anything_is_compiled(
    draftless: Recipe, out: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("specrt_export.compile.ort_cpu_compiler.compile_ort_cpu", never)
    path = draftless.folder / "target" / "generation_config.json"
    path.write_text(json.dumps({key: "x"}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"has {key} 'x'"):
        build(draftless, out)
    assert not out.parent.exists()


@pytest.mark.parametrize("place", ["file/bundle", "file/deeper/bundle", "nul\0/bundle"])
def test_a_place_that_can_be_no_folder_is_refused(small: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    recipe = read_recipe(small)
    with pytest.raises(BuildError, match="cannot be made a folder") as refused:
        check_inputs(recipe, find_inputs(recipe), tmp_path / place)
    assert "build elsewhere with --out" in str(refused.value)


def test_a_place_that_may_not_be_written_to_is_refused(
    small: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write to a read-only folder, so that one cannot stand in for the question.
    monkeypatch.setattr("os.access", lambda path, mode: False)
    recipe = read_recipe(small)
    with pytest.raises(BuildError, match="may not be written to; build elsewhere with --out"):
        check_inputs(recipe, find_inputs(recipe), out)
