"""`engine.json`: what a plan was built as, read before the plan itself is opened."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from specrt.errors import BundleError
from specrt.schema import Count, Span, read

FORMAT = 1
FILE_NAME = "engine.json"


@dataclass(frozen=True)
class Range:
    """The sizes an input may take in a profile, and the one its kernels were chosen for."""

    least: Count
    best: Count
    most: Count

    @property
    def fixed(self) -> bool:
        """Whether there is only one size."""
        return self.least == self.most


@dataclass(frozen=True)
class Profile:
    """One optimisation profile: passes of some widths, and of how many scored rows."""

    name: str
    """`prefill`, `decode`, `catch-up`, or `verify G` for gamma G."""
    width: Range
    rows: Range

    def takes(self, width: int, rows: int) -> bool:
        """Tell whether a pass of this width and so many rows fits."""
        return (
            self.width.least <= width <= self.width.most
            and self.rows.least <= rows <= self.rows.most
        )


@dataclass(frozen=True)
class EngineRecord:
    """What the runtime must know of a plan besides the model's geometry."""

    format: Annotated[int, Span(1, FORMAT)]
    backend: str
    """`tensorrt` or `tensorrt-rtx`."""
    version: str
    """Of the library that built it."""
    form: str
    """`native`: KV buffers are updated in place, inputs and outputs at one address.
    `decomposed`: each pass writes whole new KV buffers, for TensorRT before 10.15."""
    compute: str
    """`fp16`, `bf16` or `fp32`: what KV buffers hold."""
    profiles: tuple[Profile, ...]
    """In the order of the plan."""
    candidates: int = 0
    """How many of the best scores of each row the plan cuts out for sampling."""
    confidence: bool = False
    """Whether it tells the probability of the likeliest token."""

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_engine_record(path: Path) -> EngineRecord:
    """Read an `engine.json`.

    Raises: BundleError for one that is missing, of a newer format, or not such a record.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        return read(EngineRecord, data)
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(
            f"{path} cannot be read ({error}); build the bundle again with `specrt build RECIPE`"
        ) from error
