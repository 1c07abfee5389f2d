"""One contract for both libraries: texts, threads, ends, processors, and memory given back."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cpp.conftest import BuildLibrary, Library
from specrt.bundle import read_manifest
from specrt.generator import Generator
from specrt.params import SamplingParams


@pytest.fixture(
    scope="module",
    params=["hosted", "native", pytest.param("hosted, sanitized", marks=pytest.mark.nightly)],
)
def library(request: pytest.FixtureRequest, built_library: BuildLibrary) -> Library:
    return built_library(request.param.split(",")[0], sanitize=request.param != "hosted")


def generated(generator: Generator, tokens: int) -> list[int]:
    """Return what Python generates of the prompt in application/main.cpp."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return generator.generate([57] * 20, params).token_ids


def test_sessions_run_on_threads_of_their_own(
    library: Library, codelet: Path, generator: Generator
) -> None:
    (texts,) = library.run("together", bundle=codelet)
    assert json.loads(texts) == [generated(generator, 30)] * 2


def test_another_thread_ends_what_runs(
    library: Library, codelet: Path, generator: Generator
) -> None:
    cancelled, reason, after, closed = library.run("ended", bundle=codelet)
    assert cancelled.startswith("SPECRT_CANCELLED|")
    assert reason == "cancelled"
    assert json.loads(after) == generated(generator, 4)
    assert closed.startswith("SPECRT_CLOSED|")


def test_floating_point_of_the_application_changes_nothing(
    library: Library, codelet: Path, generator: Generator
) -> None:
    ids, kept = library.run("floating", bundle=codelet)
    params = SamplingParams(
        max_tokens=24, ignore_eos=True, temperature=1e300, seed=3, verifier="rejection"
    )
    assert json.loads(ids) == generator.generate([57] * 20, params, gamma=2).token_ids
    assert kept == "true"


def test_processors_decide_and_throw(library: Library, codelet: Path) -> None:
    decided, ids, threw = library.run("processors", bundle=codelet)
    assert decided == "SPECRT_OK|"
    assert json.loads(ids) == [65] * 6
    assert threw == "SPECRT_CALLBACK|a logits processor threw: no scores today"


def test_what_an_application_asks_besides(
    library: Library, codelet: Path, generator: Generator
) -> None:
    (line,) = library.run("asked", bundle=codelet)
    found, manifest = json.loads(line), read_manifest(codelet)
    assert found["bos"] == (-1 if manifest.bos_token_id is None else manifest.bos_token_id)
    assert found["eos"] == sorted(manifest.eos_token_ids)
    assert found["weights"] == sum(model.weight_bytes for model in manifest.models)
    rows = manifest.batch if library.implementation == "hosted" else 1
    assert found["kv"] * manifest.batch == manifest.kv_bytes() * rows
    assert found["resident"] > 10 * 2**20
    if library.implementation == "native":
        assert found["telemetry"] == os.environ.get("ORT_DISABLE_TELEMETRY", "1")
    vocabulary = range(manifest.target.geometry.vocab_size)
    spelled = b"".join(generator.tokenizer.bytes_of(token) + b"\n" for token in vocabulary)
    assert bytes(found["bytes"]) == spelled
    assert found["emitted"] == sorted(found["emitted"])
    assert found["emitted"][-1] == 12
    told = found["completion"]
    for name, entries in (
        ("logprobs", told["logprobs"]), ("prompt_logprobs", told["prompt_logprobs"][1:])
    ):  # fmt: skip
        expected = [[int(t), e["rank"], e["logprob"]] for one in entries for t, e in one.items()]
        numbers = [json.loads(each) for each in found[name]]
        assert [each[:2] for each in numbers] == [each[:2] for each in expected]
        assert [n[2] for n in numbers] == pytest.approx([e[2] for e in expected], abs=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("implementation", ["hosted", "native"])
def test_memory_goes_back(built_library: BuildLibrary, codelet: Path, implementation: str) -> None:
    """Not sanitized: what is freed is kept for a while then."""
    lines = built_library(implementation).run("memory", bundle=codelet)
    generations, threads, cycles = map(int, lines)
    assert generations < 2048
    assert threads < 2048  # kept for each of 3,000, they take 12 MiB
    assert cycles < 8192


def test_json_has_points_where_the_application_has_commas(
    native: Library, codelet: Path, tmp_path: Path
) -> None:
    if shutil.which("localedef") is None:
        pytest.skip("needs localedef")
    made = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")]
    if subprocess.run(made, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the sources of locales")
    comma = {"LOCPATH": str(tmp_path), "LC_ALL": "de_DE.UTF-8"}
    point, *notices, completion = native.run("locale", environment=comma, bundle=codelet)
    assert point == ","
    assert re.search(r"\d\.\d MB", "".join(notices))
    assert len(json.loads(completion)["logprobs"]) == 3
    assert json.loads(completion)["ttft_ms"] > 0
