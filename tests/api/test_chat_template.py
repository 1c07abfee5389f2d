"""Chats become the text that templates make of them, and no template costs more than its bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import models

from specrt.chat_template import ChatTemplate, read_template
from specrt.errors import RequestError

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
    return folder


def test_special_tokens_are_known_by_name(tmp_path: Path) -> None:
    begin = {"content": "<s>", "lstrip": False, "special": True}
    folder = bundle(tmp_path, chat_template=LLAMA, bos_token=begin, add_bos_token=True)
    said = read_template(folder).render([{"role": "user", "content": "hi"}])
    assert said.startswith("<s><|start_header_id|>user<|end_header_id|>\n\nhi<|eot|>")
    with pytest.raises(RequestError, match="refused the messages: unknown role: robot"):
        read_template(folder).render([{"role": "robot", "content": "hi"}])


def test_templates_render_as_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=HubTokenizer(models.BPE()), chat_template=LLAMA, **TOKENS
    )
    for prompted in (True, False):
        said = {"tokenize": False, "add_generation_prompt": prompted}
        found = ChatTemplate(LLAMA, TOKENS).render(TALK, add_generation_prompt=prompted)
        assert found == tokenizer.apply_chat_template(TALK, **said)


DEEP = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"


def test_blocks_of_a_template_leave_no_lines() -> None:
    source = "{% if true %}\nX\n  {% endif %}\nY"
    assert ChatTemplate(source, {}).render([]) == "X\nY"


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
    ):
        (tmp_path / "tokenizer_config.json").write_bytes(text)
        with pytest.raises(RequestError, match=rf"config\.json {told}.*build the bundle again"):
            read_template(tmp_path)


def test_json_is_not_escaped_for_the_web() -> None:
    source = "{{ {'b': messages[0].content} | tojson(separators=(',', ':'), sort_keys=true) }}"
    found = ChatTemplate(source, {}).render([{"role": "user", "content": "<ż>"}])
    assert found == '{"b":"<ż>"}'


def test_the_default_of_several_is_taken_and_a_separate_file_wins(tmp_path: Path) -> None:
    told = f"{tmp_path} has no chat template.*complete plain text instead"
    named: list[object] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain {{ eos_token }}"},
    ]
    for others in (named[:1], [{"name": "default"}], [5]):
        with pytest.raises(RequestError, match=told):
            read_template(bundle(tmp_path, chat_template=others))
    folder = bundle(tmp_path, chat_template=named)
    assert read_template(folder).render([]) == "plain <|eot|>"
    (tmp_path / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert read_template(folder).render([]) == "from the file"
