"""A head that predicts several tokens, as a torch module: a model of its target's type, one layer.

Source: DeepSeek-V3, arXiv:2412.19437. Parameters have the names that Qwen's checkpoints have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specrt_export.heads.head_checkpoint import HeadSizes


class LastState(torch.nn.Module):
    """The feature: what leaves the target's last norm, as it is."""

    def __init__(self, _: HeadSizes) -> None:
        super().__init__()

    def forward(self, states: list[Tensor]) -> Tensor:
        """Return the one state that there is."""
        (state,) = states
        return state


class MtpModule(torch.nn.Module):
    """The head: both inputs normed and joined, a layer of the target's type, the last projection.

    At position t it reads token t + 1 and the target's last state at t, or its own, normed.
    """

    def __init__(self, config: HeadSizes) -> None:
        super().__init__()
        model = one_layer(config)
        decoder: Any = model.base_model
        self.config, width = model.config, config.width
        for name, part in decoder.named_children():
            self.add_module(name, part)
        self.norm = decoder.norm
        norm, eps = type(self.norm), self.config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(width, eps), norm(width, eps)
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.lm_head = torch.nn.Linear(width, config.scored, bias=False)
        decoder.norm = torch.nn.Identity()
        self._decode = decoder.forward

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, _: Tensor | None, cache: Any
    ) -> Tensor:
        """Return the states of all positions before the last norm; masks are the layer's own.

        Shapes: embeds and hidden [B, S, width], positions [B, S] -> [B, S, width].
        """
        normed = self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)
        made: Tensor = self._decode(
            inputs_embeds=self.fc(torch.cat(normed, dim=-1)), position_ids=positions,
            past_key_values=cache, use_cache=cache is not None,
        )[0]  # fmt: skip
        return made

    def fed_back(self, state: Tensor) -> Tensor:
        """Return what the next token is paired with, where the target's state is not known."""
        normed: Tensor = self.norm(state)
        return normed

    def logits(self, state: Tensor) -> Tensor:
        """Return the scores [..., scored] that follow a state."""
        scores: Tensor = self.lm_head(self.norm(state))
        return scores


def one_layer(config: HeadSizes) -> Any:
    """Return a model of the target's type with one layer, which attends to all positions."""
    from transformers import AutoConfig, AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM

    known = {k: v for k, v in config.layer.items() if k not in ("model_type", "architectures")}
    made = AutoConfig.for_model(config.layer["model_type"], **known)
    made.num_hidden_layers = config.layers
    if getattr(made, "layer_types", None):
        made.layer_types = ["full_attention"] * config.layers
    return factory.from_config(made, attn_implementation="eager", dtype=torch.float32)
