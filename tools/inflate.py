"""Grow a checkpoint of the Llama or T5 family without changing what it computes.

    inflate.py CHECKPOINT --out FOLDER --to 200M|1B|3B|8B [--dtype float32|bfloat16|float16]
    inflate.py CHECKPOINT --out FOLDER --layers 12 --intermediate-size 4096
    inflate.py CHECKPOINT --out FOLDER --to 200M --hybrid conv|recurrent

THE GROWN MODEL HAS THE SMALL ONE'S OUTPUTS AND THE BIG ONE'S COST. It is for one thing: to measure
what a real pair's acceptance is worth at the cost of a larger target. It knows no more than the
small one, and every figure made with it has to say that its target was inflated.

How outputs stay. Added layers come after the old ones and write zeros into the residual stream;
added columns of the stream are zero, and scale and epsilon of each RMSNorm make up for the longer
mean, the last one's also for what T5 multiplies by the width; added heads and intermediate units
are multiplied by zero columns; where queries per kv head become fewer, kv heads are copied; in
wider heads every rotary angle keeps its dimension. Weights whose value does not matter are random
and as spread as the old ones, so that kernels and quantisers meet ordinary numbers. What writes
into the residual stream cannot be: zeros, which cost a CPU what others do, but let a GPU draw less
power. Old input columns stay side by side, so that quantising by blocks that fill a head and divide
the old widths gives them what it gave them before.

With --hybrid a Llama becomes a model of the type lfm2 (conv) or granitemoehybrid (recurrent). Added
layers are short convolutions or Mamba 2 mixers that write zeros, between layers that attend;
growth/hybrid.py says how conv does without norms of heads.

How well. In exact arithmetic outputs are equal; in float32 logits agree to about 1e-6. A checkpoint
written in its own type keeps its numbers bit for bit, but for two things. Norms are written in
float32; a program that rounds them gets a slightly different model. And a wider head_dim (8B) has
queries multiplied by sqrt(2), which rounds them in bfloat16 and float16: codelet's logits then move
by 6e-4 of the largest, a tenth of what computing in bfloat16 does.

The vocabulary stays as it is, so presets come to fewer parameters than their namesakes. config.json
says under "specrt_inflated_from" what it was made from. The work is done in growth/, with NumPy
alone, one weight in memory at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from growth.axes import grown_axes
from growth.config import check_config, check_rotary, grown_config
from growth.family import FAMILIES, family_of
from growth.hybrid import KINDS, hybrid_config, hybrid_of, hybrid_plans
from growth.layout import Plan, is_tied, plan_weights
from growth.shape import Shape, check_growth, presets_of
from growth.shards import SHARD_BYTES, Entry, write_shards
from growth.tensor import DTYPES, encode, grow, stored_dtype
from specrt.errors import BuildError, CheckpointError, SpecrtError
from specrt_export.atomic_folder import atomic_folder
from specrt_export.checkpoint.checkpoint import Checkpoint

BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Files that a grown model shares with the small one."""


def inflate(
    checkpoint: Checkpoint,
    out: Path,
    new: Shape,
    dtype: str,
    shard_bytes: int = SHARD_BYTES,
    say: Callable[[str], None] = lambda line: None,
    *,
    hybrid: str | None = None,
) -> None:
    """Write a grown copy of a checkpoint; a `hybrid` has added layers of a kind of KINDS.

    Raises: SpecrtError for what cannot be grown or written; then nothing is at `out` that was not.
    """
    config, name = checkpoint.config, checkpoint.folder.resolve().name
    family = family_of(config, name)
    check_config(config, family, name)
    if checkpoint.coded:
        raise CheckpointError(f"{name} is quantized; grow the checkpoint it was quantized from")
    old = Shape.of(config, family)
    check_growth(old, new, family.divides)
    check_rotary(config, old, new)
    sizes = {
        axis: int(config[key]) for axis, key in {"vocab": "vocab_size", **family.sizes}.items()
    }
    tied = is_tied(checkpoint, family)
    _check_out(out, new.parameters(sizes["vocab"], tied) * DTYPES[dtype][1])
    axes = grown_axes(old, new, sizes)
    plans = plan_weights(checkpoint, family, axes, old, new)
    note = f"{name}: {old}. It has that model's outputs at this one's cost."
    grown = grown_config(config, old, new, dtype, note, family)
    if hybrid:
        kind = hybrid_of(hybrid, grown, old, new)
        plans = list(hybrid_plans(kind, plans, old, new))
        grown = hybrid_config(kind, grown, old, new)
    entries = [_entry(plan, dtype) for plan in plans]
    say(_summary(new, entries, dtype))
    with atomic_folder(out) as folder:
        write_shards(folder, entries, shard_bytes)
        text = json.dumps(grown, indent=2)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
        for beside in BESIDE:
            if (checkpoint.folder / beside).is_file():
                shutil.copyfile(checkpoint.folder / beside, folder / beside)


