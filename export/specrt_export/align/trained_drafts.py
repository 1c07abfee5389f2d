"""Drafts in training: what each of them says of the tokens of a text, draft position by position.

Source of the unrolled steps of a head: training-time test of EAGLE-3, arXiv:2503.01840.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specrt_export.align.trace_batches import TraceBatch
from specrt_export.heads.eagle3_module import Eagle3Head, FeatureProjection


class TrainedDraft(Protocol):
    """A draft whose weights change."""

    @property
    def trained(self) -> nn.Module:
        """The weights that are trained."""

    def steps(
        self, batch: TraceBatch, begins: Tensor, count: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each position of a draft that is not like the one before, its states.

        Drafts of `count` tokens begin at some of the batch's places.
        Shapes: begins [N] bool -> (states [M, H], places [M]): what is scored from a state is the
            token at a place.
        """

    def logits(self, states: Tensor) -> Tensor:
        """Return the scores of entries that follow states, in f32."""


class ModelDraft:
    """A language model: it reads the text alone, so each position of a draft is like the first."""

    def __init__(self, model: Any) -> None:
        self.model = _without_scores(model)

    @property
    def trained(self) -> nn.Module:
        """The model."""
        module: nn.Module = self.model
        return module

    def steps(
        self, batch: TraceBatch, begins: Tensor, count: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the states of all tokens that a draft has, once for all positions."""
        output = self.model.base_model(input_ids=batch.tokens, use_cache=False)
        drafted = begins.clone()
        for position in range(1, count):
            at, there = batch.behind(begins.nonzero()[:, 0], position)
            drafted[at[there]] = True
        places = drafted.nonzero()[:, 0]
        row, token = batch.where[places].T
        yield output.last_hidden_state[row, token - 1], places

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
        self.feature, self.head = feature, head
        self._read = _lower_layers(_without_scores(target).base_model, max(head.flags.inputs) + 1)
        self._module = nn.ModuleDict({"feature": feature, "head": head})
        _attend_unrolled(head.config)

    @property
    def trained(self) -> nn.Module:
        """The head and the projection of features; its embeddings stay as they are."""
        return self._module

    def steps(
        self, batch: TraceBatch, begins: Tensor, count: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the states of each position, of the drafts that begin where they are asked for.

        A draft that begins at token t + 2 is read at t. The first position is computed for the
        whole text, and all that follow see its keys up to theirs; keys of later positions are seen
        by the draft they belong to.
        """
        with torch.no_grad():
            output = self._read(input_ids=batch.tokens, use_cache=False, output_hidden_states=True)
            entering = [output.hidden_states[i] for i in self.head.flags.inputs]
            embeds = self.head.embed_tokens(nn.functional.pad(batch.tokens, (0, count)))
        width = batch.tokens.shape[1]
        keys, order = _UnrolledKeys(), torch.arange(width)
        hidden = self.feature(entering)
        state = self.head(embeds[:, 1 : 1 + width], hidden, order[None], None, keys)
        places = (begins & (batch.where[:, 1] >= 2)).nonzero()[:, 0]
        row, token = batch.where[places].T.contiguous()
        column = _columns(row)
        at = torch.zeros(
            len(batch.tokens), int(column.max()) + 1 if len(row) else 1, dtype=torch.int64
        )
        at[row, column] = token - 2
        state = state.gather(1, at[..., None].expand(-1, -1, state.shape[-1]))
        yield state[row, column], places
        seen = (order <= at[..., None])[:, None]
        for position in range(1, count):
            fed = embeds.gather(1, (at + position + 1)[..., None].expand_as(state))
            state = self.head(fed, self.head.fed_back(state), at + position, seen, keys)
            behind, there = batch.behind(places, position)
            yield state[row, column][there], behind[there]

    def logits(self, states: Tensor) -> Tensor:
        """Return the scores of the entries that the head has."""
        return self.head.logits(states).float()


def _columns(row: Tensor) -> Tensor:
    """Count the entries of each row, which follow one another, from 0."""
    return torch.arange(len(row)) - torch.searchsorted(row, row)


def _without_scores(model: Any) -> Any:
    """Let a model attend without storing scores, unless its type caps them."""
    if getattr(model, "_supports_sdpa", False) and not getattr(
        model.config, "attn_logit_softcapping", None
    ):
        model.set_attn_implementation("sdpa")
    return model


def _lower_layers(model: Any, count: int) -> Any:
    """Return a model that runs its first layers alone, with the same weights."""
    shorter = copy(model)
    shorter.config = copy(model.config)
    shorter.config.num_hidden_layers = min(count, int(model.config.num_hidden_layers))
    return shorter


# Attention of a head whose drafts begin at many places of a text at once:
#
#     draft that begins at s, position k    sees the text's keys 0 .. s, and its own of 1 .. k
#
# Own keys are one for each draft and position, so their scores are products of rows, not a matrix.


class _UnrolledKeys:
    """Keys and values of a text and, after them, of each position of the drafts that begin in it.

    Has the one verb of transformers' caches that its layers call.
    """

    def __init__(self) -> None:
        self._layers: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Any, Any]:
        """Add a position's keys and values; return all so far, the text's first."""
        pairs = self._layers.setdefault(layer, [])
        pairs.append((keys, values))
        return tuple(key for key, _ in pairs), tuple(value for _, value in pairs)


def _attend_unrolled(config: Any) -> None:
    """Let layers of a configuration attend to `_UnrolledKeys`."""
    from transformers import AttentionInterface

    AttentionInterface.register("specrt_unrolled", _attend)
    config._attn_implementation = "specrt_unrolled"


def _attend(
    module: Any, query: Tensor, keys: tuple[Tensor, ...], values: tuple[Tensor, ...],
    seen: Tensor | None, *, scaling: float, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend to the text, causally where `seen` is None, and to what each draft has of its own.

    Shapes: query [B, H, Q, D]; keys and values [B, G, S, D], then [B, G, Q, D] each; seen
        [B, 1, Q, S] bool -> [B, Q, H, D].
    """
    if seen is None:
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, keys[0], values[0], is_causal=True, scale=scaling, enable_gqa=True
        )
        return attended.transpose(1, 2), None
    batch, heads, count, width = query.shape
    query = query.view(batch, keys[0].shape[1], -1, count, width) * scaling  # [B, G, H/G, Q, D]
    shared = query @ keys[0].unsqueeze(2).transpose(-1, -2)
    least = torch.finfo(shared.dtype).min
    own = [(query * key.unsqueeze(2)).sum(-1, keepdim=True) for key in keys[1:]]
    scores = torch.cat([shared.masked_fill(~seen.unsqueeze(2), least), *own], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    attended = weights[..., : shared.shape[-1]] @ values[0].unsqueeze(2)
    for number, value in enumerate(values[1:], shared.shape[-1]):
        attended = attended + weights[..., number, None] * value.unsqueeze(2)
    return attended.view(batch, heads, count, width).transpose(1, 2), None
