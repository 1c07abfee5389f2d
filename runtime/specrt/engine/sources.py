"""What an encoder may be given, and what a draft may share: one check for all backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specrt.bundle import EncoderRecord
from specrt.engine.protocol import Source
from specrt.errors import EngineError


class SharedEncoder(Protocol):
    """A target that leaves the hidden states of each row's source for a draft to read."""

    max_source: int
    hidden_width: int


def check_shared_encoder(path: Path, draft: EncoderRecord, target: SharedEncoder | None) -> None:
    """Refuse a draft without an encoder whose target leaves no hidden states of its size.

    Raises: EngineError.
    """
    left = "leaves none"
    if target is not None:
        if (target.max_source, target.hidden_width) == (draft.max_source, draft.width):
            return
        left = f"leaves up to {target.max_source} of width {target.hidden_width}"
    raise EngineError(
        f"{path} reads the hidden states of its target, up to {draft.max_source} of width "
        f"{draft.width}, and that {left} here; build both in one bundle, for one backend"
    )


def no_target_source(row: int) -> EngineError:
    """Return the refusal of a draft's row for which its target has read no source."""
    return EngineError(
        f"row {row} of the target has no source, and the draft reads the target's: give it to the "
        "target first"
    )


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


def checked_states(source: Source, width: int, most: int) -> NDArray[np.float32]:
    """Return a source of hidden states, [E, width].

    Raises: EngineError for one that is empty, longer than `most`, or of another kind or width.
    """
    given: NDArray[Any] = np.asarray(source)
    if given.ndim != 2 or given.shape[1] != width or given.dtype.kind != "f":
        raise EngineError(
            f"a source of type {given.dtype} and shape {list(given.shape)} was given; "
            f"expected hidden states of type float32 and shape [1 to {most}, {width}]"
        )
    if not 0 < len(given) <= most:
        raise EngineError(f"{len(given)} hidden states were given; expected 1 to {most}")
    return given.astype(np.float32)


def require_source(row: int, length: int) -> None:
    """Refuse tokens for a row whose source has no length yet.

    Raises: EngineError.
    """
    if not length:
        raise EngineError(
            f"row {row} was fed tokens before it was given a source; call condition first"
        )
