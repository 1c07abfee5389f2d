"""Blocks as codes, scales and minimums: to the last bit what the gguf package makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specrt.errors import CheckpointError
from specrt_export.checkpoint.codes import FP4_VALUES
from specrt_export.checkpoint.gguf.blocks import FORMATS, Format
from specrt_export.checkpoint.gguf.reader import read_gguf
from specrt_export.checkpoint.gguf.weights import GgufWeight
from support.gguf_files import container

CODED = {n: format_ for n, format_ in FORMATS.items() if format_.decode is not None}
NAMES = [format_.name for format_ in FORMATS.values()]

HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip
"""Where the fp16 numbers of a block are."""

CODES = {
    "Q4_0": (-8, 7), "Q4_1": (0, 15), "Q5_0": (-16, 15), "Q5_1": (0, 31), "Q8_0": (-128, 127),
    "Q2_K": (0, 3), "Q3_K": (-4, 3), "Q4_K": (0, 15), "Q5_K": (0, 31), "Q6_K": (-32, 31),
    "IQ4_NL": (-127, 113), "IQ4_XS": (-127, 113), "MXFP4": (0, 15),
}  # fmt: skip
"""The least and the largest code."""

SCALES = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.0123, -7.5, 65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5, 3e-5], np.float16
)
"""Zeros of both signs, the largest, the least that is not a zero, and the least normal number."""


def random_rows(format_: Format, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Return blocks of any bytes, with scales that are finite."""
    chance = np.random.default_rng(seed)
    made = chance.integers(0, 256, (rows * blocks, format_.bytes), np.uint8)
    for at in HALVES.get(format_.name, ()):
        some = chance.normal(size=len(made)).astype(np.float16)
        scales = np.where(chance.random(len(made)) < 0.5, chance.choice(SCALES, len(made)), some)
        made[:, at : at + 2] = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
    if format_.name == "MXFP4":
        made[:, 0] = chance.choice([0, 1, 2, 126, 127, 253, 254], len(made))
    return made.reshape(rows, -1)


@pytest.mark.parametrize("number", FORMATS, ids=NAMES)
def test_weights_are_the_references_bits(number: int) -> None:
    gguf = pytest.importorskip("gguf", exc_type=ImportError)
    rows = random_rows(FORMATS[number], 61, 8 if number in CODED else 640)
    with np.errstate(all="ignore"):  # floats are any bits at all
        ours = FORMATS[number].floats(rows)
        theirs = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(number))
    numbers = ~np.isnan(ours)
    assert numbers.mean() > 0.9
    bits = theirs.astype(np.float32).reshape(ours.shape).view(np.uint32)
    assert (ours.view(np.uint32)[numbers] == bits[numbers]).all()
    assert (np.isnan(theirs.reshape(ours.shape)) == np.isnan(ours)).all()


@pytest.mark.parametrize("format_", CODED.values(), ids=lambda f: f.name)
def test_codes_are_whole_numbers_with_scales(format_: Format) -> None:
    rows = random_rows(format_, 40, 4)
    codes = format_.codes(rows)
    is_fp4, (least, most) = format_.precision == "fp4", CODES[format_.name]
    assert codes.codes.dtype == (np.uint8 if format_.minimums or is_fp4 else np.int8)
    assert (codes.codes.min(), codes.codes.max()) == (least, most)
    assert (format_.precision == "int8") == (most - least > 15)
    assert codes.codes.shape == (40, 4 * format_.items)
    assert codes.scales.shape == (40, 4 * format_.items // format_.block)
    assert codes.scales.dtype == np.float32
    assert (codes.minimums is not None) == format_.minimums
    scales = np.repeat(codes.scales, format_.block, axis=1)
    values = FP4_VALUES[codes.codes] if is_fp4 else codes.codes.astype(np.float32)
    with np.errstate(over="ignore"):  # of the largest scales of MXFP4
        weights, wanted = scales * values, format_.floats(rows)
    if codes.minimums is not None:
        assert codes.minimums.shape == codes.scales.shape
        weights = weights - np.repeat(codes.minimums, format_.block, axis=1)
    assert (wanted.view(np.uint32) == weights.view(np.uint32)).all()


INFINITE = np.array([np.inf], "<f2").tobytes()


@pytest.mark.parametrize(
    ("number", "at", "scale"),
    [(n, at, INFINITE) for n, at in [(2, 0), (3, 2), (10, 82), (11, 108), (12, 2), (14, 208)]]
    + [(20, 0, INFINITE), (23, 0, INFINITE), (39, 0, b"\xff")],
)
def test_scales_that_are_no_numbers_are_refused(
    tmp_path: Path, number: int, at: int, scale: bytes
) -> None:
    rows = random_rows(FORMATS[number], 3, 1)
    rows[1, at : at + len(scale)] = list(scale)
    path = tmp_path / "model.gguf"
    shape = [3, FORMATS[number].items]
    path.write_bytes(container([], [("w", shape, number, rows.tobytes())]))
    weight = GgufWeight("w", read_gguf(path).tensors["w"])
    weight.codes(0, 1)
    for read in (weight.codes, weight.floats):
        with pytest.raises(CheckpointError, match=r"w holds values that are not finite numbers"):
            read(1, 3)


def test_a_file_that_was_cut_since_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(container([], [("w", [4, 32], 8, bytes(4 * 34))]))
    tensor = read_gguf(path).tensors["w"]
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(CheckpointError, match="ends before w does; fetch the checkpoint again"):
        tensor.rows(0, 4)
