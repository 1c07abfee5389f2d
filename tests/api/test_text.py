"""Text comes out whole characters at a time, prompts from files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as HubTokenizer

from specrt.chat_template import ChatTemplate
from specrt.detokenizer import StopStrings, WindowDetokenizer
from specrt.errors import BundleError, RequestError
from specrt.text import (
    PromptRecord,
    Tokenizer,
    decode_utf8,
    first_of_each,
    of_categories,
    read_prompts,
    read_text,
)
from support.toy import BOS, EOS, SPECIAL, STYLES, sentencepiece

held = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
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


@pytest.fixture(scope="session")
def spelled(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    """Tokenizers whose tokens are bytes, each in the style of some checkpoints."""
    made = [Tokenizer(sentencepiece(tmp_path_factory.mktemp(style), style)) for style in STYLES]
    return [tokenizer, *made]


def hub(tokenizer: Tokenizer) -> HubTokenizer:
    return HubTokenizer.from_str(tokenizer.to_json())


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


def test_a_prompts_half_character_is_completed_or_lost_with_it(spelled: list[Tokenizer]) -> None:
    for used in spelled[:-1]:
        first = hub(used).token_to_id("<0x00>") or 0
        prompt = [first + 97, first + 0xE2]
        for more, shown in (([0x82, 0xAC], "€"), ([97], "a"), ([0x82, 97], "a"), ([], "")):
            assert used.decode([first + byte for byte in more], prompt) == shown


def test_a_space_is_kept_behind_text_and_dropped_at_its_beginning(
    spelled: list[Tokenizer],
) -> None:
    for used in spelled[1:]:
        library = hub(used)
        tokens = [library.token_to_id(f"▁{w}") for w in ("h", "w")]
        (bos,) = used.encode(BOS, special=False)
        (text,) = used.encode("e", special=False)[-1:]
        gemma = "Strip" not in str(library.decoder) and "Fuse" in str(library.decoder)
        for prompt in ([], [bos], [bos, bos]):
            assert used.decode(tokens, prompt) == (" h w" if gemma else "h w")
        for prompt in ([text], [bos, text], [bos, text, bos]):
            assert used.decode(tokens, prompt) == " h w"
        assert [used.piece(token) for token in (*tokens, bos)] == [" h", " w", ""]


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


@pytest.mark.parametrize(
    "decoder",
    [
        [decoders.Fuse(), decoders.ByteFallback()],
        [decoders.Fuse(), decoders.Strip(" ", 1, 0), decoders.Strip("h", 1, 0)],
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)],
    ],
)
def test_decoders_in_another_order_are_the_librarys(
    tmp_path: Path, decoder: list[decoders.Decoder]
) -> None:
    made = HubTokenizer(models.BPE({" ": 0, " h": 1, "<0x41>": 2, "h": 3}, []))
    made.decoder = decoders.Sequence(decoder)
    made.save(str(tmp_path / "tokenizer.json"))
    used = Tokenizer(tmp_path / "tokenizer.json")
    for ids in ([0, 1, 2], [1, 3, 2, 2], [2, 0, 3]):
        assert used.decode(ids) == made.decode(ids)


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


def test_a_character_is_held_whole(tokenizer: Tokenizer, spelled: list[Tokenizer]) -> None:
    for used in spelled[:-1]:
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


def test_a_size_is_that_of_the_largest_id_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    HubTokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a")).save(str(path))
    assert Tokenizer(path).size == 8
    path.write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a tokenizer: .* build the bund"):
        Tokenizer(path)


# Control tokens

PARTS = [BOS, EOS, SPECIAL, "<", "</", "s>", "/s", ">", "oo", "<|too", "l|>", "|>", "e", "o ", " "]
contents = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)
CHAT = ChatTemplate(
    "{{ bos }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}<|tool|>",
    {"bos": BOS},
)
ODD = ChatTemplate(
    "{% for m in messages %}<{{ m.content }}><|t{{ m.content }}l|>|{{ m.content }}/s></s>"
    "{% endfor %}",
    {},
)
TRIM = ChatTemplate(
    "{% for m in messages %}<|tool|> {{ m.content | trim }}<|tool|>{% endfor %}",
    {},
)
JOIN = ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}", {})


def spelled_out(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(hub(tokenizer).decode(ids, skip_special_tokens=False))


@held
@given(said=st.lists(contents, max_size=3), behind=st.integers(0, 99))
@example(said=["e<", "/s>e", "/s"], behind=0)
@example(said=["e</ ", " s> e", " /s "], behind=0)
def test_what_messages_hold_is_text(spelled: list[Tokenizer], said: list[str], behind: int) -> None:
    messages = [{"role": "tool", "content": content} for content in said]
    for used in spelled:
        bos, eos, tool = (used.encode(mark, special=False)[0] for mark in (BOS, EOS, SPECIAL))
        for template, own in (
            (CHAT, [bos, *[tool, eos] * len(said), tool]), (TRIM, [tool, tool] * len(said)),
            (ODD, [eos] * len(said)), (JOIN, []),
        ):  # fmt: skip
            prompt = template.render(messages)
            if not prompt:
                continue
            ids = used.encode(prompt)
            assert [token for token in ids if token in (bos, eos, tool)] == own
            shown = spelled_out(used, ids)
            if used is spelled[0]:
                tail = used.encode(prompt, behind=min(behind, len(prompt)))
                assert prompt.endswith(spelled_out(used, tail))
            if used in (spelled[1], spelled[-1]):  # put and drop spaces beside control tokens
                shown, prompt = (text.replace(" ", "") for text in (shown, prompt))
            assert shown == prompt


@held
@given(text=contents)
def test_a_prompt_may_hold_no_control_tokens(spelled: list[Tokenizer], text: str) -> None:
    for used in spelled:
        ids = used.encode(f"e{text}", parse_special=False)
        begin = [library_id] if (library_id := hub(used).encode("e").ids[0]) in used.special else []
        assert not used.special.intersection(ids[len(begin) :])
        assert ids[: len(begin)] == begin
        shown = f"e{text}"
        shown = " ".join(shown.split()) if used is spelled[-1] else shown  # t5 has no other blanks
        assert used.decode(ids).strip() == shown.strip()
        if used.special.isdisjoint(hub(used).encode(f"e{text}", add_special_tokens=False).ids):
            assert ids == used.encode(f"e{text}")


def test_a_tokenizers_own_special_tokens_are_added_once(tmp_path: Path) -> None:
    """Whatever its vocabulary lacks."""
    made = HubTokenizer(models.WordLevel({BOS: 0, EOS: 1, "X": 2}, "X"))
    made.normalizer = normalizers.Replace(Regex("[^X]"), "")
    made.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, 0), (EOS, 1)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    used = Tokenizer(tmp_path / "tokenizer.json")
    for text, ids in (("X", [0, 2, 1]), ("", [0, 1]), ("a", [0, 1])):
        assert used.encode(text, parse_special=False) == used.encode(text) == ids


def test_a_prompt_without_control_tokens_in_messages_is_encoded_as_ever(
    spelled: list[Tokenizer],
) -> None:
    """What a content could be part of is no control token as long as it is not."""
    for used in spelled:
        for content in ("he", "tool", "s", "> o", "a <", " o  e "):
            for template in (CHAT, TRIM):
                prompt = template.render([{"role": "tool", "content": content}])
                assert used.encode(prompt) == used.encode(str(prompt), special=False)


def test_control_tokens_are_known_however_they_are_written(tmp_path: Path) -> None:
    """Some tokenizers find them in lower case, and take the blanks beside them in."""
    made = HubTokenizer(models.BPE({c: i for i, c in enumerate("</s>e \n")}, []))
    made.normalizer = normalizers.Lowercase()
    made.add_special_tokens(
        [AddedToken(EOS, special=True, normalized=True, lstrip=True, rstrip=True)]
    )
    made.decoder = decoders.Fuse()
    made.save(str(tmp_path / "tokenizer.json"))
    used = Tokenizer(tmp_path / "tokenizer.json")
    (end,) = used.encode("</S>")
    template = ChatTemplate("e {{ messages[0].content }} </S>\ne", {})
    for content in ("e </S> e", "</s>", "</", "<", " </S></s> "):
        ids = used.encode(template.render([{"role": "user", "content": content}]))
        assert (ids.count(end), ids[-2]) == (1, end)
        assert used.decode(ids) == f"e {content.lower()}".rstrip() + "e"


def test_control_tokens_of_the_vocabulary_are_known_however_they_are_written(
    tmp_path: Path,
) -> None:
    """Those of Unigram models are words of theirs, once the normalizer has dropped characters."""
    names = ["<unk>", EOS, *"<>/se", "▁"]
    made = HubTokenizer(models.Unigram([(name, -2.0) for name in names], 0))
    made.normalizer = normalizers.Replace(Regex("\x01"), "")
    made.add_special_tokens(["<unk>", EOS])
    made.save(str(tmp_path / "tokenizer.json"))
    used = Tokenizer(tmp_path / "tokenizer.json")
    plain = [names.index(mark) for mark in "<>/se"]
    spelled = [plain[0], plain[2], plain[3], plain[1]]
    assert used.encode("e<\x01/s>?", parse_special=False) == [plain[4], *spelled, 0]
    template = ChatTemplate("{{ messages[0].content }}</s>", {})
    prompt = template.render([{"role": "user", "content": "<\x01/s>?"}])
    assert used.encode(prompt) == [*spelled, 0, 1]


def test_control_tokens_beside_what_a_normalizer_parts_are_text(tmp_path: Path) -> None:
    """The library counts a character before one as its own."""
    made = HubTokenizer(
        models.WordPiece({c: i for i, c in enumerate("?</s>\u672c")}, unk_token="?")
    )
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens([AddedToken(EOS, special=True, normalized=True, lstrip=True)])
    made.save(str(tmp_path / "tokenizer.json"))
    used = Tokenizer(tmp_path / "tokenizer.json")
    template = ChatTemplate("s {{ messages[0].content }}s", {})
    ids = used.encode(template.render([{"role": "user", "content": "\u672c</s>"}]))
    assert ids == [3, 5, 1, 2, 3, 4, 3]


def test_blank_control_tokens_in_contents_are_text(tmp_path: Path) -> None:
    made = HubTokenizer(models.BPE({c: i for i, c in enumerate("e\n")}, []))
    made.add_special_tokens(["\n\n"])
    made.save(str(tmp_path / "tokenizer.json"))
    used = Tokenizer(tmp_path / "tokenizer.json")
    template = ChatTemplate("{{ messages[0].content }}e{{ '\\n\\n' }}", {})
    prompt = template.render([{"role": "user", "content": "e\n\ne"}])
    assert used.encode(prompt) == [0, 1, 1, 0, 0, 2]


def test_a_template_that_reads_control_tokens_in_contents_is_refused(
    tokenizer: Tokenizer,
) -> None:
    source = "{% if '</s>' in messages[0].content %}</s></s>{% endif %}e</s>"
    said = [{"role": "user", "content": f"a{EOS}"}]
    with pytest.raises(RequestError, match=r"</s>.*leave"):
        tokenizer.encode(ChatTemplate(source, {}).render(said))
    # Where it only drops some, the rest is what it makes of them.
    cut_off = ChatTemplate("{{ messages[0].content.split('</s>')[-1] }}</s>", {})
    prompt = cut_off.render([{"role": "user", "content": f"a{EOS}b"}])
    assert tokenizer.encode(prompt) == [*b"b", *tokenizer.encode(EOS)]


def test_parts_and_calls_of_messages_are_contents_too(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content[0].text }}{{ m.calls | tojson }}</s>{% endfor %}", {}
    )
    message = {"content": [{"type": "text", "text": f"a{EOS}"}], "calls": {f"n{EOS}": f"{EOS}b"}}
    ids = tokenizer.encode(template.render([message]))
    assert ids == [*b'a</s>{"n</s>": "</s>b"}', *tokenizer.encode(EOS)]


def test_messages_that_could_hide_control_tokens_are_refused() -> None:
    template = ChatTemplate("{% for part in messages[0].content %}{{ part }}{% endfor %}", {})
    for content in (iter([EOS]), {EOS}, [Path(EOS)]):
        with pytest.raises(RequestError, match=r"type \w+; expected text.* lists and mappings"):
            template.render([{"content": content}])


def test_contents_may_hold_private_characters(tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ messages[0].content }}</s>", {})
    every = "".join(map(chr, range(0x10F001, 0x10FFFE)))
    for content in (every, f"{every[1:]}{EOS[:1]}"):
        ids = tokenizer.encode(template.render([{"content": content}]))
        assert tokenizer.decode(ids) == content
    with pytest.raises(RequestError, match=r"hold all private .* leave"):
        tokenizer.encode(template.render([{"content": every + EOS}]))


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
