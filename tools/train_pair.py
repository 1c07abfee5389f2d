"""Train a draft/target pair of Llama-architecture causal language models on folders of text.

    train_pair.py text FOLDER... --out OUT        tokenizer, training tokens, held-out tokens
    train_pair.py train target --out OUT          target by cross-entropy
    train_pair.py train draft --out OUT           draft by cross-entropy
    train_pair.py train distill --out OUT         draft on the distributions of OUT/target
    train_pair.py measure --out OUT               held-out losses and agreement of a pair

`--init PAIR` starts from an existing pair instead of random weights; give it to `text` as well,
so that the text is cut by that pair's tokenizer. A killed `train` continues when run again.
OUT/target and OUT/draft are Hugging Face checkpoints in bfloat16; OUT/report.json has the figures.

Hidden matrices are trained by Muon (Jordan et al. 2024, torch.optim.Muon), the rest by AdamW
(Loshchilov and Hutter 2019); the draft is distilled by the forward Kullback-Leibler divergence
(Hinton et al. 2015). Losses are in nats per token, times in seconds. The work is done in pair/.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import torch
from transformers.utils.logging import disable_progress_bar

from pair.errors import BadInputError
from pair.measure import measure
from pair.model import HEAD, load_model, save_model
from pair.report import add_to_report
from pair.stage import STAGES, Options
from pair.text import split_texts
from pair.tokenizer import load_tokenizer, new_tokenizer
from pair.tokens import load_tokens, write_split
from pair.training import Run, train

FOLDER = click.Path(file_okay=False, path_type=Path)
out_option = click.option("--out", type=FOLDER, required=True, help="Folder of all results.")
init_option = click.option("--init", type=FOLDER, help="Existing pair (target/, draft/).")
window_option = click.option("--window", default=512, type=click.IntRange(8), help="Tokens each.")
test_option = click.option(
    "--test-windows", default=128, type=click.IntRange(1), help="Held-out windows to measure on."
)
device_option = click.option("--device", default="auto", type=click.Choice(["auto", "cpu", "cuda"]))


def usable_device(device: str) -> str:
    """Return cpu or cuda for `auto`, or the name given where it can be used."""
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise BadInputError("no CUDA device")
    if device == "auto":
        return "cuda" if found else "cpu"
    return device


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--threads", type=click.IntRange(1), help="CPU threads; without it, all.")
def main(threads: int | None) -> None:
    """Train a draft/target pair of small Llama models on folders of text."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if threads is not None:
        os.environ["RAYON_NUM_THREADS"] = str(threads)  # the tokenizer's
        torch.set_num_threads(threads)


@main.command("text")
@click.argument("folders", type=FOLDER, nargs=-1, required=True)
@out_option
@init_option
@click.option("--seen", type=FOLDER, multiple=True, help="Folder to train on, never held out.")
@click.option("--suffix", default=".py", help="End of the names of the files to read.")
@click.option("--vocabulary", default=8192, type=click.IntRange(257, 2**16), help="Entries.")
@click.option("--held-out", default=0.01, type=click.FloatRange(0, 0.5), help="Share of files.")
def text_command(
    folders: tuple[Path, ...],
    out: Path,
    init: Path | None,
    seen: tuple[Path, ...],
    suffix: str,
    vocabulary: int,
    held_out: float,
) -> None:
    """Cut the text in FOLDERS into OUT/train.bin and OUT/held_out.bin."""
    kept, held = split_texts(folders, seen, suffix, held_out)
    if init is None:
        tokenizer = new_tokenizer(kept, vocabulary)
    else:
        target, draft = (init / name / "tokenizer.json" for name in ("target", "draft"))
        tokenizer = load_tokenizer(target, like=draft)
    add_to_report(out, "text", write_split(tokenizer, kept, held, out))


@main.command("train")
@click.argument("stage", type=click.Choice(list(STAGES)))
@out_option
@init_option
@click.option("--minutes", default=60.0, help="Training time; pauses of the process are left out.")
@click.option("--deadline", type=click.DateTime(["%H:%M"]), help="Time of day in UTC to end by.")
@click.option("--steps", default=10**9, type=click.IntRange(0), help="End after as many steps.")
@click.option("--batch", default=16, type=click.IntRange(1), help="Windows a step.")
@window_option
@click.option("--seed", default=1, type=click.IntRange(0), help="Of weights and order of text.")
@click.option("--muon", type=float, help="Peak learning rate of matrices, if not the stage's.")
@click.option("--adam", type=float, help="Peak learning rate of the rest, if not the stage's.")
@click.option("--hold", default=0.4, type=click.FloatRange(0, 0.99), help="Share before decay.")
@click.option("--width", type=click.IntRange(HEAD), help="Of a new model, a multiple of 64.")
@click.option("--layers", type=click.IntRange(1), help="Of a new model.")
@click.option("--save-every", default=120.0, help="Seconds between saved states.")
@test_option
@device_option
def train_command(stage: str, device: str, **options: Any) -> None:
    """Train one STAGE, or continue it, and write its checkpoint."""
    o = Options(device=usable_device(device), **options)
    held_out = load_tokens(o.out, "held_out", o.window)
    run, state = Run(stage, o), o.out / "state" / f"{stage}.pt"
    if state.is_file():
        run.load(state)
    train(run, state)
    name = STAGES[stage].model
    save_model(run.model, run.tokenizer, o.out / name)
    pair = {name: run.model} if run.teacher is None else {"target": run.teacher, name: run.model}
    scores = measure(pair, held_out, o.window, o.test_windows, o.device)
    add_to_report(o.out, stage, run.figures() | scores)


@main.command("measure")
@out_option
@click.option("--pair", type=FOLDER, help="Pair to measure, if not OUT itself.")
@window_option
@test_option
@device_option
def measure_command(
    out: Path, pair: Path | None, window: int, test_windows: int, device: str
) -> None:
    """Print the losses and the agreement of a pair on OUT's held-out text as JSON."""
    tokens, device = load_tokens(out, "held_out", window), usable_device(device)
    loaded = {
        name: load_model((pair or out) / name, out / "tokenizer.json", device)
        for name in ("target", "draft")
    }
    click.echo(json.dumps(measure(loaded, tokens, window, test_windows, device)))


if __name__ == "__main__":
    main()
