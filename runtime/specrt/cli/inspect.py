"""`specrt inspect`: everything a bundle says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from specrt.bundle import DEFAULT_BUNDLE, Bundle
from specrt.manifest import Manifest, ModelRecord

MIB = 1 << 20


@click.command("inspect")
@click.argument("bundle", type=click.Path(path_type=Path), default=DEFAULT_BUNDLE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundle: Path, as_json: bool) -> None:
    """Show what BUNDLE holds, for whom it was built, and the memory it will take."""
    manifest = Bundle.open(bundle).manifest
    if as_json:
        print(json.dumps({**json.loads(manifest.to_json()), "memory": memory(manifest)}))
        return
    _show(bundle, manifest)


def memory(manifest: Manifest) -> dict[str, int]:
    """Return the bytes a device needs: weights, KV buffers when full, and their sum."""
    models = [m for m in (manifest.target, manifest.draft) if m]
    weights = sum(m.weight_bytes for m in models)
    caches = manifest.kv_bytes()
    return {"weight_bytes": weights, "kv_bytes": caches, "total_bytes": weights + caches}


def _show(bundle: Path, manifest: Manifest) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    plain = Table(show_header=False, box=None, pad_edge=False)
    needs = memory(manifest)
    for name, value in (
        ("bundle", f"{manifest.name} ({bundle}), format {manifest.format}"),
        ("backend", f"{manifest.backend}, {manifest.precision}, batch {manifest.batch}"),
        ("context", f"{manifest.max_length} positions, prefill in passes of {manifest.prefill}"),
        ("gammas", f"{_list(manifest.gammas)} (default {manifest.gamma})"),
        ("ends at", f"token {_list(manifest.eos_token_ids)}; BOS {manifest.bos_token_id}"),
        ("built for", ", ".join(f"{k} {v}" for k, v in manifest.device.items())),
        ("built with", ", ".join(f"{k} {v}" for k, v in manifest.versions.items())),
        ("memory", f"{needs['total_bytes'] / MIB:.0f} MiB: weights "
                   f"{needs['weight_bytes'] / MIB:.0f}, KV buffers {needs['kv_bytes'] / MIB:.0f}"),
    ):  # fmt: skip
        plain.add_row(f"[bold]{name}", value)
    console.print(plain)
    console.print(_models(manifest))
    console.print(_files(manifest))


def _list(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values)) or "none"


def _models(manifest: Manifest) -> Any:
    from rich.table import Table

    table = Table(title="models", title_justify="left")
    for name in (
        "",
        "type",
        "parameters",
        "layers",
        "heads",
        "head dim",
        "vocab",
        "windows",
        "fused",
    ):
        table.add_column(name)
    for role, model in (("target", manifest.target), ("draft", manifest.draft)):
        if model is not None:
            table.add_row(role, *_row(model))
    return table


def _row(model: ModelRecord) -> list[str]:
    g = model.geometry
    windows = sorted({w for w in g.windows if w})
    return [
        model.model_type,
        f"{model.parameters / 1e6:.1f} M",
        str(g.layers),
        f"{g.heads}/{g.kv_heads}",
        str(g.head_dim),
        str(g.vocab_size),
        _list(tuple(windows)),
        ", ".join(f"{what} {count}" for what, count in model.fused.items()),
    ]


def _files(manifest: Manifest) -> Any:
    from rich.table import Table

    table = Table(title="files", title_justify="left")
    table.add_column("file")
    table.add_column("bytes", justify="right")
    table.add_column("sha256")
    for name, record in manifest.files.items():
        table.add_row(name, f"{record.bytes:,}", record.sha256[:16])
    return table
