"""Chat templates: those of models in use, and those that would take all time or memory."""

# ruff: noqa: E501, RUF001  # templates are as their authors wrote them

from __future__ import annotations

KNOWN = {
    "chatml": """\
{% for message in messages %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}""",
    "llama31": """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- tool_call.arguments | tojson }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "gemma3": """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
""",
    "mistral": """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{#- This block checks for alternating user/assistant messages, skipping tool calling messages #}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
""",
    "qwen3": """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {{- tool_call.arguments | tojson }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}""",
    "deepseek": """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<｜User｜>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}""",
    "macros": """\
{%- macro render(content, n=2) -%}{%- if content is string -%}{{ content | trim | replace('<', '&lt;') }}{%- else -%}{{ content | map(attribute='text') | join('
') }}{%- endif -%}{%- endmacro -%}
{%- macro box() -%}[{{ caller() }}]{%- endmacro -%}
{%- for m in messages if m.role != 'robot' -%}{%- call box() -%}{{ m.role|upper ~ ': ' ~ render(m.content) }}{%- endcall -%}{{ '%02d' % loop.index }}{{ "{:>3}|{}".format(loop.index, m.role) }}{{ loop.previtem|default('none') is mapping }}{{ loop.nextitem.role if loop.nextitem is defined }}{%- endfor -%}
{%- set text -%}{% filter upper %}{{ messages[-1].role }}{% endfilter %}{%- endset -%}{{ text|length }}{{ messages|map(attribute='role')|unique|sort|join(', ') }}{{ messages|selectattr('role','equalto','user')|list|length }}{{ messages|groupby('role')|map('first')|list|tojson }}{{ dict(a=1, b=[1,2,{'c': none}])|dictsort|tojson(indent=2) }}{{ (1, 2.5)|sum }}{{ 2**10 // 3 % 7 }}{{ 'abc'[::-1] }}{{ 'a,b'.split(',')|reverse|list }}{{ range(3)|batch(2, 'x')|list }}{{ {'a': 1}.items()|list }}{{ messages[0].get('name', 'nobody') }}{{ 'x' * 3 + 'y' }}{{ cycler('a','b').next() }}{{ 'title me'|title }}{{ 3.14159|round(2) }}{{ ' x '.strip() ~ 5 ~ none ~ true }}{% generation %}{{ messages[0].content[:5] | indent(4) }}{% endgeneration %}{{ '' if tools is none }}{{ 'aXa'|replace(new='b', old='a', count=1) }}{{ 'a generator' if messages|selectattr('role', 'equalto', 'nobody') }}{{ 3 is odd }}{{ 9 is divisibleby 3 }}{{ 'trim' is filter }}{{ {1.5: none, true: 4}|tojson }}{{ none|map('x')|list }}{{ namespace([('q', 7)]).q }}""",
}
"""The forms that transformers renders for these families; `macros` has what others use."""

TREES = "{% set ns = namespace(a=(1,), b=(1,)) %}{% for i in range(50) %}" + (
    "{% set ns.a = (ns.a, ns.a) %}{% set ns.b = (ns.b, ns.b) %}{% endfor %}"
)
"""Two tuples that are small, and whose elements are more than there are atoms."""


def _doubled(step: str) -> str:
    return f"{{% set ns = namespace(x='x') %}}{{% for i in range(60) %}}{step}{{% endfor %}}"


def _many(body: str, value: str = "") -> str:
    """Return loops of 10^10 turns, over a text of a million characters."""
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}"
    return f"{{% set x = 'y' * 999999 %}}{value}{loops}{body}{{% endfor %}}{{% endfor %}}"


HOSTILE = {
    "steps": (
        _many(""), "{% for a in range(99999) %}{% for b in range(99999) if 0 %}{% endfor %}{% endfor %}",
        _many("{% if 'z' in x %}{% endif %}"), _many("{% set y = x[1:] %}"), _many("{{ x.upper() }}"),
        _many("{% set y = range(99999)|list %}"), _many("{% set y = range(99999)|sort %}"),
        _many("{% if 'a' in range(99999) %}{% endif %}"), _many("{{ loop.changed(x ~ '') }}"),
        _many("{% if messages.x %}{% endif %}" * 1500), _many("{% set y = x|trim %}"),
        "{% set l = [1, 2] %}{% for a in l recursive %}{{ loop(l) if loop.depth < 60 }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ caller() }}{% endmacro %}" + _many("{% call f() %}{% endcall %}"),
        "{% for a in range(99999) %}{% set z = range(99999)|map('string')|groupby(0) %}{% endfor %}",
        "{% for a in ['y' * 999999] * 999 %}{{ loop|join }}{% endfor %}",

        _many("{% set y = d.items()|list %}", "{% set d = dict(range(50000)|map('string')|batch(2)) %}"),
        _many("{% set y = d.keys() - [] %}", "{% set d = dict(range(50000)|map('string')|batch(2)) %}"),
        TREES + "{{ {'a': ns.a}.items() - {'a': ns.b}.items() }}",
        *(_many("{% set y = range(99999)|" + f + "|first %}") for f in (
            "select('none')", "reject('integer')", "selectattr('q')", "rejectattr('real', 'integer')",
        )),
        "{% for x in [1] recursive %}{% if loop.depth < 9 %}{{ loop(iterable=range(99999)) }}{% endif %}{% endfor %}",
        _many("{% set y = z.split(t) %}", "{% set z, t = 'a' * 2400, 'a' * 600 ~ 'b' ~ 'a' * 300 %}"),
        "{{ ('a' * 99999)|replace(new='b' * 99999, old='a') }}",
        "{{ ('a' * 99999)|replace('a', count=99999, new='b' * 99999) }}",
        "{{ '{:>٩٩٩٩٩٩٩٩٩}'.format('x') }}",
        *("{% set x = " + held + " %}{{ range(99999)|join(x) }}" for held in (
            "[0] * 99999", "[none] * 99999", "[0.1] * 99999", "{1: [0] * 99999}", "{'a': 'x' * 99999}",
        )),
        "{{ 'x'|center(10 ** 10) }}", "{{ 'x'|center(10000000000) }}", "{{ 'x'.center(10 ** 10) }}",
        "{{ 'x'.ljust(10 ** 10) }}", "{{ 'x'.zfill(10 ** 10) }}", "{{ 'x' * 10 ** 10 }}",
        "{{ 10 ** 10 * 'x' }}", "{{ [1] * 10 ** 10 }}", "{{ ('\t' * 1000).expandtabs(10 ** 8) }}",
        "{{ ('a\n' * 1000)|indent(10 ** 8) }}", "{{ ('a\n' * 99999)|indent('x' * 99999) }}",
        "{{ '%1000000000d' % 1 }}", "{{ '%.1000000000f' % 1 }}", "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}", "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
        "{% set x = 'y' * 99999 %}{{ ('{0}' * 10000).format(x) }}{{ ('%(a)s' * 10000) % {'a': x} }}",
        "{{ range(99999)|join('x' * 99999) }}", "{{ ('x' * 99999).join('y' * 99999) }}",
        "{% set x = 'y' * 99999 %}{{ ''.join(range(99999)|map('string')|map('replace', '1', x)) }}",
        "{{ [1]|batch(10 ** 9, 'x')|list }}", "{{ [1]|slice(10 ** 9)|list }}",
        "{{ range(99999)|batch(1)|list|sum(start=[]) }}", "{{ 1.5|round(10 ** 8, 'ceil') }}",
        "{{ [[1]]|tojson(indent=10 ** 9) }}", "{{ [1, 2]|tojson(separators=('x' * 9999999, 'y')) }}",
        "{{ range(99999)|map(attribute='a' ~ '.a' * 99999, default={})|list }}",
        "{% set x = ' \u20ac' * 2999999 %}{{ x.split() }}", "{{ ('\u20ac' * 2999999)|list }}",
        "{% set x = 'a' * 999999 %}{{ x.rfind('b' ~ 'a' * 99999) }}{{ x.strip('b' * 99999) }}",
        "{{ strftime_now('%c' * 9999999) }}", "{{ ('\U0001f600' * 9999999)|tojson|length }}",
        *(TREES + use for use in (
            "{{ ns.a }}", "{{ ns.a ~ '' }}", "{{ ns.a == ns.b }}", "{{ {ns.a: 1}|length }}",
            "{{ {}[ns.a] }}", "{{ {}.get(ns.a) }}", "{{ ns.a|tojson }}", "{{ ns.a is eq ns.b }}",
            "{{ ns.a|safe|length }}", "{{ [ns.a]|unique|list }}", "{{ raise_exception(ns.a) }}",
            "{{ ns.a in [ns.b] }}", "{{ [ns.a, ns.b]|sort }}", "{{ '%s' % [ns.a] }}",
            "{{ '{}'.format(ns.a) }}", "{{ [ns.b].index(ns.a) }}", "{{ dict([(ns.a, 1)]) }}",
            "{{ ns.a is filter }}", "{{ ns.a is test }}", "{{ [1]|join(ns.a) }}",
        )),
        *map(_doubled, (
            "{% set ns.x = ns.x ~ ns.x %}", "{% set ns.x = ns.x + ns.x %}",
            "{% set ns.x = [ns.x, ns.x]|join %}", "{% set ns.x = '%s%s'|format(ns.x, ns.x) %}",
            "{% set ns.x = ns.x|replace('x', 'xx') %}", "{% set ns.x = ns.x.replace('x', 'xx') %}",
            "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
            "{% set ns.x = [ns.x] + [ns.x] %}{% set ns.x = ns.x|string %}",
        )),
    ),
    "characters": (
        "{% for i in range(99999) %}" + "x" * 40000 + "{% endfor %}", "x" * (1 << 18),
        "{{ strftime_now('%c' * 999) }}",
    ),
    "64 bits": (
        "{{ 10 ** 10 ** 10 }}", "{{ 7 ** (10 ** 9) }}", "{{ 1e300|int }}", "{{ ('1' * 4000)|int }}",
        "{{ 99999999999999999999 }}", "{{ [9e18|int, 9e18|int]|sum }}",
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    ),
    "deep": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(20000) %}"
        "{% set ns.x = ns.x|map('string') %}{% endfor %}{{ ns.x|list }}",
        "{% set ns = namespace(x=1) %}{% for i in range(9999) %}{% set ns.x = (ns.x,) %}{% endfor %}"
        "{{ {ns.x: 1} }}",
    ),
    "width that is a value": (
        "{{ '%*d' % (10 ** 9, 1) }}", "{{ '{:{}}'.format(1, 10 ** 9) }}", "{{ '{0:{1}}'.format(1, 2) }}",
    ),
    "no bound": (
        "{{ (5).to_bytes(10 ** 9) }}", "{{ 'x'.encode() }}", "{{ 'x'.translate({120: 'y' * 99}) }}",
        "{{ dict.fromkeys(range(9)) }}",
    ),
    "no chat template needs": (
        "{% block a %}{{ self.a() }}{% endblock %}", "{% include 'x' %}", "{% extends 'x' %}",
        "{% import 'x' as y %}", "{% from 'x' import y %}",
        "{% autoescape 'x'|center(10000000000) %}{% endautoescape %}",
    ),
    "No filter named": (
        "{{ [-10 ** 12]|map(' pay')|list }}", "{{ ['x']|map(' counted', 0)|list }}",
        "{{ 'x'|wordwrap(1) }}", "{{ 'x'|urlize }}", "{{ [1]|pprint }}", "{{ '<!--'|striptags }}",
    ),
    "undefined": ("{{ lipsum(n=10 ** 9) }}",),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ a" + "|e" * 20000 + " }}"),
    "of numbers": (
        "{{ '%999999999d' is odd }}", "{{ ['%999999999d']|select('even')|list }}",
        "{{ '%999999999d' is divisibleby 5 }}",
    ),
    "has a key of the type": (
        "{{ {(1, 2): 3} }}", "{{ {range(2): 3} }}", "{{ dict([((1, 2), 3)]) }}",
        "{{ namespace([((1, 2), 3)]).x }}", "{{ {1: 2}.items() - [] }}", "{{ [(1, 2)] - {}.keys() }}",
    ),
    "not text": (
        "{% set ns = namespace() %}{% set ns.x = [ns, ns] %}{{ ns }}",
        _many("{% set y = n|escape %}", "{% set n = namespace(__html__=x.upper) %}"),
    ),
}  # fmt: skip
"""By a word of the refusal."""
