"""A bundle is whole or not there: built the same twice, never half-made, refused with a reason."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

import specrt
from specrt.bundle import Bundle
from specrt.errors import BuildError, CheckpointError, ExportError, SpecrtError
from specrt.params import SamplingParams
from specrt.text.chat_template import read_template
from specrt_export.atomic_folder import atomic_folder
from specrt_export.check import model_parity
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.plan.build_plan import resolve
from specrt_export.portable.graph import GEOMETRY
from specrt_export.recipe.recipe import Recipe, read_recipe
from support.builds import build, is_fresh


def hashes(bundle: Path) -> dict[str, str]:
    return {name: f.sha256 for name, f in Bundle.open(bundle).manifest.files.items()}


def leftovers(out: Path) -> list[str]:
    """Whatever lies next to a bundle."""
    return sorted(p.name for p in out.parent.iterdir() if p != out) if out.parent.exists() else []


def complete(bundle: Path, gamma: int | None = None) -> list[int]:
    with specrt.load(bundle, threads=1) as generator:
        return generator.generate(
            "def f(x):\n", SamplingParams(max_tokens=8), gamma=gamma
        ).token_ids


def test_building_twice_gives_the_same_files(small: Path, built: Path) -> None:
    stages: list[tuple[str, float]] = []
    again = built.with_name("again")
    build(read_recipe(small), again, lambda stage, done: stages.append((stage, done)))
    first, second = Bundle.open(built).manifest, Bundle.open(again).manifest
    assert first == second
    assert (first.gammas, first.gamma, first.max_width) == ((0, 1, 3), 3, 64)
    assert stages[-1][0] == "write manifest"
    assert (shares := [done for _, done in stages]) == sorted(shares)
    assert leftovers(built) == ["again"]
    assert complete(again) == complete(again, gamma=0)


def test_a_recipe_passes_few_rooms(small: Path, out: Path) -> None:
    """It becomes a plan, which alone is read from then on."""
    passed: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and any(type(held) is Recipe for held in frame.f_locals.values()):
            passed.append(Path(frame.f_code.co_filename).parent.name)

    recipe = read_recipe(small)
    sys.setprofile(note)
    try:
        plan = resolve(recipe, out)
        assert not plan.is_fresh()
    finally:
        sys.setprofile(None)
    stays = [room for room, _ in groupby(passed)]
    assert passed[0] == "plan"
    assert (len(set(passed)) <= 8, len(stays) <= 20) == (True, True), stays
    assert Recipe not in map(type, vars(plan).values())


def test_a_bundle_is_stale_once_what_it_was_built_from_changes(small: Path, built: Path) -> None:
    recipe = read_recipe(small)
    assert is_fresh(recipe, built)
    assert not is_fresh(replace(recipe, engine=replace(recipe.engine, gamma=1)), built)

    weights = small.parent / "target" / "model.safetensors"
    graph, facts = small.parent / "draft.onnx", weights.stat()
    os.utime(weights, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert not is_fresh(recipe, built)
    os.utime(weights, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert is_fresh(recipe, built)
    graph.write_bytes(graph.read_bytes() + b"\x00")
    assert not is_fresh(recipe, built)


BARE = """
import sys, time
sys.modules.update(dict.fromkeys(("torch", "transformers", "onnx_ir", "onnxscript")))
"""
"""Without an exporter, as after `pip install specrt[build]`: the recipe names its graphs."""

SLOW_BUILD = f"""{BARE}
from pathlib import Path
from specrt_export.builder import build
from specrt_export.plan.build_plan import resolve
from specrt_export.recipe.recipe import read_recipe

def hook(stage, done):
    if stage == "write manifest":
        print("there", flush=True)
        time.sleep(60)

