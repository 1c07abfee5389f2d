"""Prompts and their categories are read from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrt.errors import RequestError
from specrt.text.prompt_file import (
    PromptRecord,
    decode_utf8,
    first_of_each,
    of_categories,
    read_prompts,
    read_text,
)


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
        PromptRecord("\ufeffa", "code"), PromptRecord("b\n", "qa"),
        PromptRecord("one\u2028two\u0085three"),
    ]  # fmt: skip
    assert [p.place for p in prompts] == [f"{path}:1", f"{path}:3", f"{path}:4"]


def test_prompts_are_chosen_by_category() -> None:
    prompts = [
        PromptRecord(str(i), c) for i, c in enumerate(["code", "prose", "code", "copy", "code"])
    ]
    assert of_categories(prompts, []) == prompts
    assert [p.text for p in of_categories(prompts, ["code", "copy"])] == ["0", "2", "3", "4"]
    with pytest.raises(RequestError, match=r"no prompt is of category 'cod'; did you mean 'code'"):
        of_categories(prompts, ["cod", "copy"])
    assert [p.text for p in first_of_each(prompts, 2)] == ["0", "1", "2", "3"]


def test_a_wrong_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for line, told in (
        ("[" * 100_000, "is not JSON"),
        ("[1]", r"is \[1\].* expected lines such as"),
        ('{"prompt": 5}', "has neither a string `prompt` nor a list of `turns`"),
        ('{"turns": [5]}', "has neither"),
    ):
        path.write_text(f'{{"prompt": "a"}}\n\n{line}\n', encoding="utf-8")
        with pytest.raises(RequestError, match=rf"prompts\.jsonl:3 {told}"):
            read_prompts(path)
    path.write_text("\n\n  \n", encoding="utf-8")
    with pytest.raises(RequestError, match="holds no prompts; expected lines such as"):
        read_prompts(path)


def test_what_is_not_utf8_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b"abc\xe9")
    with pytest.raises(RequestError, match="latin is not UTF-8: byte 0xe9 at offset 3"):
        read_text(path)
    with pytest.raises(RequestError, match="here is not UTF-8: byte 0xe9 at offset 4"):
        decode_utf8(b"\xef\xbb\xbfa\xe9", "here")
