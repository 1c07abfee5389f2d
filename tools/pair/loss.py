"""What training minimises."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from pair.model import logits_of

TRUE_TEXT_WEIGHT = 0.1  # of the cross-entropy while distilling


def losses(
    model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, windows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (what to minimise, cross-entropy); a teacher's student follows its distributions.

    Shapes: windows int64 [batch, window + 1].
    Source: Hinton et al. 2015, arXiv:1503.02531 (distillation, here without a temperature).
    """
    logits = logits_of(model, windows)
    entropy = functional.cross_entropy(logits, windows[:, 1:].flatten())
    if teacher is None:
        return entropy, entropy
    with torch.no_grad():
        truth = logits_of(teacher, windows).log_softmax(-1)
    own = logits.log_softmax(-1)
    divergence = functional.kl_div(own, truth, reduction="batchmean", log_target=True)
    return divergence + TRUE_TEXT_WEIGHT * entropy, entropy