def _entry(plan: Plan, dtype: str) -> Entry:
    stored = stored_dtype(plan, dtype)
    code, item = DTYPES[stored]
    make = partial(_make, plan, stored)
    return Entry(plan.name, code, plan.shape, int(np.prod(plan.shape)) * item, make)


def _make(plan: Plan, dtype: str) -> NDArray[Any]:
    return encode(plan.name, grow(plan), dtype)


def _summary(new: Shape, entries: list[Entry], dtype: str) -> str:
    parameters = sum(entry.parameters for entry in entries)
    size = sum(entry.bytes for entry in entries) / 1e9
    return f"{new}\n{parameters:,} parameters, {dtype}, {size:.2f} GB"


def _check_out(out: Path, size: int) -> None:
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise BuildError(f"{out} is there already; give a new folder, or remove that one first")
    parent = next(folder for folder in out.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(parent).free
    if size > free:
        raise BuildError(
            f"the grown weights take {size / 1e9:.1f} GB, and {parent} has {free / 1e9:.1f} GB "
            "free; use a shorter --dtype or another disk"
        )


def wanted_shape(config: Mapping[str, Any], to: str | None, numbers: Mapping[str, Any]) -> Shape:
    """Return the preset, or the checkpoint's own shape, with the numbers given put in.

    Raises: CheckpointError for a preset that the checkpoint's family has not.
    """
    family = family_of(config, "the checkpoint")
    presets = presets_of(family)
    if to is not None and to not in presets:
        raise CheckpointError(
            f"--to is {to}; {', '.join(family.models)} models grow to {', '.join(presets)}; "
            "or give numbers"
        )
    start = presets[to] if to else Shape.of(config, family)
    given = {name: n for name, n in numbers.items() if n is not None}
    if "kv_heads" not in family.keys:
        if "kv_heads" in given:
            raise CheckpointError(
                f"kv_heads is {given['kv_heads']}, and heads of {' and '.join(family.models)} "
                "models have keys of their own; give --heads alone"
            )
        given["kv_heads"] = given.get("heads", start.heads)
    return replace(start, **given)


def _number(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(name, type=click.IntRange(1), help="In place of the preset's, or kept.")


SHAPES = "\b\n" + "\n".join(
    f"{family.models[0]:6}{name:6}{shape}"
    for family in FAMILIES
    for name, shape in presets_of(family).items()
)
NAMES = sorted({name for family in FAMILIES for name in presets_of(family)})


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=SHAPES)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to make.")
@click.option("--to", type=click.Choice(NAMES), help="Shape with a name.")
@_number("--hidden-size")
@_number("--layers")
@_number("--decoder-layers")
@_number("--heads")
@_number("--kv-heads")
@_number("--head-dim")
@_number("--intermediate-size")
@click.option(
    "--dtype", default="float32", show_default=True, type=click.Choice(list(DTYPES)), help="Stored."
)
@click.option(
    "--hybrid",
    type=click.Choice(list(KINDS)),
    help="Let added layers be convolutions, as LFM2 has them, or Mamba 2 mixers, as Granite 4 has.",
)
def main(
    checkpoint: Path,
    out: Path,
    to: str | None,
    dtype: str,
    hybrid: str | None,
    **numbers: int | None,
) -> None:
    """Grow CHECKPOINT without changing its outputs: the small model's text at a big one's cost.

    Every figure made with the result has to say that its target was inflated.
    """
    try:
        if not checkpoint.is_dir():
            raise CheckpointError(f"no folder {checkpoint}; give the one that holds config.json")
        opened = Checkpoint.open(checkpoint)
        shape = wanted_shape(opened.config, to, numbers)
        inflate(opened, out, shape, dtype, say=click.echo, hybrid=hybrid)
    except SpecrtError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{out} has the outputs of {checkpoint} at the cost above; say so next to figures.")


if __name__ == "__main__":
    main()
