"""Train a T5 pair on inverse text normalisation: numbers, dates, times and codes in digits.

    train_seq2seq.py text --out OUT               pairs of texts, and a tokenizer of them
    train_seq2seq.py train target --out OUT       target by cross-entropy
    train_seq2seq.py train draft --out OUT        draft on the distributions of OUT/target
    train_seq2seq.py measure --out OUT            answers that are right to the letter, by rule
    train_seq2seq.py prompts FILE.jsonl           held-out pairs, as `specrt` reads prompts

The texts are drawn in itn/, a source and the one answer that is right; nothing is downloaded. The
draft has its target's encoder, byte for byte, and fewer decoder layers. A killed `train` continues
when run again. OUT/target and OUT/draft are Hugging Face checkpoints in bfloat16; OUT/report.json
has the figures. Losses are in nats per token, times in seconds. The work is done in seq2seq/, and
what it shares with train_pair.py in pair/.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
from transformers.utils.logging import disable_progress_bar

from itn.task import pairs
from pair.errors import BadInputError
from pair.report import add_to_report
from pair.stage import Options
from pair.training import train
from seq2seq.measure import measure
from seq2seq.model import HEAD, load_model, save_model
from seq2seq.pairs import TokenPairs
from seq2seq.tokenizer import load_tokenizer, new_tokenizer
from seq2seq.training import STAGES, Seq2SeqRun

TOKENIZER_PAIRS = 20_000
FOLDER = click.Path(file_okay=False, path_type=Path)
out_option = click.option("--out", type=FOLDER, required=True, help="Folder of all results.")
test_option = click.option(
    "--test-pairs", default=200, type=click.IntRange(1), help="Held-out pairs to measure on."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--threads", type=click.IntRange(1), help="CPU threads; without it, all.")
def main(threads: int | None) -> None:
    """Train a T5 pair on spoken and written forms of numbers, dates, times and codes."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    if threads is not None:
        torch.set_num_threads(threads)


@main.command("text")
@out_option
@click.option("--pairs", "count", default=200_000, type=click.IntRange(1), help="To train on.")
@click.option(
    "--loose", default=0.5, type=click.FloatRange(0, 1), help="Share of sentences without sense."
)
@click.option("--vocabulary", default=1024, type=click.IntRange(258, 2**16), help="Entries.")
@click.option("--seed", default=1, type=click.IntRange(0), help="Of the texts.")
def text_command(out: Path, count: int, loose: float, vocabulary: int, seed: int) -> None:
    """Draw pairs of texts into OUT/train.npz."""
    out.mkdir(parents=True, exist_ok=True)
    plain = islice(pairs(seed), TOKENIZER_PAIRS)
    texts = (text for pair in plain for text in (pair.source, pair.answer))
    tokenizer = new_tokenizer(texts, vocabulary)
    tokens = TokenPairs.cut(tokenizer, list(islice(pairs(seed, loose=loose), count)))
    tokens.save(out / "train.npz")
    tokenizer.save(str(out / "tokenizer.json"))
    figures = {
        "pairs": len(tokens),
        "tokens": tokens.tokens(),
        "entries": tokenizer.get_vocab_size(),
    }
    add_to_report(out, "text", figures)


@main.command("train")
@click.argument("stage", type=click.Choice(list(STAGES)))
@out_option
@click.option("--minutes", default=30.0, help="Training time; pauses of the process are left out.")
@click.option("--deadline", type=click.DateTime(["%H:%M"]), help="Time of day in UTC to end by.")
@click.option("--steps", default=10**9, type=click.IntRange(0), help="End after as many steps.")
@click.option("--batch", default=32, type=click.IntRange(1), help="Pairs a step.")
@click.option("--seed", default=1, type=click.IntRange(0), help="Of weights and order of pairs.")
@click.option("--muon", type=float, help="Peak learning rate of matrices, if not the stage's.")
@click.option("--adam", type=float, help="Peak learning rate of the rest, if not the stage's.")
@click.option("--hold", default=0.4, type=click.FloatRange(0, 0.99), help="Share before decay.")
@click.option("--width", type=click.IntRange(HEAD), help="Of a new target, a multiple of 64.")
@click.option(
    "--layers", type=click.IntRange(1), help="Of a new target's sides; of a draft's decoder."
)
@click.option("--save-every", default=120.0, help="Seconds between saved states.")
@test_option
def train_command(stage: str, test_pairs: int, **options: Any) -> None:
    """Train one STAGE, or continue it, and write its checkpoint."""
    o = Options(device="cpu", init=None, window=0, test_windows=0, **options)
    run, state = Seq2SeqRun(stage, o), o.out / "state" / f"{stage}.pt"
    if state.is_file():
        run.load(state)
    train(run, state)
    save_model(run.model, run.tokenizer, o.out / stage)
    add_to_report(o.out, stage, run.figures() | measured(o.out, stage, test_pairs))


@main.command("measure")
@out_option
@click.option("--pair", type=FOLDER, help="Pair to measure, if not OUT itself.")
@test_option
def measure_command(out: Path, pair: Path | None, test_pairs: int) -> None:
    """Measure a pair on held-out texts: exact answers, and how often the draft agrees."""
    for name in STAGES:
        add_to_report(out, f"{name}_held_out", measured(pair or out, name, test_pairs))


@main.command("prompts")
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--count", default=40, type=click.IntRange(1), help="Pairs.")
@click.option("--seed", default=2, type=click.IntRange(0), help="Of the pairs.")
@click.option(
    "--sentences", default=(2, 3), multiple=True, type=click.IntRange(1), help="Of a pair."
)
@click.option("--trained", is_flag=True, help="As they are trained on, to calibrate with.")
def prompts_command(
    path: Path, count: int, seed: int, sentences: tuple[int, ...], trained: bool
) -> None:
    """Write pairs of texts to a file of prompts and completions."""
    drawn = islice(pairs(seed, not trained, sentences), count)
    lines = (
        json.dumps({"prompt": p.source, "completion": p.answer}, ensure_ascii=False) for p in drawn
    )
    path.write_text("".join(f"{line}\n" for line in lines), "utf8")


def measured(folder: Path, stage: str, count: int) -> dict[str, float]:
    """Return the held-out figures of one model of a pair."""
    if not (folder / "target").is_dir():
        raise BadInputError(f"no checkpoint: {folder / 'target'}")
    tokenizer = load_tokenizer(folder / stage / "tokenizer.json")
    models = {name: load_model(folder / name) for name in dict.fromkeys(("target", stage))}
    return measure(models, tokenizer, list(islice(pairs(1, held_out=True), count)))


if __name__ == "__main__":
    main()
