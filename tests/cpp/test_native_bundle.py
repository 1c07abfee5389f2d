"""Files of a bundle, sound, damaged or hostile: the native library reads and refuses as Python."""

from __future__ import annotations

import copy
import hashlib
import json
import platform
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from cpp.conftest import Library, NativeCalls, compiler, onnxruntime_library, run_program
from cpp.native_calls import Document
from specrt.bundle import (
    FORMAT,
    HEADS,
    Bundle,
    Geometry,
    Manifest,
    ModelRecord,
    Provenance,
    hash_file,
    read_manifest,
)
from specrt.engine.backends import backend_named, check_versions
from specrt.errors import BundleError
from specrt.system.machine import this_machine
from specrt.tuning.tuning_record import TunedSetting, Tuning, read_tuning

READ = [
    b"null", b" true ", b"-0", b"12", b"9223372036854775807", b"-9223372036854775808", b'""',
    b'"\\u00e9\\ud83d\\ude00\\n\\/"', '"é😀"'.encode(), b"[]", b"[1, [2, {}]]", b"\t{\n}\r",
    b'{"b": 1, "a": [false]}', b"[" * 64 + b"]" * 64, b"2.5", b"-1E+2", b"1e-999",
    b"9223372036854775808e-18",
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


OUT = Ellipsis
"""Instead of a value: leave the place out."""
OF_ONE_SHAPE = {
    "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab_size": 8192,
    "max_positions": 4096, "windows": [0, 0],
}  # fmt: skip
"""A geometry as bundles of formats 1 to 3 have it."""
KINDS = ", ".join(map(json.dumps, ("", *HEADS)))
DAMAGE: list[tuple[str, Any, str]] = [
    ("format", 5, "has bundle format 5, and this specrt reads up to 4"),
    ("batch", 65, "batch is 65; expected 1 to 64"),
    ("gammas", [2, 4], "gammas is (2, 4); expected 0 among them"),
    ("gammas", [0, 2**63 - 1], "asks for passes of"),
    ("prefill", 4096, "asks for passes of 4096; expected up to 2048"),
    ("eos_token_ids", [8192], "eos_token_ids is (8192); expected ids below 8192"),
    ("target/geometry", {**OF_ONE_SHAPE, "windows": [0]}, "target.geometry.windows has 1 entries"),
    ("target/geometry/heads", 3, "memories[0].kv_heads is 2; expected a divisor"),
    ("target/geometry/memories", [], "target.geometry.memories is empty"),
    ("target/geometry/memories", [{"kind": "shared"}], "owner is 0; expected an earlier layer"),
    ("target/geometry/memories", [{"kind": "conv", "key_width": 4}], "window is 0"),
    ("target/geometry/memories", [{"kind": "attention", "kv_heads": 2}], "has no width"),
    ("target/geometry/memories", [{"kind": "recurrent", "kv_heads": 3, "key_heads": 2}],
     "key_heads is 2; expected a divisor of kv_heads, 3"),
    ("draft/geometry/memories",
     [{"kind": "lent", "kv_heads": 1, "key_width": 8, "value_width": 8, "owner": 1}],
     "a layer reads what no layer of the target keeps; expected one of the same sizes there"),
    ("draft/engine", "other", 'files lacks "other"; expected it'),
    ("draft/kind", "medusa", f'kind is ("", "medusa"); expected one of ({KINDS})'),
    ("target/kind", "eagle3", "the target is a head or has a vocab_map; expected a language model"),
    ("target/vocab_map", "tokenizer.json", "the target is a head or has a vocab_map"),
    ("draft/kind", "eagle3", "the head reads features of width 0, and the target leaves 0"),
    ("draft/vocab_map", "other", 'files lacks "other"; expected it'),
    ("draft/accepted", [0.5, 2], "accepted has a number that is not a share; expected 0 to 1"),
    ("files/tokenizer.json", OUT, 'files lacks "tokenizer.json"'),
    ("files/|etc|passwd", {"bytes": 1, "sha256": ""}, "a place inside the bundle"),
    ("files/a|..|..|b", {"bytes": 1, "sha256": ""}, "a place inside the bundle"),
    ("files/gone", {"bytes": 1, "sha256": ""}, "gone is missing; build the bundle again"),
    ("files/tokenizer.json/bytes", 5, "bytes, expected 5; build the bundle again"),
    ("files/tokenizer.json/sha256", "0" * 64, "is not the file that was built (sha256"),
    ("device", {}, "was built for None, and this machine is " + platform.machine()),
    ("versions", {"onnxruntime": "newest"}, 'names "newest" as its version of onnxruntime'),
    ("versions", {"onnxruntime": "1.999"}, "was built with onnxruntime 1.999"),
]  # fmt: skip


def _damage(document: Document, place: str, value: Any) -> None:
    """Put a value where a path leads, whose keys have bars for slashes."""
    *outer, last = (key.replace("|", "/") for key in place.split("/"))
    for key in outer:
        document = document[key]
    if value is OUT:
        del document[last]
    else:
        document[last] = value


@pytest.fixture
def folder(codelet: Path, tmp_path: Path) -> Path:
    """A bundle whose small files may be written to."""
    folder = tmp_path / "bundle"
    shutil.copytree(codelet, folder, copy_function=lambda a, b: Path(b).symlink_to(a))
    for name in ("manifest.json", "tokenizer.json"):
        (folder / name).unlink()
        shutil.copyfile(codelet / name, folder / name)
    return folder


def test_a_damaged_bundle_is_refused_as_in_python(
    native_calls: NativeCalls, codelet: Path, folder: Path, tmp_path: Path
) -> None:
    bundles = [
        (tmp_path / "no", "does not exist; build one"),
        (tmp_path, "it has no manifest.json; build one"),
    ]
    for number, (place, value, says) in enumerate(DAMAGE):
        data = json.loads((codelet / "manifest.json").read_text("utf-8"))
        _damage(data, place, value)
        path = tmp_path / str(number)
        shutil.copytree(folder, path, symlinks=True)
        (path / "manifest.json").write_text(json.dumps(data))
        with pytest.raises(BundleError):
            check_versions(path, Bundle.open(path).manifest)
        bundles.append((path, says))
    call = {"call": "opened", "library": str(onnxruntime_library())}
    cases = [({**call, "path": str(p)}, {"status": 4, "message": says}) for p, says in bundles]
    native_calls.check(cases)
    *refusals, sound = native_calls([*(one for one, _ in cases), {**call, "path": str(codelet)}])
    assert isinstance(sound, list)
    for (path, _), refusal in zip(bundles, refusals, strict=True):
        assert "\n" not in refusal["message"]
        assert len(refusal["message"]) < len(str(path)) * 2 + 500


ENCODER: Document = {
    "cross": "target/cross.onnx", "max_source": 8, "width": 8, "heads": 2, "head_dim": 4,
    "encoder": "target/encoder.onnx",
}  # fmt: skip
HEAD: Document = {"kind": "eagle3", "features": 8}
TRIMMED: Document = {"kind": "", "vocab_map": "tokenizer.json"}


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"versions/kernels": OUT}, 4, "build the bundle again"),
        ({"versions/kernels": "another"}, 4, "another"),
        ({"task": "text2text-generation"}, 0, ""),
        *(({"task": "text2text-generation", "decoder_start": [0], f"{role}/encoder": ENCODER}, 7,
           "is an encoder-decoder") for role in ("target", "draft")),
        *(({"target/features": 8, "draft": {**draft, "backend": backend}},
           0 if backend == "ort-cpu" else 7, f"has {said}, which the native")
          for said, draft in (("a head", HEAD), ("a draft that scores some entries only", TRIMMED))
          for backend in ("tensorrt", "tensorrt-rtx", "ort-cpu")),
        ({"target/features": 8, "draft": {**HEAD, "kind": "dflash"}}, 4,
         "drafts blocks (dflash), which the native library does not run"),
    ],
    ids=str,
)  # fmt: skip
def test_what_native_does_not_run_is_refused_by_name(
    native_calls: NativeCalls, folder: Path, changes: Document, status: int, says: str
) -> None:
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    manifest["format"] = FORMAT
    for place, value in changes.items():
        merged = {**manifest["draft"], **value} if place == "draft" else value
        _damage(manifest, place, merged)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    if "draft" in changes:
        assert read_manifest(folder).draft is not None  # Python reads it
    call = {"call": "opened", "library": str(onnxruntime_library()), "path": str(folder)}
    (answer,) = native_calls([call])
    assert isinstance(answer, list) == (status == 0)
    if status:
        assert (answer["status"], says in answer["message"]) == (status, True), answer


