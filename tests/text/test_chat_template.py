"""Chats become the text that templates make of them, and no template goes on for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specrt.errors import RequestError
from specrt.text.chat_template import ChatTemplate, read_template
from support.bundles import listed
from support.chat_templates import KNOWN

LLAMA = """
{{- bos_token }}
{%- if tools is not none %}{{ raise_exception('tools were given') }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'robot' %}{{- raise_exception('unknown role: robot') }}{%- endif %}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' }}
    {%- generation %}{{ message.content | trim ~ eos_token }}{%- endgeneration %}
    {%- if loop.index > 8 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant' }}{%- endif %}
"""
TALK = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "What is <b>ż & 'x'</b>?\n"},
]
TOKENS = {"bos_token": "<|begin|>", "eos_token": "<|eot|>"}


def bundle(folder: Path, **config: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({**TOKENS, **config}))
    return listed(folder)


def test_special_tokens_are_known_by_name(tmp_path: Path) -> None:
    begin = {"content": "<s>", "lstrip": False, "special": True}
    folder = bundle(tmp_path, chat_template=LLAMA, bos_token=begin, add_bos_token=True)
    said = read_template(folder).render([{"role": "user", "content": "hi"}])
    assert said.startswith("<s><|start_header_id|>user<|end_header_id|>\n\nhi<|eot|>")
    with pytest.raises(RequestError, match="refused the messages: unknown role: robot"):
        read_template(folder).render([{"role": "robot", "content": "hi"}])


LONG = [
    {"role": role, "content": f"<think>why</think>\n w\u00f6rd {turn}" * 20}
    for turn in range(100)
    for role in ("user", "assistant")
]


@pytest.mark.parametrize("name", KNOWN)
def test_known_templates_render_as_in_transformers(name: str) -> None:
    library = pytest.importorskip("transformers.utils.chat_template_utils")
    template = ChatTemplate(KNOWN[name], TOKENS)
    for talk in (TALK, [*TALK, {"role": "assistant", "content": "<think>x</think>\n\ny"}], LONG):
        for prompted in (True, False):
            expected = library.render_jinja_template(
                [talk], chat_template=KNOWN[name], add_generation_prompt=prompted, **TOKENS
            )
            assert [template.render(talk, add_generation_prompt=prompted)] == expected[0]


DOUBLED = "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = "
LIMITED = {
    "takes more than 0.05 seconds": (
        "{% for i in [1] * 999999 %}" + "{% if i %}{% endif %}" * 2000 + "{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ ([range(99999)] * 9999) | map('join') | list }}",
        "{% for a in [1] recursive %}{{ loop(range(9999)) if loop.depth < 9 }}{% endfor %}",
    ),
    "more than 1049088 characters": (
        "{{ 'x' * 10 ** 10 }}", "{{ 10 ** 10 * [1] }}", "{{ 'x' | center(9999999) | length }}",
        "{% for i in range(9999) %}" + "x" * 9999 + "{% endfor %}",
        *(f"{DOUBLED}{twice} %}}{{% endfor %}}" for twice in (
            "ns.x ~ ns.x", "ns.x + ns.x", "[ns.x, ns.x] | join", "'%s%s' % (ns.x, ns.x)",
            "'{0}{0}'.format(ns.x)", "([ns.x] + [ns.x]) | string",
        )),
        DOUBLED + "ns.x %}{% set x %}{{ ns.x * 2 }}{% endset %}{% set ns.x = x %}{% endfor %}",
    ),
    "64 bits": (
        "{{ 10 ** (10 ** 10) }}", "{{ 7 ** (10 ** 9) }}",
        DOUBLED.replace("'x'", "3") + "ns.x * ns.x %}{% endfor %}",
    ),
    "autoescape": ("{% autoescape true %}{{ messages[0].content }}{% endautoescape %}",),
    "unsafe": ("{{ messages[0].content.encode() }}",),
}  # fmt: skip


@pytest.mark.parametrize("word", LIMITED)
def test_templates_that_go_on_or_make_too_much_are_refused(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if word.endswith("seconds"):
        monkeypatch.setattr("specrt.text.template_sandbox.MOST_SECONDS", 0.05)
    for source in LIMITED[word]:
        with pytest.raises(RequestError, match=word):
            ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


DEEP = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"


def test_whatever_a_template_raises_is_one_short_line() -> None:
    for source, told in (
        ("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", "refused the messages"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "refused the messages"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "refused the messages"),
        ("{{ raise_exception('two\n \x1b[31m lines' ~ 'x' * 9999) }}", "refused the messages"),
        ("{% for %}", "is not valid Jinja"),
        (DEEP, "is not valid Jinja"),
    ):
        with pytest.raises(RequestError, match=f"{told}: .") as refused:
            ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 300


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    for text, told in (
        (b"[" * 100_000, "is not JSON"),
        (b'{"chat_template": 5}', "has the chat_template 5; expected a string"),
        (b"\xff", "cannot be read as UTF-8"),
        (b" " * (9 << 20), "has 9437184 bytes; expected up to"),
    ):
        (tmp_path / "tokenizer_config.json").write_bytes(text)
        with pytest.raises(RequestError, match=rf"config\.json {told}.*build the bundle again"):
            read_template(listed(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * (1 << 19))
    with pytest.raises(RequestError, match=r"jinja has 524288 bytes; expected up to"):
        read_template(listed(tmp_path))


def test_json_is_not_escaped_for_the_web() -> None:
    source = "{{ {'b': messages[0].content} | tojson(separators=(',', ':'), sort_keys=true) }}"
    found = ChatTemplate(source, {}).render([{"role": "user", "content": "<ż>"}])
    assert found == '{"b":"<ż>"}'


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ 'null' if m.content is none else m.content }}{{ c.name }}", "nullf"),
        ("{% if m.content is none %}{{ c.name }}{% else %}{{ m.content }}{% endif %}", "f"),
        ("{{ m.content | trim }}{{ c.name }}", "f"), ("{{ m.content + c.name }}", "f"),
        ("{{ m.content }}{% if m.content is string %}{{ c.name }}{% endif %}", "f"),
        ("{{ c.arguments.a }}", "1"), ("{{ c.arguments | tojson }}", '{"a": 1}'),
        ("{% for k, v in c.arguments | items %}{{ k }}{% endfor %}", "a"),
        ("{{ 'call ' + c.arguments }}", 'call {"a": 1}'),
    ],
)  # fmt: skip
def test_a_call_has_the_form_that_a_template_shows(source: str, wanted: str) -> None:
    known = "{% set m = messages[0] %}{% set c = m.tool_calls[0].function %}"
    function = {"name": "f", "arguments": {"a": 1}}
    call = {"id": "1", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    template = ChatTemplate(known + source, {})
    assert template.render([message]) == wanted


def test_what_is_nested_deeply_is_refused_or_told_as_text() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ tools }}{% for m in messages %}"
                            "{% for c in m.tool_calls %}{{ c.function.arguments }}"
                            "{% endfor %}{% endfor %}", {})  # fmt: skip
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    with pytest.raises(RequestError, match="tools hold lists and objects more than 64 deep"):
        template.render([{"role": "user", "content": "x"}], tools=[{"function": deep}])
    call = {"function": {"name": "f", "arguments": {"a": deep}}}
    prompt = template.render([{"role": "assistant", "tool_calls": [call]}])
    assert prompt.endswith(json.dumps({"a": deep}))


@pytest.mark.parametrize("given", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_has_all_its_names(given: str) -> None:
    names = ("reasoning", "reasoning_content", "thinking")
    message = {"role": "assistant", "content": "so", **dict.fromkeys(names), given: "why</s>"}
    for read in names:
        template = ChatTemplate(f"{{{{ messages[0].{read} }}}}", {})
        assert template.render([message]) == "why</s>"
