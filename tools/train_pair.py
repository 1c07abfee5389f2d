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
(Hinton et al. 2015). Losses are in nats per token, times in seconds.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

END = "<|endoftext|>"  # token 0, after every file
FILE_BYTES = range(200, 400_000)
LONGEST_LINE = 1000  # characters; a file with a longer line is data, not writing
HEAD = 64  # width of an attention head
WARMUP_STEPS = 40
FINAL_RATE = 0.03  # learning rate at the end, as a share of its peak
TRUE_TEXT_WEIGHT = 0.1  # of the cross-entropy while distilling
PAUSE_SECONDS = 20.0  # a longer step was a stopped process, not work
REPORT_EVERY = 20  # steps between lines where the output is not a terminal

Tokens = np.ndarray[Any, np.dtype[np.uint16]]


class BadInputError(click.ClickException):
    """Something the caller gave cannot be used: one line, exit status 2."""

    exit_code = 2


@dataclass(frozen=True)
class Stage:
    """What one stage trains: the model's name and shape, and its peak learning rates."""

    model: str
    width: int
    layers: int
    muon: float
    adam: float


STAGES = {
    "target": Stage("target", 384, 8, 0.02, 3e-3),
    "draft": Stage("draft", 128, 2, 0.02, 5e-3),
    "distill": Stage("draft", 128, 2, 0.01, 2e-3),
}


@dataclass(frozen=True)
class Options:
    """The options of `train`; its help says what they are."""

    out: Path
    init: Path | None
    minutes: float
    deadline: datetime | None
    steps: int
    batch: int
    window: int
    seed: int
    muon: float | None
    adam: float | None
    hold: float
    width: int | None
    layers: int | None
    save_every: float
    test_windows: int
    device: str


def add_to_report(out: Path, name: str, figures: dict[str, Any]) -> None:
    """Put one stage's figures into OUT/report.json next to those of the others, and print them."""
    path, aside = out / "report.json", out / "report.json.tmp"
    report = json.loads(path.read_text("utf8")) if path.is_file() else {}
    aside.write_text(json.dumps(report | {name: figures}, indent=2) + "\n", "utf8")
    aside.replace(path)
    click.echo(json.dumps({name: figures}))


# --- text -----------------------------------------------------------------------------------


def usable_texts(folders: Iterable[Path], suffix: str) -> Iterator[tuple[bytes, str]]:
    """Yield (hash, text) of every file in UTF-8, of a usable size and without endless lines."""
    for folder in folders:
        if not folder.is_dir():
            raise BadInputError(f"not a folder: {folder}")
        for path in folder.rglob(f"*{suffix}"):
            if not path.is_file() or path.stat().st_size not in FILE_BYTES:
                continue
            try:
                text = path.read_text("utf8")
            except UnicodeDecodeError:
                continue
            if max(map(len, text.split("\n"))) <= LONGEST_LINE:
                yield hashlib.sha256(text.encode()).digest(), text


def split_texts(
    folders: Iterable[Path], seen: Iterable[Path], suffix: str, share: float
) -> tuple[list[str], list[str]]:
    """Return the different texts of all folders as (training, held out), in order of their hash.

    A text's side follows from its content alone: another run, another order of folders or a copy
    under another name cannot move it across. Nothing in `seen` is ever held out.
    """
    old, new = dict(usable_texts(seen, suffix)), dict(usable_texts(folders, suffix))
    train: list[str] = []
    held_out: list[str] = []
    for digest, text in sorted((new | old).items()):
        chance = int.from_bytes(digest[:8], "big") / 2**64
        (held_out if chance < share and digest not in old else train).append(text)
    if not train or not held_out:
        counts = f"{len(train)} files to train on, {len(held_out)} held out"
        raise BadInputError(f"too little text in *{suffix}: {counts}")
    return train, held_out


def new_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer of those texts: single digits, END is token 0."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def cutting(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the parts of a tokenizer that decide which ids a text becomes."""
    parts = json.loads(tokenizer.to_str())
    return {key: parts[key] for key in ("added_tokens", "normalizer", "pre_tokenizer", "model")}


