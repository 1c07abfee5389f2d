"""An EAGLE-3 head as a torch module: what the target leaves for it, and its own forward pass.

Source: EAGLE-3, Li et al. 2025, arXiv:2503.01840. Parameters have the names that checkpoints have.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from specrt_export.heads.eagle3_format import HeadConfig
from specrt_export.heads.head_checkpoint import HeadSizes


class FeatureProjection(torch.nn.Module):
    """Makes a feature of what enters some layers of the target.

    Shapes: one [B, S, target_width] for each layer -> [B, S, width].
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        norm = _parts(config).norm
        read, eps = len(config.inputs) * config.target_width, layer_config(config).rms_norm_eps
        self.fc = torch.nn.Linear(read, config.width, bias=False)
        self.input_norm = norm(read, eps=eps) if config.norm_before_fc else None
        self.fc_norm = (
            torch.nn.ModuleList(norm(config.target_width, eps=eps) for _ in config.inputs)
            if config.fc_norm
            else None
        )

    def forward(self, states: list[Tensor]) -> Tensor:
        """Project the states of each position."""
        if self.fc_norm is not None:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        joined = torch.cat(states, dim=-1)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        projected: Tensor = self.fc(joined)
        return projected


class Eagle3Head(torch.nn.Module):
    """The head: embeddings, one decoder layer or more, and the last projection.

    At position t it reads token t + 1 and the feature of position t, or its own last state.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        parts = _parts(config)
        self.flags = config
        self.config = layer_config(config)
        width, eps = config.width, self.config.rms_norm_eps
        self.embed_tokens = torch.nn.Embedding(config.vocabulary, width)
        self.layers = torch.nn.ModuleList(
            parts.layer(self.config, layer_idx=i) for i in range(config.layers)
        )
        first: Any = self.layers[0]
        first.hidden_norm = parts.norm(width, eps=eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(first.self_attn, name)
            wide = torch.nn.Linear(2 * width, narrow.out_features, bias=narrow.bias is not None)
            setattr(first.self_attn, name, wide)
        self.norm = parts.norm(width, eps=eps)
        self.lm_head = torch.nn.Linear(width, config.scored, bias=False)
        self.rotary_emb = parts.rotary(config=self.config)

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Return the states of all positions before the last norm.

        Shapes: embeds and hidden [B, S, width], positions [B, S] -> [B, S, width].
        """
        angles = self.rotary_emb(embeds, position_ids=positions)
        options: dict[str, Any] = {
            "attention_mask": mask, "position_ids": positions, "past_key_values": cache,
            "use_cache": cache is not None, "position_embeddings": angles,
        }  # fmt: skip
        first: Any = self.layers[0]
        normed = first.hidden_norm(hidden)
        residual = normed if self.flags.norm_before_residual else hidden
        joined = torch.cat([first.input_layernorm(embeds), normed], dim=-1)
        attended, _ = first.self_attn(hidden_states=joined, **options)
        state: Tensor = residual + attended
        state = state + first.mlp(first.post_attention_layernorm(state))
        for layer in self.layers[1:]:
            state = layer(state, **options)
        return state

    def fed_back(self, state: Tensor) -> Tensor:
        """Return what the next token is paired with, where the target's feature is not known."""
        return self.norm(state) if self.flags.norm_output else state

    def logits(self, state: Tensor) -> Tensor:
        """Return the scores [..., scored] that follow a state."""
        scores: Tensor = self.lm_head(self.norm(state))
        return scores


class _Parts:
    """The classes of transformers that layers of a type are made of."""

    def __init__(self, module: Any, name: str) -> None:
        self.layer = getattr(module, f"{name}DecoderLayer")
        self.norm = getattr(module, f"{name}RMSNorm")
        self.rotary = getattr(module, f"{name}RotaryEmbedding")


_NAMES = {"llama": "Llama", "qwen3": "Qwen3"}


def _parts(config: HeadSizes) -> _Parts:
    kind = str(config.layer["model_type"])
    return _Parts(import_module(f"transformers.models.{kind}.modeling_{kind}"), _NAMES[kind])


def layer_config(config: HeadSizes) -> Any:
    """Return the configuration of the layers, as transformers has it."""
    from transformers import AutoConfig

    known = {k: v for k, v in config.layer.items() if k not in ("model_type", "architectures")}
    known |= {"num_hidden_layers": config.layers, "vocab_size": config.vocabulary}
    made = AutoConfig.for_model(config.layer["model_type"], **known)
    made._attn_implementation = "eager"
    return made
