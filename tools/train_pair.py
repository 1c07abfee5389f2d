"""Train a draft/target pair: Llama on folders of text, or T5 on inverse text normalisation.

    train_pair.py text FOLDER... --out OUT          tokenizer, training tokens, held-out tokens
    train_pair.py train llama target --out OUT      target by cross-entropy
    train_pair.py train llama draft --out OUT       draft by cross-entropy
    train_pair.py train llama distill --out OUT     draft on the distributions of OUT/target
    train_pair.py measure llama --out OUT           held-out losses and agreement of a pair

    train_pair.py draw --out OUT                    pairs of texts, and a tokenizer of them
    train_pair.py train t5 target --out OUT         target by cross-entropy
    train_pair.py train t5 draft --out OUT          draft on the distributions of OUT/target
    train_pair.py measure t5 --out OUT              answers that are right to the letter, by rule
    train_pair.py prompts FILE.jsonl                held-out pairs, as `specrt` reads prompts

Pairs of texts are numbers, dates, times and codes in words and in digits: drawn in itn/, a source
and the one answer that is right; nothing is downloaded. The T5 draft has its target's encoder, byte
for byte, and fewer decoder layers.

For Llama `--init PAIR` starts from an existing pair instead of random weights; give it to `text` as
well, so that the text is cut by that pair's tokenizer. A killed `train` continues when run again.
OUT/target and OUT/draft are Hugging Face checkpoints in bfloat16; OUT/report.json has the figures.

Hidden matrices are trained by Muon (Jordan et al. 2024, torch.optim.Muon), the rest by AdamW
(Loshchilov and Hutter 2019); the draft is distilled by the forward Kullback-Leibler divergence
(Hinton et al. 2015). Losses are in nats per token, times in seconds. The work is done in pair/, of
T5 in seq2seq/.
"""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
from transformers.utils.logging import disable_progress_bar

from itn.task import pairs
from pair.errors import BadInputError
from pair.measure import measure
from pair.model import HEAD, load_model
from pair.report import add_to_report
from pair.stage import Options
from pair.text import split_texts
from pair.tokenizer import load_tokenizer, new_tokenizer
from pair.tokens import load_tokens, write_split
from pair.training import Run, train
from seq2seq.pairs import TokenPairs
from seq2seq.tokenizer import new_tokenizer as pair_tokenizer
from seq2seq.training import Seq2SeqRun, measured

KINDS = {"llama": Run, "t5": Seq2SeqRun}
TOKENIZER_PAIRS = 20_000
FOLDER = click.Path(file_okay=False, path_type=Path)
out_option = click.option("--out", type=FOLDER, required=True, help="Folder of all results.")
init_option = click.option("--init", type=FOLDER, help="Existing pair (target/, draft/).")
window_option = click.option("--window", default=512, type=click.IntRange(8), help="Tokens each.")
test_option = click.option(
    "--tests", type=click.IntRange(1), help="Held-out windows or pairs to measure on."
)
pair_option = click.option("--pair", type=FOLDER, help="Pair to measure, if not OUT itself.")
kind_argument = click.argument("kind", type=click.Choice(list(KINDS)))
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
    """Train a draft/target pair of small models."""
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


@main.command("draw")
@out_option
@click.option("--pairs", "count", default=200_000, type=click.IntRange(1), help="To train on.")
@click.option(
    "--loose", default=0.5, type=click.FloatRange(0, 1), help="Share of sentences without sense."
)
@click.option("--vocabulary", default=1024, type=click.IntRange(258, 2**16), help="Entries.")
@click.option("--seed", default=1, type=click.IntRange(0), help="Of the texts.")
def draw_command(out: Path, count: int, loose: float, vocabulary: int, seed: int) -> None:
    """Draw pairs of texts into OUT/train.npz."""
    out.mkdir(parents=True, exist_ok=True)
    plain = islice(pairs(seed), TOKENIZER_PAIRS)
    texts = (text for pair in plain for text in (pair.source, pair.answer))
    tokenizer = pair_tokenizer(texts, vocabulary)
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
@kind_argument
@click.argument("stage", type=click.Choice(sorted({s for k in KINDS.values() for s in k.stages})))
@out_option
@init_option
@click.option("--minutes", type=float, help="Training time; pauses of the process are left out.")
@click.option("--deadline", type=click.DateTime(["%H:%M"]), help="Time of day in UTC to end by.")
@click.option("--steps", default=10**9, type=click.IntRange(0), help="End after as many steps.")
@click.option("--batch", type=click.IntRange(1), help="Windows or pairs a step.")
@window_option
@click.option("--seed", default=1, type=click.IntRange(0), help="Of weights and order of text.")
@click.option("--muon", type=float, help="Peak learning rate of matrices, if not the stage's.")
@click.option("--adam", type=float, help="Peak learning rate of the rest, if not the stage's.")
@click.option("--hold", default=0.4, type=click.FloatRange(0, 0.99), help="Share before decay.")
@click.option("--width", type=click.IntRange(HEAD), help="Of a new model, a multiple of 64.")
@click.option("--layers", type=click.IntRange(1), help="Of a new model; of a T5 draft's decoder.")
@click.option("--save-every", default=120.0, help="Seconds between saved states.")
@test_option
@device_option
def train_command(kind: str, stage: str, device: str, **options: Any) -> None:
    """Train one STAGE, or continue it, and write its checkpoint."""
    family = KINDS[kind]
    if stage not in family.stages:
        raise BadInputError(f"{kind} has no stage {stage!r}; expected {', '.join(family.stages)}")
    for name in ("minutes", "batch", "tests"):
        options[name] = options[name] or getattr(family, name)
    o = Options(device="cpu" if kind == "t5" else usable_device(device), **options)
    run, state = family(stage, o), o.out / "state" / f"{stage}.pt"
    if state.is_file():
        run.load(state)
    train(run, state)
    scores = run.write()
    add_to_report(o.out, stage, run.figures() | scores)


@main.command("measure")
@kind_argument
@out_option
@pair_option
@window_option
@test_option
@device_option
def measure_command(
    kind: str, out: Path, pair: Path | None, window: int, tests: int | None, device: str
) -> None:
    """Print the held-out figures of a pair as JSON."""
    folder, tests = pair or out, tests or KINDS[kind].tests
    if kind == "t5":
        for name in Seq2SeqRun.stages:
            add_to_report(out, f"{name}_held_out", measured(folder, name, tests))
        return
    tokens, device = load_tokens(out, "held_out", window), usable_device(device)
    loaded = {
        name: load_model(folder / name, out / "tokenizer.json", device)
        for name in ("target", "draft")
    }
    click.echo(json.dumps(measure(loaded, tokens, window, tests, device)))


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


if __name__ == "__main__":
    main()
