"""Losses and agreement on held-out text."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from pair.model import logits_of
from pair.tokens import Tokens, windows_at

BATCH = 8  # windows


@torch.no_grad()
def measure(
    pair: dict[str, LlamaForCausalLM], tokens: Tokens, window: int, count: int, device: str
) -> dict[str, float]:
    """Return held-out cross-entropy per model over `count` evenly spaced windows.

    With both models also their overlap, the mean of sum(min(p, q)): the chance that a token
    drawn from the draft is accepted; and how often both rank the same token first. Every prefix
    is the true text, not the models' own.
    Source: Leviathan et al. 2023, arXiv:2211.17192 (acceptance).
    """
    sums: dict[str, float] = {}
    starts = np.linspace(0, len(tokens) - window - 1, count).astype(int)
    for part in np.array_split(starts, -(-count // BATCH)):
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
