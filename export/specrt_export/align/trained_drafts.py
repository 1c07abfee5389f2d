"""Drafts in training: what each of them says of the tokens of a text, draft position by position.

Source of the unrolled steps of a head: training-time test of EAGLE-3, arXiv:2503.01840.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specrt_export.heads.eagle3_module import Eagle3Head, FeatureProjection


class TrainedDraft(Protocol):
    """A draft whose weights change."""

    @property
    def trained(self) -> nn.Module:
        """The weights that are trained."""

    def steps(self, tokens: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield, for each position of a draft that is not like the one before, its states.

        Shapes: tokens [B, S] -> (offset, states [B, S, H]): the state at s predicts token
            s + offset, where that is in the text.
        """

    def logits(self, states: Tensor) -> Tensor:
        """Return the scores of entries that follow states, in f32."""


class ModelDraft:
    """A language model: it reads the text alone, so each position of a draft is like the first."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def trained(self) -> nn.Module:
        """The model."""
        module: nn.Module = self.model
        return module

    def steps(self, tokens: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the states of the whole text, once for all positions."""
        output = self.model.base_model(input_ids=tokens, use_cache=False)
        yield 1, output.last_hidden_state

    def logits(self, states: Tensor) -> Tensor:
        """Return the scores of all tokens."""
        scores: Tensor = self.model.get_output_embeddings()(states)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        if cap:
            scores = torch.tanh(scores / cap) * cap
        return scores.float()


class HeadDraft:
    """An EAGLE-3 head: from its second position on it reads its own states."""

    def __init__(self, target: Any, feature: FeatureProjection, head: Eagle3Head) -> None:
        self.target, self.feature, self.head = target, feature, head
        self._module = nn.ModuleDict({"feature": feature, "head": head})

    @property
    def trained(self) -> nn.Module:
        """The head and the projection of features; its embeddings stay as they are."""
        return self._module

    def steps(self, tokens: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the states of each position; a draft that began at t + 1 is read at t.

        Keys of the first position are seen by all that follow; those of later ones only by the
        draft they belong to.
        """
        from transformers import DynamicCache

        inputs = self.head.flags.inputs
        with torch.no_grad():
            output = self.target.base_model(
                input_ids=tokens, use_cache=False, output_hidden_states=True
            )
            entering = [output.hidden_states[i] for i in inputs]
            embeds = self.head.embed_tokens(nn.functional.pad(tokens, (0, count)))
        width = tokens.shape[1]
        hidden = self.feature(entering)
        least = torch.finfo(torch.float32).min
        first = torch.full((width, width), least).triu(1)
        own = torch.full((width, width), least).fill_diagonal_(0.0)
        cache, mask = DynamicCache(), first
        for step in range(count):
            fed = embeds[:, step + 1 : step + 1 + width]
            positions = torch.arange(step, step + width)[None]
            state = self.head(fed, hidden, positions, mask[None, None], cache)
            yield step + 2, state
            hidden = self.head.fed_back(state)
            mask = torch.cat([mask, own], dim=-1)

    def logits(self, states: Tensor) -> Tensor:
        """Return the scores of the entries that the head has."""
        return self.head.logits(states).float()
