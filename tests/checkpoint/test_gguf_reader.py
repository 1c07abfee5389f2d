"""The container of GGUF files: read as it is, and refused in one line whatever was done to it."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shared import REPOSITORY
from specrt.errors import CheckpointError
from specrt_export.checkpoint.gguf.blocks import ABSENT
from specrt_export.checkpoint.gguf.model import GgufModel
from specrt_export.checkpoint.gguf.reader import GgufFile, read_gguf
from support.gguf_files import (
    BYTES_VOCABULARY,
    F32,
    STRING,
    array,
    container,
    entry,
    item,
    plain,
    text,
)

VALUES = [
    plain("general.architecture", "llama"),
    plain("a.number", 7),
    plain("a.real", 0.5),
    plain("a.flag", True),
    plain("a.list", ["one", "", "zwei ü"]),
    array("some.numbers", F32, [1.0, 2.0]),
]
TENSORS = [("first", [2, 32], 8, bytes(range(68))), ("second", [3], 0, bytes(12))]


def written(path: Path, data: bytes) -> GgufFile:
    path.write_bytes(data)
    return read_gguf(path)


@pytest.mark.parametrize(("version", "alignment"), [(2, 32), (3, 32), (3, 8), (3, 128)])
def test_values_and_tensors_are_read(tmp_path: Path, version: int, alignment: int) -> None:
    values = [*VALUES, plain("general.alignment", alignment)]
    path = tmp_path / "model.gguf"
    file = written(path, container(values, TENSORS, version=version, alignment=alignment))
    assert file.architecture == "llama"
    assert (file.whole("a.number"), file.real("a.real")) == (7, 0.5)
    assert file.flag("a.flag", default=False)
    assert list(file.texts("a.list")) == ["one", "", "zwei ü"]
    assert file.numbers("some.numbers").tolist() == [1.0, 2.0]
    first = file.tensors["first"]
    assert (first.shape, first.format.name, first.nbytes) == ((2, 32), "Q8_0", 68)
    assert first.rows(1, 2).tobytes() == bytes(range(34, 68))
    assert file.tensors["second"].offset % alignment == 0


def huge(*values: bytes) -> bytes:
    return container([*VALUES, *values], TENSORS)


def entries(*made: bytes) -> bytes:
    return container(VALUES, TENSORS, entries=made, counts=(len(made), len(VALUES)))


FIRST, SECOND = entry("first", [2, 32], 8, 0), entry("second", [3], 0, 96)
MANY = 1 << 62
DAMAGED: dict[str, tuple[bytes, str]] = {
    "another magic": (b"PK\x03\x04" + bytes(40), r"begins with b'PK.*not a GGUF file"),
    "before GGUF": (b"tjgg" + bytes(40), "before GGUF"),
    "big endian": (b"GGUF\0\0\0\3" + bytes(40), "big endian.*little endian"),
    "many items": (huge(text("x") + b"\x09\0\0\0\6\0\0\0" + MANY.to_bytes(8, "little")), "items"),
    "long text": (huge(text("x") + b"\x08\0\0\0" + MANY.to_bytes(8, "little")), f"takes {MANY} by"),
    "a list of lists": (huge(text("x") + b"\x09\0\0\0\x09\0\0\0" + bytes(64)), "list of lists"),
    "type 13": (huge(text("x") + b"\x0d\0\0\0"), "'x' is of type 13"),
    "list of type 13": (huge(text("x") + b"\x09\0\0\0\x0d\0\0\0"), "'x' is of type 13"),
    "a flag of 2": (huge(text("x") + b"\7\0\0\0\2"), "'x' is 2, where 0 or 1"),
    "a key twice": (huge(plain("a.number", 1)), "'a.number' is there twice"),
    "alignment 48": (huge(plain("general.alignment", 48)), "alignment is 48; expected a power"),
    "a worded alignment": (huge(plain("general.alignment", "32")), "general.alignment is '32'"),
    "no name": (entries(FIRST, entry("", [3], 0, 96)), "has no name"),
    "a name of bytes": (entries(entry(b"\xff\xfe", [3], 0, 96), FIRST), "not UTF-8"),
    "no axes": (entries(FIRST, entry("second", [], 0, 96)), "'second' has 0 axes"),
    "half a block": (entries(entry("x", [2, 48], 8, 0), FIRST), "Q8_0, in blocks of 32 weights"),
    "half a large block": (entries(entry("x", [2, 384], 23, 0), FIRST), "IQ4_XS, in blocks of 256"),
    "a cut block": (entries(entry("x", [2, 256], 11, 0), SECOND), "'x' ends at byte .* truncated"),
    "an overflow": (entries(entry("x", [1 << 33, 1 << 33], 0, 0), SECOND), "truncated"),
    "an odd offset": (entries(FIRST, entry("second", [3], 0, 97)), "no multiple of 32"),
    "an overlap": (entries(FIRST, entry("second", [3], 0, 64)), "'first' and 'second' overlap"),
    "format 99": (entries(FIRST, entry("second", [3], 99, 96)), "format 99; specrt reads F32"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"model\.gguf.*{message}") as caught:
        written(tmp_path / "model.gguf", data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", ABSENT)
def test_formats_that_are_not_read_are_named(tmp_path: Path, number: int) -> None:
    data = entries(entry("first", [256], number, 0), SECOND)
    with pytest.raises(CheckpointError, match=rf"'first' is stored as {ABSENT[number]}; specrt r"):
        written(tmp_path / "model.gguf", data)


def test_a_file_that_ends_anywhere_is_refused(tmp_path: Path) -> None:
    whole = container(VALUES, TENSORS)
    written(tmp_path / "whole.gguf", whole)
    for length in range(len(whole) - 20):  # the last tensor is padded
        with pytest.raises(CheckpointError):
            written(tmp_path / "model.gguf", whole[:length])


def test_texts_of_a_list_are_held_to_utf8_when_they_are_read(tmp_path: Path) -> None:
    file = written(tmp_path / "model.gguf", huge(array("x", STRING, ["a", b"\xc3("])))
    with pytest.raises(CheckpointError, match=r"'x': item 1 is not UTF-8"):
        list(file.texts("x"))


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda file: file.whole("a.real"), r"a\.real is 0\.5; expected a whole number"),
        (lambda file: file.whole("a.none"), r"has no a\.none, which its model needs"),
        (lambda file: file.text("a.number"), r"a\.number is 7; expected a text"),
        (lambda file: file.flag("a.number", default=True), "expected true or false"),
        (lambda file: file.texts("some.numbers"), "is a list of 2; expected a list of texts"),
        (lambda file: file.numbers("a.list"), "is a list of 3; expected a list of numbers"),
    ],
)
def test_a_value_of_another_type_is_named(tmp_path: Path, read: Any, message: str) -> None:
    file = written(tmp_path / "model.gguf", container(VALUES, TENSORS))
    with pytest.raises(CheckpointError, match=message):
        read(file)


def split(folder: Path, **changes: Any) -> list[Path]:
    """Write a model of three parts; `changes` are numbers that parts claim."""
    paths = []
    for number in range(3):
        said = {"split.no": number, "split.count": 3, **changes}
        values = [text(k) + b"\2\0\0\0" + item(2, v) for k, v in said.items()]
        more = [*VALUES, plain("split.tensors.count", 3)] if number == 0 else []
        paths.append(folder / f"m-{number + 1:05}-of-00003.gguf")
        paths[-1].write_bytes(container([*values, *more], [(f"t{number}", [3], 0, bytes(12))]))
    return paths


def test_a_model_of_several_parts_is_one_by_any_of_them(tmp_path: Path) -> None:
    paths = split(tmp_path)
    for path in paths:
        file = read_gguf(path)
        assert file.files == tuple(paths)
        assert {tensor.name: tensor.file for tensor in file.tensors.values()} == {
            f"t{n}": path for n, path in enumerate(paths)
        }


def test_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    paths = split(tmp_path)
    second = paths[1].read_bytes()
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"lacks m-00002-of-00003\.gguf, one of 3 parts"):
        read_gguf(paths[2])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"m-00002.*part 2 .*of 3; its name says 1 of 3"):
        read_gguf(paths[0])
    paths[1].write_bytes(second.replace(b"t1", b"t0"))
    with pytest.raises(CheckpointError, match=r"m-00002.*holds t0, and so does .*m-00001"):
        read_gguf(paths[0])
    paths[0].rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="one of 3 parts, which its name does not say"):
        read_gguf(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match=r"first one is missing: m-00001-of-00003\.gguf"):
        read_gguf(paths[1])


def whole_model() -> bytes:
    """Return a small file that is read to its end: header, sizes, names and vocabulary."""
    sizes = {"context_length": 64, "embedding_length": 8, "feed_forward_length": 8}
    sizes |= {"block_count": 1, "attention.head_count": 2}
    values = [plain("general.architecture", "llama")]
    values += [plain(f"llama.{key}", held) for key, held in sizes.items()]
    values.append(plain("llama.attention.layer_norm_rms_epsilon", 1e-5))
    values += [plain(key, held) for key, held in BYTES_VOCABULARY.items()]
    outer = [("token_embd.weight", [320, 8]), ("output_norm.weight", [8])]
    norms = [(f"blk.0.{name}.weight", [8]) for name in ("attn_norm", "ffn_norm")]
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    parts = [*outer, *norms, *((f"blk.0.{name}.weight", [8, 8]) for name in names)]
    tensors = [(n, s, 0, bytes(4 * s[0] * (s[1] if len(s) > 1 else 1))) for n, s in parts]
    return container(values, tensors)


GENEROUS_SECONDS = 5.0
"""One file takes milliseconds; this is what a busy machine may make of them."""


def mutate(whole: bytes, chance: random.Random) -> bytes:
    """Damage a file as disks, downloads and people do: numbers, lengths, runs, ends."""
    data = bytearray(whole)
    # Entries of values and tensors come first; most of the damage goes there.
    reach = len(data) if chance.random() < 0.2 else min(len(data), chance.choice((64, 600, 9000)))
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(reach)
        kind = chance.randrange(6)
        if kind == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[at] = chance.choice((0, 1, 8, 9, 127, 128, 255))
        elif kind == 2:
            number = chance.choice((0, 1, 1 << 20, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1))
            data[at : at + 8] = number.to_bytes(8, "little")
        elif kind == 3:
            del data[at : at + chance.choice((1, 4, 8, 100))]
        elif kind == 4:
            data[at:at] = data[at : at + chance.choice((1, 8, 40, 400))]
        else:
            del data[chance.randrange(len(data)) :]
        reach = min(reach, len(data))
        if not reach:
            break
    return bytes(data)


def fuzz(path: Path, rounds: range) -> None:
    """Open damaged files one after another; anything but a model or one line of error fails."""
    whole = whole_model()
    path.write_bytes(whole)
    GgufModel.open(path)
    for seed in rounds:
        path.write_bytes(mutate(whole, random.Random(seed)))
        began = time.process_time()
        said = ""
        try:
            GgufModel.open(path).unpack()
        except CheckpointError as error:
            said = str(error)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
        assert "\n" not in said, seed
        assert len(said) < 1000, seed
        assert time.process_time() - began < GENEROUS_SECONDS, seed


@pytest.mark.parametrize("first", [0, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_no_damage_takes_memory_or_ends_in_a_traceback(tmp_path: Path, first: int) -> None:
    """In a process that may take 64 MB more than it has once everything is imported."""
    count = 400 if first < 10_000 else 20_000
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from checkpoint import test_gguf_reader as own\n"
        f"path = Path({str(tmp_path / 'model.gguf')!r})\n"
        f"own.fuzz(path, range({first}, {first + 1}))\n"
        "pages = int(Path('/proc/self/statm').read_text().split()[0])\n"
        "limit = pages * resource.getpagesize() + (64 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        f"own.fuzz(path, range({first}, {first + count}))\n"
    )
    paths = [REPOSITORY / part for part in ("tests", "runtime", "export")]
    environment = {"PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
