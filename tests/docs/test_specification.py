"""docs/embedding.md, held to the code: its tables and examples, and a runtime written from it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import types
from dataclasses import MISSING, Field, fields
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import onnxruntime as ort
import pytest

from shared import REPOSITORY
from specrt.bundle import (
    Bundle,
    EncoderRecord,
    FileRecord,
    Manifest,
    ModelRecord,
    Provenance,
    Quality,
)
from specrt.engine.ort.kernels import CONTRIB, KERNELS, LAYOUT
from specrt.engine.tensorrt.engine_record import EngineRecord, Profile, Range, SourceShape
from specrt.engine.tensorrt.library import DECOMPOSED, NATIVE
from specrt.engine.tensorrt.passes import KV_TYPES, expected
from specrt.geometry import Geometry, LayerMemory
from specrt.system.machine import Machine
from specrt.tuning.tuning_record import FORMAT as TUNING_FORMAT
from specrt.tuning.tuning_record import TunedSetting, Tuning
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu
from specrt_export.precision import Precision
from specrt_export.quantize.quantizer import quantize
from support.kernels import without_kernels

DOCUMENT = REPOSITORY / "docs" / "embedding.md"
HEADERS = REPOSITORY / "runtime" / "cpp" / "include"
RECORDS = (
    Manifest, ModelRecord, EncoderRecord, Geometry, LayerMemory, FileRecord, Provenance, Quality,
    Tuning, Machine, TunedSetting, EngineRecord, Profile, SourceShape,
)  # fmt: skip
_COUNT = (1, 10**9)
_WORDS = {bool: "boolean", int: "integer", float: "number", str: "text"}
_TYPES = {"tensor(float)": "float", "tensor(int64)": "int64"}

Row = list[str]


def _table(text: str, head: str) -> list[Row]:
    """Return the rows of the one table whose first column has this title."""
    lines = text.splitlines()
    (begin,) = (i for i, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = takewhile(lambda line: line.startswith("|"), lines[begin + 2 :])
    return [[c.strip() for c in re.split(r"(?<!\\)\|", row.strip().strip("|"))] for row in rows]


@pytest.fixture(scope="module")
def document() -> str:
    """The text of the specification."""
    return DOCUMENT.read_text(encoding="utf-8")


def _said(kind: Any) -> str:
    """Return a type in the notation of the document."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        span = inner[1].first, inner[1].last
        last = "2^63-1" if span[1] == 2**63 - 1 else span[1]
        return "count" if span == _COUNT else f"integer {span[0]} to {last}"
    if origin in (Union, types.UnionType):
        return f"{_said(inner[0])}?"
    if origin is tuple:
        return f"[{_said(inner[0])}]"
    if origin is dict:
        return f"{{{_said(inner[1])}}}"
    return _WORDS.get(kind) or str(kind.__name__)


def _default(field: Field[Any]) -> str:
    """Return what a field is where it is left out, in the notation of the document."""
    if field.default_factory is not MISSING:
        return f"`{json.dumps(field.default_factory())}`"
    return "no" if field.default is MISSING else f"`{json.dumps(field.default)}`"


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_record_has_the_fields_of_its_table(document: str, record: Any) -> None:
    hints = get_type_hints(record, include_extras=True)
    rows = _table(document, f"`{record.__name__}`")
    assert [row[:3] for row in rows] == [
        [f"`{f.name}`", _said(hints[f.name]), _default(f)] for f in fields(record)
    ]
    if record is Tuning:
        assert rows[0][0] == "`format`"
        assert rows[0][3].startswith(f"{TUNING_FORMAT};")


def _named(rows: list[Row], sizes: dict[str, int]) -> dict[tuple[str, str], list[str]]:
    """Return side, type and shape of each value that a table names, for each layer."""
    found = {}
    for name, side, kind, shape, *_ in rows:
        plain = name.strip("`")
        parts = shape.strip("[]").split(", ")
        told = [kind, *(str(sizes.get(part, part)) for part in parts)]
        for layer in range(sizes["L"]):
            found[side.split(" ")[0].rstrip(","), plain.replace("{i}", str(layer))] = told
    return found


def _engine(path: Path) -> dict[tuple[str, str], list[str]]:
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(KERNELS))
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    sides = {"input": session.get_inputs(), "output": session.get_outputs()}
    return {
        (side, value.name): [_TYPES[value.type], *map(str, value.shape)]
        for side, values in sides.items()
        for value in values
    }


