"""What `specrt collect` stores: the target's own text, and how likely it held tokens to be."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import specrt
from align.conftest import ANSWER, PROMPTS, collect
from specrt.cli.options import ProgressLine
from specrt.errors import RequestError
from specrt.params import SamplingParams
from specrt.traces import FORMAT, INDEX, RANKED, TraceIndex, TraceWriter, read_index, read_texts
from specrt_export.check.equivalence import Reference
from specrt_export.checkpoint.checkpoint import Checkpoint


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_texts_and_distributions_are_those_of_the_target(pair: Path, traces: Path) -> None:
    reference = Reference(Checkpoint.open(pair / "target"))
    texts = [*read_texts(traces, read_index(traces))]
    assert len(texts) == PROMPTS
    with specrt.load(pair / "bundle", threads=1, text_memory_bytes=0) as generator:
        for text in texts[:8]:
            params = SamplingParams(max_tokens=ANSWER)
            plain = generator.generate(text.prompt.tolist(), params, drafter="none")
            assert text.answer.tolist() == plain.token_ids
            whole = np.concatenate([text.prompt, text.answer]).astype(np.int64)
            logits = torch.from_numpy(reference(whole[None]))[0, len(text.prompt) - 1 : -1]
            told = torch.log_softmax(logits.double(), -1).numpy()
            assert text.ids.shape == (len(text.answer), RANKED)
            at = np.take_along_axis(told, text.ids.astype(np.int64), -1)
            np.testing.assert_allclose(text.logprobs, at, atol=0.02)
            np.testing.assert_allclose(at, -np.sort(-told)[:, :RANKED], atol=1e-4)
            np.testing.assert_allclose(text.rest, 1 - np.exp(at).sum(-1), atol=2e-3)


def test_collecting_goes_on_where_it_stopped(
    pair: Path, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, told = tmp_path / "traces", list[tuple[float, str]]()
    monkeypatch.setattr(ProgressLine, "update", lambda _, *shown: told.append(shown))
    assert collect(pair, out, "--limit", "64") == 0
    assert told[1:] == [(number / 64, "of 64 prompts") for number in range(1, 65)]
    (out / ".traces-00001.safetensors.part").write_bytes(b"killed while it wrote")
    assert collect(pair, out) == 0
    assert contents(out) == contents(traces)
    assert collect(pair, out) == 0
    assert contents(out) == contents(traces)


def test_one_process_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    out, part = tmp_path / "traces", tmp_path / "traces" / ".traces-00000.safetensors.1.part"
    wanted = TraceIndex(FORMAT, "tokenizer", 9, 9, "bundle", "name", 0.0, 4)
    first = TraceWriter(out, wanted)
    part.touch()
    with pytest.raises(RequestError, match=rf"another process collects traces in {out}; wait"):
        TraceWriter(out, wanted)
    assert part.exists(), "the first is writing it"
    del first
    assert TraceWriter(out, wanted).index == wanted
    assert not part.exists()


def test_a_full_disk_names_the_file_and_the_next_run_goes_on(
    pair: Path, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out, replace, name = tmp_path / "traces", Path.replace, "traces-00000.safetensors"

    def full(self: Path, target: Path) -> Path:
        if target.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(self, target)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", full)
        assert collect(pair, out, "--limit", "64") == 2
    assert f"{out / name} cannot be written: No space left" in capsys.readouterr().err
    assert not [*out.glob(".*")]
    assert collect(pair, out) == 0
    assert contents(out) == contents(traces)


@pytest.mark.parametrize(
    ("change", "told"),
    [(["--temperature", "0.5"], "temperature"), (["--max-tokens", "5"], "max_tokens")],
)
def test_traces_of_another_run_are_not_added_to(
    pair: Path, traces: Path, change: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(traces)
    assert collect(pair, traces, *change) == 2
    assert told in capsys.readouterr().err
    assert contents(traces) == before


def test_other_prompts_and_folders_of_something_else_are_refused(
    pair: Path, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, place = tmp_path / "other.jsonl", tmp_path / "place"
    first, *rest = (pair / "prompts.jsonl").read_text("utf-8").splitlines(keepends=True)
    other.write_text("".join([*rest, first]), encoding="utf-8")
    place.mkdir()
    (place / "letter").write_text("dear", encoding="utf-8")
    assert collect(pair, traces, "--prompts", str(other)) == 2
    assert "other prompts" in capsys.readouterr().err
    assert collect(pair, place) == 2
    assert "holds no traces" in capsys.readouterr().err
    assert [path.name for path in place.iterdir()] == ["letter"]


def copied(traces: Path, to: Path) -> Path:
    to.mkdir()
    for name, data in contents(traces).items():
        (to / name).write_bytes(data)
    return to


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_shard_is_refused(traces: Path, tmp_path: Path, damage: str) -> None:
    folder = copied(traces, tmp_path / "copy")
    shard = folder / read_index(folder).shards[0].file
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "remove":
        shard.unlink()
    else:
        shard.write_bytes(data if damage == "flip" else data[:-1])
    with pytest.raises(RequestError, match="collect the traces again"):
        [*read_texts(folder, read_index(folder))]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"format": 7}', '{"format": 1}', "[" * 5000])
def test_a_damaged_index_is_refused(traces: Path, tmp_path: Path, text: str) -> None:
    folder = copied(traces, tmp_path / "copy")
    (folder / INDEX).write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match="collect the traces again"):
        read_index(folder)
