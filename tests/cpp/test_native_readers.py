"""Files of a bundle that may hold anything: what Python refuses the native runtime refuses."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpp.conftest import BuildLibrary, run_check
from specrt.bundle import Bundle, read_manifest
from specrt.errors import BundleError
from specrt.tuning.tuning_record import read_tuning

HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 7, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**64, 1e308, -0.5,
    0.0, 1.0, "", "a", "a\0b", "x" * 256, "é\u202e", "../x", "/", [], {}, [[]], [0], [0, 0, 3],
    {"a": 1},
)  # fmt: skip
TUNING = {
    "format": 2, "date": "2026-01-01",
    "machine": {"cpu": "c", "vector_units": "", "cores": 2, "accelerator": "", "library": "l"},
    "threads": 1, "pools": 1, "verify_ns": list(range(1000, 1009)),
    "draft_ns": [0, *range(100, 108)], "outside_ns": 10, "fixed_gamma": None, "drafter": "model",
    "settings": [{"drafter": "ngram", "fixed_gamma": 2, "emitted": 9, "decode_ns": 7, "rounds": 5,
                  "drafted": 4, "evaluated": 3, "accepted": 2}],
    "pad_to_even": False,
}  # fmt: skip
TOKENIZER = {
    "version": "1.0", "normalizer": None, "pre_tokenizer": {"type": "ByteLevel"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A"}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
    },
    "decoder": {"type": "ByteLevel"},
    "added_tokens": [{"id": 256, "content": "<s>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 0, "Ġb": 1, "é": 299}, "merges": [["a", "b"]]},
}  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in a document: what holds it, and under which key."""
    keys: list[Any] = []
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [
        place for _, key in ((value, k) for k in keys) for place in places(value[key])
    ]


def mutated(chance: random.Random, document: Any) -> Any:
    """Return a document with a few places changed, left out, or moved."""
    made = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        holder, key = chance.choice(places(made))
        kind = chance.random()
        if kind < 0.6:
            holder[key] = copy.deepcopy(chance.choice(HOSTILE))
        elif kind < 0.75:
            other, there = chance.choice(places(document))
            holder[key] = copy.deepcopy(other[there])
        elif kind < 0.9:
            del holder[key]
        elif isinstance(holder, dict):
            holder[chance.choice(("extra", "a\0", "", "files"))] = 1
        else:
            holder.append(chance.choice(HOSTILE))
        if not places(made):
            break
    return made


def damaged(chance: random.Random, data: bytes) -> bytes:
    """Return bytes with a few of them changed, left out, or there twice."""
    made = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        at, size = chance.randrange(len(made)), chance.randrange(1, 40)
        kind = chance.randrange(4)
        if kind == 0:
            made[at] = chance.randrange(256)
        elif kind == 1:
            del made[at : at + size]
        elif kind == 2:
            made[at:at] = made[at : at + size]
        else:
            made[at:at] = (
                chance.choice((b"[", b"{", b'"', b"\\u", b"9" * 30, b"e9", b"\xff")) * size
            )
        made = made or bytearray(b" ")
    return bytes(made)


@pytest.fixture
def folder(codelet: Path, tmp_path: Path) -> Path:
    """A bundle whose small files may be written to."""
    folder = tmp_path / "bundle"
    shutil.copytree(codelet, folder, copy_function=lambda a, b: Path(b).symlink_to(a))
    for name in ("manifest.json", "tokenizer.json"):
        (folder / name).unlink()
        shutil.copyfile(codelet / name, folder / name)
    return folder


def test_what_may_be_anything_is_read_or_refused(
    built_library: BuildLibrary, folder: Path, tmp_path: Path
) -> None:
    chance = random.Random(11)
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    bundle = Bundle.open(folder)

    def manifest_refused() -> bool:
        try:
            read_manifest(folder)
        except BundleError:
            return True
        return False

    def tuning_refused() -> bool:
        return "it is damaged" in (read_tuning(bundle, 1)[1] or "")

    files: list[tuple[str, Any, Callable[[], bool] | None]] = [
        ("manifest.json", manifest, manifest_refused),
        ("tuning.json", {**TUNING, "source": manifest["source"]}, tuning_refused),
        ("tokenizer.json", TOKENIZER, None),
    ]
    cases = []
    for name, document, refused in files:
        path = folder / name
        kept = path.read_bytes() if path.exists() else None
        for number in range(1000):
            made = document if number == 0 else mutated(chance, document)
            data = json.dumps(made).encode()
            path.write_bytes(data)
            expected = None if refused is None else refused()
            assert number or not expected, "the document itself is sound"
            cases.append({"file": name, "hex": data.hex(), "refused": expected})
        for _ in range(300):
            data = damaged(chance, json.dumps(document).encode())
            cases.append({"file": name, "hex": data.hex(), "refused": None})
        if kept is None:
            path.unlink()
        else:
            path.write_bytes(kept)
    path = tmp_path / "readers.json"
    path.write_text(json.dumps({"folder": str(folder), "cases": cases}))
    run_check(built_library("native", sanitize=True), "readers", path)
