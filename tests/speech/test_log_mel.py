"""Features are those of transformers' extractor for Whisper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specrt.speech.log_mel import LogMel, log_mel_of
from speech.recordings import RATE, sines


@pytest.mark.export
@pytest.mark.parametrize(
    ("bins", "samples"), [(80, 1), (80, 30 * RATE), (128, 5 * RATE + 7), (128, 47 * RATE + 9)]
)
def test_features_are_those_of_transformers(bins: int, samples: int) -> None:
    transformers = pytest.importorskip("transformers")
    wave = sines(48)[:samples]
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins)
    long: dict[str, Any] = {"truncation": False, "padding": "longest"}
    options = long if samples > 30 * RATE else {}
    wanted = extractor(wave, sampling_rate=RATE, return_tensors="np", **options).input_features[0]
    found = log_mel_of(extractor.to_dict())(wave)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def test_silence_has_one_value_and_a_window_of_frames() -> None:
    found = LogMel()(np.zeros(100, np.float32))
    assert found.shape == (80, 3000)
    np.testing.assert_array_equal(found, np.float32(-1.5))


def test_other_sizes_are_those_of_the_settings() -> None:
    sizes = {"feature_size": 4, "hop_length": 80, "n_fft": 64, "chunk_length": 2}
    made = log_mel_of({**sizes, "sampling_rate": 16000, "feature_extractor_type": "Whisper..."})
    assert made(sines(1)).shape == (4, 400)
    assert (made.window_frames, made.seconds(100)) == (400, 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dither": 0.1}, "dither is 0.1; expected 0"),
        ({"padding_value": 1.0}, "padding_value is 1.0; expected 0"),
        ({"n_fft": "many"}, "n_fft is 'many'; expected a whole number"),
        ({"hop_length": 0}, "hop_length is 0; expected a whole number"),
    ],
)
def test_another_extractor_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        log_mel_of(settings)
