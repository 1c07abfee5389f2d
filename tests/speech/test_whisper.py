"""A random Whisper transcribes as transformers lets it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specrt.text.tokenizer import Tokenizer
from speech.recordings import sines
from speech.scripted import CONFIG, transcribed
from speech.tiny_whisper import LENGTH, Eager, of_transformers, spoken, tiny

pytestmark = pytest.mark.export

SHORT = replace(CONFIG, max_length=LENGTH)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("options", [{"language": "de"}, {"task": "translate"}], ids=str)
def test_long_recordings(tokenizer: Tokenizer, seed: int, options: dict[str, Any]) -> None:
    model, wave = tiny(seed=seed), sines(71, seed)
    wanted = of_transformers(model, wave, return_timestamps=True, **options)
    done = transcribed(
        wave, Eager(model), tokenizer, SHORT, LENGTH, timestamps=True,
        no_speech_threshold=None, **options,
    )  # fmt: skip
    assert len({one.seek for one in done.segments}) > 1
    assert [[*one.tokens] for one in done.segments] == [spoken(one["tokens"]) for one in wanted]
    times = [(one.start, one.end) for one in done.segments]
    np.testing.assert_allclose(times, [(float(o["start"]), float(o["end"])) for o in wanted])
