"""WAV files: RIFF with one channel of 16-bit PCM or 32-bit floats, and nothing else."""

from __future__ import annotations

import errno
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrt.errors import RequestError, shortage
from specrt.held_file import read_file

Samples = NDArray[np.float32]
"""A recording, [samples], from -1 to 1."""

MOST_BYTES = 1 << 30
"""Of a file: nine hours of 16 bits at 16 kHz."""

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE

_FORMATS = {2: "ADPCM", 6: "A-law", 7: "mu-law", 0x55: "MP3"}
"""Some of those that are refused, by what the file says."""

_TYPES = {(_PCM, 16): "<i2", (_FLOAT, 32): "<f4"}

_UNKNOWN = 0xFFFFFFFF
"""The size that a program writes which cannot go back, as into a pipe."""

_RATE = 16_000


class WavFormat(NamedTuple):
    """How the samples of a file are stored."""

    code: int
    channels: int
    rate: int
    """Samples a second."""
    block: int
    """Bytes of one sample of all channels."""
    bits: int


def read_wav(path: str | Path, rate: int = _RATE) -> Samples:
    """Read the samples of a file.

    Raises: RequestError for a file that cannot be read, and as `parse_wav` does.
    """
    try:
        data = read_file(Path(path), MOST_BYTES, pipe=True)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise _too_large(str(path)) from None
        remedy = shortage(error) or "name a WAV file"
        raise RequestError(f"{path} cannot be read: {error.strerror}; {remedy}") from error
    return parse_wav(data, str(path), rate)


def _too_large(name: str) -> RequestError:
    return RequestError(f"{name} has more than {MOST_BYTES >> 20} MiB; split it")


def parse_wav(data: bytes, name: str, rate: int = _RATE) -> Samples:
    """Return the samples of a file's bytes; `name` is what errors call it.

    Raises: RequestError for anything but whole RIFF of one channel at `rate` samples a second.
    """
    if len(data) > MOST_BYTES:
        raise _too_large(name)
    if not data:
        raise RequestError(f"{name} is empty; {_remedy(rate)}")
    if len(data) < 12 or data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise RequestError(
            f"{name} is not an RIFF WAVE file: it begins with {data[:4]!r}; {_remedy(rate)}"
        )
    found: WavFormat | None = None
    at = 12
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, at)
        at += 8
        if kind == b"data":
            return _samples(data, at, size, found, name, rate)
        if at + size > len(data):
            break
        if kind == b"fmt ":
            found = _format(data[at : at + size], name, rate)
        at += size + size % 2  # chunks begin at even bytes
    raise RequestError(
        f"{name} ends at byte {len(data)}, before its samples; it was cut off: copy or record it "
        "again"
    )


def _format(chunk: bytes, name: str, rate: int) -> WavFormat:
    """Read a format chunk; of the extensible form the part that says how samples are stored."""
    if len(chunk) < 16:
        raise RequestError(
            f"{name} has a format chunk of {len(chunk)} bytes; expected 16 or more: {_remedy(rate)}"
        )
    code, channels, samples, _, block, bits = struct.unpack_from("<HHIIHH", chunk)
    if code == _EXTENSIBLE and len(chunk) >= 26:
        (code,) = struct.unpack_from("<H", chunk, 24)
    return WavFormat(code, channels, samples, block, bits)


def _samples(
    data: bytes, at: int, size: int, found: WavFormat | None, name: str, rate: int
) -> Samples:
    """Return what a data chunk holds."""
    if found is None:
        raise RequestError(f"{name} has samples before it says what they are; {_remedy(rate)}")
    kind = _type(found, name, rate)
    there = len(data) - at
    if size == _UNKNOWN:
        size = there - there % found.block
    if size > there:
        raise RequestError(
            f"{name} was cut off: it says that {size} bytes of samples follow, and {there} do; "
            f"copy it again, or keep what there is: {_remedy(rate)}"
        )
    if size == 0:
        raise RequestError(f"{name} has no samples; expected some: {_remedy(rate)}")
    if size % found.block:
        raise RequestError(
            f"{name} has {size} bytes of samples of {found.block} bytes each; expected whole "
            f"ones: {_remedy(rate)}"
        )
    stored = np.frombuffer(data, kind, size // found.block, at)
    if found.code == _PCM:
        return stored.astype(np.float32) / np.float32(1 << 15)
    samples = stored.astype(np.float32)
    if not np.isfinite(samples).all():
        raise RequestError(f"{name} has samples that are not numbers; {_remedy(rate)}")
    return samples


def _type(found: WavFormat, name: str, rate: int) -> str:
    """Return NumPy's name of a format.

    Raises: RequestError for one that is not read.
    """
    kind = _TYPES.get((found.code, found.bits))
    if kind is None:
        known = {_PCM: "integers", _FLOAT: "floats", **_FORMATS}
        stored = known.get(found.code, f"format {found.code:#x}")
        raise RequestError(
            f"{name} has {stored} of {found.bits} bits; expected integers of 16 or floats of 32: "
            f"{_remedy(rate)}"
        )
    if found.channels != 1:
        raise RequestError(f"{name} has {found.channels} channels; expected one: {_remedy(rate)}")
    if found.rate != rate:
        raise RequestError(
            f"{name} has {found.rate} samples a second; expected {rate}: {_remedy(rate)}"
        )
    if found.block != found.bits // 8:
        raise RequestError(
            f"{name} has samples of {found.bits} bits in {found.block} bytes; {_remedy(rate)}"
        )
    return kind


def _remedy(rate: int) -> str:
    return f"convert it with `ffmpeg -i FILE -ar {rate} -ac 1 OUT.wav`"
