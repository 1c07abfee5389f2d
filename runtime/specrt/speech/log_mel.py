"""Log-mel spectrograms as Whisper's feature extractor makes them, in NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from reprlib import repr as short
from typing import Annotated, Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from specrt.records import Interval, read

Features = NDArray[np.float32]
"""Log-mel values, [mel bins, frames]."""

_HIGHEST_HZ = 8000.0

_FLOOR = 1e-10
"""Least power, so that silence has a logarithm."""

_RANGE = 8.0
"""Decades below the loudest value of a recording that are told apart."""

_BLOCK = 3000
"""Frames that are transformed at once: a long recording takes no more memory for it."""

# Slaney's mel scale: linear up to 1 kHz, 15 mels there, and 27 mels for each factor of 6.4 above.
_MEL_HZ, _KNEE_HZ, _KNEE_MELS, _MELS_PER_LOG = 200.0 / 3.0, 1000.0, 15.0, 27.0 / np.log(6.4)


@dataclass(frozen=True)
class LogMel:
    """The feature extractor of a checkpoint: its sizes, and what it makes of samples.

    Source: Radford et al. 2022, arXiv:2212.04356, section 2.2.
    """

    feature_size: Annotated[int, Interval(1, 1024)] = 80
    """Mel bins."""
    sampling_rate: Annotated[int, Interval(1000, 10**6)] = 16_000
    hop_length: Annotated[int, Interval(1, 10**5)] = 160
    """Samples from one frame to the next."""
    n_fft: Annotated[int, Interval(2, 10**5)] = 400
    """Samples of a frame."""
    chunk_length: Annotated[int, Interval(1, 600)] = 30
    """Seconds of a window."""

    @property
    def window_samples(self) -> int:
        """Samples of a window."""
        return self.chunk_length * self.sampling_rate

    @property
    def window_frames(self) -> int:
        """Frames of a window."""
        return self.window_samples // self.hop_length

    def seconds(self, frames: float) -> float:
        """Return how long so many frames last."""
        return frames * self.hop_length / self.sampling_rate

    def __call__(self, samples: NDArray[np.float32]) -> Features:
        """Return the features of a recording, padded with zeros where it is less than a window.

        Shapes: samples [N]; the features have a frame for each hop.
        """
        missing = self.window_samples - len(samples)
        whole = np.pad(samples, (0, missing)) if missing > 0 else samples
        frames = len(whole) // self.hop_length
        logs = np.empty((self.feature_size, frames), np.float32)
        for first, power in self._powers(whole, frames):
            mels = self._filters @ power.T
            logs[:, first : first + len(power)] = np.log10(np.maximum(mels, _FLOOR))
        np.maximum(logs, logs.max() - np.float32(_RANGE), out=logs)
        logs += np.float32(4.0)
        logs /= np.float32(4.0)
        return logs

    def _powers(self, samples: NDArray[np.float32], frames: int) -> Iterator[tuple[int, Powers]]:
        """Yield the power spectra of frames, some at a time, with the number of the first.

        Frames are centred on their samples; beyond its ends a recording is mirrored.
        """
        half = self.n_fft // 2
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.n_fft) / self.n_fft)
        padded = np.pad(samples, half, mode="reflect")
        framed = sliding_window_view(padded, self.n_fft)[:: self.hop_length]
        for first in range(0, frames, _BLOCK):
            block = framed[first : min(first + _BLOCK, frames)]
            spectrum = np.fft.rfft(block.astype(np.float64) * hann)
            yield first, spectrum.real**2 + spectrum.imag**2

    @cached_property
    def _filters(self) -> NDArray[np.float64]:
        """Triangles over the bins of a spectrum, each of area 1. Shapes: [mel bins, n_fft/2 + 1].

        Source: Slaney 1998, Auditory Toolbox, Technical Report 1998-010.
        """
        bins = np.linspace(0.0, self.sampling_rate / 2, 1 + self.n_fft // 2)
        edges = _hertz(np.linspace(0.0, _mels(_HIGHEST_HZ), self.feature_size + 2))
        low, centre, high = (edges[i : len(edges) - 2 + i, None] for i in range(3))
        rising, falling = (bins - low) / (centre - low), (high - bins) / (high - centre)
        return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (high - low))


Powers = NDArray[np.float64]
"""Power spectra, [frames, n_fft/2 + 1]."""


def log_mel_of(settings: Mapping[str, Any]) -> LogMel:
    """Return the feature extractor that a checkpoint's settings describe.

    Raises: ValueError for one that computes something else.
    """
    for name in ("dither", "padding_value"):
        if settings.get(name, 0) != 0:
            raise ValueError(f"{name} is {short(settings[name])}; expected 0")
    own = {one.name for one in fields(LogMel)}
    return read(LogMel, {key: value for key, value in settings.items() if key in own})


def _mels(hertz: float) -> float:
    """Return the mels of a frequency above the knee of the scale."""
    return float(_KNEE_MELS + np.log(hertz / _KNEE_HZ) * _MELS_PER_LOG)


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the frequencies of mels."""
    above = _KNEE_HZ * np.exp((mels - _KNEE_MELS) / _MELS_PER_LOG)
    return np.where(mels < _KNEE_MELS, mels * _MEL_HZ, above)
