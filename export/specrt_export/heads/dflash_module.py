"""A block head as a torch module: what the target leaves for it, and its own forward pass.

Source: DFlash (z-lab/dflash) and DSpark (deepseek-ai/DeepSpec). Parameters have the names that
checkpoints have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding

from specrt_export.heads.dflash_format import BlockConfig
from specrt_export.heads.eagle3_module import layer_config

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attends in a layer: takes its number, queries [B, H, S, D] of the block, and the new keys and
values [B, Hkv, C + S, D]; returns [B, S, H, D]."""


class ContextProjection(torch.nn.Module):
    """Makes a feature of what enters some layers of the target.

    Shapes: one [B, S, target_width] for each layer -> [B, S, width].
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        read, eps = len(config.inputs) * config.target_width, layer_config(config).rms_norm_eps
        self.fc = torch.nn.Linear(read, config.width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.width, eps=eps)

    def forward(self, states: list[Tensor]) -> Tensor:
        """Project the states of each position."""
        projected: Tensor = self.hidden_norm(self.fc(torch.cat(states, dim=-1)))
        return projected


class BlockAttention(torch.nn.Module):
    """Attention of the block's queries over keys and values of the context and of the block."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.number = number
        self.head_dim = config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        heads, kv = self.heads, self.kv_heads
        width, bias = config.hidden_size, bool(getattr(config, "attention_bias", False))

        def linear(read: int, made: int) -> torch.nn.Linear:
            return torch.nn.Linear(read, made, bias=bias)

        self.q_proj = linear(width, heads * self.head_dim)
        self.k_proj = linear(width, kv * self.head_dim)
        self.v_proj = linear(width, kv * self.head_dim)
        self.o_proj = linear(heads * self.head_dim, width)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self, block: Tensor, context: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        """Shapes: block [B, S, W], context [B, C, W], cos and sin [B, 1, C + S, D]; [B, S, W]."""
        read, behind = torch.cat([context, block], dim=1), context.shape[1]
        query = self.q_norm(self._split(self.q_proj(block), self.heads)).transpose(1, 2)
        key = self.k_norm(self._split(self.k_proj(read), self.kv_heads)).transpose(1, 2)
        value = self._split(self.v_proj(read), self.kv_heads).transpose(1, 2)
        query = query * cos[:, :, behind:] + _turned(query) * sin[:, :, behind:]
        key = key * cos + _turned(key) * sin
        attended = attend(self.number, query, key, value)
        joined = attended.reshape(*block.shape[:2], self.heads * self.head_dim)
        made: Tensor = self.o_proj(joined)
        return made

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.head_dim)


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


class BlockLayer(torch.nn.Module):
    """A decoder layer that also attends to the context's keys and values."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config, number)
        mlp: Any = Qwen3MLP
        self.mlp = mlp(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, state: Tensor, *attention: Any) -> Tensor:
        """Return the states of the block after the layer."""
        state = state + self.self_attn(self.input_layernorm(state), *attention)
        made: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return made


class MarkovHead(torch.nn.Module):
    """Scores that a token adds to the next one's, of low rank."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.markov_w1 = torch.nn.Embedding(config.vocabulary, config.markov_rank)
        self.markov_w2 = torch.nn.Linear(config.markov_rank, config.scored, bias=False)

    def forward(self, previous: Tensor) -> Tensor:
        """Shapes: tokens [B, N] -> [B, N, entries]."""
        added: Tensor = self.markov_w2(self.markov_w1(previous))
        return added


class ConfidenceHead(torch.nn.Module):
    """The log odds that the target accepts each token of a block.

    They are a sum of what the state says, and of what the token before says to a Markov head.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self._rank = config.markov_rank * config.confidence_reads_markov
        self._width = config.width
        self.proj = torch.nn.Linear(config.width + self._rank, 1)

    def of_states(self, states: Tensor) -> Tensor:
        """Shapes: [B, R, W] -> [B, R]."""
        zeros = states.new_zeros(*states.shape[:-1], self._rank)
        odds: Tensor = self.proj(torch.cat([states, zeros], dim=-1)).squeeze(-1)
        return odds

    def of_tokens(self, embeds: Tensor) -> Tensor:
        """Shapes: embeddings of the Markov head [B, N, rank] -> [B, N]."""
        zeros = embeds.new_zeros(*embeds.shape[:-1], self._width)
        read = torch.cat([zeros, embeds], dim=-1)
        return torch.nn.functional.linear(read, self.proj.weight).squeeze(-1)


class BlockDraftHead(torch.nn.Module):
    """The head: embeddings, decoder layers, the last projection, and what DSpark adds to it.

    It reads the last committed token and mask tokens after it, as one block, and what the target
    left at all positions before.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.flags = config
        self.config = layer_config(config)
        width, eps = config.width, self.config.rms_norm_eps
        self.embed_tokens = torch.nn.Embedding(config.vocabulary, width)
        self.layers = torch.nn.ModuleList(
            BlockLayer(self.config, number) for number in range(config.layers)
        )
        self.norm = Qwen3RMSNorm(width, eps=eps)
        self.lm_head = torch.nn.Linear(width, config.scored, bias=False)
        self.rotary_emb = Qwen3RotaryEmbedding(config=self.config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.has_confidence else None

    def forward(self, embeds: Tensor, context: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the normed states of a block.

        Shapes: embeds [B, S, width], context [B, C, width], positions [B, C + S]; [B, S, width].
        """
        cos, sin = (t.unsqueeze(1) for t in self.rotary_emb(embeds, position_ids=positions))
        state = embeds
        for layer in self.layers:
            state = layer(state, context, cos, sin, attend)
        normed: Tensor = self.norm(state)
        return normed
