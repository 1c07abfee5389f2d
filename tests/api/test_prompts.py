"""Prompt files: JSON lines, and which line is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import REPOSITORY
from specrt.errors import RequestError
from specrt.text import Prompt, decode_utf8, first_of_each, of_categories, read_prompts, read_text


def test_prompts_and_turns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '\ufeff{"prompt": "\ufeffa", "category": "code"}\n\n'
        '{"question_id": 7, "category": "qa", "turns": ["b\\n", "c"]}\r\n'
        '{"prompt": "one\u2028two\u0085three"}',  # only newlines end a line
        encoding="utf-8",
        newline="",
    )
    prompts = read_prompts(path)
    assert prompts == [
        Prompt("\ufeffa", "code"), Prompt("b\n", "qa"), Prompt("one\u2028two\u0085three"),
    ]  # fmt: skip
    assert [p.place for p in prompts] == [f"{path}:1", f"{path}:3", f"{path}:4"]


def test_prompts_are_chosen_by_category() -> None:
    prompts = [Prompt(str(i), c) for i, c in enumerate(["code", "prose", "code", "copy", "code"])]
    assert of_categories(prompts, []) == prompts
    assert [p.text for p in of_categories(prompts, ["code", "copy"])] == ["0", "2", "3", "4"]
    with pytest.raises(RequestError, match=r"no prompt is of category 'cod'; did you mean 'code'"):
        of_categories(prompts, ["cod", "copy"])
    assert [p.text for p in first_of_each(prompts, 2)] == ["0", "1", "2", "3"]


def test_a_wrong_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for line, told in (
        ("[" * 100_000, "is not JSON"),
        ("[1]", "is list; expected an object with `prompt`"),
        ('{"prompt": 5}', "has neither a string `prompt` nor a list of `turns`"),
        ('{"turns": [5]}', "has neither"),
    ):
        path.write_text(f'{{"prompt": "a"}}\n\n{line}\n', encoding="utf-8")
        with pytest.raises(RequestError, match=rf"prompts\.jsonl:3 {told}"):
            read_prompts(path)
    path.write_text("\n\n  \n", encoding="utf-8")
    with pytest.raises(RequestError, match="holds no prompts; expected JSON lines"):
        read_prompts(path)


def test_what_is_not_utf8_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b"abc\xe9")
    with pytest.raises(RequestError, match="latin is not UTF-8: byte 0xe9 at offset 3"):
        read_text(path)
    with pytest.raises(RequestError, match="here is not UTF-8: byte 0xe9 at offset 4"):
        decode_utf8(b"\xef\xbb\xbfa\xe9", "here")
    with pytest.raises(RequestError, match="none cannot be read: No such file or directory"):
        read_text(tmp_path / "none")


def test_every_set_that_comes_with_specrt_is_of_one_kind() -> None:
    for name, count in {"code": 16, "prose": 12, "copy": 12, "adversarial": 8}.items():
        prompts = read_prompts(REPOSITORY / "benchmarks" / "prompts" / f"{name}.jsonl")
        assert len({p.text for p in prompts}) == len(prompts) == count
        assert len({p.category for p in prompts}) == 1