def listed(folder: Path, change: Callable[[Document], None]) -> None:
    """Change what the manifest lists of a bundle."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    change(manifest["files"])
    path.write_text(json.dumps(manifest))


def elsewhere(folder: Path, location: str) -> None:
    """Let the target's graph take its weights from another file; list the graph as it is then."""
    path = folder / "target" / "engine.onnx"
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    path.unlink()
    onnx.save(model, path)
    record = asdict(hash_file(path))
    listed(folder, lambda files: files.update({"target/engine.onnx": record}))


def test_files_that_are_read_and_not_listed_are_refused(
    native: Library, folder: Path, tmp_path: Path
) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai")
    library = Path(genai.__file__).parent / "libonnxruntime-genai.so"
    outside = tmp_path / "outside.data"
    outside.symlink_to(folder / "target" / "engine.data")
    for name, change in (
        ("target/engine.data", None),
        ("draft/engine.data", None),
        ("tokenizer_config.json", None),
        ("target/../../outside.data", lambda at: elsewhere(at, "../../outside.data")),
        (f"target/{outside}", lambda at: elsewhere(at, str(outside))),
    ):
        bundle = tmp_path / hashlib.sha256(name.encode()).hexdigest()[:8]
        shutil.copytree(folder, bundle, symlinks=True)
        if change is None:
            listed(bundle, lambda files, name=name: files.pop(name))
        else:
            change(bundle)
        (line,) = native.run("opening", bundle=bundle, tokenizer=library)
        says = f"{bundle}/{name} is not listed in manifest.json; build the bundle again"
        assert line == f"SPECRT_BUNDLE|{says}"
    assert native.run("opening", bundle=folder, tokenizer=library) == ["SPECRT_OK|"]


