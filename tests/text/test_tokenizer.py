"""What a tokenizer reads as control tokens, and what as text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
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

from specrt.errors import BundleError, RequestError
from specrt.text.chat_template import ChatTemplate
from specrt.text.tokenizer import Tokenizer
from support.toy import BOS, EOS, SPECIAL
from text.support import held, hub


def test_a_size_is_that_of_the_largest_id_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    HubTokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a")).save(str(path))
    assert Tokenizer(path).size == 8
    path.write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a tokenizer: .* build the bund"):
        Tokenizer(path)


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
