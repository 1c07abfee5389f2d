"""A stage under way: its steps, and the state it resumes from."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import click
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer
from transformers import LlamaForCausalLM

from pair.errors import BadInputError
from pair.measure import measure
from pair.model import load_model, logits_of, new_model, save_model
from pair.schedule import Clock, next_time, rate
from pair.stage import Options, Stage
from pair.tokenizer import load_tokenizer
from pair.tokens import load_tokens, training_starts, windows_at

REPORT_EVERY = 20  # steps between lines where the output is not a terminal
TRUE_TEXT_WEIGHT = 0.1  # of the cross-entropy while distilling


def distillation(logits: Tensor, truth: Tensor, entropy: Tensor) -> Tensor:
    """Return what a student that follows its teacher's distributions minimises.

    Shapes: logits and truth, in logarithms of chances, [tokens, vocabulary].
    Source: Hinton et al. 2015, arXiv:1503.02531 (distillation, here without a temperature).
    """
    own = logits.log_softmax(-1)
    divergence = functional.kl_div(own, truth, reduction="batchmean", log_target=True)
    return divergence + TRUE_TEXT_WEIGHT * entropy


def losses(
    model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, windows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (what to minimise, cross-entropy); a teacher's student follows its distributions.

    Shapes: windows int64 [batch, window + 1].
    """
    logits = logits_of(model, windows)
    entropy = functional.cross_entropy(logits, windows[:, 1:].flatten())
    if teacher is None:
        return entropy, entropy
    with torch.no_grad():
        truth = logits_of(teacher, windows).log_softmax(-1)
    return distillation(logits, truth, entropy), entropy


def first_model(name: str, o: Options) -> LlamaForCausalLM:
    """Return the model a stage begins with: that of `o.init`, of the stage before, or random."""
    spec, tokenizer = Run.stages[name], o.out / "tokenizer.json"
    if o.init is not None or name == "distill":
        return load_model((o.init or o.out) / spec.model, tokenizer, o.device)
    torch.manual_seed(o.seed)
    size = load_tokenizer(tokenizer).get_vocab_size()
    model = new_model(size, o.width or spec.width, o.layers or spec.layers, o.window)
    nn.Module.to(model, o.device)
    return model


def optimizers_of(model: LlamaForCausalLM, muon: float, adam: float) -> list[Optimizer]:
    """Give Muon the layers' matrices and AdamW the embeddings and norms, at those rates.

    Source: Jordan et al. 2024 (Muon); Loshchilov and Hutter 2019, arXiv:1711.05101 (AdamW).
    """
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, weight in model.named_parameters():
        (matrices if weight.ndim == 2 and "embed" not in name else others).append(weight)
    return [
        Muon(matrices, lr=muon, momentum=0.95, weight_decay=0.01),
        AdamW(others, lr=adam, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Run:
    """A stage of a Llama pair: what is saved and read back, and how to take a step."""

    stages: ClassVar[dict[str, Stage]] = {
        "target": Stage("target", 384, 8, 0.02, 3e-3),
        "draft": Stage("draft", 128, 2, 0.02, 5e-3),
        "distill": Stage("draft", 128, 2, 0.01, 2e-3),
    }
    minutes, batch, tests = 60.0, 16, 128
    """Defaults: of the training time, of windows a step, and of held-out windows."""

    # Of the kinds that a stage works on.
    model: Any
    teacher: Any
    tokens: Any
    peaks: Sequence[float]
    optimizers: list[Optimizer]

    def __init__(self, name: str, o: Options) -> None:
        self.name, self.o = name, o
        self.tokenizer = o.out / "tokenizer.json"
        self.clock = Clock(o.minutes * 60, next_time(o.deadline), o.steps)
        self.loss = math.nan  # running mean of the cross-entropy
        self.open()

    def open(self) -> None:
        """Read the text, and make the model and what trains it."""
        name, o, spec = self.name, self.o, self.stages[self.name]
        self.tokens, self.held_out = (
            load_tokens(o.out, side, o.window) for side in ("train", "held_out")
        )
        self.model = first_model(name, o)
        self.teacher = None
        if name == "distill":
            self.teacher = load_model(o.out / "target", self.tokenizer, o.device)
        self.peaks = o.muon or spec.muon, o.adam or spec.adam
        self.optimizers = optimizers_of(self.model, *self.peaks)

    def losses(self) -> tuple[Tensor, Tensor]:
        """Return (what to minimise, cross-entropy) of the next windows."""
        o = self.o
        starts = training_starts(len(self.tokens), self.clock.steps, o.batch, o.window, o.seed)
        return losses(self.model, self.teacher, windows_at(self.tokens, starts, o.window, o.device))

    def step(self) -> None:
        """Train on the next text.

        Raises: ClickException when the loss is no longer a number.
        """
        clock = self.clock
        factor = rate(clock.done(), clock.steps, self.o.hold)
        loss, entropy = self.losses()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        new = entropy.item()
        if not math.isfinite(new):
            raise click.ClickException(f"loss {new} at step {clock.steps}: lower the rates")
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.loss = 0.95 * self.loss + 0.05 * new if clock.steps else new
        clock.tick()

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
        """Continue from a state that `save` wrote.

        Raises: BadInputError for a state of other settings.
        """
        state = torch.load(path, map_location=self.o.device, weights_only=True)
        if state["settings"] != self.settings():
            raise BadInputError(f"{path} is of other settings: repeat them or remove it")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.clock.active, self.clock.steps = state["clock"]
        self.loss = state["loss"]

    def write(self) -> dict[str, float]:
        """Write the checkpoint; return its held-out figures."""
        o, name = self.o, self.stages[self.name].model
        save_model(self.model, self.tokenizer, o.out / name)
        pair = {name: self.model}
        if self.teacher is not None:
            pair = {"target": self.teacher, name: self.model}
        return measure(pair, self.held_out, o.window, o.tests, o.device)

    def tokens_seen(self) -> int:
        """Return how many tokens all steps so far were trained on."""
        return self.clock.steps * self.o.batch * self.o.window

    def figures(self) -> dict[str, Any]:
        """Return the run's figures for the report, without the held-out ones."""
        return {
            "parameters": sum(weight.numel() for weight in self.model.parameters()),
            "steps": self.clock.steps,
            "tokens": self.tokens_seen(),
            "seconds": round(self.clock.active, 1),
            "train_loss": round(self.loss, 4) if self.clock.steps else None,
        }

    def line(self) -> str:
        """Return the run's figures for people."""
        clock = self.clock
        pace = self.tokens_seen() / max(clock.active, 1e-9)
        at = f"{clock.done():.1%}, step {clock.steps}, {clock.active / 60:.1f} min"
        return f"{self.name} {at}, loss {self.loss:.3f}, {pace:.0f} tokens/s"


def train(run: Run, state: Path) -> None:
    """Train until the clock is done, saving to `state` now and then, and at the end."""
    terminal, saved = sys.stdout.isatty(), time.monotonic()
    run.clock.last = saved
    while run.clock.done() < 1.0:
        run.step()
        if terminal:
            click.echo(f"\r{run.line()}\x1b[K", nl=False)
        elif run.clock.steps % REPORT_EVERY == 0:
            click.echo(run.line())
        if time.monotonic() - saved > run.o.save_every:
            run.save(state)
            saved = time.monotonic()
    if terminal:
        click.echo()
    run.save(state)
