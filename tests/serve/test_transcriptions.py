"""/v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import specrt
from serve.support import Live, listening
from specrt.serve.application import ServerOptions, app
from specrt.speech import (
    Transcription,
    TranscriptionOptions,
    read_wav,
    read_whisper_config,
    transcribe,
)
from specrt.speech.subtitles import srt_text, vtt_text
from speech.recordings import pcm, sines

pytestmark = pytest.mark.export

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


@pytest.fixture(scope="module")
def live(whisper: Path) -> Iterator[Live]:
    with listening(app(whisper, ServerOptions(threads=1, max_audio_bytes=4 << 20))) as found:
        yield found


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """41 seconds."""
    path = tmp_path_factory.mktemp("recording") / "tones.wav"
    path.write_bytes(pcm(sines(41)))
    return path


@pytest.fixture(scope="module")
def wanted(whisper: Path, recording: Path) -> Transcription:
    """What the recording is in English, with timestamps; it would be taken for German."""
    options = TranscriptionOptions(language="en", timestamps=True, logprobs=True)
    with specrt.load(whisper, threads=1) as generator:
        config = read_whisper_config(whisper)
        return transcribe(generator, config, read_wav(recording), options)


def post(live: Live, file: bytes, path: str = TRANSCRIPTIONS, **fields: Any) -> httpx.Response:
    return live.http.post(path, files={"file": ("tones.wav", file)}, data=fields)


def test_every_form_of_answer_is_of_one_transcription(
    live: Live, recording: Path, wanted: Transcription
) -> None:
    def answer(form: str) -> httpx.Response:
        found = post(live, recording.read_bytes(), language="en", response_format=form)
        assert found.status_code == 200, found.text
        return found

    with ThreadPoolExecutor(3) as pool:
        verbose, srt, vtt = pool.map(answer, ("verbose_json", "srt", "vtt"))
    found = verbose.json()
    assert {name: found[name] for name in wanted.to_json()} == wanted.to_json()
    detected = post(live, recording.read_bytes(), response_format="verbose_json").json()
    assert (detected["language"], found["language"]) == ("de", "en")
    assert found["usage"] == {"type": "duration", "seconds": 41}
    assert found["metrics"]["windows"] == wanted.windows
    assert srt.text == srt_text(wanted.segments)
    assert vtt.text == vtt_text(wanted.segments)
    assert vtt.headers["content-type"].startswith("text/vtt")
    short, text = answer("json").json(), answer("text").text
    assert set(short) == {"text", "usage", "metrics"}
    assert text == short["text"] + "\n"


def test_a_translation_is_another_text(live: Live, recording: Path) -> None:
    data, form = recording.read_bytes(), "verbose_json"
    said, translated = (
        post(live, data, path, response_format=form).json()
        for path in (TRANSCRIPTIONS, TRANSLATIONS)
    )
    assert (said["task"], translated["task"]) == ("transcribe", "translate")
    assert said["segments"] != translated["segments"]


REFUSED: list[tuple[dict[str, str], str]] = [
    ({"prompt": "Hello"}, "prompt is not supported"),
    ({"languag": "de"}, "did you mean 'language'?"),
    ({"language": "xx"}, "language is 'xx'; known: de, en"),
    ({"response_format": "xml"}, "response_format is 'xml'"),
    ({"temperature": "warm"}, "temperature is 'warm'; expected a number"),
    ({"temperature": "-1"}, "temperature is -1.0"),
    ({"seed": "1.5"}, "seed is '1.5'; expected a whole number"),
    ({"gamma": "9"}, "gamma"),
    ({"drafter": "none such"}, "drafter"),
    ({"stream": "true"}, "stream is not supported"),
    ({"timestamp_granularities[]": "word"}, "expected segment"),
    ({"timestamp_granularities[]": "segment"}, "needs response_format verbose_json"),
    ({"model": "other"}, "other"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_fields_that_are_not_served_are_refused(
    live: Live, fields: dict[str, str], message: str
) -> None:
    answer = post(live, pcm(sines(1)), **fields)
    assert answer.status_code == (404 if "model" in fields else 400), answer.text
    assert message in answer.json()["error"]["message"]


def test_files_that_are_not_read_are_refused(live: Live) -> None:
    files = [(b"", "tones.wav is empty"), (pcm(sines(1))[:-2], "tones.wav was cut off")]
    for data, message in files:
        answer = post(live, data)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True)
    assert post(live, bytes(5 << 20)).status_code == 413
    assert live.http.post(TRANSCRIPTIONS, data={"language": "de"}).status_code == 400
    answer = live.http.post(TRANSCRIPTIONS, json={"file": "tones.wav"})
    assert "expected multipart/form-data" in answer.json()["error"]["message"]


def test_a_text_is_no_prompt_of_it(live: Live) -> None:
    said = live.refusal("/v1/completions", 400, prompt="Hello")
    assert "/v1/audio/transcriptions" in said


def test_a_bundle_of_text_says_that_it_hears_nothing(toy: Live) -> None:
    answer = post(toy, pcm(sines(1)))
    assert answer.status_code == 400
    assert "not a bundle for automatic-speech-recognition" in answer.json()["error"]["message"]
