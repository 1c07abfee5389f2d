"""Where a model's weights are from: the files, their hashes, and what these store tensors as."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

from specrt.bundle import Provenance, hash_file
from specrt.errors import CheckpointError, one_line
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.safetensors_file import FLOAT_TYPES, WeightBytes, count_formats

SNAPSHOTS = "snapshots"
"""The folder of a hub's cache whose folders have the names of commits."""


def provenance_of(checkpoint: Checkpoint, hub: str = "", revision: str = "") -> Provenance:
    """Return where the weights of a checkpoint are from.

    Every file of weights is read once more, to hash it: about a second a GB and core. `hub` is the
    name that it was fetched by; a commit that its folder is named after replaces `revision`.
    Raises: CheckpointError for a file that cannot be read.
    """
    if hub and checkpoint.folder.parent.name == SNAPSHOTS:
        revision = checkpoint.folder.name
    files = weight_files(checkpoint)
    try:
        with ThreadPoolExecutor(max_workers=2) as pool:
            hashes = [record.sha256 for record in pool.map(hash_file, files)]
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or checkpoint.origin} cannot be read: {error.strerror}; fetch the "
            "checkpoint again"
        ) from error
    named = {one_line(path.name): sha256 for path, sha256 in zip(files, hashes, strict=True)}
    folder = checkpoint.prequantized
    left_out = "" if folder is None else ", ".join(folder.left_out)
    return Provenance(formats(checkpoint), named, hub, revision, left_out)


def weight_files(checkpoint: Checkpoint) -> list[Path]:
    """Return the files that hold weights, or what belongs to their codes."""
    if checkpoint.gguf is not None:
        return list(checkpoint.gguf.file.files)
    folder = checkpoint.prequantized
    held = checkpoint.weights if folder is None else folder.tensors()
    return sorted({tensor.file for tensor in held.values()})


def formats(checkpoint: Checkpoint) -> str:
    """Return what tensors are stored as; see `count_formats`."""
    if checkpoint.source is not None:
        return checkpoint.source.formats()
    return count_formats(weight.dtype for weight in checkpoint.weights.values())


def parameters(checkpoint: Checkpoint) -> int:
    """Return how many numbers the weights are."""
    return sum(prod(weight.shape) for weight in checkpoint.weights.values())


USUAL_MIXTURES = (
    frozenset(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")),
    frozenset(("Q4_0", "Q4_1")),
    frozenset(("Q5_0", "Q5_1")),
)
"""What llama-quantize stores the same weight of different layers as: some layers get more bits."""


def oddity(checkpoint: Checkpoint) -> str | None:
    """Return what is strange about how weights are stored, naming the first; None where nothing is.

    A weight is held against those of its name in other layers. Floats of a model that has no codes
    are of one type, too, but for the vectors of GGUF files, which are always fp32.
    """
    gguf, weights = checkpoint.gguf, checkpoint.weights
    common = Counter(weight.dtype for weight in weights.values())
    odd = list(_unlike(_by_layer(weights), common))
    if not odd and all(weight.dtype in FLOAT_TYPES for weight in weights.values()):
        matrices = {n: w for n, w in weights.items() if gguf is None or len(w.shape) > 1}
        odd = list(_unlike([{n: w for n, w in matrices.items() if _loaded(n)}], common))
    if not odd:
        return None
    name, stored, usual, others = odd[0]
    shown = name if gguf is None else gguf.weights[name].tensor.name
    more = f", and {len(odd) - 1} more are as odd" if len(odd) > 1 else ""
    return f"{shown} is stored as {stored}, and {others} like it as {usual}{more}"


def _loaded(name: str) -> bool:
    """Tell buffers, which old checkpoints hold as fp32, from weights."""
    return name.endswith((".weight", ".bias"))


def _by_layer(weights: Mapping[str, WeightBytes]) -> Iterable[Mapping[str, WeightBytes]]:
    """Return the weights of one name in all layers, for each name."""
    kinds: dict[str, dict[str, WeightBytes]] = {}
    for name, weight in weights.items():
        kind = re.sub(r"\.[0-9]+\.", ".*.", name)
        if kind != name:
            kinds.setdefault(kind, {})[name] = weight
    return kinds.values()


def _unlike(
    groups: Iterable[Mapping[str, WeightBytes]], common: Counter[str]
) -> Iterable[tuple[str, str, str, int]]:
    """Yield each weight that is stored otherwise than most of its group, and how those are.

    Of two layers that differ the one is odd whose type is less `common` in the model.
    """
    for group in groups:
        counts = Counter(weight.dtype for weight in group.values())
        if len(counts) < 2 or any(counts.keys() <= usual for usual in USUAL_MIXTURES):
            continue
        others, _, usual = max((count, common[name], name) for name, count in counts.items())
        for name, weight in group.items():
            if weight.dtype != usual:
                yield name, weight.dtype, usual, others
