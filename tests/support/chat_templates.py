"""Chat templates of models in use."""

# ruff: noqa: E501, RUF001  # templates are as their authors wrote them

from __future__ import annotations

KNOWN = {
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
