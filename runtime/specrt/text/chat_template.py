"""Chat templates: messages to the text of a prompt, as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from reprlib import repr as short
from typing import Any, NoReturn

from specrt.bundle import (
    CHAT_TEMPLATE,
    TOKENIZER_CONFIG,
    Manifest,
    check_unlisted,
    hold_listed,
    read_manifest,
)
from specrt.errors import RequestError, SpecrtError
from specrt.text.control_tokens import token_name
from specrt.text.message_forms import called_names, conversation_forms
from specrt.text.traced_text import ChatPrompt, traced

Message = dict[str, Any]
"""`role` and `content`; of a chat with tools also `tool_calls`, `tool_call_id`, `name`."""

MOST_SOURCE = 1 << 16
"""Characters of a template; the longest in use have half of it."""

MOST_OUTPUT = 1 << 20
"""Characters that a template may write besides its messages'."""

MOST_CONFIG = 1 << 23
"""Bytes of a `tokenizer_config.json`."""

_COPIES, _UNIT, _DEEPEST = 64, 16, 64
"""Characters more for each element of the messages and each so many characters in them, and the
levels that they may be nested."""

_LONGEST = 200
"""Characters of a template's own words in an error."""

_READ = 10 * _LONGEST
"""Characters of which those are taken."""

_MOST_FORM = 200
"""Characters of a form of dates."""


class NoTemplateError(RequestError):
    """A bundle has no chat template."""


class ChatTemplate:
    """The Jinja template of a tokenizer, rendered in a sandbox as transformers renders it."""

    def __init__(
        self, source: str, special: dict[str, str], *, tool_use: str | None = None
    ) -> None:
        """Prepare a template; `tool_use` is the one for conversations with tools, if another."""
        from specrt.text.template_sandbox import Sandbox, TemplateLimitError

        self._tool_use = None if tool_use is None else ChatTemplate(tool_use, special)
        if len(source) > MOST_SOURCE:
            raise TemplateLimitError(
                f"has {len(source)} characters, more than the {MOST_SOURCE} that one may have"
            )
        functions: dict[str, Callable[..., Any]] = {
            "tojson": _tojson,
            "raise_exception": _refuse,
            "strftime_now": _now,
        }
        self._special = special
        self._sandbox = Sandbox(functions)
        try:
            self._template, written = self._sandbox.prepare(source)
        except RequestError:
            raise
        except Exception as error:  # deep nesting fails in the parser and in Python's compiler
            raise RequestError(
                f"the bundle's chat template is not valid Jinja: {_line(error)}"
            ) from error
        self._literals = (*written, *special.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> ChatPrompt:
        """Return the prompt for messages, with the tools that the model may call.

        Contents are text, whatever they hold, where the prompt is encoded as it is; so are the
        descriptions of tools. Calls of earlier turns have the form in which the template shows
        them; see `conversation_forms`.
        Raises: RequestError when the template refuses them, or takes more than its bounds.
        """
        if tools is not None and self._tool_use is not None:
            return self._tool_use.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt
            )
        described = None if tools is None else [*tools]
        refusals: list[RequestError] = []
        for forms in conversation_forms(messages):
            shown: list[tuple[int, int, ChatPrompt]] = []
            for number, form in enumerate(forms):
                try:
                    prompt = self._render(form, described, add_generation_prompt)
                except RequestError as error:
                    refusals.append(error)
                    continue
                seen = sum(prompt.count(name) for name in called_names(form))
                shown.append((seen - prompt.count("None"), -number, prompt))
            if shown:
                return max(shown)[-1]
        raise refusals[0]

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> ChatPrompt:
        from specrt.text.template_sandbox import TemplateLimitError

        self._sandbox.limits.begin(MOST_OUTPUT + _COPIES * _elements([messages, tools]))
        pieces: list[str] = []
        written = 0
        try:
            for piece in self._template.generate(
                messages=traced(messages),
                add_generation_prompt=add_generation_prompt,
                tools=traced(tools),  # templates ask whether it is none, too
                documents=None,
                **self._special,
            ):
                pieces.append(piece)
                written += len(piece)
                self._sandbox.limits.check_length(written)
        except SpecrtError:
            raise
        except MemoryError as error:
            raise TemplateLimitError("takes more memory than there is") from error
        except Exception as error:  # a template is a program, and may fail like one
            raise RequestError(f"the chat template refused the messages: {_line(error)}") from error
        return ChatPrompt(pieces, self._literals)


