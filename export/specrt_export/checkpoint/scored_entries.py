"""The entries of the vocabulary that a draft scores, where these are not all."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specrt.errors import CheckpointError
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.safetensors_file import WeightBytes, map_array

NAME, SIZE = "d2t", "draft_vocab_size"
"""The weight that says which they are, and the key of config.json that says how many."""


def read_entries(
    checkpoint: Checkpoint, stored: WeightBytes | None, scored: int, vocabulary: int
) -> NDArray[np.int64] | None:
    """Return the target's id of each scored entry: its place plus what `d2t` adds; None for all.

    Raises: CheckpointError for one that is missing, or leads to no rising ids.
    """
    if stored is None:
        if scored != vocabulary:
            raise CheckpointError(
                f"{checkpoint.origin} scores {scored} of {vocabulary} entries and has no {NAME} "
                "that says which; fetch it again"
            )
        return None
    if stored.shape != (scored,) or stored.dtype not in ("I64", "I32"):
        raise CheckpointError(
            f"{stored.file}: {NAME} is {stored.dtype}{list(stored.shape)}; expected I64 or I32"
            f"[{scored}], as {SIZE} says"
        )
    ids = np.arange(scored) + map_array(stored).astype(np.int64)
    if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= vocabulary:
        raise CheckpointError(
            f"{stored.file}: {NAME} does not lead to rising ids from 0 to {vocabulary - 1}; it "
            "adds to the place of an entry, it is not the id itself"
        )
    return ids


def model_entries(checkpoint: Checkpoint) -> NDArray[np.int64] | None:
    """Return the ids that a language model scores; None where it scores all.

    Raises: CheckpointError as `read_entries` does, and for numbers that no such model has.
    """
    scored, vocabulary = checkpoint.config.get(SIZE), checkpoint.config.get("vocab_size")
    if scored is None:
        return None
    tied = checkpoint.config.get("tie_word_embeddings")
    if type(scored) is not int or type(vocabulary) is not int or tied or scored < 1:
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'} has {SIZE} {scored!r} of vocab_size "
            f"{vocabulary!r}; expected whole numbers above 0, and tie_word_embeddings false"
        )
    return read_entries(checkpoint, checkpoint.weights.get(NAME), scored, vocabulary)
