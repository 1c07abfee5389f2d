"""What the runtime asks of a compiled plan: its tensors, and contexts that run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1}
"""Element types of the tensors of a plan, by the names used here."""


@dataclass(frozen=True)
class Tensor:
    """One input or output of a plan."""

    shape: tuple[int, ...]
    """-1 where it is given with each pass."""
    type: str
    """A key of `ITEM_BYTES`."""
    is_input: bool


class Context(Protocol):
    """One way to run a plan, in one profile; shapes and addresses stay until they are set again.

    Raises: EngineError from every method, saying what was being done.
    """

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Give the shape of an input."""

    def set_address(self, name: str, address: int) -> None:
        """Say where an input or output lies on the device."""

    def capturable(self) -> bool:
        """Tell whether the next run may be captured into a graph."""

    def enqueue(self) -> None:
        """Put one run on the device's stream."""


class Plan(Protocol):
    """A deserialized plan."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Inputs and outputs by name."""

    def scratch_bytes(self, profile: int) -> int:
        """Return the bytes of working memory that a context of a profile needs."""

    def aliases(self, output: str) -> str:
        """Return the input that an output is written into, as the plan says; empty for none."""

    def context(self, profile: int, scratch: int) -> Context:
        """Return a context of one profile with working memory at an address.

        Contexts that never run at once may share working memory.
        """

    def close(self) -> None:
        """Give the plan back, after its contexts; never raises."""
