"""A random Whisper, from its checkpoint to texts: what transformers transcribes with it."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specrt
from shared import nightly_but
from specrt.generator import Generator
from specrt.params import Gamma, SamplingParams
from specrt.speech import TranscriptionOptions, read_whisper_config, transcribe
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.portable.exporter import export_graph
from speech.recordings import sines
from speech.scripted import DE, EN, END
from speech.tiny_whisper import GRAPHS, LENGTH, EagerWhisper

pytestmark = pytest.mark.export


@pytest.fixture(scope="module")
def eager(whisper: Path) -> EagerWhisper:
    return EagerWhisper(whisper.parent / "target")


@pytest.fixture(scope="module")
def opened(whisper: Path) -> Iterator[Generator]:
    with specrt.load(whisper, threads=1) as made:
        yield made


def test_windows_in_rows_have_the_texts_of_transformers(
    whisper: Path, opened: Generator, eager: EagerWhisper
) -> None:
    log_mel = read_whisper_config(whisper).log_mel
    heard = [log_mel(sines(30, seed)) for seed in range(5)]
    wanted = [eager.text(one, language="en") for one in heard]
    assert len(set(map(tuple, wanted))) > 1
    params = SamplingParams(max_tokens=LENGTH - len(opened.models.decoder_start))
    for gamma in (0, 1, 3):
        many = [done for (done,) in opened.generate_many(heard, params, gamma=gamma)]
        assert [done.token_ids for done in many] == wanted, gamma
        assert (many[0].speculation.accepted > 0) == (gamma > 0)


@pytest.mark.parametrize("options", [{"language": "de"}, {"task": "translate"}], ids=str)
@pytest.mark.parametrize("seed", nightly_but([0], [0, 1]))
def test_segments_of_long_recordings_are_those_of_transformers(
    whisper: Path, opened: Generator, eager: EagerWhisper, options: dict[str, Any], seed: int
) -> None:
    """The language of the second is detected."""
    config, wave = read_whisper_config(whisper), sines(71, seed)
    wanted = eager.segments(config.log_mel(wave), **options)
    settings = TranscriptionOptions(timestamps=True, no_speech_threshold=None, **options)
    gammas: list[Gamma] = [0, 3, "auto"]
    for gamma in gammas:
        seconds: list[float] = []
        done = transcribe(opened, config, wave, settings, progress=seconds.append, gamma=gamma)
        assert done.windows > 2
        assert seconds == sorted(seconds)
        assert (seconds[0], seconds[-1]) == (0, done.duration)
        assert [one.tokens for one in done.segments] == [tokens for _, _, tokens in wanted]
        times = [(one.start, one.end) for one in done.segments]
        np.testing.assert_allclose(times, [(start, end) for start, end, _ in wanted])


def test_tokens_that_a_checkpoint_forces_are_no_language(
    whisper: Path, opened: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The language is one token, and so its own end."""
    options: Any = opened.models.options
    for name, value in (("forced_eos_token_id", END), ("bad_words_ids", [[EN], [DE]])):
        monkeypatch.setitem(options, name, value)
    done = transcribe(opened, read_whisper_config(whisper), sines(2))
    assert done.language in ("en", "de")


@pytest.mark.nightly
def test_an_export_is_the_recorded_graphs(whisper: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(whisper.parent / "target", config_only=True)
    export_graph(checkpoint, tmp_path / "target.onnx")
    with tarfile.open(GRAPHS) as archive:
        archive.extractall(tmp_path / "recorded", filter="data")
    for path in (tmp_path / "recorded").iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), f"record {path.name} again"
