"""Builds codelet's bundles, and targets grown from it to the cost of larger ones.

A grown target has codelet's outputs (see tools/inflate.py), and drafts of codelet's own.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from gpucheck.evidence import Evidence, NotRunError
from gpucheck.inventory import TENSORRT
from gpucheck.settings import ATTENTION, CODELET, HEAD, SCRIPT
from gpucheck.workbench import FACTS, RTX, Built, Workbench, codelet_source
from growth.config import grown_config
from growth.shape import PRESETS, Shape
from growth.shards import Entry, write_shards
from inflate import inflate
from specrt.bundle import read_manifest
from specrt.engine.tensorrt.engine_record import EngineRecord
from specrt.engine.tensorrt.library import lacks_to_build
from specrt_export.builder import build
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.compile.compiler import GraphSource, open_compiler
from specrt_export.lower.lazy_tensor import WEIGHTS
from specrt_export.plan.build_plan import resolve
from specrt_export.portable.attachment import attach_graph
from specrt_export.portable.graph import geometry_of, read_graph
from specrt_export.quantize.quantizer import quantize
from specrt_export.recipe.model_options import ModelOptions
from specrt_export.recipe.recipe import Recipe, read_recipe
from specrt_export.recipe.recipe_tables import ModelSource

FP8_FROM = 8.9
SPARE_DISK = 1.1
"""What has to be free, as a factor of what a build writes."""
CHUNK = 1 << 24


def bundle(bench: Workbench, backend: str, evidence: Evidence, pair: str) -> None:
    """Build a recipe of this folder as `specrt build` does; a fresh bundle stays."""
    recipe, out = recipe_of(bench, backend, pair), bench.folder(pair, backend)
    began, plan = time.monotonic(), resolve(recipe, out)
    evidence.add(reused=plan.is_fresh())
    if not evidence.facts["reused"]:
        if pair == HEAD and not find_spec("torch"):
            raise NotRunError("a head is exported, which needs torch; carry its bundle here")
        out.parent.mkdir(parents=True, exist_ok=True)
        build(plan)
    evidence.add(build_seconds=round(time.monotonic() - began, 1))
    evidence.add(versions=read_manifest(out).versions)
    for role in ("target", "draft"):
        model, part = bench.codelet(backend, role, pair), evidence.part(role)
        part.add(read_bytes=model.read_bytes)
        if model.backend in TENSORRT:
            part.add(profiles=_profiles(model.record))


def cpu_bundle(bench: Workbench, pair: str) -> Path:
    """Return codelet, or its target with a head, in fp32 for the CPU; build what is missing."""
    out = bench.folder(pair, "ort-cpu")
    recipe = read_recipe(CODELET / "recipe.toml", backend="ort-cpu")
    plan = resolve(_with_head(bench, recipe) if pair == HEAD else recipe, out)
    if not plan.is_fresh():
        out.parent.mkdir(parents=True, exist_ok=True)
        build(plan)
    return out


def recipe_of(bench: Workbench, backend: str, pair: str, precision: str = "") -> Recipe:
    """Return the recipe of a bundle, in its own precision where none is named.

    Raises: NotRunError where this machine cannot build for the backend.
    """
    if backend in TENSORRT and (reason := lacks_to_build(backend, bench.survey())):
        raise NotRunError(reason)
    mixed = pair == "mixed"
    path = SCRIPT / ("mixed.toml" if mixed else "codelet.toml")
    recipe = read_recipe(path, backend=None if mixed else backend)
    wanted: dict[str, Any] = {"gammas": bench.settings.gammas}
    wanted |= {"precision": precision} if precision else {}
    plan = {"capabilities": bench.settings.capabilities, **ATTENTION.get(pair, {})}
    return replace(
        _with_head(bench, recipe) if pair == HEAD else recipe,
        engine=replace(recipe.engine, **wanted),
        tensorrt=replace(recipe.tensorrt, **plan) if backend == RTX else recipe.tensorrt,
    )


def probe(bench: Workbench, backend: str, way: str, evidence: Evidence) -> Built:
    """Build codelet's draft in one way to open a backend."""
    bench = replace(bench, settings=bench.settings.opened(way if backend == RTX else ""))
    options = recipe_of(bench, backend, "codelet").models["draft"]
    out = bench.folder(f"open-{way}", backend)
    return _compiled(bench, options, codelet_source("draft"), out, evidence)