def _sizes(geometry: Geometry, length: int, batch: int) -> dict[str, int]:
    g, one, groups = geometry, geometry.memories[0], -(-length // 16)
    return {
        "L": g.layers, "Hkv": one.kv_heads, "D": one.key_width, "D'": -(-one.key_width // 16) * 16,
        "V": g.vocab_size, "B": batch, "M": length, "P": 16 * groups, "P/16": groups,
    }  # fmt: skip


@pytest.mark.parametrize("role", ["target", "draft"])
def test_an_engine_has_the_inputs_and_outputs_of_its_table(
    document: str, codelet: Path, role: str
) -> None:
    bundle = Bundle.open(codelet)
    manifest, model = bundle.manifest, getattr(bundle.manifest, role)
    told = _named(
        _table(document, "`engine.onnx` with kernels"),
        _sizes(model.geometry, manifest.max_length, manifest.batch),
    )
    if role == "target":
        del told["output", "confidence"]
    found = _engine(bundle.file(model.engine))
    found["input", "input_ids"][-1] = "T"  # what a graph calls a free size means nothing
    assert found == told
    assert f"`{LAYOUT}`" in document


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_an_engine_without_kernels_has_those_of_its_table(
    document: str, draft: tuple[Path, Path], tmp_path: Path, precision: str
) -> None:
    length, source = 64, draft
    if precision != "fp32":
        stored = quantize(*draft, tmp_path / "stored", Precision.of(precision))
        source = stored.graph, stored.folder
    with without_kernels():
        made = compile_ort_cpu(*source, tmp_path / "made", length, batch=3, confidence=True)
    sizes = {**_sizes(made.geometry, length, 1), "M'": length + 1}
    told = _named(_table(document, "`engine.onnx` without kernels"), sizes)
    assert _engine(tmp_path / "made" / "engine.onnx") == told
    assert f"`{CONTRIB}`" in document


@pytest.mark.parametrize("compute", KV_TYPES)
def test_a_plan_has_the_tensors_of_its_table(document: str, compute: str) -> None:
    geometry = Geometry.uniform(2, 4, 2, 8, 96, 64, (0, 0))
    profiles = (Profile("decode of 16", *[Range(1, 1, 1)] * 2, kv_length=Range(16, 16, 16)),)
    record = EngineRecord(
        1, "tensorrt", "10.16.1.11", NATIVE, compute, profiles, candidates=8, confidence=True,
        feature=24, hidden=24,
    )  # fmt: skip
    sizes = {**_sizes(geometry, 32, 3), "S": -1, "R": -1, "N": -1, "K": 8, "H": 24}
    told = _named(_table(document, "tensor of a plan"), sizes)
    assert told == {
        ("input" if tensor.is_input else "output", name): [
            "KV" if name.removeprefix("present_").startswith(("key.", "value.")) else tensor.type,
            *map(str, tensor.shape),
        ]
        for name, tensor in expected(record, geometry, batch=3, max_length=32).items()
    }
    assert KV_TYPES[compute] in document
    assert f"`{NATIVE}` or `{DECOMPOSED}`" in document


def test_every_status_is_told_with_its_number(document: str) -> None:
    header = (HEADERS / "specrt" / "specrt.h").read_text(encoding="utf-8")
    declared = re.findall(r"^ +(SPECRT_[A-Z]+(?:_[A-Z]+)*) = (\d+)", header, re.MULTILINE)
    assert len(declared) > 1
    assert [(name.strip("`"), number) for name, number, _ in _table(document, "status")] == declared


@pytest.mark.parametrize("language", ["c", "cpp"])
def test_an_example_compiles(document: str, tmp_path: Path, language: str) -> None:
    compiler = shutil.which("cc" if language == "c" else "c++")
    assert compiler is not None
    found = re.findall(rf"^```{language}\n(.*?)^```", document, re.MULTILINE | re.DOTALL)
    (source,) = (example for example in found if "#include" in example)
    place = tmp_path / f"example.{language}"
    place.write_text(source, encoding="utf-8")
    standard = "c99" if language == "c" else "c++17"
    done = subprocess.run(
        [compiler, f"-std={standard}", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
         f"-I{HEADERS}", str(place)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere(document: str) -> None:
    titles = re.findall(r"^#+ (.*)$", document, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    for place in re.findall(r"\]\(([^)]+)\)", document):
        assert place[1:] in anchors if place[0] == "#" else (DOCUMENT.parent / place).exists()
