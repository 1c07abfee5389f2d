"""Windows of long recordings, and the segments of their tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.errors import CapacityError, RequestError
from specrt.params import TimestampRules
from specrt.speech.log_mel import LogMel
from specrt.speech.subtitles import srt_text, vtt_text
from specrt.speech.transcription import Recording, TranscriptionSegment, split
from specrt.speech.whisper_config import WhisperConfig, whisper_config
from specrt.text.tokenizer import Tokenizer
from speech.recordings import RATE, sines
from speech.scripted import (
    BEGIN,
    CONFIG,
    DE,
    EN,
    END,
    SETTINGS,
    SILENT,
    START,
    TRANSCRIBE,
    VOCABULARY,
    Scripted,
    said,
    transcribed,
)

ENGLISH = WhisperConfig(LogMel(feature_size=4), START, END, SILENT)

# Segments


def of_transformers(tokens: list[int], frames: int) -> tuple[list[tuple[float, float]], int]:
    """Return times of segments and the step to the next window, as transformers finds them.

    All are frames: in seconds, transformers takes 1.2 s for 59 steps of 0.02 s.
    """
    torch = pytest.importorskip("torch", reason="needs the export extra")
    library = pytest.importorskip("transformers.models.whisper.generation_whisper")
    segments, moved = library.WhisperGenerationMixin._retrieve_segment(
        seek_sequence=torch.tensor(tokens), seek_outputs=[None],
        time_offset=torch.zeros(1, dtype=torch.float64), timestamp_begin=BEGIN,
        seek_num_frames=torch.tensor([frames]), time_precision=2, time_precision_features=1,
        input_stride=2, prev_idx=0, idx=0, return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 3),
    )  # fmt: skip
    return [(float(s["start"]), float(s["end"])) for s in segments], int(moved)


parts = st.lists(
    st.tuples(st.text("abc", max_size=3), st.integers(1, 250), st.booleans()), max_size=6
)


@pytest.mark.export
@given(parts, st.sampled_from(["", "xy"]), st.integers(100, 3000))
def test_segments_and_steps_are_those_of_transformers(
    parts: list[tuple[str, int, bool]], rest: str, frames: int
) -> None:
    now, tokens = 0, [BEGIN]
    for text, steps, again in parts:
        now += steps
        tokens += [*text.encode(), BEGIN + now] + [BEGIN + now] * again
    tokens += rest.encode()
    spans, moved = split(tokens, frames, BEGIN)
    found = [(span.begin * 2, span.end * 2) for span in spans]
    wanted, step = of_transformers(tokens, frames)
    assert found == wanted
    assert moved == (step or frames)


# Windows


def test_a_window_begins_where_the_last_whole_segment_ended(tokenizer: Tokenizer) -> None:
    decode = Scripted(
        said(0.0, "One.", 9.0, 9.0, "Two.", 20.0, 20.0, "Thr"),
        said(0.0, "Three.", 12.5, 12.5, "Four.", 26.0),
        said(0.0, "Five."),
    )
    samples = sines(55.004)
    done = transcribed(samples, decode, tokenizer, timestamps=True, language="en")
    times = [(one.start, one.end, one.text) for one in done.segments]
    assert times == [
        (0.0, 9.0, "One."), (9.0, 20.0, "Two."), (20.0, 32.5, "Three."),
        (32.5, 46.0, "Four."), (50.0, pytest.approx(55.0), "Five."),
    ]  # fmt: skip
    assert [one.seek for one in done.segments] == [0, 0, 2000, 2000, 5000]
    assert (done.text, done.language, done.windows) == ("One.Two.Three.Four.Five.", "en", 3)
    assert done.duration == len(samples) / RATE
    whole = CONFIG.log_mel(samples)
    for request, seek in zip(decode.asked, (0, 2000, 5000), strict=True):
        given = whole[:, seek : seek + 3000]
        np.testing.assert_array_equal(request.features[:, : given.shape[1]], given)
        assert not request.features[:, given.shape[1] :].any()
        assert request.params.decoder_start == (START, EN, TRANSCRIBE)
        assert request.params.timestamp_rules == TimestampRules(BEGIN, END, 50)
        assert request.params.max_tokens == 445
    assert done.speculation is not None
    assert (done.speculation.rounds, done.speculation.drafted) == (3, 6)
    assert done.tokens == sum(map(len, (
        said(0.0, "One.", 9.0, 9.0, "Two.", 20.0, 20.0, "Thr"),
        said(0.0, "Three.", 12.5, 12.5, "Four.", 26.0), said(0.0, "Five."),
    )))  # fmt: skip


def test_a_window_without_speech_is_left_out(tokenizer: Tokenizer) -> None:
    for silence, mean, left_out in ((0.7, 0.2, True), (0.7, 0.9, False), (0.5, 0.2, False)):
        decode = Scripted(said(" Thanks."), silence=silence, mean=mean)
        done = transcribed(sines(3), decode, tokenizer, language="en")
        assert (done.text == "") == left_out, (silence, mean)
        assert (decode.asked[0].params.logprobs == 0) == (silence > 0.6)
        for one in done.segments:
            assert one.no_speech_prob == pytest.approx(silence)
    decode = Scripted(said(" Thanks."), silence=0.9, mean=0.1)
    done = transcribed(sines(3), decode, tokenizer, language="en", no_speech_threshold=None)
    assert (done.text, decode.heard) == ("Thanks.", 0)


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_nothing_is_decoded_of_digital_silence(tokenizer: Tokenizer, value: float) -> None:
    done = transcribed(np.full(20 * RATE, value, np.float32), Scripted(), tokenizer)
    assert (done.text, done.segments, done.windows, done.duration) == ("", (), 0, 20.0)


def test_a_model_of_english_has_no_language_and_no_task(tokenizer: Tokenizer) -> None:
    decode = Scripted(said(" one"))
    done = transcribed(sines(2), decode, tokenizer, ENGLISH)
    assert (done.language, decode.asked[0].params.decoder_start) == ("en", (START, SILENT))
    for options in ({"language": "de"}, {"task": "translate"}):
        with pytest.raises(RequestError, match="only transcribes English; leave them out"):
            transcribed(sines(2), decode, tokenizer, ENGLISH, **options)


def test_what_is_no_recording_is_refused(tokenizer: Tokenizer) -> None:
    for samples in (
        [],
        np.zeros((2, 100)),
        np.zeros(5, np.int16),
        np.array([0.5, np.nan]),
        np.array([1e300]),
    ):
        with pytest.raises(RequestError, match="samples"):
            Recording(np.asarray(samples), CONFIG.log_mel)
    with pytest.raises(CapacityError, match="context of this bundle is 3 tokens"):
        transcribed(sines(1), Scripted(), tokenizer, context=3, language="en")


# Subtitles

CUES = [
    TranscriptionSegment(0.0, 9.24, " One\n two", (), 0),
    TranscriptionSegment(3599.9996, 3661.5, "a --> b", (), 0),
]


def test_subtitles() -> None:
    assert srt_text(CUES) == (
        "1\n00:00:00,000 --> 00:00:09,240\nOne two\n\n2\n01:00:00,000 --> 01:01:01,500\na -> b\n"
    )
    assert vtt_text(CUES) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:09.240\nOne two\n\n"
        "01:00:00.000 --> 01:01:01.500\na -> b\n"
    )
    assert (srt_text([]), vtt_text([])) == ("", "WEBVTT\n")


# Settings


def test_settings_become_a_config() -> None:
    assert whisper_config(SETTINGS, CONFIG.log_mel, VOCABULARY) == CONFIG
    english = {**SETTINGS, "is_multilingual": False}
    assert not whisper_config(english, CONFIG.log_mel, VOCABULARY).multilingual
    for own in ({"language": "<|de|>"}, {"forced_decoder_ids": [[1, DE], [2, TRANSCRIBE]]}):
        assert whisper_config({**SETTINGS, **own}, CONFIG.log_mel, VOCABULARY).language == "de"
    detects = {**SETTINGS, "forced_decoder_ids": [[1, None], [2, TRANSCRIBE]]}
    assert whisper_config(detects, CONFIG.log_mel, VOCABULARY).language is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lang_to_id": None}, "lang_to_id or task_to_id is missing"),
        ({"lang_to_id": [1]}, r"lang_to_id is \[1\]; expected an object"),
        ({"lang_to_id": {"<|en|>": 9999}}, r"lang_to_id\['<\|en\|>'\] is 9999; expected a token"),
        ({"task_to_id": {"translate": 3}}, "lang_to_id or task_to_id is missing"),
        ({"no_timestamps_token_id": None}, "no_timestamps_token_id is None; expected a token id"),
        ({"decoder_start_token_id": -1}, "decoder_start_token_id is -1"),
        ({"eos_token_id": []}, r"eos_token_id is \[\]"),
        ({"max_initial_timestamp_index": "50"}, "max_initial_timestamp_index is '50'"),
    ],
)
def test_damaged_settings_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        whisper_config({**SETTINGS, **changed}, CONFIG.log_mel, VOCABULARY)
