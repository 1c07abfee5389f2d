"""Make an EAGLE-3 head for a target that tools/inflate.py grew.

    widen_head.py HEAD --target SMALL --grown GROWN --out FOLDER

The grown target has the small one's hidden states in its first columns and zeros after them, and
the old layers before the added ones. So the head reads the same layers, with zeros for the added
columns, drafts what it drafted, and keeps its own width; the embeddings that it shared become its
own. EVERY FIGURE MADE WITH IT HAS TO SAY THAT THE TARGET WAS INFLATED.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from specrt.errors import CheckpointError, SpecrtError
from specrt_export.atomic_folder import atomic_folder
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.safetensors_file import map_array
from specrt_export.checkpoint.scored_entries import NAME
from specrt_export.heads.eagle3_format import Head, read_head


def widen(head: Head, added: int) -> dict[str, NDArray[Any]]:
    """Return the weights of a head that reads hidden states with so many zeros after them.

    Raises: CheckpointError for norms over what is read, whose mean the zeros would change.
    """
    config = head.config
    if config.norm_before_fc or config.fc_norm:
        raise CheckpointError(
            f"{head.checkpoint.origin} normalises what it reads of its target, and zeros would "
            "change the mean; only heads without norm_before_fc and fc_norm can be widened"
        )
    weights = {name: map_array(stored).astype(np.float32) for name, stored in head.weights.items()}
    parts = np.split(weights["fc.weight"], len(config.inputs), axis=1)
    weights["fc.weight"] = np.hstack([np.pad(part, ((0, 0), (0, added))) for part in parts])
    return weights


def wider_config(head: Head, width: int) -> dict[str, Any]:
    """Return the config of a head whose target is so wide."""
    layers = {"eagle_aux_hidden_state_layer_ids": list(head.config.inputs)}
    note = f"{head.checkpoint.origin}, of a target of width {head.config.target_width}"
    return {
        **head.checkpoint.config, **layers, "target_hidden_size": width, "dtype": "float32",
        "specrt_widened_from": note,
    }  # fmt: skip


def write(head: Head, grown: Checkpoint, out: Path) -> None:
    """Write the head for the grown target.

    Raises: CheckpointError for a target that is narrower, or was not grown.
    """
    width = grown.config["hidden_size"]
    if "specrt_inflated_from" not in grown.config or width < head.config.target_width:
        raise CheckpointError(
            f"{grown.origin}, of width {width}, was not grown from a target of width "
            f"{head.config.target_width}; give what tools/inflate.py wrote"
        )
    weights = widen(head, width - head.config.target_width)
    if head.entries is not None:
        weights[NAME] = head.entries - np.arange(len(head.entries))
    with atomic_folder(out) as folder:
        text = json.dumps(wider_config(head, width), indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("head", type=FOLDER)
@click.option("--target", type=FOLDER, required=True, help="The target that HEAD was trained for.")
@click.option("--grown", type=FOLDER, required=True, help="The same, grown by tools/inflate.py.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to make.")
def main(head: Path, target: Path, grown: Path, out: Path) -> None:
    """Let HEAD draft for its target's grown likeness, at the width it has."""
    try:
        small = read_head(Checkpoint.open(head), Checkpoint.open(target))
        write(small, Checkpoint.open(grown), out)
    except SpecrtError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{out} drafts for {grown}, whose size is inflated; say so next to figures.")


if __name__ == "__main__":
    main()