def target(bench: Workbench, backend: str, evidence: Evidence, size: str, precision: str) -> None:
    """Build a grown target; one that was built from the same stays.

    Raises: NotRunError where it was not grown, or the machine cannot build it.
    """
    gpus = bench.survey().gpus
    capability = gpus[0].capability if gpus else ""
    if precision == "fp8" and capability and float(capability) < FP8_FROM:
        raise NotRunError(f"fp8 needs capability {FP8_FROM}, and this GPU has {capability}")
    options = recipe_of(bench, backend, "codelet", precision).models["target"]
    source, out = _grown(bench, size), bench.folder(f"{size}-{precision}", backend)
    if not source.graph.is_file():
        raise NotRunError(f"{size} was not grown: the step {size}.grow comes first")
    origin = repr((replace(options, recipe=Path()), open_compiler(options).versions()))
    digest = hashlib.sha256(origin.encode() + source.graph.read_bytes()).hexdigest()
    if (out / FACTS).is_file() and bench.target(size, precision, backend).source == digest:
        evidence.add(reused=True)
        return
    built = _compiled(bench, options, source, out, evidence)
    replace(built, source=digest).write()
    evidence.add(read_bytes=built.read_bytes)


def _compiled(
    bench: Workbench, options: ModelOptions, source: GraphSource, out: Path, evidence: Evidence
) -> Built:
    """Quantize, lower and compile a model; it is not compared on a CPU, which would take long."""
    compiler = open_compiler(options)
    shutil.rmtree(out, ignore_errors=True)
    scratch = bench.settings.scratch or bench.settings.work
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder, began = Path(name), time.monotonic()
        if options.precision.rewrites:
            stored = quantize(source.graph, source.weights, folder / "quantized", options.precision)
            source = GraphSource(stored.graph, stored.folder)
        lowered = compiler.lower(source, folder / "lowered")
        read_bytes = (lowered.folder / WEIGHTS).stat().st_size
        evidence.add(lower_seconds=round(time.monotonic() - began, 1))
        began = time.monotonic()
        made = compiler.compile(lowered, out, folder / "previous", lambda stage, done: None)
        evidence.add(build_seconds=round(time.monotonic() - began, 1))
    built = Built(
        out / made.file, options.backend, lowered.geometry, read_bytes, options.precision.layers,
        options.engine.max_length, options.engine.prefill,
    )  # fmt: skip
    if built.backend in TENSORRT:
        record = built.record
        evidence.add(
            plan_bytes=record.plan_bytes, weight_bytes=record.weight_bytes,
            library=record.version, profiles=_profiles(record),
        )  # fmt: skip
    return built


def _profiles(record: EngineRecord) -> dict[str, Any]:
    return {
        one.profile: {"kernels": one.launches, "attention": one.attention}
        for one in record.compiled
    }


def export(bench: Workbench, backend: str, evidence: Evidence, size: str) -> None:
    """Export the graph of a grown target from its config; needs torch, and no weights."""
    out = _graph(bench, size)
    evidence.add(shape=str(PRESETS[size]), reused=out.is_file())
    if out.is_file():
        return
    try:
        from specrt_export.portable.exporter import export_graph
    except ImportError as error:
        raise NotRunError(f"exporting needs {error.name}") from error
    config = _codelet_config()
    grown = grown_config(config, Shape.of(config), PRESETS[size], "float16", "gpu-check")
    folder = out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(grown), encoding="utf-8")
    export_graph(Checkpoint.open(folder, config_only=True), out)
    evidence.add(graph_bytes=out.stat().st_size)


def grow(bench: Workbench, backend: str, evidence: Evidence, size: str) -> None:
    """Write the weights of a grown target, and attach its graph to them.

    Raises: NotRunError where the disk is too small or the graph is missing.
    """
    source, shape = _grown(bench, size), PRESETS[size]
    evidence.add(reused=source.graph.is_file())
    if source.graph.is_file():
        return
    if not _graph(bench, size).is_file():
        raise NotRunError(f"the graph of {size} is missing: the step {size}.export makes it")
    vocabulary = geometry_of(read_graph(codelet_source("target").graph)).vocab_size
    parameters = shape.parameters(vocabulary, tied=False)
    # The checkpoint, a plan that holds matrices in two layouts, and the lowered weights.
    copies = 1 + 1.6 + (1 if bench.settings.scratch is None else 0)
    _require_disk(bench.settings.work, 2 * parameters * copies)
    shutil.rmtree(source.weights.parent, ignore_errors=True)
    source.weights.parent.mkdir(parents=True)
    began = time.monotonic()
    inflate(Checkpoint.open(CODELET / "checkpoint" / "target"), source.weights, shape, "float16")
    evidence.add(parameters=parameters, grow_seconds=round(time.monotonic() - began, 1))
    evidence.add(distinct_bytes=_make_distinct(source.weights))
    attach_graph(_graph(bench, size), Checkpoint.open(source.weights), source.graph)


