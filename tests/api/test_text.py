"""Text comes out as it would have been decoded at once, whole characters at a time."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import models

from specrt.errors import BundleError
from specrt.text import StopStrings, Tokenizer
from support.toy import BOS, EOS, SPECIAL, byte_fallback

held = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LOST = "\ufffd"


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
@given(text=unicode, at=places)
def test_chunks_join_to_the_text_however_it_is_cut(
    tokenizer: Tokenizer, llama: Tokenizer, text: str, at: list[int]
) -> None:
    for used in (tokenizer, llama):
        ids = used.encode(text) if text else []
        found = chunks(used, cut(ids, at))
        assert "".join(found) == used.decode(ids)
        assert "".join(chunks(used, [[i] for i in ids])) == used.decode(ids)
    ids = tokenizer.encode(text) if text else []
    assert all(text.startswith(shown) for shown in accumulate(chunks(tokenizer, cut(ids, at))))
    assert chunks(llama, [[i] for i in llama.encode("hello world")])[0] == "h"


broken = st.sampled_from([*"€😀".encode(), 0xC3, 0xFF, 97, 32, 261, 264])


@held
@given(ids=st.lists(st.integers(0, 264) | broken, max_size=60), at=places)
def test_chunks_join_to_the_decoded(tokenizer: Tokenizer, ids: list[int], at: list[int]) -> None:
    for pieces in (cut(ids, at), [[i] for i in ids]):
        assert "".join(chunks(tokenizer, pieces)) == tokenizer.decode(ids)


def test_a_character_is_held_whole(tokenizer: Tokenizer, llama: Tokenizer) -> None:
    for used in (tokenizer, llama):
        for text in ("a😀b", "👨‍👩‍👧", "né€ 😀😀 the"):
            found = chunks(used, [[i] for i in used.encode(text)])
            assert ("".join(found), "" in found) == (text, True)  # something was held
            assert not any(LOST in chunk for chunk in found)


def test_half_a_character_is_shown_as_lost_once_that_is_certain(tokenizer: Tokenizer) -> None:
    assert chunks(tokenizer, [[97], [0xE2], [0x82]]) == ["a", "", "", LOST]
    assert chunks(tokenizer, [[97], [0xE2], [98], [99]]) == ["a", "", LOST + "b", "c", ""]


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    for name in (BOS, EOS, SPECIAL):
        special = tokenizer.encode(name)
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
    """Return what was shown piece by piece, and what was met."""
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
    if met is None:
        assert text == whole
    else:
        assert met in stops
        assert whole.startswith(text + met)
    assert (met is None) == (not any(stop in whole for stop in stops))
    if len(stops) == 1:
        assert (text, met or "") == whole.partition(stops[0])[:2]


def test_what_is_shown_and_when() -> None:
    for stops, pieces, shown, met in (
        (("end",), ["an en", "d."], ["an ", ""], "end"),
        (("end",), ["an en", "try"], ["an ", "entry", ""], None),
        (("aab",), ["aa", "a", "a", "b"], ["", "a", "a", ""], "aab"),
        (("abab",), ["aba", "cabab"], ["", "abac"], "abab"),
        (("b", "abc"), ["xabc"], ["x"], "abc"),
        (("late", "soon"), ["sooner or later"], [""], "soon"),
        ((), ["anything"], ["anything", ""], None),
    ):
        assert feed(stops, pieces) == (shown, met)
