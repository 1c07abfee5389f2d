"""Draft and target share a vocabulary, or are refused with the id at which they part."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from specrt.errors import CheckpointError
from specrt_export.checkpoint import Checkpoint
from specrt_export.inputs import check_vocabulary, read_tokens

WORDS = ["<unk>", "def", "return", "x"]


def checkpoint(
    folder: Path, words: list[str], added: list[str] | None = None, size: int = 16
) -> Checkpoint:
    folder.mkdir()
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.add_special_tokens(added or [])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Checkpoint(folder, {"vocab_size": size}, {})


def test_equal_vocabularies_are_accepted(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "t", WORDS, ["<|end|>"])
    draft = checkpoint(tmp_path / "d", [*WORDS, "<|end|>"], size=32)
    check_vocabulary(target, draft)
    assert read_tokens(target) == dict(enumerate([*WORDS, "<|end|>"]))


@pytest.mark.parametrize(
    "filler",
    ["<pad>", "[PAD]", "<unused3>", "<|reserved_special_token_7|>", "<|extra_12|>", "[unused9]"],
)
def test_unused_tokens_at_the_end_are_accepted(tmp_path: Path, filler: str) -> None:
    short, long = checkpoint(tmp_path / "s", WORDS), checkpoint(tmp_path / "l", WORDS, [filler])
    check_vocabulary(short, long)
    check_vocabulary(long, short)


@pytest.mark.parametrize(
    ("words", "added", "message"),
    [
        (["<unk>", "def", "yield", "x"], [], r"token id 2: 'return' in .*t, 'yield' in .*d;"),
        (WORDS[:3], [], r"token id 3: 'x' in .*t, no token in"),
        (WORDS, ["<|im_start|>"], r"token id 4: no token in .*t, '<\|im_start\|>' in"),
    ],
)
def test_the_first_difference_is_named(
    tmp_path: Path, words: list[str], added: list[str], message: str
) -> None:
    target = checkpoint(tmp_path / "t", WORDS)
    draft = checkpoint(tmp_path / "d", words, added)
    with pytest.raises(CheckpointError, match=message):
        check_vocabulary(target, draft)


def test_a_tokenizer_larger_than_its_model_is_refused(tmp_path: Path) -> None:
    target = checkpoint(tmp_path / "t", WORDS, size=3)
    with pytest.raises(CheckpointError, match=r"token id 3 \('x'\).*vocab_size 3"):
        read_tokens(target)


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; write one"):
        read_tokens(Checkpoint(tmp_path, {}, {}))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        read_tokens(Checkpoint(tmp_path, {}, {}))