def test_every_place_of_external_data_in_a_graph_is_found(native_calls: NativeCalls) -> None:
    def tensor(location: str) -> onnx.TensorProto:
        made = helper.make_tensor("t", onnx.TensorProto.FLOAT, [2], [1.0, 2.0])
        made.ClearField("float_data")
        made.data_location = onnx.TensorProto.EXTERNAL
        made.external_data.add(key="offset", value="0")
        made.external_data.add(key="location", value=location)
        return made

    constant = helper.make_node("Constant", [], ["c"], value=tensor("in a branch"))
    branch = helper.make_graph([constant], "b", [], [])
    branching = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    graph = helper.make_graph(
        [branching, helper.make_node("Constant", [], ["d"], value=tensor("in a node"))],
        "g", [], [], [tensor("of a graph"), helper.make_tensor("own", 1, [1], [0.5])],
    )  # fmt: skip
    inner = helper.make_node("Constant", [], ["e"], value=tensor("in a function"))
    function = helper.make_function("d", "f", [], ["e"], [inner], [helper.make_opsetid("", 20)])
    data = helper.make_model(graph, functions=[function]).SerializeToString()
    expected = sorted(["in a branch", "in a node", "of a graph", "in a function"])
    chance = random.Random(2)
    native_calls.check([({"call": "external", "hex": data.hex()}, expected)])
    spoilt = [damaged(chance, data) for _ in range(300)] + [data[:size] for size in range(1, 99)]
    assert "refused" in native_calls({"call": "external", "hex": one.hex()} for one in spoilt)


CHANGES = """
#include <cstdio>
#define ENTRY(name) extern "C" __attribute__((visibility("default"))) void* name()
ENTRY(OgaCreateTokenizerFromPath) { std::rename(OTHER, FILE_OF_THE_BUNDLE); return nullptr; }
#define NOT_CALLED(name) ENTRY(name) { return nullptr; }
NOT_CALLED(OgaDestroyTokenizer) NOT_CALLED(OgaTokenizerEncode) NOT_CALLED(OgaTokenizerDecode)
NOT_CALLED(OgaCreateSequences) NOT_CALLED(OgaDestroySequences) NOT_CALLED(OgaDestroyString)
NOT_CALLED(OgaSequencesGetSequenceCount) NOT_CALLED(OgaSequencesGetSequenceData)
NOT_CALLED(OgaResultGetError) NOT_CALLED(OgaDestroyResult)
"""
"""A tokenizer library that puts another file into the bundle while that is opened."""


