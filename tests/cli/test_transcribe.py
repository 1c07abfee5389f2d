"""`specrt transcribe`: its forms of output, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specrt
from cli.conftest import Run
from specrt.completion import Completion
from specrt.params import SamplingParams
from specrt.speech import TranscriptionOptions, read_wav, read_whisper_config, transcribe
from specrt.speech.transcription import WindowRequest
from specrt.text.tokenizer import Tokenizer
from speech.folders import speech_folder
from speech.recordings import RATE, pcm, sines
from speech.scripted import Scripted, said
from support.bundles import listed

SAID = (said(0.0, " One.", 9.0, 9.0, " Two"), said(0.0, " Two.", 5.5, 5.5, " Three.", 20.0))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speech_folder(tmp_path_factory.mktemp("speech"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """39 seconds."""
    path = tmp_path / "tones.wav"
    path.write_bytes(pcm(sines(39)))
    return path


Decode = Callable[[WindowRequest], Completion]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Callable[[Decode], None]:
    """Lets the verb open a decoder that follows a script."""

    def use(decode: Decode) -> None:
        def generate(features: Any, params: SamplingParams, **options: Any) -> Completion:
            assert options == {"gamma": 2, "drafter": None}
            return decode(WindowRequest(features, params))

        target = SimpleNamespace(max_length=448, geometry=SimpleNamespace(max_positions=448))
        made = SimpleNamespace(
            generate=generate, tokenizer=tokenizer, models=SimpleNamespace(target=target),
            notices=["it is scripted"],
        )  # fmt: skip
        monkeypatch.setattr("specrt.cli.transcribe.load", lambda *_, **__: nullcontext(made))

    return use


@pytest.mark.export
def test_a_random_whisper_writes_what_the_library_does(cli: Run, whisper: Path, file: Path) -> None:
    asked = ("--timestamps", "--json", "--language", "en", "--threads", 1, "--gamma", 3)
    ran = cli("transcribe", file, whisper, *asked)
    assert ran.status == 0, ran.err
    told, options = json.loads(ran.out), TranscriptionOptions(language="en", timestamps=True)
    with specrt.load(whisper, threads=1) as made:
        wanted = transcribe(made, read_whisper_config(whisper), read_wav(file), options, gamma=0)
    assert [one["tokens"] for one in told["segments"]] == [[*s.tokens] for s in wanted.segments]
    assert told["speculation"]["accepted"] > 0


def test_times_are_printed_as_they_were_asked_for(
    cli: Run, bundle: Path, file: Path, scripted: Any
) -> None:
    def out(option: str) -> str:
        scripted(Scripted(*SAID))
        ran = cli("transcribe", file, bundle, "--gamma", 2, "--language", "en", option)
        assert ran.status == 0
        return ran.out

    assert out("--timestamps").splitlines() == [
        "[00:00:00.000 --> 00:00:09.000] One.",
        "[00:00:09.000 --> 00:00:14.500] Two.",
        "[00:00:14.500 --> 00:00:29.000] Three.",
    ]
    assert out("--srt").startswith("1\n00:00:00,000 --> 00:00:09,000\nOne.\n\n2\n")
    assert out("--vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:09.000\nOne.\n\n")
    scripted(Scripted(*SAID))
    told = json.loads(cli("transcribe", file, bundle, "--gamma", 2, "--timestamps", "--json").out)
    assert (told["text"], told["language"], told["duration"]) == ("One. Two. Three.", "de", 39.0)
    assert [one["start"] for one in told["segments"]] == [0.0, 9.0, 14.5]
    assert told["speculation"]["rounds"] == 2
    assert told["real_time_factor"] >= 0


def test_what_is_done_is_printed_on_ctrl_c(
    cli: Run, bundle: Path, file: Path, scripted: Any
) -> None:
    decode = Scripted(said(" Eins"))

    def interrupted(request: WindowRequest) -> Completion:
        if decode.asked:
            raise KeyboardInterrupt
        return decode(request)

    scripted(interrupted)
    ran = cli("transcribe", file, bundle, "--gamma", 2)
    assert (ran.status, ran.out) == (130, "Eins\n")
    assert "[30.0 s of audio" in ran.err


def test_a_recording_without_speech_is_refused(
    cli: Run, bundle: Path, tmp_path: Path, scripted: Any
) -> None:
    path = tmp_path / "silence.wav"
    path.write_bytes(pcm(np.zeros(2 * RATE, np.float32)))
    said_ = cli("transcribe", path, bundle).refusal
    assert said_ == f"specrt: {path} has no speech in its 2.0 s; nothing to write down\n"
    path.write_bytes(pcm(sines(1)))
    scripted(Scripted(said(" Thanks."), silence=0.9, mean=0.1))
    ran = cli("transcribe", path, bundle, "--gamma", 2)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.splitlines()[-1].endswith("has no speech in its 1.0 s; nothing to write down")


REFUSED = [
    ("{none} {bundle}", "{none} cannot be read: No such file or directory; name a WAV file"),
    ("{cut} {bundle}", "{cut} was cut off: it says that 32000 bytes of samples follow"),
    ("{file} {text}", "{text} is a bundle for text-generation; expected one for automatic-speech"),
    ("{file} {none}", "{none} does not exist; build one with"),
    ("{file} {bundle} --language xx", "language is 'xx'; known: de, en"),
    ("{file} {bundle} --task translat", "task is 'translat'; did you mean 'translate'?"),
    ("{file} {bundle} --temperature=-1", "--temperature is -1.0; expected a finite number of 0"),
    ("{file} {bundle} --no-speech-threshold 2", "--no-speech-threshold is 2.0; expected a probab"),
    ("", "Missing argument 'FILE.wav'"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[words for words, _ in REFUSED])
def test_bad_input_is_one_line(
    cli: Run, bundle: Path, file: Path, tmp_path: Path, words: str, message: str
) -> None:
    (tmp_path / "text").mkdir(exist_ok=True)
    places = {"bundle": bundle, "file": file}
    places |= {name: tmp_path / name for name in ("none", "text", "cut")}
    listed(places["text"])
    places["cut"].write_bytes(pcm(sines(1))[:999])
    said_ = cli("transcribe", *words.format(**places).split()).refusal
    assert message.format(**places) in said_


def test_damaged_settings_are_refused(cli: Run, file: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"generation_config": None}, "has no generation_config.json, which names the control"),
        ({"generation_config": {}}, "generation_config.json cannot be used (lang_to_id or task"),
        ({"preprocessor_config": {"feature_size": 80}}, "makes 80 and 3000; build the bundle"),
        ({"preprocessor_config": None, "processor_config": {"feature_extractor": []}},
         "feature_extractor is []; expected an object"),
    ]  # fmt: skip
    for number, (files, message) in enumerate(cases):
        folder = speech_folder(tmp_path / str(number), **files)
        assert message in cli("transcribe", file, folder).refusal
    (folder / "preprocessor_config.json").write_text("{}")
    assert "is not in the list of manifest.json" in cli("transcribe", file, folder).refusal
