"""specrt: lossless speculative decoding as a compiled artifact."""

from __future__ import annotations

from specrt.completion import Chunk, Completion, Stream
from specrt.errors import SpecrtError
from specrt.generate import Generator, load
from specrt.llm import LLM
from specrt.params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Chunk",
    "Completion",
    "Generator",
    "SamplingParams",
    "SpecrtError",
    "Stream",
    "__version__",
    "load",
]
