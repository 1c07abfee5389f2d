"""Recordings made of sines, and files of them."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

RATE = 16_000

Wave = np.ndarray[Any, np.dtype[np.float32]]


def sines(seconds: float, seed: int = 0) -> Wave:
    """Return tones that come and go, with a little noise."""
    random = np.random.default_rng(seed)
    time = np.arange(round(seconds * RATE)) / RATE
    wave = 0.01 * random.standard_normal(len(time))
    for pitch in random.uniform(80, 7000, 6):
        wave += 0.1 * np.sin(2 * np.pi * pitch * time) * (np.sin(time * random.uniform(1, 9)) > 0)
    return wave.astype(np.float32)


def chunk(kind: bytes, data: bytes, size: int | None = None) -> bytes:
    return kind + struct.pack("<I", len(data) if size is None else size) + data


def form(code: int = 1, channels: int = 1, rate: int = RATE, bits: int = 16) -> bytes:
    block = channels * bits // 8
    return chunk(b"fmt ", struct.pack("<HHIIHH", code, channels, rate, rate * block, block, bits))


def riff(*chunks: bytes) -> bytes:
    return chunk(b"RIFF", b"WAVE" + b"".join(chunks))


def pcm(wave: Wave) -> bytes:
    """Return a file of 16 bits."""
    return riff(form(), chunk(b"data", (wave * 32767).astype("<i2").tobytes()))