def read_template(bundle: str | Path, source: str | None = None) -> ChatTemplate:
    """Read the chat template of a bundle: chat_template.jinja, else tokenizer_config.json.

    `source` is one in its place, which knows the bundle's special tokens.
    Raises: NoTemplateError when the bundle has none, RequestError for one that cannot be read,
        BundleError for files that are not those of the manifest.
    """
    folder = Path(bundle)
    manifest = read_manifest(folder)
    check_unlisted(folder, manifest)
    texts = {
        name: _read(folder, manifest, name, most)
        for name, most in ((TOKENIZER_CONFIG, MOST_CONFIG), (CHAT_TEMPLATE, 4 * MOST_SOURCE))
        if name in manifest.files
    }
    config = _config(folder / TOKENIZER_CONFIG, texts.get(TOKENIZER_CONFIG, "{}"))
    special = special_tokens(config)
    if source is not None:
        return ChatTemplate(source, special)
    source = texts.get(CHAT_TEMPLATE, config.get("chat_template"))
    tool_use = None
    if isinstance(source, list):
        named = [t for t in source if isinstance(t, dict)]
        source, tool_use = (
            next((t.get("template") for t in named if t.get("name") == name), None)
            for name in ("default", "tool_use")
        )
    if not all(one is None or isinstance(one, str) for one in (source, tool_use)):
        raise _damaged(
            folder / TOKENIZER_CONFIG,
            f"has the chat_template {short(source)}; expected a string or a list of named ones",
        )
    if not source:
        raise NoTemplateError(
            f"{folder} has no chat template: its model was not trained for chat; "
            "complete plain text instead (no --chat; a session without a template)"
        )
    return ChatTemplate(source, special, tool_use=tool_use)


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that templates know by name."""
    extra = config.get("extra_special_tokens")
    known = {**extra, **config} if isinstance(extra, dict) else config
    names = {key: token_name(value) for key, value in known.items() if key.endswith("_token")}
    return {key: name for key, name in names.items() if name}


def _config(path: Path, text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise _damaged(path, f"holds {short(config)}; expected an object")
    return config


def _read(folder: Path, manifest: Manifest, name: str, most: int) -> str:
    """Return the text of a file that the manifest lists: the bytes that were hashed."""
    held = hold_listed(folder, manifest, name)
    if len(held.data) > most:
        raise _damaged(folder / name, f"has {len(held.data)} bytes; expected up to {most}")
    try:
        return bytes(held.data).decode()
    except UnicodeDecodeError as error:
        raise _damaged(folder / name, f"cannot be read as UTF-8: {error}") from error


def _damaged(path: Path, what: str) -> RequestError:
    return RequestError(
        f"{path} {what}; correct it in the checkpoint and build the bundle again, or leave --chat "
        "out"
    )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a model has never seen.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _now(form: str) -> str:
    if len(form) > _MOST_FORM:
        raise RequestError(
            f"the chat template has a form of dates of more than {_MOST_FORM} characters"
        )
    return datetime.now().strftime(form)


def _elements(value: Any, levels: int = _DEEPEST) -> int:
    """Return how many elements messages and tools have, their texts with them.

    Raises: RequestError for what is nested so deeply that Python cannot copy it.
    """
    if isinstance(value, str):
        return 1 + len(value) // _UNIT
    if levels == 0:
        raise RequestError(
            f"the messages or the tools hold lists and objects more than {_DEEPEST} deep; expected "
            "fewer levels: nest calls, or the parameters of tools, less"
        )
    parts = [*value, *value.values()] if isinstance(value, Mapping) else value
    inner = parts if isinstance(parts, (list, tuple)) else ()
    return 1 + sum([_elements(part, levels - 1) for part in inner])


def _refuse(message: Any) -> NoReturn:
    raise RequestError(f"the chat template refused the messages: {_line(message)}")


def _line(message: Any) -> str:
    """Return the message of a template or its failure as one line of bearable length."""
    shown = "".join(c if c.isprintable() else " " for c in str(message)[:_READ])
    text = " ".join(shown.split()) or type(message).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
