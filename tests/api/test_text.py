"""Text comes out whole characters at a time, prompts from files."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import models

from specrt.errors import BundleError, RequestError
from specrt.text import (
    PromptRecord,
    StopStrings,
    Tokenizer,
    decode_utf8,
    first_of_each,
    of_categories,
    read_prompts,
    read_text,
)
from support.toy import BOS, EOS, SPECIAL, byte_fallback

held = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LOST = "\ufffd"


broken = st.sampled_from([*"€😀".encode(), 0xC3, 0xFF, 97, 32, 261, 264])


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_fallback(tmp_path_factory.mktemp("byte_fallback")))


def cut(ids: list[int], places: list[int]) -> list[list[int]]:
    """Cut a list at some places; pieces may be empty."""
    edges = [0, *sorted(p % (len(ids) + 1) for p in places), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


def chunks(tokenizer: Tokenizer, pieces: list[list[int]]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


unicode = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("é€😀👨‍👩‍👧 the\n"))
places = st.lists(st.integers(0, 1000), max_size=12)


@held
@given(text=unicode, at=places, mixed=st.lists(st.integers(0, 264) | broken, max_size=60))
def test_chunks_join_to_the_text_however_it_is_cut(
    tokenizer: Tokenizer, llama: Tokenizer, text: str, at: list[int], mixed: list[int]
) -> None:
    spelled = [(used, used.encode(text) if text else []) for used in (tokenizer, llama)]
    for used, ids in (*spelled, (tokenizer, mixed)):
        found = chunks(used, cut(ids, at))
        assert "".join(found) == used.decode(ids)
        assert "".join(chunks(used, [[i] for i in ids])) == used.decode(ids)
    shown = chunks(tokenizer, cut(spelled[0][1], at))
    assert all(text.startswith(so_far) for so_far in accumulate(shown))


def test_a_character_is_held_whole(tokenizer: Tokenizer, llama: Tokenizer) -> None:
    for used in (tokenizer, llama):
        for text in ("a😀b", "👨‍👩‍👧", "né€ 😀😀 the"):
            found = chunks(used, [[i] for i in used.encode(text)])
            assert ("".join(found), "" in found) == (text, True)  # something was held
            assert not any(LOST in chunk for chunk in found)
    # Half of one is shown as lost once that is certain.
    assert chunks(tokenizer, [[97], [0xE2], [0x82]]) == ["a", "", "", LOST]
    assert chunks(tokenizer, [[97], [0xE2], [98]]) == ["a", "", LOST + "b", ""]


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    for special in map(tokenizer.encode, (BOS, EOS, SPECIAL)):
        ids = [*b"ab", *special, *b"c", *special * 3, *b"d", *special]
        assert tokenizer.decode(ids) == "".join(chunks(tokenizer, [[i] for i in ids])) == "abcd"
        assert chunks(tokenizer, [special, special]) == ["", "", ""]


def test_a_size_is_that_of_the_largest_id_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    HubTokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a")).save(str(path))
    assert Tokenizer(path).size == 8
    path.write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a tokenizer: .* build the bun"):
        Tokenizer(path)


letters = st.text("abc", max_size=14)
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def feed(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str | None]:
    found, shown = StopStrings(stops), []
    for piece in pieces:
        text, met = found.push(piece)
        shown.append(text)
        if met is not None:
            assert found.finish() == ""
            return shown, met
    return [*shown, found.finish()], None


@settings(held, max_examples=150)
@given(pieces=st.lists(letters, max_size=8), stops=stops)
def test_a_stop_string_is_never_shown(pieces: list[str], stops: tuple[str, ...]) -> None:
    whole = "".join(pieces)
    shown, met = feed(stops, pieces)
    text = "".join(shown)
    assert not any(stop in text for stop in stops)
    assert text == whole if met is None else met in stops and whole.startswith(text + met)
    assert (met is None) == (not any(stop in whole for stop in stops))
    if len(stops) == 1:
        assert (text, met or "") == whole.partition(stops[0])[:2]


def test_what_is_shown_and_when() -> None:
    for stops, pieces, shown, met in (
        (("end",), ["an en", "d."], ["an ", ""], "end"),
        (("end",), ["an en", "try"], ["an ", "entry", ""], None),
        (("aab",), ["aa", "a", "a", "b"], ["", "a", "a", ""], "aab"),
        (("late", "soon"), ["sooner or later"], [""], "soon"),
        ((), ["anything"], ["anything", ""], None),
    ):
        assert feed(stops, pieces) == (shown, met)


# Prompt files


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
