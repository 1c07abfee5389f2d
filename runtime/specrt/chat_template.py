"""Chat templates: messages to the text of a prompt, as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from reprlib import repr as short
from typing import Any, NoReturn

from specrt.errors import RequestError, SpecrtError
from specrt.text import ChatPrompt

Message = dict[str, str]

_LONGEST = 200
"""Characters of a template's own words in an error."""


class NoTemplateError(RequestError):
    """A bundle has no chat template."""


class ChatTemplate:
    """The Jinja template of a tokenizer, rendered in a sandbox as transformers renders it."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special = special
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # deep nesting fails in the parser and in Python's compiler
            raise RequestError(
                f"the bundle's chat template is not valid Jinja: {_line(error)}"
            ) from error

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> ChatPrompt:
        """Return the prompt for messages of `role` and `content`.

        Contents are text, whatever they hold, where the prompt is encoded as it is.
        Raises: RequestError when the template refuses them.
        """
        render = partial(self._render, add_generation_prompt=add_generation_prompt)
        return ChatPrompt(render(messages), messages, render)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None,  # templates ask whether it is none, not only whether it is defined
                documents=None,
                **self._special,
            )
        except SpecrtError:
            raise
        except Exception as error:  # a template is a program, and may fail like one
            raise RequestError(f"the chat template refused the messages: {_line(error)}") from error


def read_template(bundle: str | Path) -> ChatTemplate:
    """Read the chat template of a bundle: chat_template.jinja, else tokenizer_config.json.

    Raises: NoTemplateError when the bundle has none, RequestError for one that cannot be read.
    """
    folder = Path(bundle)
    config = _config(folder / "tokenizer_config.json")
    separate = folder / "chat_template.jinja"
    source = _read(separate) if separate.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named ones; transformers takes `default`
        named = [t for t in source if isinstance(t, dict)]
        source = next((t.get("template") for t in named if t.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise _damaged(
            folder / "tokenizer_config.json",
            f"has the chat_template {short(source)}; expected a string or a list of named ones",
        )
    if not source:
        raise NoTemplateError(
            f"{folder} has no chat template: its model was not trained for chat; "
            "complete plain text instead (no --chat; a session without a template)"
        )
    tokens = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token")
    }
    return ChatTemplate(source, {k: v for k, v in tokens.items() if isinstance(v, str)})


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise _damaged(path, f"holds {short(config)}; expected an object")
    return config


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, f"cannot be read as UTF-8: {error}") from error


def _damaged(path: Path, what: str) -> RequestError:
    return RequestError(
        f"{path} {what}; correct it in the checkpoint and build the bundle again, or leave --chat "
        "out"
    )


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


def _refuse(message: Any) -> NoReturn:
    raise RequestError(f"the chat template refused the messages: {_line(message)}")


def _line(message: Any) -> str:
    """Return the message of a template or its failure as one line of bearable length."""
    shown = "".join(c if c.isprintable() else " " for c in str(message))
    text = " ".join(shown.split()) or type(message).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
