"""The fixtures of the runtime's tests."""

from runtime.conftest import tokenizer

__all__ = ["tokenizer"]
