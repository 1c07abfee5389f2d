"""Chat templates: from messages to the text a chat model was trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from specrt.errors import RequestError

Message = dict[str, str]


class ChatTemplate:
    """The Jinja template of a tokenizer, rendered in a sandbox as transformers renders it."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        from jinja2.exceptions import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._error = TemplateError
        self._special = special
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise RequestError(f"the bundle's chat template is not valid Jinja: {error}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the prompt text for messages of `role` and `content`.

        Raises: RequestError when the template refuses them.
        """
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None,  # templates ask whether it is none, not only whether it is defined
                documents=None,
                **self._special,
            )
        except (self._error, TypeError) as error:
            raise RequestError(f"the chat template refused the messages: {error}") from error


def read_template(folder: Path) -> ChatTemplate:
    """Read the chat template of a bundle: chat_template.jinja, else tokenizer_config.json.

    Raises: RequestError when the bundle has none.
    """
    path = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    separate = folder / "chat_template.jinja"
    source = (
        separate.read_text(encoding="utf-8") if separate.is_file() else config.get("chat_template")
    )
    if isinstance(source, list):  # several named ones; transformers takes `default`
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    if not source:
        raise RequestError(
            f"{folder} has no chat template: its model was not trained for chat; "
            "leave --chat out to complete plain text"
        )
    special = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, (str, dict))
    }
    return ChatTemplate(source, special)


def _generation_tag() -> type[Any]:
    """Return the `{% generation %}` block of newer templates, which marks and changes nothing."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return Generation


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a model has never seen.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise RequestError(f"the chat template refused the messages: {message}")
