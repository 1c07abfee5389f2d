"""WAV files: what is read of them, and that everything else is refused in one line."""

from __future__ import annotations

import io
import struct
import wave
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.errors import RequestError
from specrt.speech.wav import parse_wav, read_wav
from speech.recordings import RATE, chunk, form, riff, sines

TONE = sines(0.05)
INTEGERS = (TONE * 32767).astype("<i2")
DATA = chunk(b"data", INTEGERS.tobytes())
EXTENDED = struct.pack("<HHIIHHHHIH14s", 0xFFFE, 1, RATE, 4 * RATE, 4, 32, 22, 32, 4, 3, b"")


def test_integers_are_read_as_pythons_own_reader_has_them(tmp_path: Path) -> None:
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(INTEGERS.tobytes())
    path = tmp_path / "tone.wav"
    path.write_bytes(held.getvalue())
    np.testing.assert_array_equal(read_wav(path), INTEGERS.astype(np.float32) / 32768)


@pytest.mark.parametrize(
    "data",
    [
        riff(form(3, bits=32), chunk(b"data", TONE.tobytes())),
        riff(chunk(b"fmt ", EXTENDED), chunk(b"data", TONE.tobytes())),
        riff(
            chunk(b"LIST", b"odd") + b"\0", form(3, bits=32), chunk(b"data", TONE.tobytes()), b"x"
        ),
        riff(form(3, bits=32), chunk(b"data", TONE.tobytes(), 0xFFFFFFFF)),
    ],
    ids=["floats", "extensible", "other chunks", "written to a pipe"],
)
def test_floats_are_read_bit_for_bit(data: bytes) -> None:
    np.testing.assert_array_equal(parse_wav(data, "f"), TONE)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "f is empty; convert it with `ffmpeg -i FILE -ar 16000 -ac 1 OUT.wav`"),
        (riff(chunk(b"fmt ", b"\1\0"), DATA), "a format chunk of 2 bytes"),
        (riff(form(), chunk(b"data", b"")), "f has no samples"),
        (riff(form(), chunk(b"data", b"abc")), "3 bytes of samples of 2 bytes each"),
        (
            riff(form(3, bits=32), chunk(b"data", struct.pack("<2f", 0.5, float("nan")))),
            "samples that are not numbers",
        ),
    ],
)
def test_other_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_wav(data, "f")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert any(remedy in str(refused.value) for remedy in ("convert it with `ffmpeg", "again"))


def test_a_file_that_is_not_there_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.wav"):
        with pytest.raises(RequestError, match=r"cannot be read: .*; name a WAV file"):
            read_wav(path)


@given(st.data())
@settings(max_examples=100)
def test_a_damaged_file_is_read_or_refused(data: st.DataObject) -> None:
    whole = bytearray(riff(form(3, bits=32), chunk(b"LIST", b"name"), DATA))
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, 80))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with suppress(RequestError):
        found = parse_wav(cut, "f")
        assert np.isfinite(found).all()
        assert len(found) > 0
