"""What a tokenizer reads as control tokens, and what as text."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HubTokenizer

from specrt.errors import BundleError, CheckpointError, RequestError
from specrt.text.chat_template import ChatTemplate
from specrt.text.tokenizer import Tokenizer
from support.toy import BOS, EOS, SPECIAL, byte_level, sentencepiece
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
    "{% for m in messages %}<|tool|> {{ m.content | trim }}<|tool|>{% endfor %}", {}
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
            if used in (spelled[1], spelled[-1]):  # put and drop spaces next to control tokens
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


@pytest.mark.parametrize(
    ("expression", "own"),
    [
        ("{{ '</s>' ~ x ~ '</s>' }}", 2), ("{{ '</s>' + x + '</s>' }}", 2),
        ("{{ ('</s>' ~ x ~ ' </s> ') | trim }}", 2), ("{{ ('</s>' ~ x).strip() }}", 1),
        ("{{ (x ~ '|</s>').split('|')[-1] }}", 1), ("{{ ('</s>|' ~ x).rsplit('|', 1)[0] }}", 1),
        ("{{ ('</s>|' ~ x).partition('|')[0] }}{{ x.partition('|') | join }}", 1),
        ("{{ ['</s>', x, '</s>'] | join }}", 2), ("{{ '</s>'.join([x, x]) }}", 1),
        ("{{ '</s>%s' % x }}{{ '</s>%s' | format(x) }}", 2), ("{{ '</s>{}'.format(x) }}", 1),
        ("{{ ('</s>' ~ x).replace('e', 'o') }}", 1), ("{{ 'e</s>' | replace('e', x) }}", 1),
        ("{{ x.replace('s>', '/s>').replace('//', '/') }}", 0), ("{{ x[1:] }}{{ x[0:] }}", 0),
        ("{{ ('</s>' ~ x)[:4] }}{{ ('</s>' ~ x)[4:] }}", 1), ("{{ x | upper | lower }}", 0),
        ("{{ x | list | join }}{% for c in x %}{{ c }}{% endfor %}{{ x | string }}", 0),
        ("{{ {'a': [x]} }}{{ {'a': [x]} | tojson }}{{ x | tojson }}{{ [x] ~ '' }}", 0),
        ("{{ x | reverse | reverse }}{{ x | first }}{{ x | last }}{{ x * 2 }}", 0),
        ("{% macro m(y) %}</s>{{ y }}{% endmacro %}{{ m(x) | trim }}", 1),
        ("{% set y %}</s>{{ x }}{% endset %}{{ y }}{% filter trim %}{{ x }}{% endfilter %}", 1),
        ("{% set n = namespace(y='</s>') %}{% set n.y = n.y ~ x %}{{ n.y | indent }}", 1),
        ("{{ messages | map(attribute='content') | map('trim') | join('</s>') }}", 1),
        ("{{ x | safe }}{{ x | e | replace('&lt;', '<') | replace('&gt;', '>') }}", 0),
        ("{{ x | default('</s>') }}{{ none | default('</s>', true) }}", 1),
        ("{{ x | title | lower }}{{ x | center(40) | trim }}{{ x.ljust(40) }}", 0),
    ],
)  # fmt: skip
def test_texts_are_known_as_messages_whatever_a_template_does_with_them(
    tokenizer: Tokenizer, expression: str, own: int
) -> None:
    (end,) = tokenizer.encode(EOS)
    template = ChatTemplate("{% set x = messages[0].content %}" + expression, {})
    messages = [{"role": "user", "content": content} for content in (f"e{EOS}e|{EOS}", "e")]
    prompt = template.render(messages)
    ids = tokenizer.encode(prompt)
    assert ids.count(end) == own
    assert spelled_out(tokenizer, ids) == prompt


MARKERS = ["<|user|>", "<|assistant|>", "[system]", "[/system]", "<end>", "</think>", "<think>"]
WORDS = ["  ", "\n\n", "hello", "<b>", "user", "###"]
MARKED = ChatTemplate(
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<end>{% endfor %}{% if x %}"
    "[{{ x.role }}][/{{ x.role }}]{{ m.split('</think>') }}user hello ### {% endif %}<|assistant|>",
    {},
)


def word_pieces(folder: Path) -> Path:
    words = {"[UNK]": 0, **{c: i + 1 for i, c in enumerate("abdehiklnorstuy<>/|[]# ")}}
    made = HubTokenizer(models.WordPiece(words, unk_token="[UNK]", continuing_subword_prefix=""))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="")
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@held
@given(said=st.lists(st.sampled_from([*MARKERS, *WORDS, "e", "|", "<", "th", " a"]), max_size=6))
@example(said=["<|user|>", "hello", "  ", "</think>", "<b>", "###", "\n\n"])
def test_what_a_template_writes_is_no_token_in_contents_and_other_added_tokens_are(
    marked: list[tuple[Tokenizer, HubTokenizer]], said: list[str]
) -> None:
    """Whatever the flag of an added token says, and as models were trained to read the others."""
    content = f"e{''.join(said)}e"
    prompt = MARKED.render([{"role": "user", "content": content}])
    for used, reference in marked:
        ids = used.encode(prompt)
        names = [hub(used).id_to_token(token) for token in ids]
        assert [name for name in names if name in MARKERS] == ["<|user|>", "<end>", "<|assistant|>"]
        begin, end = names.index("<|user|>") + 1, names.index("<end>")
        assert ids[begin:end] == reference.encode(content, add_special_tokens=False).ids
        assert used.encode(str(prompt), special=False)[:begin] == ids[:begin]
        raw = [hub(used).id_to_token(i) for i in used.encode(content, parse_special=False)]
        assert not {"<|user|>", "<|assistant|>"} & {*raw}


@pytest.fixture(scope="session")
def marked(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Tokenizer, HubTokenizer]]:
    """Tokenizers with added tokens, none of them special, and what reads contents as it must."""
    made = []
    for number, write in enumerate(
        (byte_level, word_pieces, partial(sentencepiece, style="gemma"))
    ):
        path = write(tmp_path_factory.mktemp(f"marked{number}"))
        added = HubTokenizer.from_file(str(path))
        added.add_tokens([AddedToken(name, normalized=False) for name in (*MARKERS, *WORDS)])
        added.save(str(path))
        state = json.loads(path.read_text())
        for token in state["added_tokens"]:
            token["special"] |= token["content"] in MARKERS
        reference = HubTokenizer.from_str(json.dumps(state))
        reference.encode_special_tokens = True
        made.append((Tokenizer(path), reference))
    return made


@pytest.mark.parametrize("where", ["tokenizer_config.json", "special_tokens_map.json"])
def test_special_tokens_that_only_the_configuration_names_are_special(
    where: str, tmp_path: Path
) -> None:
    path = byte_level(tmp_path)
    state = json.loads(path.read_text())
    state["model"]["vocab"] |= {"<bos>": 262, "<pad>": 263}
    made = HubTokenizer.from_str(json.dumps(state))
    made.add_tokens([AddedToken(n, normalized=False) for n in ("<end>", "<extra>", "word")])
    made.save(str(path))
    special = {made.token_to_id(name) for name in (BOS, EOS, SPECIAL)}
    bos, end, pad, extra, word = map(
        made.token_to_id, ("<bos>", "<end>", "<pad>", "<extra>", "word")
    )
    named = {"bos_token": "<bos>", "eos_token": {"content": "<end>"}, "pad_token": "!"}
    named["additional_special_tokens"] = ["<extra>", {"content": "<pad>"}]
    (tmp_path / where).write_text(json.dumps(named))
    used = Tokenizer(path)
    assert used.special == special | {bos, end, pad, extra}
    assert used.encode("a<bos>!word", special=False) == [97, bos, 33, word]
    assert used.decode([97, bos, end, pad, extra, 33, word]) == "a!word"
    prompt = ChatTemplate("{{ messages[0].content }}<end>", {}).render([{"content": "<bos><end>"}])
    assert used.encode(prompt) == [*b"<bos><end>", end]
    # What is written of it into a bundle names them itself.
    again = Tokenizer(tmp_path / "elsewhere.json", data=used.to_json().encode())
    assert again.special == used.special


@pytest.mark.parametrize("where", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"additional_special_tokens": "<extra>"}', "\xff"])
def test_a_damaged_configuration_is_refused_by_name(
    where: str, content: str, tmp_path: Path
) -> None:
    path = byte_level(tmp_path)
    (tmp_path / where).write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=rf"{where} .*; fetch it again"):
        Tokenizer(path)


def test_messages_that_could_hide_control_tokens_are_refused() -> None:
    template = ChatTemplate("{% for part in messages[0].content %}{{ part }}{% endfor %}", {})
    for content in (iter([EOS]), {EOS}, [Path(EOS)]):
        with pytest.raises(RequestError, match=r"type \w+; expected text.* lists and mappings"):
            template.render([{"content": content}])
