"""Recordings and their texts: what a quantized model of speech is measured on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specrt.errors import BuildError, CheckpointError
from specrt.speech.log_mel import LogMel
from specrt.text.tokenizer import Tokenizer
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.plan.speech_pairs import feature_extractor, read_speech_pairs
from speech.recordings import RATE, chunk, form, pcm, riff, sines
from speech.tiny_whisper import BINS, LENGTH

pytestmark = pytest.mark.export

SHAPE = BINS, 3000

START = (3,)


@pytest.fixture(scope="module")
def tokenizer(whisper: Path) -> Tokenizer:
    return Tokenizer(whisper / "tokenizer.json")


def save_clips(folder: Path, count: int) -> Path:
    """Write clips of several lengths, of 16 bits, and their texts; return the file of lines."""
    lines = []
    for number in range(count):
        (folder / f"{number}.wav").write_bytes(pcm(sines(2 + number, number)))
        lines.append({"audio": f"{number}.wav", "completion": "words that were said " * 3})
    path = folder / "clips.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_recording_is_heard_as_the_runtime_hears_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = save_clips(tmp_path, 6)
    found = read_speech_pairs(path, tokenizer, START, LENGTH, SHAPE, LogMel(BINS))
    assert len(found.sources) == len(found.scored) == 6
    stored = np.frombuffer((tmp_path / "4.wav").read_bytes()[44:], "<i2").astype(np.float32)
    np.testing.assert_array_equal(found.sources[4], LogMel(BINS)(stored / np.float32(1 << 15)))
    features = {"features": "4.npy", "completion": "words that were said " * 3}
    np.save(tmp_path / "4.npy", found.sources[4])
    path.write_text((json.dumps(features) + "\n") * 6, encoding="utf-8")
    again = read_speech_pairs(path, tokenizer, START, LENGTH, SHAPE, LogMel(BINS))
    np.testing.assert_array_equal(again.sources[0], found.sources[4])
    np.testing.assert_array_equal(again.scored[0], found.scored[4])


WAVE = sines(1.0)

BAD: list[tuple[dict[str, object], bytes, str]] = [
    ({"audio": "none.wav", "completion": "a"}, b"", r"line 1.*none\.wav cannot be read"),
    ({"audio": "a.wav", "completion": "a"}, riff(form(rate=8000), chunk(b"data", bytes(64))),
     "8000 samples a second; expected 16000.*ffmpeg"),
    ({"audio": "a.wav", "completion": "a"}, pcm(np.zeros(31 * RATE, np.float32)),
     "lasts 31.0 s, and the encoder hears 30; cut it"),
    ({"audio": "a.wav"}, pcm(WAVE), "line 1.*completion"),
    ({"audio": "a.wav", "features": "a.npy", "completion": "a"}, b"", "both audio and features"),
    ({"completion": "a"}, b"", "neither audio nor features"),
    ({"audio": 3, "completion": "a"}, b"", "line 1.*cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "data", "said"), BAD, ids=[said[:20] for _, _, said in BAD])
def test_what_is_no_recording_is_one_line(
    line: dict[str, object], data: bytes, said: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "a.wav").write_bytes(data)
    path = tmp_path / "clips.jsonl"
    path.write_text(json.dumps(line), encoding="utf-8")
    with pytest.raises(BuildError, match=said) as raised:
        read_speech_pairs(path, tokenizer, START, LENGTH, SHAPE, LogMel(BINS))
    assert "\n" not in str(raised.value)


def test_an_extractor_of_other_sizes_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = save_clips(tmp_path, 1)
    with pytest.raises(BuildError, match=r"makes 80 features in 3000 frames.*reads 4 in 3000"):
        read_speech_pairs(path, tokenizer, START, LENGTH, SHAPE, LogMel())


def test_an_extractor_is_that_of_the_checkpoint(whisper: Path, tmp_path: Path) -> None:
    assert feature_extractor(Checkpoint.open(whisper.parent / "target")).feature_size == BINS
    (tmp_path / "config.json").write_text('{"model_type": "whisper", "num_mel_bins": 7}')
    bare = Checkpoint.open(tmp_path, config_only=True)
    assert feature_extractor(bare) == LogMel(7)
    (tmp_path / "preprocessor_config.json").write_text('{"dither": 0.1}')
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json.*dither"):
        feature_extractor(bare)