build(resolve(read_recipe(Path(sys.argv[1])), Path(sys.argv[2])), hook)
"""


def test_a_killed_build_leaves_the_bundle_and_the_next_sweeps_up(small: Path, built: Path) -> None:
    before = hashes(built)
    command = [sys.executable, "-c", SLOW_BUILD, str(small), str(built)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        process.send_signal(signal.SIGKILL)
    (left,) = leftovers(built)
    assert re.fullmatch(rf"\.small\.{process.pid}\..*\.part", left)
    assert hashes(built) == before
    with atomic_folder(built) as folder:
        shutil.copytree(built, folder, dirs_exist_ok=True)
    assert leftovers(built) == []
    assert hashes(built) == before


def test_a_signal_ends_a_build_as_ctrl_c_does(small: Path, out: Path) -> None:
    """Also two at once, which `timeout` sends."""
    number = signal.SIGTERM
    program = f"{BARE}\nfrom specrt.cli import main\nmain()"
    command = [sys.executable, "-c", program, "build", str(small), "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "compile" not in process.stderr.readline():
            pass
        assert len(leftovers(out)) == 1
        process.send_signal(number)
        process.send_signal(number)
        said = process.stderr.read()
    assert process.returncode == 128 + number
    assert said.splitlines()[-1] == "specrt: interrupted"
    assert "Traceback" not in said
    assert leftovers(out) == []
    assert not out.exists()


def dead_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def put(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(text, encoding="utf-8")


def put_whole(out: Path, text: str) -> None:
    with atomic_folder(out) as folder:
        put(folder, text)


def said_in(out: Path) -> str:
    return (out / "manifest.json").read_text(encoding="utf-8")


def test_a_build_killed_while_renaming_gives_its_bundle_back(out: Path) -> None:
    put(out.parent / f".small.{dead_process()}.a1b2c3d4.old", "the old one")
    with pytest.raises(KeyboardInterrupt), atomic_folder(out):
        raise KeyboardInterrupt
    assert (said_in(out), leftovers(out)) == ("the old one", [])


@pytest.mark.parametrize("exchange", [True, False], ids=["in one step", "by two renames"])
def test_a_bundle_changes_places_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr("specrt_export.atomic_folder._exchange", lambda *names: False)
    out = tmp_path / "m[1]"
    for text in ("first", "second"):
        put_whole(out, text)
        assert (said_in(out), leftovers(out)) == (text, [])
    with atomic_folder(out) as one, atomic_folder(out) as other:
        assert one != other
        put(one, "one")
        put(other, "other")
    assert said_in(out) == "one"
    if exchange:
        return
    rename, calls = Path.rename, []

    def second_fails(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(KeyboardInterrupt):
        put_whole(out, "third")
    assert (said_in(out), leftovers(out)) == ("one", [])


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file grow past a size; what writes more is refused as by a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_fills_loses_nothing(
    small: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, before = read_recipe(small), hashes(built)
    with monkeypatch.context() as tiny:
        free = SimpleNamespace(total=1 << 30, used=1 << 30, free=0)
        tiny.setattr(shutil, "disk_usage", lambda path: free)
        with pytest.raises(
            BuildError, match=r" 0\.0 MB free, and the build needs about \d\d+\.\d MB"
        ):
            build(recipe, built)
    told = r"engine\.data could not be written, with \d+\.\d+ [MG]B free on its disk"
    with largest_file(1 << 20), pytest.raises(BuildError, match=told):
        build(recipe, built)
    assert (hashes(built), leftovers(built)) == (before, [])


def test_only_a_bundle_or_an_empty_folder_is_replaced(small: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years", encoding="utf-8")
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "link").symlink_to(home)
    for out in (home, tmp_path / "file", tmp_path / "link"):
        with pytest.raises(BuildError, match=r"exists and is not a bundle; .*--out"):
            build(read_recipe(small), out)
    with pytest.raises(BuildError, match=r"cannot be made a folder .*elsewhere with --out"):
        build(read_recipe(small), tmp_path / "file" / "bundle")
    nameless = tmp_path / os.fsdecode(b"\xff")
    with pytest.raises(BuildError, match=r"udcff' is not UTF-8, .*elsewhere with --out"):
        build(read_recipe(small), nameless)
    assert not nameless.exists()
    assert (home / "thesis.txt").read_text(encoding="utf-8") == "years"
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("name", ["recipe.toml", "target.onnx"])
def test_what_a_build_reads_is_never_replaced(small: Path, out: Path, name: str) -> None:
    out = small.parent if name == small.name else out
    out.mkdir(parents=True, exist_ok=True)
    (out / "manifest.json").write_text("{}", encoding="utf-8")
    if name != small.name:
        lines = small.read_text(encoding="utf-8").replace(f'"{name}"', f'"{out / name}"')
        small.write_text(lines, encoding="utf-8")
        shutil.move(small.parent / name, out / name)
    with pytest.raises(BuildError, match=f"holds .*{name}, which the build reads"):
        build(read_recipe(small), out)
    assert (out / name).is_file()


def other_vocabulary(home: Path) -> None:
    path = home / "draft" / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = data["model"]["vocab"]
    a, b = (next(t for t, i in vocabulary.items() if i == at) for at in (300, 301))
    vocabulary[a], vocabulary[b] = 301, 300
    path.write_text(json.dumps(data), encoding="utf-8")


def moved_weights(home: Path) -> None:
    """A checkpoint that was saved again, with other offsets."""
    weights = home / "target" / "model.safetensors"
    data = weights.read_bytes()
    size = int.from_bytes(data[:8], "little")
    longer = data[8 : 8 + size] + b" " * 64
    weights.write_bytes(len(longer).to_bytes(8, "little") + longer + data[8 + size :])


def fast_rotation(home: Path) -> None:
    """A graph of another model: keys turn a little too fast."""
    graph = onnx.load(home / "draft.onnx", load_external_data=False)
    for tensor in graph.graph.initializer:
        if tensor.name.endswith("inv_freq"):
            turned = onnx.numpy_helper.to_array(tensor) * np.float32(1.02)
            tensor.CopyFrom(onnx.numpy_helper.from_array(turned, tensor.name))
    onnx.save(graph, home / "draft.onnx")


def short_draft(home: Path) -> None:
    """A draft that was trained for fewer positions."""
    graph = onnx.load(home / "draft.onnx", load_external_data=False)
    entry = next(entry for entry in graph.metadata_props if entry.key == GEOMETRY)
    entry.value = json.dumps({**json.loads(entry.value), "max_positions": 100})
    (home / "draft.onnx").write_bytes(graph.SerializeToString())


REFUSED: list[tuple[Callable[[Path], object], type[SpecrtError], str]] = [
    (lambda home: (home / "draft" / "config.json").unlink(), CheckpointError,
     "draft has no config.json"),
    (other_vocabulary, CheckpointError, r"differ at token id 300: '.*' in .*target, '.*' in .*dra"),
    (moved_weights, CheckpointError, r"exported from another checkpoint .*specrt export"),
    (lambda home: (home / "draft.onnx").unlink(), BuildError,
     r"draft\.onnx does not exist; make it with `specrt export .*remove `draft\.graph`"),
    (lambda home: (home / "draft.onnx").write_bytes(b"not a graph at all"), ExportError,
     r"draft\.onnx is not an ONNX graph"),
    (short_draft, BuildError, "max_length 128 is more than the 100 positions .*draft was trained"),
]  # fmt: skip


def test_what_a_machine_lacks_is_said(
    small: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = Mock(side_effect=OSError(errno.EMFILE, "too many open files"))
    monkeypatch.setattr("specrt_export.builder.hash_file", lacking)
    with pytest.raises(BuildError, match=r"as it was; .* `ulimit -[nv]"):
        build(read_recipe(small), out)
    assert leftovers(out) == []
    monkeypatch.setattr("onnx.load", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):  # the command line says what is missing
        build(read_recipe(small), out)


@pytest.mark.parametrize(("spoil", "kind", "words"), REFUSED)
def test_a_pair_that_does_not_fit_is_refused_before_any_work(
    small: Path, out: Path, spoil: Callable[[Path], object], kind: type[SpecrtError], words: str
) -> None:
    spoil(small.parent)
    stages: list[str] = []
    with pytest.raises(kind, match=words) as refused:
        build(read_recipe(small), out, lambda stage, done: stages.append(stage))
    assert "\n" not in str(refused.value)
    assert stages == []
    assert not out.exists()
    assert leftovers(out) == []


def test_weights_that_are_not_numbers_are_named_before_any_work(small: Path, out: Path) -> None:
    """In the draft, too, and wherever they are; in bf16 these are its NaN and minus infinity."""
    file = small.parent / "draft" / "model.safetensors"
    held = Checkpoint.open(file.parent).weights["model.norm.weight"]
    stages: list[str] = []
    for place, bits in ((0, 0x7FC0), (held.bytes - 2, 0xFF80)):
        data = bytearray(file.read_bytes())
        at = held.offset + place
        data[at : at + 2] = bits.to_bytes(2, "little")
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds NaN or infinity; ex"):
            build(read_recipe(small), out, lambda stage, done: stages.append(stage))
    assert stages == ["read weights"] * 2
    assert not out.exists()


def test_a_graph_that_computes_something_else_than_transformers_is_refused(
    small: Path, out: Path
) -> None:
    """Its engine would agree with it, and fp32 has no quality gate."""
    fast_rotation(small.parent)
    with pytest.raises(ExportError, match=r"draft\.onnx disagrees with the model"):
        build(read_recipe(small), out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("available_bytes", lambda: 10**6, r"target is not compared .* GB are free"),
        ("find_spec", lambda name: None, None),
    ],
)
def test_a_build_without_transformers_or_room_for_it_says_so(
    draftless: Recipe, out: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any,
    words: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(model_parity, name, value)
    stages: list[str] = []
    build(draftless, out, lambda stage, done: stages.append(stage))
    warnings = [stage for stage in stages if stage.startswith("warning")]
    assert len(warnings) == (words is not None)
    assert all(re.search(words or "", warning) for warning in warnings)
    assert not any("compare target" in stage for stage in stages)


def test_a_target_alone_decodes_plainly(draftless: Recipe, out: Path) -> None:
    """And its texts end as config.json says, where there is no generation config."""
    home = draftless.folder / "target"
    (home / "generation_config.json").unlink()
    named = {"cls_token": "<|endoftext|>", "eos_token": "class"}
    (home / "special_tokens_map.json").write_text(json.dumps(named))
    (home / "chat_template.jinja").write_text("{{ cls_token }}")
    (home / "additional_chat_templates").mkdir()
    (home / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].type }}")
    stages: list[str] = []
    build(draftless, out, lambda stage, done: stages.append(stage))
    (warning,) = (stage for stage in stages if stage.startswith("warning"))
    assert "'class'" in warning
    assert "eos_token_id" in warning
    manifest = Bundle.open(out).manifest
    assert (manifest.gammas, manifest.gamma, manifest.draft) == ((0, 1, 3), 0, None)
    assert (manifest.eos_token_ids, manifest.bos_token_id) == ((0,), 0)
    assert not (out / "draft").exists()
    assert complete(out) == complete(out, gamma=0)
    # Chat templates for purposes, and tokens that only a map names, come along.
    template = read_template(out)
    assert template.render([]) == "<|endoftext|>"
    assert template.render([], tools=[{"type": "function"}]) == "function"
    (home / "additional_chat_templates" / "tool_use.jinja").write_text("changed")
    assert not is_fresh(draftless, out)
    # The model's own count is held to the tokenizer's, where the recipe names no draft.
    path = draftless.folder / "target" / "tokenizer.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["added_tokens"].append({**data["added_tokens"][0], "id": 8192, "content": "<|one|>"})
    path.write_text(json.dumps(data), encoding="utf-8")
    stages.clear()
    with pytest.raises(
        CheckpointError, match=r"token id 8192 .*, but the model has vocab_size 8192"
    ):
        build(draftless, out, lambda stage, done: stages.append(stage))
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"target/tokenizer\.json is not a tokenizer"):
        build(draftless, out, lambda stage, done: stages.append(stage))
    assert (stages, leftovers(out)) == ([], [])
