"""Chat templates render as transformers renders them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specrt.errors import RequestError
from specrt.text import ChatTemplate, read_template

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
SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|eot|>"}


def bundle(folder: Path, **config: object) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**SPECIAL, **config}), encoding="utf-8")
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
    from tokenizers import Tokenizer, models

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=LLAMA, **SPECIAL
    )
    for prompted in (True, False):
        said = {"tokenize": False, "add_generation_prompt": prompted}
        found = ChatTemplate(LLAMA, SPECIAL).render(TALK, add_generation_prompt=prompted)
        assert found == tokenizer.apply_chat_template(TALK, **said)


DEEP = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"


def test_whatever_a_template_raises_is_one_short_line() -> None:
    for source, told in (
        ("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", "refused the messages"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "refused the messages"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "refused the messages"),
        ("{{ raise_exception('two\n \x1b[31m lines' ~ 'x' * 9999) }}", "refused the messages"),
        ("{{ raise_exception({}) }}", "refused the messages"),
        ("{% for %}", "is not valid Jinja"),
        (DEEP, "is not valid Jinja"),
    ):
        with pytest.raises(RequestError, match=f"{told}: .") as refused:
            ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 300


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    for text, told in (
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds []; expected an object"),
        ('{"chat_template": 5}', "has the chat_template 5; expected a string"),
        ("\xff", "cannot be read as UTF-8"),
    ):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(RequestError) as refused:
            read_template(tmp_path)
        assert f"{path} {told}" in str(refused.value)
        assert "build the bundle again" in str(refused.value)


def test_json_is_not_escaped_for_the_web() -> None:
    for call, text in (
        ("tojson", '{"b": "<ż>", "a": 1}'),
        ("tojson(separators=(',', ':'), sort_keys=true)", '{"a":1,"b":"<ż>"}'),
    ):
        source = "{{ {'b': messages[0].content, 'a': 1} | " + call + " }}"
        assert ChatTemplate(source, {}).render([{"role": "user", "content": "<ż>"}]) == text


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