def _graph(bench: Workbench, size: str) -> Path:
    """Return where the graph of a grown target is; its weights are elsewhere."""
    return bench.settings.work / "graphs" / f"{size}.onnx"


def _grown(bench: Workbench, size: str) -> GraphSource:
    folder = bench.settings.work / f"grown-{size}"
    return GraphSource(folder / "target.onnx", folder / "weights")


def _require_disk(folder: Path, size: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(folder).free / 1e9, size * SPARE_DISK / 1e9
    if free < needed:
        raise NotRunError(f"{needed:.0f} GB of disk are needed, and {free:.0f} are free")


def _make_distinct(folder: Path) -> int:
    """Make fp16 matrices of zeros in a grown checkpoint differ; return their bytes.

    TensorRT keeps equal weights once: of codelet grown to 1 B it kept 1.69 of 1.98 GB, because what
    added layers write into the residual stream is all zeros. These become the smallest numbers of
    fp16, 6e-8, with random signs: too small to move a score by what fp16 rounds.
    """
    rng, written = np.random.default_rng(0), 0
    for weight in Checkpoint.open(folder).weights.values():
        if weight.dtype != "F16" or len(weight.shape) != 2:
            continue
        size = prod(weight.shape)
        bits: Any = np.memmap(weight.file, np.uint16, "r+", weight.offset, (size,))
        if not (bits[: weight.shape[1]] & 0x7FFF).any() and not (bits & 0x7FFF).any():
            for at in range(0, size, CHUNK):
                part = bits[at : at + CHUNK]
                part[:] = rng.integers(0, 2, part.size, np.uint16) << 15 | 1
            written += bits.nbytes
    return written


def _codelet_config() -> dict[str, Any]:
    path = CODELET / "checkpoint" / "target" / "config.json"
    config: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return config


def _with_head(bench: Workbench, recipe: Recipe) -> Recipe:
    """Return a recipe with a random EAGLE-3 head, the same every time, as its draft."""
    folder = bench.settings.work / "random-head"
    if not (folder / "model.safetensors").is_file():
        _write_head(folder, _codelet_config())
    source = ModelSource(str(folder), precision=recipe.target.precision)
    return replace(recipe, target=replace(recipe.target, graph=""), draft=source)


def _write_head(folder: Path, target: dict[str, Any]) -> None:
    width, inner, size = target["hidden_size"], target["intermediate_size"], target["head_dim"]
    layers, vocabulary = target["num_hidden_layers"], target["vocab_size"]
    heads, kv = (target[f"num_{kind}_heads"] * size for kind in ("attention", "key_value"))
    rng = np.random.default_rng(0)
    shapes = {
        "fc": (width, 3 * width), "lm_head": (vocabulary, width),
        "layers.0.self_attn.q_proj": (heads, 2 * width),
        "layers.0.self_attn.k_proj": (kv, 2 * width),
        "layers.0.self_attn.v_proj": (kv, 2 * width),
        "layers.0.self_attn.o_proj": (width, heads), "layers.0.mlp.gate_proj": (inner, width),
        "layers.0.mlp.up_proj": (inner, width), "layers.0.mlp.down_proj": (width, inner),
    }  # fmt: skip
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    made = {name: rng.normal(size=shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    made |= {name: np.ones(width) for name in ("norm", *(f"layers.0.{one}" for one in norms))}
    arrays = {f"{name}.weight": np.asarray(array, np.float16) for name, array in made.items()}
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
        "model_type": "speculator_model", "draft_vocab_size": vocabulary,
        "eagle_aux_hidden_state_layer_ids": [1, layers // 2, layers - 1],
        "transformer_layer_config": {**target, "num_hidden_layers": 1},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_shards(
        folder,
        [Entry(n, "F16", a.shape, a.nbytes, partial(np.asarray, a)) for n, a in arrays.items()],
    )
