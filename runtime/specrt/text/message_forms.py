"""The forms in which chat templates know the reasoning and the calls of earlier turns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning before an answer: each template reads one of them."""


def conversation_forms(messages: Sequence[Any]) -> Iterator[list[list[Any]]]:
    """Yield a conversation in forms that templates know, the likely ones together.

    The content of calls alone may be null or empty. Where the template takes no arguments of calls
    as they are, they become text where they were an object, and an object where they were text.
    """
    talk = [_reasoned(message) for message in messages]
    yield _contents(talk)
    if any(map(_calls, talk)):
        yield _contents([_recalled(message) for message in talk])


def called_names(messages: Sequence[Any]) -> set[str]:
    """Return the names of the functions that were called."""
    names = (_function(call).get("name") for message in messages for call in _calls(message))
    return {name for name in names if isinstance(name, str)}


def _reasoned(message: Any) -> Any:
    """Return a message with its reasoning by all names."""
    if not isinstance(message, dict):
        return message
    given = {name: message[name] for name in REASONING if message.get(name) is not None}
    return (
        message | dict.fromkeys(REASONING, next(iter(given.values()))) | given if given else message
    )


def _contents(talk: list[Any]) -> list[list[Any]]:
    """Return a conversation as it is, and with calls alone whose content is null, and is empty."""
    forms = [talk]
    for content in (None, ""):
        form = [
            {**message, "content": content} if _calls_alone(message) else message
            for message in talk
        ]
        forms += [form] if form != talk else []
    return forms


def _calls_alone(message: Any) -> bool:
    return bool(_calls(message)) and message.get("content", "") in (None, "")


def _recalled(message: Any) -> Any:
    """Return a message whose calls have arguments of the other kind."""
    if not _calls(message):
        return message
    calls = [
        {**call, "function": {**_function(call), "arguments": _other(_function(call))}}
        for call in _calls(message)
    ]
    return {**message, "tool_calls": calls}


def _other(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        return json.dumps(arguments, ensure_ascii=False)
    found = object_of(arguments) if isinstance(arguments, str) else None
    return {"arguments": arguments} if found is None else found


def _calls(message: Any) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return [call for call in calls or () if isinstance(call, Mapping)]


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else {}


def object_of(text: str) -> dict[str, Any] | None:
    """Return the object that a text is in JSON, None where it is not one.

    Python reads NaN, infinities and half a character, too, which can be written nowhere.
    """
    try:
        found = json.loads(text)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