@pytest.mark.parametrize("name", ["tokenizer.json", "target/engine.data"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    native: Library, folder: Path, tmp_path: Path, name: str
) -> None:
    other, source, library = tmp_path / "other", tmp_path / "changes.cpp", tmp_path / "changes.so"
    other.write_bytes(b"{}")
    source.write_text(CHANGES)
    defined = [f'-DOTHER="{other}"', f'-DFILE_OF_THE_BUNDLE="{folder / name}"']
    run_program([*compiler(), "-shared", "-fPIC", "-w", *defined, source, "-o", library])
    (line,) = native.run("opening", bundle=folder, tokenizer=library)
    assert line.startswith(f"SPECRT_BUNDLE|{folder / name} was changed while")


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
    "cuda_graphs": {"captured": 2, "refusals": ["why"]},
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


def full(manifest: Document) -> tuple[Document, Document]:
    """Return a manifest and a tuning that have every field, and no default where there is one."""
    made = copy.deepcopy(manifest)
    made |= {"gamma": 2, "bos_token_id": 5, "device": {**made["device"], "gpu": "g"}}
    more = {"precision": "int8", "embedding": "fp16", "head": "bf16", "block": 32, "per_row": True,
            "symmetric": False, "quality": {"kl": 0.25, "top1": 0.5, "tokens": 7},
            "bits": {"head": "int8"}, "features": 96, "accepted": [0.5, 0.25]}  # fmt: skip
    made["target"] |= {"kind": "", "vocab_map": ""}
    made["draft"] |= {"kind": "eagle3", "vocab_map": "draft/vocab_map.bin"}
    made |= {"format": FORMAT}
    made["files"]["draft/vocab_map.bin"] = {"bytes": 4, "sha256": "0" * 64}
    for role, items in (("target", 2), ("draft", 4)):
        made[role] |= {**more, "backend": made["backend"], "kv_item_bytes": items}
    machine = asdict(this_machine(backend_named(manifest["backend"]).library()))
    tuning = {**TUNING, "fixed_gamma": 2, "machine": machine, "source": made["source"]}
    whole = {
        "formats": "F32 1",
        "files": {"a.gguf": "0" * 64},
        "hub": "o/m",
        "revision": "main",
        "left_out": "inputs in int8",
    }
    made["origins"] = {"target": whole, "draft": {"formats": "Q4_0 2", "files": {}}}
    for kind, document in (
        (Manifest, made), (ModelRecord, made["draft"]), (Geometry, made["draft"]["geometry"]),
        (Provenance, whole), (Tuning, tuning), (TunedSetting, tuning["settings"][0]),
    ):  # fmt: skip
        assert {field.name for field in fields(kind)} == set(document), kind
    return made, tuning


def least(document: Document) -> Document:
    """Return a manifest or a tuning without what has a default."""
    made = copy.deepcopy(document)
    for name in ("origins", "task", "decoder_start"):
        made.pop(name, None)
    for role in ("target", "draft"):
        for name in (
            "precision", "embedding", "head", "block", "per_row", "symmetric", "quality",
            "backend", "bits", "kind", "features", "accepted", "vocab_map", "encoder",
        ):  # fmt: skip
            made.get(role, {}).pop(name, None)
    return made


def earlier(document: Document) -> Document:
    """Return a manifest in format 3, whose engines have windows and no rings, or a tuning."""
    made = copy.deepcopy(document)
    if "batch" in made:
        made["format"] = 3
    for role in ("target", "draft"):
        if role in made:
            geometry = made[role]["geometry"]
            memories = geometry.pop("memories")
            geometry |= {
                "layers": len(memories), "kv_heads": memories[0]["kv_heads"],
                "head_dim": memories[0]["key_width"], "windows": [16] * len(memories),
            }  # fmt: skip
    return made


def _model(manifest: Manifest, model: ModelRecord) -> Document:
    sizes = ("heads", "vocab_size", "max_positions")
    names = (
        "engine", "precision", "kv_item_bytes", "weight_bytes", "kind", "features", "vocab_map",
    )  # fmt: skip
    return {
        "backend": manifest.backend_of(model),
        "geometry": [getattr(model.geometry, name) for name in sizes]
        + [size for one in model.geometry.buffers.values() for size in one[:2]],
        **{name: getattr(model, name) for name in names},
    }


@pytest.mark.parametrize(
    "reduce", [copy.deepcopy, least, earlier], ids=["every field", "no default", "format 3"]
)
def test_both_read_the_same_of_what_python_writes(
    native_calls: NativeCalls, folder: Path, reduce: Callable[[Document], Document]
) -> None:
    bundle = Bundle.open(folder)
    manifest, tuning = map(reduce, full(json.loads((folder / "manifest.json").read_text("utf-8"))))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "tuning.json").write_text(json.dumps(tuning))
    m = read_manifest(folder)
    assert m.draft is not None
    record, notice = read_tuning(Bundle(bundle.path, m), 1)
    assert record is not None, notice
    names = (
        "name",
        "backend",
        "precision",
        "source",
        "gamma",
        "bos_token_id",
        "versions",
        "device",
    )
    expected = {
        **{name: getattr(m, name) for name in names},
        "gammas": sorted(m.gammas), "eos_token_ids": list(m.eos_token_ids),
        "sizes": [m.batch, m.max_length, m.prefill],
        "target": _model(m, m.target), "draft": _model(m, m.draft),
        "files": {name: [file.bytes, file.sha256] for name, file in m.files.items()},
        "notice": None, "verify_ns": record.costs.verify_ns, "draft_ns": record.costs.draft_ns,
        "outside_ns": record.outside_ns, "drafter": record.drafter,
        "fixed_gamma": record.fixed_gamma,
    }  # fmt: skip
    library = backend_named(m.backend).library()
    native_calls.check([({"call": "record", "folder": str(folder), "library": library}, expected)])


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in a document: what holds it, and under which key."""
    keys: list[Any] = []
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [
        place for _, key in ((value, k) for k in keys) for place in places(value[key])
    ]


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


def mutated(chance: random.Random, document: Document) -> Iterator[Document]:
    """Yield the document with each place in turn of a kind it never has, left out, and hostile."""
    for number in range(len(places(document))):
        for value in ({"odd": []}, OUT, *chance.choices(HOSTILE, k=2)):
            made = copy.deepcopy(document)
            holder, key = places(made)[number]
            if value is OUT:
                del holder[key]
            else:
                holder[key] = copy.deepcopy(value)
            yield made


def test_what_may_be_anything_is_read_or_refused(native_calls: NativeCalls, folder: Path) -> None:
    """Every field of manifest and tuning is read by both, and what is random is read alike."""
    chance = random.Random(11)
    bundle = Bundle.open(folder)
    sound = (folder / "manifest.json").read_bytes()
    manifest, tuning = full(json.loads(sound))
    tuning.pop("cuda_graphs", None)  # of engines that native does not have

    def manifest_refused() -> bool:
        try:
            read_manifest(folder)
        except BundleError:
            return True
        return False

    def tuning_refused() -> bool:
        return "it is damaged" in (read_tuning(bundle, 1)[1] or "")

    files: list[tuple[str, Document, Callable[[], bool] | None]] = [
        ("tuning.json", tuning, tuning_refused),
        ("tokenizer.json", TOKENIZER, None),
        ("manifest.json", manifest, manifest_refused),
    ]
    for name, document, refused in files:
        texts = [json.dumps(one).encode() for one in (document, *mutated(chance, document))]
        expected: list[bool] = []
        if refused is not None:
            for text in texts:
                (folder / name).write_bytes(text)
                expected.append(refused())
            assert not expected[0]
            assert all(expected[1::4]), "a value of a kind that its place never has"
            (folder / "manifest.json").write_bytes(sound)
        texts += [damaged(chance, texts[0]) for _ in range(100)]
        call = {"call": "refusals", "folder": str(folder), "file": name,
                "texts": [text.hex() for text in texts]}  # fmt: skip
        (found,) = native_calls([call])
        assert len(found) == len(texts)
        for text, said, wanted in zip_longest(texts, found, expected):
            assert said is None or ("\n" not in said and len(said) < len(str(folder)) + 2000)
            assert wanted is None or (said is not None) == wanted, (text, said)


def test_json_is_read_as_python_reads_it(native_calls: NativeCalls) -> None:
    for text in REFUSED:
        with pytest.raises(ValueError, match=r".+"):
            json.loads(text.decode("utf-8"))
    cases = [(text, json.loads(text)) for text in READ]
    cases += [(text, "refused") for text in (*REFUSED, *STRICTER)]
    native_calls.check(({"call": "parse", "hex": text.hex()}, value) for text, value in cases)


def test_files_are_hashed_as_hashlib_does(native_calls: NativeCalls, tmp_path: Path) -> None:
    cases = []
    for size in (*range(130), 1 << 18, (1 << 18) + 1, 700_001):
        data = np.random.default_rng(size).bytes(size)
        path = tmp_path / str(size)
        path.write_bytes(data)
        call = {"call": "hashed", "path": str(path), "blocks": data[:640].hex()}
        cases.append((call, {"sha256": hashlib.sha256(data).hexdigest(), "same": True}))
    native_calls.check(cases)
