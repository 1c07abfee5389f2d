"""specrt: lossless speculative decoding as a compiled artifact."""

from __future__ import annotations

import os
from importlib import import_module

TYPE_CHECKING = False
"""As type checkers know it; `typing` is imported later, where Ctrl-C prints one line."""

if TYPE_CHECKING:
    from typing import Any

    from specrt.aio import AsyncStream
    from specrt.completion import Chunk, Completion, Stream
    from specrt.errors import (
        BundleError,
        CapacityError,
        EngineError,
        LinkError,
        RequestError,
        SpecrtError,
    )
    from specrt.generator import Generator
    from specrt.llm import LLM
    from specrt.loading import load
    from specrt.loading import load as open  # noqa: A004
    from specrt.params import SamplingParams
    from specrt.remote.remote_target import connect
    from specrt.sampling.distribution import Logprob
    from specrt.session import Session
    from specrt.text.chat_template import ChatTemplate, read_template

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncStream",
    "BundleError",
    "CapacityError",
    "ChatTemplate",
    "Chunk",
    "Completion",
    "EngineError",
    "Generator",
    "LinkError",
    "Logprob",
    "RequestError",
    "SamplingParams",
    "Session",
    "SpecrtError",
    "Stream",
    "__version__",
    "connect",
    "load",
    "open",
    "read_template",
]

_HOMES = {
    "LLM": "llm",
    "AsyncStream": "aio",
    "BundleError": "errors",
    "CapacityError": "errors",
    "ChatTemplate": "text.chat_template",
    "Chunk": "completion",
    "Completion": "completion",
    "EngineError": "errors",
    "Generator": "generator",
    "LinkError": "errors",
    "Logprob": "sampling.distribution",
    "RequestError": "errors",
    "SamplingParams": "params",
    "Session": "session",
    "SpecrtError": "errors",
    "Stream": "completion",
    "connect": "remote.remote_target",
    "load": "loading",
    "open": "loading",
    "read_template": "text.chat_template",
}

_ALIASES = {"open": "load"}
"""Two names of one thing: `open` reads well where a `with` closes what it opened."""


# ONNX Runtime reads it when it is imported, and would keep telemetry.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line starts at once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'specrt' has no attribute {name!r}")
    home = import_module(f"specrt.{_HOMES[name]}")
    value = getattr(home, _ALIASES.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
