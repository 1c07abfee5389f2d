"""The native runtime reads and refuses what the Python runtime does, and runs the same passes."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpp.conftest import BuildLibrary, onnxruntime_library, run_check
from specrt.bundle import Bundle
from specrt.engine.backends import open_engine
from specrt.engine.protocol import Feed, PackedEngine
from specrt.errors import BundleError

Check = Callable[[str, dict[str, Any]], None]


@pytest.fixture
def native_check(built_library: BuildLibrary, tmp_path: Path) -> Check:
    """Runs a check of the native runtime, with sanitizers, over vectors."""

    def check(name: str, vectors: dict[str, Any]) -> None:
        path = tmp_path / "vectors.json"
        path.write_text(json.dumps(vectors), encoding="utf-8")
        run_check(built_library("native", sanitize=True), name, path)

    return check


READ = [
    b"null", b" true ", b"-0", b"12", b"9223372036854775807", b"-9223372036854775808", b'""',
    b'"\\u00e9\\ud83d\\ude00\\n\\/"', '"é😀"'.encode(), b"[]", b"[1, [2, {}]]", b"\t{\n}\r",
    b'{"b": 1, "a": [false]}', b"[" * 64 + b"]" * 64,
]  # fmt: skip
REFUSED = [
    b"", b" ", b"nul", b"nulll", b"01", b"-", b"+1", b"1.", b".5", b"1e", b"1e+", b"0x1", b"1 2",
    b"[1,]", b"[,1]", b"[1", b"{", b'{"a"}', b'{"a":}', b'{"a":1,}', b"{a:1}", b"{1:1}", b'"',
    b'"\n"', b'"\\x"', b'"\\u12"', b'"\\u12g4"', b'"\\', b"'a'", b'"\xff"', b'"\xc0\x80"',
    b'"\xed\xa0\x80"', b"\xef\xbb\xbf1", b"[1]]", b"//", b"\x00",
]  # fmt: skip
STRICTER = [
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b'{"a":1,"a":1}', b'"\\ud800"', b'"\\udc00"',
    b'"\\ud800\\u0041"', b"[" * 65 + b"]" * 65,
]  # fmt: skip


def test_json_is_read_as_python_reads_it(native_check: Check) -> None:
    texts = []
    for text in READ:
        value = json.loads(text)
        shown = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        texts.append({"hex": text.hex(), "reads": shown.replace("\\n", "\\u000a")})
    for text in REFUSED:
        with pytest.raises(ValueError, match=r".+"):
            json.loads(text.decode("utf-8"))
        texts.append({"hex": text.hex(), "reads": "refused"})
    texts += [{"hex": text.hex(), "reads": "refused"} for text in STRICTER]
    texts += [
        {"hex": b"2.5".hex(), "reads": "250/100"},
        {"hex": b"-1E+2".hex(), "reads": "-10000/100"},
        {"hex": b"9223372036854775808e-18".hex(), "reads": "922/100"},
        {"hex": b"1e-999".hex(), "reads": "0/100"},
    ]
    native_check("json", {"texts": texts})


def test_files_are_hashed_as_hashlib_does(native_check: Check, tmp_path: Path) -> None:
    files = []
    for size in (*range(130), 1 << 18, (1 << 18) + 1, 700_001):
        data = np.random.default_rng(size).bytes(size)
        path = tmp_path / str(size)
        path.write_bytes(data)
        files.append({"path": str(path), "sha256": hashlib.sha256(data).hexdigest()})
    native_check("sha256", {"files": files})


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    *outer, last, value = path

    def change(manifest: dict[str, Any]) -> None:
        holder: Any = manifest
        for key in outer:
            holder = holder[key]
        holder[last] = value

    return change


def _without(*path: Any) -> Callable[[dict[str, Any]], None]:
    *outer, last = path

    def change(manifest: dict[str, Any]) -> None:
        holder: Any = manifest
        for key in outer:
            holder = holder[key]
        del holder[last]

    return change


SHAPE = ("target", "geometry")
DAMAGE: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (_set("format", 2), "has bundle format 2, and this specrt reads up to 1"),
    (_set("format", True), "format is true; expected a whole number from 1 to 1"),
    (_set("batch", 0), "batch is 0; expected a whole number from 1 to 1000000000"),
    (_set("batch", 1.0), "batch is 1"),
    (_set("name", "a\0b"), "name is"),
    (_set("name", "x" * 256), "name is"),
    (_set("gammas", [2, 4]), "gammas is (2, 4); expected 0 among them"),
    (_set("gammas", [0, 2**63 - 1]), "asks for passes of"),
    (_set("gamma", 77), "gamma is 77; expected one of"),
    (_set("prefill", 4096), "asks for passes of 4096; expected up to 2048"),
    (_set("eos_token_ids", [8192]), "eos_token_ids is (8192); expected ids below 8192"),
    (_set("bos_token_id", 8192), "bos_token_id is 8192; expected an id below 8192"),
    (_set(*SHAPE, "windows", [0]), "target.geometry.windows has 1 entries"),
    (_set(*SHAPE, "kv_heads", 4), "target.geometry.kv_heads is 4; expected a divisor"),
    (_set(*SHAPE, "layers", 10**9), "target.geometry.layers is 1000000000"),
    (_set("draft", "shape", 1), "draft has an unknown key"),
    (_set("draft", "engine", "other"), 'files lacks "other"; expected it'),
    (_without("files", "tokenizer.json"), 'files lacks "tokenizer.json"'),
    (_set("files", "/etc/passwd", {"bytes": 1, "sha256": ""}), "a place inside the bundle"),
    (_set("files", "a/../../b", {"bytes": 1, "sha256": ""}), "a place inside the bundle"),
    (_set("files", "gone", {"bytes": 1, "sha256": ""}), "gone is missing; build the bundle again"),
    (_set("files", "tokenizer.json", "bytes", 5), "bytes, expected 5; build the bundle again"),
    (_set("files", "tokenizer.json", "sha256", "0" * 64), "is not the file that was built (sha256"),
    (_set("files", []), "files is []; expected an object"),
    (_set("device", {}), "was built for None, and this machine is " + platform.machine()),
    (_set("versions", {"onnxruntime": "newest"}), 'names "newest" as its version of onnxruntime'),
    (_set("versions", {"onnxruntime": "1.999"}), "was built with onnxruntime 1.999"),
    *[(_without(key), f"{key} is missing") for key in ("name", "target", "files", "source")],
]  # fmt: skip


def test_a_damaged_bundle_is_refused_as_in_python(
    native_check: Check, codelet: Path, tmp_path: Path
) -> None:
    bundles = []
    manifest = (codelet / "manifest.json").read_text(encoding="utf-8")
    for number, (change, said) in enumerate(DAMAGE):
        folder = tmp_path / str(number)
        shutil.copytree(codelet, folder, copy_function=lambda a, b: Path(b).symlink_to(a))
        data = json.loads(manifest)
        change(data)
        (folder / "manifest.json").unlink()
        (folder / "manifest.json").write_text(json.dumps(data))
        with pytest.raises(BundleError):
            Bundle.open(folder)
        bundles.append({"name": said, "path": str(folder), "says": said, "threads": 1})
    nowhere = {"name": "nowhere", "path": str(tmp_path / "no"), "says": "does not exist; build one"}
    empty = {"name": "empty", "path": str(tmp_path), "says": "it has no manifest.json; build one"}
    sound = {"name": "sound", "path": str(codelet), "says": "ed"}  # opened, or tuned
    bundles += [{**one, "threads": 1} for one in (nowhere, empty, sound)]
    native_check("bundle", {"library": str(onnxruntime_library()), "bundles": bundles})


def passes(bundle: Bundle, role: str) -> list[dict[str, Any]]:
    """Run widths up to nine, going back, and wide ones; return what each left behind."""
    manifest = bundle.manifest
    model = getattr(manifest, role)
    spare = role == "target" and model.quantized
    engine = open_engine(
        manifest.backend_of(model), bundle.file(model.engine), model.geometry,
        batch=manifest.batch, max_length=manifest.max_length, max_width=manifest.max_width,
        threads=1, pad_single_token=spare, pad_to_even=spare, upcast_weights=model.half_stored,
    )  # fmt: skip
    rng, left = np.random.default_rng(6), []
    widest = min(engine.max_width, 33)
    plan = [(widest, 0, 1)]
    plan += [(w, widest + w, r) for w in range(1, min(9, widest) + 1) for r in (w, 1)]
    plan += [(min(5, widest), 9, 3), (1, 4, 1), (widest, 2, 2)]
    for width, start, rows in plan:
        tokens = rng.integers(0, model.geometry.vocab_size, width).tolist()
        if isinstance(engine, PackedEngine):
            output = engine.forward_rows([Feed(0, tokens, start, rows)])[0]
        else:
            output = engine.forward([tokens], start, rows)
        sure = output.confidence
        left.append({
            "tokens": tokens, "start": start, "rows": rows,
            "argmax": " ".join(map(str, output.argmax.ravel().tolist())),
            "logits": hashlib.sha256(output.logits.tobytes()).hexdigest(),
            "confidence": "" if sure is None else hashlib.sha256(sure.tobytes()).hexdigest(),
        })  # fmt: skip
    engine.close()
    return left


@pytest.mark.parametrize("owns_process", [False, True])
def test_passes_leave_the_same_bits_as_in_python(
    native_check: Check, codelet: Path, owns_process: bool
) -> None:
    bundle = Bundle.open(codelet)
    vectors = {
        "bundle": str(codelet), "library": str(onnxruntime_library()), "threads": 1,
        "owns_process": owns_process, "target": passes(bundle, "target"),
        "draft": passes(bundle, "draft"),
    }  # fmt: skip
    native_check("engine", vectors)
