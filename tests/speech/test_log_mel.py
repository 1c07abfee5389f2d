"""Features are those of transformers' extractor for Whisper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specrt.speech.log_mel import log_mel_of
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