def load_tokenizer(path: Path, like: Path | None = None) -> Tokenizer:
    """Read a tokenizer.json with END = 0 and ids of 16 bits, which cuts as that at `like`."""
    if not path.is_file():
        raise BadInputError(f"no tokenizer: {path}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise BadInputError(f"not a tokenizer: {path}: {error}") from None
    if tokenizer.token_to_id(END) != 0 or tokenizer.get_vocab_size() > 2**16:
        raise BadInputError(f"tokenizer without {END} = 0, or of over 65536 entries: {path}")
    if like is not None and cutting(tokenizer) != cutting(load_tokenizer(like)):
        raise BadInputError(f"tokenizer mismatch: {path} and {like} differ")
    return tokenizer


def write_tokens(tokenizer: Tokenizer, texts: list[str], path: Path) -> int:
    """Write the texts' ids, END after each, as uint16 to `path`; return how many."""
    tokenizer.encode_special_tokens = True  # END spelled out in a text is ordinary text
    with path.open("wb") as file:
        for start in range(0, len(texts), 256):
            part = texts[start : start + 256]
            for encoding in tokenizer.encode_batch(part, add_special_tokens=False):
                np.array([*encoding.ids, 0], np.uint16).tofile(file)
    return path.stat().st_size // 2


def load_tokens(out: Path, name: str, window: int) -> Tokens:
    """Map OUT/name.bin, uint16 [tokens], which must hold two windows at least."""
    path = out / f"{name}.bin"
    if not path.is_file():
        raise BadInputError(f"no {path}: run `text` first")
    size = path.stat().st_size // 2
    if size < 2 * window + 2:
        raise BadInputError(f"too little text: {size} tokens in {path}, window {window}")
    return np.memmap(path, np.uint16, "r")


def windows_at(tokens: Tokens, starts: Iterable[int], window: int, device: str) -> Tensor:
    """Return int64 [starts, window + 1] on the device."""
    rows = np.stack([tokens[start : start + window + 1] for start in starts])
    return torch.from_numpy(rows.astype(np.int64)).to(device)


@lru_cache(maxsize=2)
def permutation(seed: int, turn: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the order of `count` windows in pass `turn` over the text."""
    return np.random.default_rng([seed, turn]).permutation(count)


def training_starts(size: int, step: int, o: Options) -> Iterator[int]:
    """Yield where the step's windows start in `size` tokens.

    A pass takes every window once, in an order and at an offset that follow from the seed and
    the pass: a resumed run goes on exactly where it was, with no generator's state to keep.
    """
    count = (size - 1 - o.window) // o.window
    for index in range(step * o.batch, (step + 1) * o.batch):
        turn, slot = divmod(index, count)
        yield int(permutation(o.seed, turn, count)[slot]) * o.window + turn * 97 % o.window


# --- models ---------------------------------------------------------------------------------


def new_model(vocabulary: int, width: int, layers: int, window: int) -> LlamaForCausalLM:
    """Return a random Llama: heads of 64, about three queries a key, tied embeddings."""
    heads, odd = divmod(width, HEAD)
    if odd:
        raise BadInputError(f"width {width} is not a multiple of {HEAD}")
    shared = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(1, heads // 3))
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=-(-width * 8 // 3 // 32) * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=max(2048, window),
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def load_model(folder: Path, tokenizer: Path, device: str) -> LlamaForCausalLM:
    """Read a checkpoint in float32; its tokenizer must be the one the text was cut by."""
    config = folder / "config.json"
    if not config.is_file():
        raise BadInputError(f"no checkpoint: {folder}")
    size = load_tokenizer(folder / "tokenizer.json", tokenizer).get_vocab_size()
    try:
        shape = json.loads(config.read_text("utf8"))
        if shape["model_type"] != "llama" or shape["vocab_size"] < size:
            raise BadInputError(f"not a Llama of {size} tokens: {folder}")
        model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BadInputError(f"cannot read {folder}: {error}".splitlines()[0]) from None
    nn.Module.to(model, device)
    return model


def save_model(model: LlamaForCausalLM, tokenizer: Path, folder: Path) -> None:
    """Write a Hugging Face checkpoint in bfloat16 aside, then put it in place of `folder`."""
    aside, old = folder.with_name(f"{folder.name}.tmp"), folder.with_name(f"{folder.name}.old")
    for path in (aside, old):
        shutil.rmtree(path, ignore_errors=True)
    rounded = copy.deepcopy(model)
    nn.Module.to(rounded, torch.bfloat16)
    rounded.save_pretrained(aside)
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(tokenizer),
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=model.config.max_position_embeddings,
    ).save_pretrained(aside)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def logits_of(model: LlamaForCausalLM, windows: Tensor) -> Tensor:
    """Return float32 logits [batch * window, vocabulary] for int64 [batch, window + 1]."""
    with torch.autocast(windows.device.type, torch.bfloat16):
        logits: Tensor = model(input_ids=windows[:, :-1], use_cache=False).logits
    return logits.float().flatten(0, 1)


@torch.no_grad()
def measure(
    pair: dict[str, LlamaForCausalLM], tokens: Tokens, window: int, count: int, device: str
) -> dict[str, float]:
    """Return held-out cross-entropy per model over `count` evenly spaced windows.

    With both models also their overlap, the mean of sum(min(p, q)): the chance that a token
    drawn from the draft is accepted (Leviathan et al. 2023); and how often both rank the same
    token first. Every prefix is the true text, not the models' own.
    """
    sums: dict[str, float] = {}
    starts = np.linspace(0, len(tokens) - window - 1, count).astype(int)
    for part in np.array_split(starts, -(-count // 8)):
        windows = windows_at(tokens, part, window, device)
        labels = windows[:, 1:].flatten()
        logits = {name: logits_of(model, windows) for name, model in pair.items()}
        figures = {f"{n}_loss": functional.cross_entropy(x, labels) for n, x in logits.items()}
        if len(logits) == 2:
            one, two = logits.values()
            shared = torch.minimum(one.softmax(-1), two.softmax(-1)).sum(-1)
            figures["overlap"] = shared.mean()
            figures["same_first"] = (one.argmax(-1) == two.argmax(-1)).float().mean()
        for name, value in figures.items():
            sums[name] = sums.get(name, 0.0) + value.item() * len(part) / count
    return {name: round(value, 4) for name, value in sums.items()}


# --- training -------------------------------------------------------------------------------


@dataclass
class Clock:
    """Training time against a budget and a wall-clock deadline, in seconds, and a step limit."""

    budget: float
    deadline: float  # Unix time
    limit: int  # steps
    active: float = 0.0
    steps: int = 0
    last: float = 0.0  # monotonic time at the end of the last step

    def tick(self) -> None:
        """End a step. One over PAUSE_SECONDS was a pause: it counts as a mean step at most."""
        now = time.monotonic()
        took, self.last = now - self.last, now
        if took > PAUSE_SECONDS and self.steps:
            took = min(took, self.active / self.steps)
        self.active += took
        self.steps += 1

    def done(self) -> float:
        """Return the share of the stage that is done, 0 to 1, replanned from what is left."""
        left = min(self.budget - self.active, self.deadline - time.time())
        if left <= 0 or self.steps >= self.limit:
            return 1.0
        return max(self.active / (self.active + left), self.steps / self.limit)


def next_time(clock: datetime | None) -> float:
    """Return the Unix time nearest to now at which it is that hour and minute in UTC."""
    if clock is None:
        return math.inf
    now, day = datetime.now(timezone.utc), timedelta(days=1)
    then = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
    return (now + (then - now + day / 2) % day - day / 2).timestamp()


def rate(done: float, steps: int, hold: float) -> float:
    """Return the learning rate's factor: warm-up, peak until `hold`, then down in a line."""
    decay = max(0.0, (done - hold) / (1 - hold))
    return min(1.0, (steps + 1) / WARMUP_STEPS) * (1 - decay * (1 - FINAL_RATE))


def losses(
    model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, windows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (what to minimise, cross-entropy) of int64 windows [batch, window + 1]."""
    logits = logits_of(model, windows)
    entropy = functional.cross_entropy(logits, windows[:, 1:].flatten())
    if teacher is None:
        return entropy, entropy
    with torch.no_grad():
        truth = logits_of(teacher, windows).log_softmax(-1)
    own = logits.log_softmax(-1)
    divergence = functional.kl_div(own, truth, reduction="batchmean", log_target=True)
    return divergence + TRUE_TEXT_WEIGHT * entropy, entropy


class Run:
    """A stage under way: everything that is saved and read back, and how to take a step."""

    def __init__(self, name: str, o: Options) -> None:
        """Begin with the weights of `o.init`, of the stage before, or random ones."""
        self.name, self.o, spec = name, o, STAGES[name]
        self.tokenizer = o.out / "tokenizer.json"
        self.tokens = load_tokens(o.out, "train", o.window)
        self.teacher = None
        if o.init is not None or name == "distill":
            self.model = load_model((o.init or o.out) / spec.model, self.tokenizer, o.device)
        else:
            torch.manual_seed(o.seed)
            size = load_tokenizer(self.tokenizer).get_vocab_size()
            width, layers = o.width or spec.width, o.layers or spec.layers
            self.model = new_model(size, width, layers, o.window)
            nn.Module.to(self.model, o.device)
        if name == "distill":
            self.teacher = load_model(o.out / "target", self.tokenizer, o.device)
        self.clock = Clock(o.minutes * 60, next_time(o.deadline), o.steps)
        self.loss = math.nan  # running mean of the cross-entropy
        self.make_optimizers(o.muon or spec.muon, o.adam or spec.adam)

    def make_optimizers(self, muon: float, adam: float) -> None:
        """Give Muon the layers' matrices and AdamW the embeddings and norms."""
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for name, weight in self.model.named_parameters():
            (matrices if weight.ndim == 2 and "embed" not in name else others).append(weight)
        self.peaks = [muon, adam]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=muon, momentum=0.95, weight_decay=0.01),
            torch.optim.AdamW(others, lr=adam, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def step(self) -> None:
        """Train on the next windows."""
        starts = training_starts(len(self.tokens), self.clock.steps, self.o)
        windows = windows_at(self.tokens, starts, self.o.window, self.o.device)
        factor = rate(self.clock.done(), self.clock.steps, self.o.hold)
        loss, entropy = losses(self.model, self.teacher, windows)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        new = entropy.item()
        if not math.isfinite(new):
            raise click.ClickException(f"loss {new} at step {self.clock.steps}: lower the rates")
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.loss = 0.95 * self.loss + 0.05 * new if self.clock.steps else new
        self.clock.tick()

    def settings(self) -> dict[str, Any]:
        """Return what must be equal for a saved state to fit."""
        return {
            "shape": [self.model.config.hidden_size, self.model.config.num_hidden_layers],
            "tokenizer": hashlib.sha256(self.tokenizer.read_bytes()).hexdigest(),
            "text": len(self.tokens),
            "order": [self.o.batch, self.o.window, self.o.seed],
        }

    def save(self, path: Path) -> None:
        """Write the state aside, then put it in place."""
        state = {
            "settings": self.settings(),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "clock": [self.clock.active, self.clock.steps],
            "loss": self.loss,
        }
        path.parent.mkdir(exist_ok=True)
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def load(self, path: Path) -> None:
        """Continue from a state that `save` wrote."""
        state = torch.load(path, map_location=self.o.device, weights_only=True)
        if state["settings"] != self.settings():
            raise BadInputError(f"{path} is of other settings: repeat them or remove it")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.clock.active, self.clock.steps = state["clock"]
        self.loss = state["loss"]

    def figures(self) -> dict[str, Any]:
        """Return the run's figures for the report, without the held-out ones."""
        return {
            "parameters": sum(weight.numel() for weight in self.model.parameters()),
            "steps": self.clock.steps,
            "tokens": self.clock.steps * self.o.batch * self.o.window,
            "seconds": round(self.clock.active, 1),
            "train_loss": round(self.loss, 4) if self.clock.steps else None,
        }

    def line(self) -> str:
        """Return the run's figures for people."""
        clock = self.clock
        pace = clock.steps * self.o.batch * self.o.window / max(clock.active, 1e-9)
        at = f"{clock.done():.1%}, step {clock.steps}, {clock.active / 60:.1f} min"
        return f"{self.name} {at}, loss {self.loss:.3f}, {pace:.0f} tokens/s"


def train(run: Run, state: Path) -> None:
    """Train until the clock is done, saving to `state` now and then, and at the end."""
    console, saved = Console(), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(run.name, total=1.0)
        run.clock.last = time.monotonic()
        while run.clock.done() < 1.0:
            run.step()
            bar.update(task, completed=run.clock.done(), description=run.line())
            if not console.is_terminal and run.clock.steps % REPORT_EVERY == 0:
                click.echo(run.line())
            if time.monotonic() - saved > run.o.save_every:
                run.save(state)
                saved = time.monotonic()
    run.save(state)


# --- commands -------------------------------------------------------------------------------

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
    return {"auto": "cuda" if found else "cpu"}.get(device, device)


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
    train, held = split_texts(folders, seen, suffix, held_out)
    if init is None:
        tokenizer = new_tokenizer(train, vocabulary)
    else:
        tokenizer = load_tokenizer(
            *(init / name / "tokenizer.json" for name in ("target", "draft"))
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").unlink(missing_ok=True)  # back once the tokens are all written
    figures = {
        "files": len(train),
        "characters": sum(map(len, train)),
        "tokens": write_tokens(tokenizer, train, out / "train.bin"),
        "held_out_files": len(held),
        "held_out_tokens": write_tokens(tokenizer, held, out / "held_out.bin"),
    }
    tokenizer.encode_special_tokens = False
    tokenizer.save(str(out / "tokenizer.json"))
    add_to_report(out, "text", figures)


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
