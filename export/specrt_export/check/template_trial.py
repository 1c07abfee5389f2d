"""Renders the chat templates of a checkpoint once, in a process of its own, before they ship.

A device bounds the time between the operations of a template, and the size of what they make. Here
the system bounds the operations too.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from specrt.errors import CheckpointError, RequestError
from specrt.text.chat_template import ChatTemplate, Message, special_tokens
from specrt.text.control_tokens import tokenizer_config
from specrt.text.template_sandbox import TemplateLimitError
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.plan.text_files import chat_templates

SECONDS = 30
"""Processor time of the process."""

_MEMORY = 1 << 30
"""Bytes that templates may take."""

_TALK: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A model."},
    {"role": "user", "content": "Why?"},
]
_TOOL = {"name": "time", "description": "Tell the time.", "parameters": {"type": "object"}}


def check_templates(checkpoint: Checkpoint) -> None:
    """Refuse chat templates that take too much time or memory.

    Raises: CheckpointError.
    """
    config = tokenizer_config(checkpoint.folder)
    sources = [*chat_templates(checkpoint).values(), *_configured(config.get("chat_template"))]
    if not sources:
        return
    done = subprocess.run(
        [sys.executable, "-m", __name__], capture_output=True, text=True, check=False,
        input=json.dumps([sources, special_tokens(config), SECONDS]),
    )  # fmt: skip
    if done.returncode != 0:
        ended = f"the chat template takes more than {SECONDS} seconds, or ends its process"
        raise CheckpointError(
            f"{checkpoint.origin}: {done.stdout or ended}; correct or remove the template"
        )


def _configured(named: Any) -> Iterator[str]:
    """Yield the templates that the tokenizer's configuration holds."""
    for one in named if isinstance(named, list) else [{"template": named}]:
        if isinstance(one, dict) and isinstance(one.get("template"), str):
            yield one["template"]


def _render(source: str, special: dict[str, str]) -> None:
    """Render conversations; a template may refuse them.

    Raises: TemplateLimitError.
    """
    for talk in (_TALK[1:2], _TALK):
        for tools in (None, [{"type": "function", "function": _TOOL}]):
            try:
                ChatTemplate(source, special).render(talk, tools=tools)
            except TemplateLimitError:
                raise
            except RequestError:
                continue


def _main() -> None:
    sources, special, seconds = json.load(sys.stdin)
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with suppress(ValueError, OSError):  # a system may refuse one
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_DATA, (taken + _MEMORY, taken + _MEMORY))
    try:
        for source in sources:
            _render(source, special)
    except TemplateLimitError as error:
        sys.stdout.write(f"the chat template {error.what}")
        sys.exit(1)


if __name__ == "__main__":
    _main()
