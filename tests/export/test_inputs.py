"""What a recipe names is held together: vocabularies, ends of text, calibration, and the disk."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tokenizers import Tokenizer as HubTokenizer
from tokenizers.models import WordLevel

from specrt.errors import BuildError, CheckpointError
from specrt.text.tokenizer import Tokenizer
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.plan.calibration_text import (
    FEWEST,
    FEWEST_FITTED,
    MOST,
    MOST_FITTED,
    PIECE,
    read_calibration,
)
from specrt_export.plan.generation_settings import begin_token, end_tokens
from specrt_export.plan.pair_vocabulary import read_tokens
from specrt_export.plan.text_files import bundled_tokenizer, chat_templates

WORDS = ["<unk>", "def", "return", "x"]


def checkpoint(
    folder: Path, words: list[str], added: list[str] | None = None, size: int = 16
) -> Checkpoint:
    folder.mkdir()
    tokenizer = HubTokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(added or [])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Checkpoint(folder, {"vocab_size": size}, {})


def test_a_tokenizer_that_is_no_tokenizer_of_the_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"token id 3 \('x'\).*vocab_size 3"):
        read_tokens(checkpoint(tmp_path / "t", WORDS, size=3))
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; write one"):
        read_tokens(Checkpoint(tmp_path, {}, {}))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        read_tokens(Checkpoint(tmp_path, {}, {}))


def test_a_small_model_of_a_multimodal_family_lacks_rows_for_pictures(tmp_path: Path) -> None:
    small = checkpoint(tmp_path / "t", WORDS, ["<eos>", "<image>"], size=5)
    with pytest.raises(CheckpointError, match=r"token id 5 \('<image>'\).*vocab_size 5"):
        read_tokens(small)
    small.config["model_type"] = "gemma3_text"
    assert read_tokens(small)[5] == "<image>"
    bundled = HubTokenizer.from_buffer(bundled_tokenizer(small))
    assert bundled.get_vocab_size() == 5


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_a_chat_template_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    """Also a pipe, which is not waited for."""
    path, one = tmp_path / name, Checkpoint(tmp_path, {}, {})
    path.parent.mkdir(exist_ok=True)
    path.write_text("{{ żółw }}", encoding="utf-8")
    assert chat_templates(one) == {path.stem.replace("chat_template", "default"): "{{ żółw }}"}
    path.write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read as a chat .* position 0"):
        chat_templates(one)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read .*pipe, not a file"):
        chat_templates(one)


def configured(folder: Path, settings: object, **config: Any) -> Checkpoint:
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return Checkpoint(folder, {"vocab_size": 10, **config}, MappingProxyType({}))


@pytest.mark.parametrize("value", [None, 0, [], [3, 9]])
def test_a_text_ends_at_none_one_or_several_tokens(tmp_path: Path, value: Any) -> None:
    """Where generation_config.json says nothing config.json is read."""
    ends = tuple(value) if isinstance(value, list) else () if value is None else (value,)
    assert end_tokens(configured(tmp_path, {"eos_token_id": value})) == ends
    found = configured(tmp_path, {}, eos_token_id=value, bos_token_id=5)
    assert (end_tokens(found), begin_token(found)) == (ends, 5)
    assert begin_token(configured(tmp_path, {"bos_token_id": 0}, bos_token_id=5)) == 0
    assert begin_token(configured(tmp_path, {})) is None
    assert end_tokens(configured(tmp_path, {"eos_token_id": 99}, vocab_size=None)) == (99,)


@pytest.mark.parametrize("value", ["x", True, -1, 10, [2, 10], [None]])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("ask", [end_tokens, begin_token])
def test_what_is_no_token_is_named_with_its_file(
    tmp_path: Path, value: Any, name: str, ask: Callable[[Checkpoint], Any]
) -> None:
    key = "eos_token_id" if ask is end_tokens else "bos_token_id"
    one, other = ({key: value}, {}) if name == "generation_config.json" else ({}, {key: value})
    wrong = value[-1] if isinstance(value, list) and ask is end_tokens else value
    told = f"{tmp_path / name} has {key} {wrong!r}"
    with pytest.raises(CheckpointError, match=f"{re.escape(told)}.*expected token ids from 0 to 9"):
        ask(configured(tmp_path, one, **other))


def test_a_damaged_generation_config_is_named(tmp_path: Path) -> None:
    found = configured(tmp_path, [])
    with pytest.raises(CheckpointError, match=r"holds \[\]; expected an object"):
        end_tokens(found)
    (tmp_path / "generation_config.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"n_config\.json is not JSON.*fetch it again"):
        end_tokens(found)


@pytest.fixture(scope="module")
def tokenizer(engines: Path) -> Tokenizer:
    return Tokenizer(engines / "codelet" / "checkpoint" / "target" / "tokenizer.json", 0)


def test_pieces_are_spread_over_the_whole_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "text.jsonl"
    lines = [json.dumps({"prompt": f"value_{n} = {n}\n"}) for n in range(3000)]
    path.write_text("\n".join(lines), encoding="utf-8")
    found = read_calibration(path, tokenizer, 128, fits=True)
    pieces = found.scored
    assert {len(piece) for piece in [*pieces, *found.fitted]} == {128}
    assert sum(map(len, pieces)) == MOST
    assert FEWEST_FITTED <= sum(map(len, found.fitted)) <= MOST_FITTED
    scored = {piece.tobytes() for piece in pieces}
    assert scored.isdisjoint(piece.tobytes() for piece in found.fitted)
    assert "value_1 " in tokenizer.decode(pieces[0].tolist())
    assert "value_299" in tokenizer.decode(pieces[-1].tolist())
    path = tmp_path / "short.txt"
    path.write_text("a = 1\n" * 100, encoding="utf-8")
    (piece,) = read_calibration(path, tokenizer, 2048).scored
    assert FEWEST <= len(piece) < PIECE
    with pytest.raises(BuildError, match=r"leaves 0 .*gptq.*give it 8192 tokens.*\"search\""):
        read_calibration(path, tokenizer, 2048, fits=True)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("none.txt", None, "cannot be read: No such file"),
        ("latin.txt", b"caf\xe9 " * 400, "is not UTF-8"),
        ("short.txt", b"x = 1\n", "comes to 5 tokens; expected 256 or more"),
        ("empty.jsonl", b"\n", "holds no prompts"),
        ("wrong.jsonl", b'{"prompt": "x"}\n{"text": "y"}\n', "wrong.jsonl:2 has neither"),
    ],
)
def test_a_text_that_will_not_do_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, name: str, text: bytes | None, told: str
) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with pytest.raises(BuildError, match=rf"^quality\.calibration: .*{re.escape(told)}"):
        read_calibration(tmp_path / name, tokenizer, 2048)
