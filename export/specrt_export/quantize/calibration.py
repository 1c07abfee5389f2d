"""Codes found on a text: each weight's after those before it, from what it is multiplied with."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray

import specrt
from specrt.engine.protocol import Source
from specrt.errors import BuildError
from specrt_export.checkpoint.codes import Codes, int4_grid, pack, unpack
from specrt_export.portable.external_data import (
    Floats,
    StoredTensor,
    atomic_file,
    external_tensors,
    location,
)
from specrt_export.portable.graph import Tokens, runs_here
from specrt_export.portable.segments import Array, SegmentedRun, Values, weight_name
from specrt_export.quantize.gptq import DAMPINGS, Products, factor, feed_back, second_moments

if TYPE_CHECKING:
    from specrt_export.quantize.weight_choice import Choice

PackedCodes = tuple[NDArray[Any], ...]
"""Codes two to a byte [N, K / 2], scales [N, K / block], and zeros of that shape if they have any.
"""

Progress = Callable[[str, float], None]
"""Told the part of the model that is begun, and the share that is done."""

_ROWS = 4096
"""Rows of a weight that one thread rounds at once; each is independent of the others."""

_MOST_THREADS = 8
"""Each holds three copies of its rows."""


@dataclass(frozen=True)
class CalibrationText:
    """A text to find codes on, and the folder in which what is done outlives a killed build."""

    pieces: Sequence[Tokens]
    """Of one length, but for texts of sources."""
    folder: Path
    sources: Sequence[Source] = ()
    """Of an encoder-decoder: what each piece is a text of."""


class CalibratedCodes:
    """The folder of a calibration: codes and scales of each weight, and how far it came.

    It belongs to one graph, its weights and one text: that of another is emptied.
    """

    def __init__(self, folder: Path, key: str, names: Sequence[str]) -> None:
        self._folder, self._names = folder, list(names)
        written = folder / "key"
        if not written.is_file() or written.read_text() != key:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            written.write_text(key)

    def write(self, name: str, *arrays: NDArray[Any]) -> None:
        """Keep packed codes [N, K / 2], scales, and zeros if there are any, [N, K / block]."""
        for array, path in zip(arrays, self._paths(name), strict=False):
            with atomic_file(path) as file:
                np.save(file, array)

    def read(self, name: str) -> PackedCodes:
        """Map what was kept of a weight."""
        return tuple(np.load(path, mmap_mode="r") for path in self._paths(name) if path.is_file())

    def weights(self, name: str) -> Floats:
        """Return the weights [K, N] that were kept as codes."""
        packed, *beside = self.read(name)
        return np.ascontiguousarray(Codes("int4", unpack(packed), *beside).floats().T)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def _paths(self, name: str) -> list[Path]:
        number = self._names.index(name)
        return [self._folder / f"{number}.{part}.npy" for part in ("codes", "scales", "zeros")]

    def write_state(self, done: int, kept: Mapping[str, Values]) -> None:
        """Keep how many stages are done, and the tensors that later ones read."""
        apart = [
            (name, array)
            for name, values in kept.items()
            for array in ([values] if isinstance(values, np.ndarray) else values)
        ]
        names = np.array([name for name, _ in apart])
        arrays = {str(number): array for number, (_, array) in enumerate(apart)}
        with atomic_file(self._folder / "state.npz") as file:
            np.savez(file, done=np.array(done), names=names, **arrays)  # type: ignore[arg-type]

    def read_state(self) -> tuple[int, dict[str, Values]]:
        """Return what `write_state` kept: nothing at first."""
        path = self._folder / "state.npz"
        if not path.is_file():
            return 0, {}
        apart: dict[str, list[Array]] = {}
        with np.load(path) as state:
            for at, name in enumerate(state["names"]):
                apart.setdefault(str(name), []).append(state[str(at)])
            # Of one piece alone all shapes are one, so that several arrays are of several pieces.
            kept = {n: arrays if len(arrays) > 1 else arrays[0] for n, arrays in apart.items()}
            return int(state["done"]), kept


def calibrate(
    model: onnx.ModelProto, checkpoint: Path, choices: Sequence[Choice], text: CalibrationText,
    progress: Progress,
) -> CalibratedCodes:  # fmt: skip
    """Find codes of products with error feedback, in the order in which they are computed.

        text ─ ... ─ tensor 0 ─ codes of q, k and v ─ ... ─ tensor 1 ─ codes of o ─ ...

    A tensor is computed with the codes found before it. In memory are the weights of one segment,
    the second moments of one tensor, and for all tokens what is read later. A build that was
    stopped goes on after the last layer that it finished, with the same bytes.
    Raises: CheckpointError, BuildError.
    """
    if not runs_here():
        raise BuildError(
            'quantizer "gptq" runs the portable graph, which takes ONNX Runtime 1.25 or newer; '
            'upgrade it, or use quantizer = "search"'
        )
    in_order = list(stages(model, choices).items())
    of_product = {p: choice for _, group in in_order for choice in group for p in choice.products}
    key = content_key(model, checkpoint, choices, [*text.pieces, *text.sources])
    found = CalibratedCodes(text.folder, key, [choice.name for choice in choices])
    tensors = {tensor.name: StoredTensor(tensor, checkpoint) for tensor in external_tensors(model)}
    own = onnx.ModelProto()
    own.CopyFrom(model)
    run = SegmentedRun(own, checkpoint, of_product, text.pieces, text.sources)
    run.plan(tensor for tensor, _ in in_order)
    done, run.kept = found.read_state()
    for tensor, _ in in_order[:done]:
        run.skip(tensor)
    multiply = Products(shared=True)
    rounder = _Rounder(multiply=Products(shared=False))
    for number, (tensor, group) in enumerate(in_order[done:], done):
        progress(group[0].group, number / len(in_order))
        weights = {
            weight_name(product): found.weights(of_product[product].name)
            for product in run.products(tensor)
        }
        inputs = run.advance(tensor, weights)
        del weights
        upper = _factor_of(inputs, group[0].weight, multiply)
        for choice in group:
            found.write(choice.name, *rounder(choice, tensors[choice.weight], upper))
        if number + 1 < len(in_order) and in_order[number + 1][1][0].group != group[0].group:
            found.write_state(number + 1, run.kept)
    return found


def stages(model: onnx.ModelProto, choices: Sequence[Choice]) -> dict[str, list[Choice]]:
    """Return by the tensor that they are multiplied with, in the graph's order, the weights."""
    place = {node.name: at for at, node in enumerate(model.graph.node)}
    inputs = {node.name: node.input[0] for node in model.graph.node if node.input}
    stages: dict[str, list[Choice]] = defaultdict(list)
    for choice in sorted(choices, key=lambda choice: min(map(place.__getitem__, choice.products))):
        stages[inputs[min(choice.products, key=place.__getitem__)]].append(choice)
    return stages


