"""What an encoder may be given: one check for all backends."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.engine.protocol import Source
from specrt.errors import EngineError


def check_row(row: int, batch: int) -> None:
    """Refuse a row that an engine does not have.

    Raises: EngineError.
    """
    if row not in range(batch):
        raise EngineError(f"a source was given to row {row}; expected a row from 0 to {batch - 1}")


def checked_tokens(source: Source, most: int) -> NDArray[np.int64]:
    """Return a source of token ids, [E].

    Raises: EngineError for one that is empty, longer than `most`, or of another kind.
    """
    given: NDArray[Any] = np.asarray(source)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise EngineError(
            f"a source of type {given.dtype} and shape {list(given.shape)} was given; "
            "expected token ids in one row"
        )
    if not 0 < len(given) <= most:
        raise EngineError(
            f"a source of {len(given)} tokens was given; expected 1 to {most}: "
            + ("shorten it, or build with a larger max_source" if len(given) else "name one")
        )
    return given.astype(np.int64)


def checked_features(source: Source, features: int, frames: int) -> NDArray[np.float32]:
    """Return a source of features, [features, frames].

    Raises: EngineError for one of another kind or shape.
    """
    given: NDArray[Any] = np.asarray(source)
    if given.shape != (features, frames) or given.dtype.kind != "f":
        raise EngineError(
            f"a source of type {given.dtype} and shape {list(given.shape)} was given; "
            f"expected features of type float32 and shape {[features, frames]}"
        )
    return given.astype(np.float32)


def require_source(row: int, length: int) -> None:
    """Refuse tokens for a row whose source has no length yet.

    Raises: EngineError.
    """
    if not length:
        raise EngineError(
            f"row {row} was fed tokens before it was given a source; call condition first"
        )
