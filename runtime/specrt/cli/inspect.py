"""`specrt inspect`: what a bundle holds. `specrt doctor`: what this machine can build and run."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from specrt.bundle import TOKENIZER, Bundle, Manifest, ModelRecord
from specrt.cli.cache import bundle_argument
from specrt.cli.options import graphs_text, table
from specrt.cli.quality_facts import acceptance_facts, loss_facts
from specrt.doctor import abilities, libraries, machine
from specrt.engine.backends import backend_of
from specrt.engine.ort.kernels import CONTRIB
from specrt.errors import BundleError
from specrt.geometry import ATTENTION, CONV, LENT, RECURRENT, SHARED, Geometry
from specrt.params import AUTO
from specrt.system.memory import size
from specrt.text.tokenizer import Tokenizer
from specrt.tuning.tuning_record import read_tuning


@click.command("inspect")
@bundle_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundle: Path, as_json: bool) -> None:
    """Show what BUNDLE holds, the device it was built for, and the memory it needs."""
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    if as_json:
        print(json.dumps({**json.loads(manifest.to_json()), "memory": memory(bundle, manifest)}))
        return
    _show(bundle, manifest, _tuned(opened))


def memory(bundle: Path, manifest: Manifest) -> dict[str, int]:
    """Return the bytes a device needs: weights, full KV buffers, and their sum.

    Cross keys and values count as KV buffers, and are told apart where there are any. A decomposed
    plan has two sets of KV buffers: its passes read one and write the other.
    """
    weights = sum(model.weight_bytes for model in manifest.models)
    cross = sum(model.cross_bytes(manifest.batch) for model in manifest.models)
    caches = cross
    for model in manifest.models:
        one = manifest.own_kv_bytes(model)
        caches += one * backend_of(manifest, model).facts(bundle / model.engine).kv_sets
    found = {"weight_bytes": weights, "kv_bytes": caches, "total_bytes": weights + caches}
    return {**found, "cross_bytes": cross} if cross else found


def _tuned(bundle: Bundle) -> str:
    """Return the result of tuning, or why there is none for this machine."""
    tuning, ignored = read_tuning(bundle, len(os.sched_getaffinity(0)))
    if tuning is None:
        return ignored or f"no; `specrt tune {bundle.path}` measures what passes cost here"
    best = f"drafter {tuning.drafter}, gamma {tuning.gamma}" if tuning.drafter else "costs only"
    how = f"{tuning.date} on {tuning.machine.cpu}, {tuning.threads} threads: {best}"
    if tuning.cuda_graphs is not None:
        how += f"; {graphs_text(tuning.cuda_graphs)}"
    return how


def _show(bundle: Path, manifest: Manifest, tuned: str) -> None:
    _print_facts([*_bundle_facts(bundle, manifest), ("tuned", tuned)])
    for role, model in (("target", manifest.target), ("draft", manifest.draft)):
        if model is not None:
            weights = _weight_facts(model, role == "target")
            facts = backend_of(manifest, model).facts(bundle / model.engine)
            engine = [(f"  {name}", value) for name, value in facts.lines]
            print(role)
            parts = _part_facts(manifest, model)
            _print_facts([*_model_facts(model), *parts, *weights, *engine])
    files = [(name, f"{f.bytes:,}", f.sha256[:16]) for name, f in manifest.files.items()]
    print(table(("file", "bytes", "sha256"), files, left=1))


def _print_facts(facts: list[tuple[str, str]]) -> None:
    width = max(14, *(len(name) + 2 for name, _ in facts))
    for name, value in facts:
        print(f"{name:{width}}{value}")


def _bundle_facts(bundle: Path, manifest: Manifest) -> list[tuple[str, str]]:
    gamma = AUTO if manifest.gamma is None else manifest.gamma
    sizes = memory(bundle, manifest)
    cross = sizes.get("cross_bytes", 0)
    buffers = f"KV buffers up to {size(sizes['kv_bytes'] - cross)}"
    buffers += f", cross keys and values {size(cross)}" if cross else ""
    versions = {name: v for name, v in manifest.versions.items() if name != "kernels"}
    return [
        ("bundle", f"{manifest.name} ({bundle}), format {manifest.format}"),
        ("backend", f"{_backends(manifest)}, {manifest.precision}, batch {manifest.batch}"),
        ("context", f"{manifest.max_length} positions, prefill by {manifest.prefill}"),
        ("gammas", f"{_list(manifest.gammas)} (default {gamma})"),
        *([("drafter", manifest.drafter)] if manifest.drafter else []),
        ("ends at", _tokens(bundle, manifest.eos_token_ids)),
        *_start_facts(bundle, manifest),
        *acceptance_facts(manifest),
        *_origin_facts(manifest),
        ("built for", ", ".join(f"{k} {v}" for k, v in manifest.device.items())),
        *_kernel_facts(manifest),
        ("built with", ", ".join(f"{k} {v}" for k, v in versions.items())),
        (
            "memory",
            f"{size(sizes['total_bytes'])}: weights {size(sizes['weight_bytes'])}, {buffers}",
        ),
        *_snapshot_facts(manifest),
    ]


def _snapshot_facts(manifest: Manifest) -> list[tuple[str, str]]:
    """Return what snapshots of recurrent states take, where there are such states."""
    if not any(model.geometry.recurs for model in manifest.models):
        return []
    return [("snapshots", f"of states, up to {size(manifest.snapshot_bytes)} besides")]


def _tokens(bundle: Path, ids: Sequence[int | None]) -> str:
    """Return ids of tokens, with their texts where the tokenizer can be read."""
    try:
        tokenizer = Tokenizer(bundle / TOKENIZER)
    except BundleError:
        return f"token {_list(ids)}"
    names = (None if token is None else tokenizer.name(token) for token in ids)
    shown = [f"{token}{f' {name!r}' * bool(name)}" for token, name in zip(ids, names, strict=True)]
    return f"token {_list(shown)}"


def _start_facts(bundle: Path, manifest: Manifest) -> list[tuple[str, str]]:
    """Return what a text begins with, and of an encoder-decoder what it is made of."""
    encoder = manifest.target.encoder
    if encoder is None:
        first = _tokens(bundle, [manifest.bos_token_id])
        return [("starts with", f"{first} when the prompt is empty")]
    source = f"up to {encoder.max_source} tokens"
    if encoder.features:
        source = (
            f"{encoder.features} features in {encoder.frames} frames, {encoder.max_source} "
            "positions"
        )
    return [
        ("task", manifest.task),
        ("source", source),
        ("starts with", _tokens(bundle, manifest.decoder_start)),
    ]


def _origin_facts(manifest: Manifest) -> list[tuple[str, str]]:
    """Return the checkpoints that models were built from, and their files of weights."""
    facts = []
    for role, origin in manifest.origins.items():
        hub = f"{origin.hub}{origin.revision and f' at {origin.revision}'}, " if origin.hub else ""
        floats = origin.left_out and f"; weight-only, left out: {origin.left_out}"
        facts.append(("from", f"{role}: {hub}{origin.formats}{floats}"))
        facts += [("", f"  {name}, sha256 {sha256}") for name, sha256 in origin.files.items()]
    return facts


def _kernel_facts(manifest: Manifest) -> list[tuple[str, str]]:
    """Return which CPU kernels a bundle is for, where it says so."""
    layout = manifest.versions.get("kernels")
    if layout is None:
        return []
    own = layout != CONTRIB
    return [("kernels", f"specrt's, {layout}" if own else "none: those of ONNX Runtime")]


def _layers(geometry: Geometry) -> str:
    """Return how many layers there are, and what they see where it is not every position."""
    parts = [str(geometry.layers)]
    for kind, verb in ((ATTENTION, "see"), (CONV, "convolve")):
        seen = [one.window for one in geometry.memories if one.kind == kind and one.window]
        if seen:
            parts.append(f"{len(seen)} of them {verb} {_list(tuple(sorted({*seen})))} positions")
    recurrent = sum(one.kind == RECURRENT for one in geometry.memories)
    parts += [f"{recurrent} have a recurrent state"] * (recurrent > 0)
    for kind, what in (
        (LENT, "read keys and values of the target"),
        (SHARED, "share keys and values"),
    ):
        count = sum(one.kind == kind for one in geometry.memories)
        parts += [f"{count} {what}"] * (count > 0)
    return ", ".join(parts)


def _kv_heads(geometry: Geometry) -> str:
    """Return the heads of keys and values of the layers that keep or are lent some."""
    kinds = Counter(
        (one.kv_heads, one.key_width, one.value_width)
        for one in geometry.memories
        if one.kind in (ATTENTION, LENT)
    )
    parts = []
    for (heads, key, value), layers in kinds.items():
        where = "" if layers == geometry.layers else f" in {layers} layers"
        widths = str(key) if key == value else f"{key} and {value}"
        parts.append(f"{heads} for keys and values{where}, of {widths}")
    return "; ".join(parts)


def _model_facts(model: ModelRecord) -> list[tuple[str, str]]:
    g = model.geometry
    of = "; drafts from the target's features" if model.kind else ""
    encoder = model.encoder
    if encoder is not None and not encoder.encoder:
        of = "; reads the target's encoder"
    cross = [("  cross heads", f"{encoder.heads} of {encoder.head_dim}")] if encoder else []
    return [
        ("  model", f"{model.model_type}, {model.parameters / 1e6:.1f} M parameters{of}"),
        ("  layers", _layers(g)),
        ("  heads", f"{g.heads}, {_kv_heads(g)}"),
        *cross,
        ("  vocabulary", str(g.vocab_size)),
        ("  fused", ", ".join(f"{what} {n}" for what, n in model.fused.items() if n[:2] != "0/")),
    ]


def _part_facts(manifest: Manifest, model: ModelRecord) -> list[tuple[str, str]]:
    """Return the weights of each engine of an encoder-decoder, as large as their files."""
    if model.encoder is None:
        return []
    engines = {
        "encoder": model.encoder.encoder, "cross projections": model.encoder.cross,
        "decoder": model.engine,
    }  # fmt: skip
    names = {part: engine.removesuffix(".onnx") + ".data" for part, engine in engines.items()}
    files = {part: manifest.files.get(name) for part, name in names.items()}
    there = [f"{name} {size(file.bytes)}" for name, file in files.items() if file is not None]
    return [("  engines", ", ".join(there))] if there else []


def _weight_facts(model: ModelRecord, verifies: bool) -> list[tuple[str, str]]:
    """Return how the weights are stored, and the measured loss of quality."""
    block = f", {model.block} weights to a scale" if model.block else ""
    block += ", 8 bits with one scale a row" if model.per_row else ""
    block += "" if model.symmetric else ", int4 with a zero besides"
    ends = f"; embedding {model.embedding}, head {model.head}"
    facts = [("  weights", f"{model.precision}{ends}{block}")]
    facts += [(f"  {name}", value) for name, value in loss_facts(model)]
    if verifies and model.quantized:
        facts.append(
            ("  lossless", "the output is that of this quantized target in plain decoding")
        )
    return facts


def _backends(manifest: Manifest) -> str:
    """Name the backend, and the draft's where it has another."""
    target = manifest.backend_of(manifest.target)
    draft = manifest.draft and manifest.backend_of(manifest.draft)
    return f"{target} (draft: {draft})" if draft and draft != target else target


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values)) or "none"


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Show what this machine can build and run, and what is missing for more."""
    sections = {"machine": machine(), "libraries": libraries(), "abilities": abilities()}
    if as_json:
        print(json.dumps({name: [asdict(c) for c in checks] for name, checks in sections.items()}))
        return
    for name, checks in sections.items():
        print(name)
        for check in checks:
            remedy = "" if check.works else f"  ->  {check.remedy}"
            print(f"  {'ok' if check.works else '--'}  {check.name:28}{check.found}{remedy}")