def content_key(
    model: onnx.ModelProto, checkpoint: Path, choices: Sequence[Choice], pieces: Iterable[Source]
) -> str:
    """Hash what decides codes; weights count by size and time."""
    digest = hashlib.sha256(model.SerializeToString(deterministic=True))
    digest.update(f"{specrt.__version__} {np.__version__} {choices!r}".encode())
    for name in sorted({location(tensor) for tensor in external_tensors(model)}):
        facts = (checkpoint / name).stat()
        digest.update(f"{name} {facts.st_size} {facts.st_mtime_ns}".encode())
    for piece in pieces:
        digest.update(piece.tobytes())
    return digest.hexdigest()


def _factor_of(inputs: Floats, weight: str, multiply: Products) -> Floats:
    """Return the factor of what a weight is multiplied with."""
    for damping in DAMPINGS:
        moments = second_moments(inputs, multiply)
        if not np.isfinite(np.einsum("ii->i", moments)).all():
            raise BuildError(
                f"what {weight} is multiplied with is not a finite number on the calibration text; "
                'use quantizer = "search"'
            )
        try:
            return factor(moments, multiply, damping)
        except np.linalg.LinAlgError:  # too little of it for the digits of fp32
            continue
    raise BuildError(
        f"what {weight} is multiplied with varies too little on the calibration text to round by; "
        'use more text, or quantizer = "search"'
    )


class _Rounder:
    """Rounds weights, with a thread for each core that takes rows of its own."""

    def __init__(self, multiply: Products) -> None:
        self._multiply = multiply
        self._threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))

    def __call__(self, choice: Choice, source: StoredTensor, upper: Floats) -> PackedCodes:
        """Return what a weight becomes."""
        whole = source.read(0, source.rows).T if choice.turned else None
        rows, inner = source.shape[::-1] if choice.turned else source.shape
        packed = np.empty((rows, inner // 2), np.uint8)
        scales = np.empty((rows, inner // choice.block), np.float32)
        zeros = np.empty(scales.shape, np.int8)
        find_grid = partial(int4_grid, positive=choice.positive, zeros=choice.zeros)

        def work(begin: int) -> None:
            end = min(begin + step, rows)
            part = source.read(begin, end) if whole is None else whole[begin:end]
            codes, found, apart, _ = feed_back(
                part.T, upper, choice.block, find_grid, self._multiply
            )
            packed[begin:end], scales[begin:end] = pack(np.ascontiguousarray(codes.T)), found.T
            if apart is not None:
                zeros[begin:end] = apart.T

        step = min(_ROWS, -(-rows // self._threads))
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(work, range(0, rows, step)))
        return (packed, scales, zeros) if choice.zeros else (packed, scales)
