"""What a pair does on held-out texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import T5ForConditionalGeneration

from itn.task import Pair, exact_matches
from seq2seq.model import LENGTH, encode, logits_of
from seq2seq.pairs import TokenPairs

BATCH = 20  # pairs


@torch.no_grad()
def measure(
    models: Mapping[str, T5ForConditionalGeneration], tokenizer: Tokenizer, texts: Sequence[Pair]
) -> dict[str, float]:
    """Return figures of a target, or of a target and its draft.

    Of each model the cross-entropy of the right answers; of the target alone how many of its greedy
    answers are right to the letter; of both their overlap, the mean of sum(min(p, q)), and how
    often they rank the same token first, after every prefix of the right answers.
    Source: Leviathan et al. 2023, arXiv:2211.17192 (acceptance).
    """
    tokens = TokenPairs.cut(tokenizer, texts)
    sums: dict[str, float] = {}
    total, right = 0, 0
    for begin in range(0, len(texts), BATCH):
        part = range(begin, min(begin + BATCH, len(texts)))
        sources, answers = tokens.batch(part)
        labels = answers[answers.ne(0)]
        logits = {
            name: logits_of(model, sources, encode(model, sources), answers)
            for name, model in models.items()
        }
        figures = {f"{n}_loss": functional.cross_entropy(x, labels) for n, x in logits.items()}
        if len(models) == 2:
            one, two = logits.values()
            figures["overlap"] = torch.minimum(one.softmax(-1), two.softmax(-1)).sum(-1).mean()
            figures["same_first"] = (one.argmax(-1) == two.argmax(-1)).float().mean()
        else:
            (model,) = models.values()
            right += exact_matches([texts[i] for i in part], answers_of(model, tokenizer, sources))
        for name, value in figures.items():
            sums[name] = sums.get(name, 0.0) + value.item() * len(labels)
        total += len(labels)
    shares = {name: round(value / total, 4) for name, value in sums.items()}
    return shares if len(models) == 2 else {"exact": round(right / len(texts), 4), **shares}


def answers_of(
    model: T5ForConditionalGeneration, tokenizer: Tokenizer, sources: torch.Tensor
) -> list[str]:
    """Return the greedy answers to sources that are padded with 0."""
    generator: Any = model  # the library's own types refuse the call
    written = generator.generate(
        sources, attention_mask=sources.ne(0), do_sample=False, max_new_tokens=LENGTH // 2
    )
    texts: list[str] = tokenizer.decode_batch(written.tolist())
    return texts
