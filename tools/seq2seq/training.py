"""A stage of an encoder-decoder pair under way."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer
from transformers import T5ForConditionalGeneration

from itn.task import pairs
from pair.errors import BadInputError
from pair.stage import Stage
from pair.training import Run, distillation
from seq2seq.measure import measure
from seq2seq.model import HEAD, encode, load_model, logits_of, new_draft, new_target, save_model
from seq2seq.pairs import TokenPairs
from seq2seq.tokenizer import load_tokenizer


def optimizers_of(
    model: nn.Module, muon: float, adam: float
) -> tuple[list[Optimizer], list[float]]:
    """Give Muon the layers' matrices and AdamW the embeddings, biases and norms.

    T5 leaves scores undivided, so that its queries are smaller by sqrt(head), and so are the steps.
    Source: Jordan et al. 2024 (Muon); Loshchilov and Hutter 2019, arXiv:1711.05101 (AdamW);
    Raffel et al. 2020, arXiv:1910.10683 (T5).
    """
    queries: list[Tensor] = []
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        if weight.ndim < 2 or "shared" in name or "relative" in name:
            others.append(weight)
        else:
            (queries if name.endswith(".q.weight") else matrices).append(weight)
    query_rate = muon * HEAD**-0.5
    optimizers: list[Optimizer] = [
        Muon(matrices, lr=muon, momentum=0.95, weight_decay=0.01),
        Muon(queries, lr=query_rate, momentum=0.95, weight_decay=0.01),
        AdamW(others, lr=adam, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    return optimizers, [muon, query_rate, adam]


class Seq2SeqRun(Run):
    """A stage of a T5 pair on pairs of texts; the draft follows the target's distributions."""

    stages: ClassVar[dict[str, Stage]] = {
        "target": Stage("target", 192, 3, 0.02, 5e-3),
        "draft": Stage("draft", 192, 1, 0.01, 2e-3),
    }
    minutes, batch, tests = 30.0, 32, 200
    model: T5ForConditionalGeneration
    teacher: T5ForConditionalGeneration | None
    tokens: TokenPairs

    def open(self) -> None:
        """Read the pairs, and make the model and what trains it."""
        o, spec = self.o, self.stages[self.name]
        self.tokens = TokenPairs.load(o.out / "train.npz")
        torch.manual_seed(o.seed)
        layers = o.layers or spec.layers
        if self.name == "target":
            size = load_tokenizer(self.tokenizer).get_vocab_size()
            self.teacher = None
            self.model = new_target(size, o.width or spec.width, layers)
        else:
            self.teacher = load_model(o.out / "target")
            self.model = new_draft(self.teacher, layers)
        self.optimizers, self.peaks = optimizers_of(
            self.model, o.muon or spec.muon, o.adam or spec.adam
        )

    def losses(self) -> tuple[Tensor, Tensor]:
        """Return (what to minimise, cross-entropy) of the next pairs."""
        sources, answers = self.tokens.training_batch(self.clock.steps, self.o.batch, self.o.seed)
        labels = answers[answers.ne(0)]
        if self.teacher is None:
            logits = logits_of(self.model, sources, encode(self.model, sources), answers)
            entropy = functional.cross_entropy(logits, labels)
            return entropy, entropy
        with torch.no_grad():
            hidden = encode(self.teacher, sources)
            truth = logits_of(self.teacher, sources, hidden, answers).log_softmax(-1)
        logits = logits_of(self.model, sources, hidden, answers)
        entropy = functional.cross_entropy(logits, labels)
        return distillation(logits, truth, entropy), entropy

    def settings(self) -> dict[str, Any]:
        """Return what must be equal for a saved state to fit."""
        config = self.model.config
        return super().settings() | {"shape": [config.d_model, config.num_decoder_layers]}

    def write(self) -> dict[str, float]:
        """Write the checkpoint; return the held-out figures of what was written."""
        save_model(self.model, self.tokenizer, self.o.out / self.name)
        return measured(self.o.out, self.name, self.o.tests)

    def tokens_seen(self) -> int:
        """Return how many tokens of answers so many steps are trained on, by their mean length."""
        mean = len(self.tokens.arrays["answer"]) / len(self.tokens)
        return round(self.clock.steps * self.o.batch * mean)


def measured(folder: Path, stage: str, count: int) -> dict[str, float]:
    """Return the held-out figures of one model of a pair."""
    if not (folder / "target").is_dir():
        raise BadInputError(f"no checkpoint: {folder / 'target'}")
    tokenizer = load_tokenizer(folder / stage / "tokenizer.json")
    models = {name: load_model(folder / name) for name in dict.fromkeys(("target", stage))}
    return measure(models, tokenizer, list(islice(pairs(1, held_out=True), count)))
