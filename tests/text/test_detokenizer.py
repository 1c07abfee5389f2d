"""Text comes out whole characters at a time, and no stop string is shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as HubTokenizer

from specrt.text.detokenizer import StopStrings, WindowDetokenizer
from specrt.text.tokenizer import Tokenizer
from support.toy import BOS, EOS, SPECIAL
from text.support import held, hub

LOST = "\ufffd"


def words(folder: Path, prefix: str = "", suffix: str = "") -> Path:
    """Write a tokenizer whose decoder looks at the neighbours of a token."""
    ends = {f"{word}{suffix}" for word in ("hel", "lo", "wor", "ld")}
    vocab = {word: i for i, word in enumerate(sorted(ends | {"hel", "wor", f"{prefix}lo"}))}
    made = HubTokenizer(models.WordLevel({**vocab, "[UNK]": len(vocab)}, unk_token="[UNK]"))
    made.decoder = decoders.BPEDecoder(suffix) if suffix else decoders.WordPiece(prefix)
    made.add_special_tokens([BOS])
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


def cut(ids: list[int], places: list[int]) -> list[list[int]]:
    """Cut a list at some places; pieces may be empty."""
    edges = [0, *sorted(p % (len(ids) + 1) for p in places), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


def chunks(tokenizer: Tokenizer, pieces: list[list[int]], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


unicode = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters=LOST)
    | st.sampled_from("é€😀👨‍👩‍👧 the\n  helo world")
)
places = st.lists(st.integers(0, 1000), max_size=12)


@held
@given(text=unicode, at=places, begin=st.integers(0, 1000), begins=st.booleans())
def test_a_completion_is_what_it_adds_to_its_prompt(
    spelled: list[Tokenizer], text: str, at: list[int], begin: int, begins: bool
) -> None:
    """However its tokens arrive, and where the prompt ends in half a character, too."""
    for used in spelled:
        library, bos = hub(used), used.encode(BOS, special=False)
        ids = [*bos * begins, *library.encode(text).ids]
        edge = begin % (len(ids) + 1)
        prompt, tokens = ids[:edge], ids[edge:]
        whole, before = library.decode(ids), used.decode(prompt)
        found = chunks(used, cut(tokens, at), prompt)
        assert before.rstrip(LOST) + "".join(found) == whole
        assert not any(LOST in shown for shown in found)
        assert used.decode(ids) == whole
        assert used.decode(tokens, prompt) == "".join(found)


@held
@given(ids=st.lists(st.sampled_from([0xC3, 0xE2, 0x82, 0xAC, 0xFF, 97]), max_size=40), at=places)
def test_bytes_that_are_no_text_come_as_they_are_certain(
    spelled: list[Tokenizer], ids: list[int], at: list[int]
) -> None:
    for used in spelled[:-1]:  # the last one has no bytes
        first = hub(used).token_to_id("<0x00>") or 0
        tokens = [first + byte for byte in ids]
        assert "".join(chunks(used, cut(tokens, at))) == bytes(ids).decode(errors="replace")
        for shown in (chunks(used, [[token] for token in tokens]), [used.decode(tokens)]):
            assert "".join(shown) == bytes(ids).decode(errors="replace")
        assert chunks(used, [[first + 0xFF]] * 3) == [*LOST * 3, ""]


@pytest.mark.parametrize(("prefix", "suffix"), [("##", ""), ("", "</w>")])
def test_decoders_that_look_at_neighbours_see_the_prompt(
    tmp_path: Path, prefix: str, suffix: str
) -> None:
    used = Tokenizer(words(tmp_path, prefix, suffix))
    library = hub(used)
    ids = [library.token_to_id(t) for t in ("hel", f"{prefix}lo{suffix}", f"wor{suffix}")]
    (bos,) = used.encode(BOS, special=False)
    whole = library.decode(ids)
    assert whole == "hello wor"
    for edge in range(4):
        before = library.decode(ids[:edge])
        for tokens in (ids[edge:], [token for i in ids[edge:] for token in (*[bos, 999] * 9, i)]):
            assert before + "".join(chunks(used, [tokens], [bos, *ids[:edge]])) == whole
            pieces = [[token] for token in tokens]
            assert before + "".join(chunks(used, pieces, [bos, *ids[:edge]])) == whole
    assert used.piece(ids[-1]) == " wor"


def test_a_window_stays_short_whatever_comes() -> None:
    """A decoder that asks for ever more context would take quadratic time."""
    seen = list[int]()

    def decode(ids: list[int]) -> str:
        seen.append(len(ids))
        return LOST * len(ids)

    detokenizer = WindowDetokenizer(decode, range(100))
    shown = [detokenizer.push([1]) for _ in range(200)]
    assert "".join(shown).count(LOST) > 180
    assert max(seen) < 16


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    for special in map(tokenizer.encode, (BOS, EOS, SPECIAL)):
        ids = [*b"ab", *special, *b"c", *special * 3, *b"d", *special]
        assert tokenizer.decode(ids) == "".join(chunks(tokenizer, [[i] for i in ids])) == "abcd"
        assert chunks(tokenizer, [special, special]) == ["", "", ""]


letters = st.text("abc", max_size=14)
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def test_special_tokens_are_no_text_however_the_tokenizer_writes_them(tmp_path: Path) -> None:
    """The library shows one whose name is written otherwise in a normalized text."""
    made = hub(Tokenizer(words(tmp_path, "##")))
    made.normalizer = normalizers.Lowercase()
    made.add_special_tokens([AddedToken("[SEP]", special=True, normalized=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    used = Tokenizer(tmp_path / "tokenizer.json")
    ids = used.encode("hel[SEP]lo")
    assert len(used.special.intersection(ids)) == 1
    assert used.decode(ids) == "".join(chunks(used, [[i] for i in ids])) == "hel lo"


def feed(stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], str | None]:
    found, shown = StopStrings(stops), []
    for piece in pieces:
        text, met = found.push(piece)
        shown.append(text)
        if met is not None:
            assert found.finish() == ""
            return shown, met
    return [*shown, found.finish()], None


@settings(held, max_examples=100)
@given(pieces=st.lists(letters, max_size=8), stops=stops)
def test_of_stop_strings_the_earliest_counts_then_the_first(
    pieces: list[str], stops: tuple[str, ...]
) -> None:
    """As docs/embedding.md has it: by a search for each of them."""
    shown, held = [], ""
    for piece in pieces:
        held += piece
        met = [(held.find(stop), stop) for stop in stops if stop in held]
        if met:
            assert feed(stops, pieces) == ([*shown, held[: min(met)[0]]], min(met)[1])
            return
        ends = (at for at in range(len(held)) if any(s.startswith(held[at:]) for s in stops))
        at = next(ends, len(held))
        shown.append(held[:at])
        held = held[at:]
    assert feed(stops, pieces) == ([*shown, held], None)
