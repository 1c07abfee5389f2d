"""The drafts that training begins with, and checkpoints of what it ends with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from specrt.errors import CheckpointError
from specrt_export.align.trained_drafts import HeadDraft, ModelDraft, TrainedDraft
from specrt_export.check.equivalence import Reference, no_progress_bar
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.scored_entries import NAME, SIZE, model_entries
from specrt_export.heads.eagle3_format import Head, HeadConfig
from specrt_export.heads.eagle3_module import Eagle3Head, FeatureProjection
from specrt_export.heads.head_formats import load_head
from specrt_export.portable.trace import quiet

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json",
                   "special_tokens_map.json", "chat_template.jinja")  # fmt: skip

_EMBEDDING = "embed_tokens.weight"


@dataclass
class DraftSource:
    """A draft to train, and what its checkpoint is written like."""

    draft: TrainedDraft
    dtype: torch.dtype
    """Of the weights that are stored."""
    tokenizer: Path
    """The folder whose tokenizer goes with it."""
    entries: NDArray[np.int64] | None = None
    """The target's ids of what it scores; None where it scores all."""

    @property
    def read(self) -> int:
        """Weights that are read for a token."""
        return read_weights(self.draft.trained)

    def maps(self, vocabulary: int) -> tuple[Tensor, Tensor] | None:
        """Return the id of each entry, and the entry of each id, -1 where it has none."""
        if self.entries is None:
            return None
        ids, entry_of = torch.from_numpy(self.entries), torch.full((vocabulary,), -1)
        entry_of[ids] = torch.arange(len(ids))
        return ids, entry_of

    def trimmed(self, kept: NDArray[np.int64]) -> DraftSource:
        """Return a draft model that scores some entries only, with a last projection of its own."""
        assert isinstance(self.draft, ModelDraft), "a head is trimmed when it is made"
        model = self.draft.model
        there = np.arange(model.config.vocab_size) if self.entries is None else self.entries
        kept = np.intersect1d(kept, there)
        kept_rows = some_rows(model.get_output_embeddings(), np.searchsorted(there, kept))
        model.set_output_embeddings(kept_rows)
        model.config.tie_word_embeddings = False
        setattr(model.config, SIZE, len(kept))
        return replace(self, entries=kept)

    def round(self) -> None:
        """Round the weights to what is stored."""
        with torch.no_grad():
            for parameter in self.draft.trained.parameters():
                parameter.copy_(parameter.to(self.dtype))

    def write(self, folder: Path) -> None:
        """Write a checkpoint that a recipe can name."""
        if isinstance(self.draft, HeadDraft):
            self._write_head(self.draft, folder)
        else:
            model: Any = self.draft.trained
            if self.entries is not None:
                model.register_buffer(NAME, _added(self.entries))
            with quiet(), no_progress_bar():
                model.to(self.dtype).save_pretrained(folder)
        for name in TOKENIZER_FILES:
            if (self.tokenizer / name).exists():
                shutil.copyfile(self.tokenizer / name, folder / name)
        for path in folder.glob("*.safetensors"):
            path.chmod(0o644)  # the library writes them for their owner alone

    def _write_head(self, draft: HeadDraft, folder: Path) -> None:
        flags = draft.head.flags
        weights = {**draft.feature.state_dict(), **draft.head.state_dict()}
        weights = {n: w.to(self.dtype).contiguous() for n, w in weights.items()}
        del weights[_EMBEDDING]  # the target's
        if self.entries is not None:
            weights[NAME] = _added(self.entries)
        config = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "model_type": "speculator_model",
            SIZE: flags.scored,
            "target_hidden_size": flags.target_width,
            "transformer_layer_config": dict(flags.layer),
            "eagle_aux_hidden_state_layer_ids": list(flags.inputs),
            "norm_before_residual": flags.norm_before_residual,
            "norm_before_fc": flags.norm_before_fc,
            "fc_norm": flags.fc_norm,
            "norm_output": flags.norm_output,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(config, indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _added(entries: NDArray[np.int64]) -> Tensor:
    """Return what is added to the place of each entry to make its id."""
    return torch.from_numpy(entries - np.arange(len(entries)))


def read_weights(model: nn.Module) -> int:
    """Return how many weights are read for a token: an embedding only where it scores, too."""
    names = model.named_parameters()
    sizes = {name: p.numel() for name, p in names if not name.endswith(_EMBEDDING)}
    config: Any = getattr(model, "config", None)
    tied: Any = model if getattr(config, "tie_word_embeddings", False) else None
    both = tied.get_input_embeddings().weight.numel() if tied is not None else 0
    return sum(sizes.values()) + int(both)


def stored_weights(checkpoint: Checkpoint) -> int:
    """Return the weights of a checkpoint that are read for a token, as `read_weights` does."""
    shapes = {name: weight.shape for name, weight in checkpoint.weights.items()}
    shapes |= {name: weight.shape for name, weight in checkpoint.coded.items()}
    tied = not any(name.endswith("lm_head.weight") for name in shapes)
    return sum(prod(s) for name, s in shapes.items() if tied or not name.endswith(_EMBEDDING))


def stored_type(checkpoint: Checkpoint) -> torch.dtype:
    """Return what most weights of a checkpoint of floats are stored as."""
    kinds = [weight.dtype for weight in checkpoint.weights.values()]
    names = {"BF16": torch.bfloat16, "F16": torch.float16}
    return names.get(max(set(kinds), key=kinds.count), torch.float32)


def model_source(checkpoint: Checkpoint) -> DraftSource:
    """Return a draft model as its checkpoint has it.

    Raises: CheckpointError for one in codes.
    """
    require_floats(checkpoint, "a draft model")
    draft, entries = ModelDraft(Reference(checkpoint).model), model_entries(checkpoint)
    return DraftSource(draft, stored_type(checkpoint), checkpoint.folder, entries)


def layers_source(target: Checkpoint, model: Any, count: int) -> DraftSource:
    """Return a draft of evenly spaced layers of the target, the first and the last among them.

    Raises: CheckpointError for a number of layers that it has not.
    """
    there = int(model.config.num_hidden_layers)
    if not 1 <= count < there:
        raise CheckpointError(
            f"a draft of {count} layers was asked for, and {target.origin} has {there}; give "
            f"--depth from 1 to {there - 1}"
        )
    taken = [round(float(at)) for at in np.linspace(0, there - 1, count)]
    config: Any = type(model.config).from_dict(model.config.to_dict())
    config.num_hidden_layers = count
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = [kinds[at] for at in taken]
    with quiet():
        made: Any = type(model)(config)
    weights = model.state_dict()
    moved = {
        name: weights[_moved(name, taken)].clone()
        for name in made.state_dict()
        if _moved(name, taken) in weights
    }
    made.load_state_dict(moved, strict=False)
    return DraftSource(ModelDraft(made.eval()), stored_type(target), target.folder)


def _moved(name: str, taken: list[int]) -> str:
    """Return the target's name of a weight of a layer that was taken from it."""
    parts = name.split(".")
    if "layers" in parts:
        at = parts.index("layers") + 1
        parts[at] = str(taken[int(parts[at])])
    return ".".join(parts)


def head_source(
    target: Checkpoint, model: Any, head: Head | None, inputs: tuple[int, ...],
    kept: NDArray[np.int64] | None,
) -> DraftSource:  # fmt: skip
    """Return the head of a checkpoint, or a new one.

    `inputs` are the layers that a new one reads, the usual ones when empty; `kept` are the ids that
    it is to score, rising, of those that it scores.
    """
    if head is not None:
        feature, module = load_head(head)
        entries = head.entries
    else:
        config = new_config(target, model, inputs)
        feature, module = _new_head(config, model)
        entries = None
    if kept is not None:
        module, entries = _trimmed(module, entries, kept)
    module.embed_tokens.weight.requires_grad_(False)
    draft = HeadDraft(model.requires_grad_(False).eval(), feature, module)
    return DraftSource(draft, stored_type(target), target.folder, entries)


def usual_inputs(layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs a new head reads: early, middle and late ones."""
    usual = (2, layers // 2, layers - 3)
    if usual[0] < usual[1] < usual[2]:
        return usual
    spread = np.linspace(1, layers - 1, min(3, layers - 1))
    return tuple(dict.fromkeys(round(float(at)) for at in spread))


def new_config(target: Checkpoint, model: Any, inputs: tuple[int, ...]) -> HeadConfig:
    """Return the sizes of a new head: one layer of the target's width and heads.

    Raises: CheckpointError for layers that the target has not.
    """
    config = model.config
    layers = int(config.num_hidden_layers)
    inputs = inputs or usual_inputs(layers)
    if list(inputs) != sorted(set(inputs)) or not 0 <= inputs[0] <= inputs[-1] < layers:
        raise CheckpointError(
            f"a head was asked for that reads the inputs of layers {list(inputs)}; expected "
            f"rising numbers from 0 to {layers - 1}"
        )
    same = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_parameters",
    )  # fmt: skip
    own = config.to_dict()
    layer = {name: own[name] for name in same if own.get(name) is not None}
    layer.setdefault("rms_norm_eps", 1e-5)
    kind = "qwen3" if own.get("model_type") == "qwen3" else "llama"
    layer |= {
        "model_type": kind, "num_hidden_layers": 1, "hidden_act": "silu",
        "attention_bias": False, "vocab_size": own["vocab_size"],
    }  # fmt: skip
    width, vocabulary = int(own["hidden_size"]), int(own["vocab_size"])
    return HeadConfig(layer, 1, vocabulary, vocabulary, width, width, inputs)


def _new_head(config: HeadConfig, model: Any) -> tuple[FeatureProjection, Eagle3Head]:
    """Return a head that begins as the target's last layer, on the latest state that it reads.

    Weights that the target has no like of are small random ones, by torch's seed.
    """
    feature, head = FeatureProjection(config), Eagle3Head(config)
    width = config.width
    last = {
        name.removeprefix(f"model.layers.{model.config.num_hidden_layers - 1}."): weight
        for name, weight in model.state_dict().items()
    }
    first: nn.Module = head.layers[0]
    with torch.no_grad():
        for parameter in [*feature.parameters(), *head.parameters()]:
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        feature.fc.weight[:, -width:] += torch.eye(width)
        for name, parameter in first.named_parameters():
            found = last.get(name)
            if found is None:
                continue
            if parameter.shape == found.shape:
                parameter.copy_(found)
            elif parameter.ndim == 2 and parameter.shape == (found.shape[0], 2 * found.shape[1]):
                parameter[:, width:] = found  # the part that reads the feature
        _copy(first, "hidden_norm.weight", last.get("input_layernorm.weight"))
        head.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
        head.lm_head.weight.copy_(model.get_output_embeddings().weight)
        _copy(head, "norm.weight", last.get("model.norm.weight"))
    return feature, head


def _copy(module: nn.Module, name: str, found: Tensor | None) -> None:
    parameter = module.get_parameter(name)
    if found is not None and found.shape == parameter.shape:
        parameter.copy_(found)


def _trimmed(
    head: Eagle3Head, entries: NDArray[np.int64] | None, kept: NDArray[np.int64]
) -> tuple[Eagle3Head, NDArray[np.int64]]:
    """Return a head that scores fewer entries; those that it never scored are left out."""
    there = np.arange(head.flags.scored) if entries is None else entries
    kept = np.intersect1d(kept, there)
    head.lm_head = some_rows(head.lm_head, np.searchsorted(there, kept))
    head.flags = replace(head.flags, scored=len(kept))
    return head, kept


def some_rows(projection: nn.Linear, rows: NDArray[np.int64]) -> nn.Linear:
    """Return a last projection of some entries."""
    made = nn.Linear(projection.in_features, len(rows), bias=projection.bias is not None)
    places = torch.from_numpy(rows)
    with torch.no_grad():
        for parameter, whole in zip(made.parameters(), projection.parameters(), strict=True):
            parameter.copy_(whole[places])
    return made


def likeliest_entries(
    weights: NDArray[np.float64], count: int, ends: Sequence[int]
) -> NDArray[np.int64]:
    """Return the ids that weigh most, rising, so many of them, the end tokens always among them.

    Shapes: weights [V].
    """
    raised = weights.copy()
    raised[list(ends)] = np.inf
    best = np.argsort(-raised, kind="stable")[:count]
    ids: NDArray[np.int64] = np.sort(best).astype(np.int64)
    return ids


def require_floats(checkpoint: Checkpoint, what: str) -> None:
    """Refuse a checkpoint in codes, or a GGUF file, which are not trained.

    Raises: CheckpointError.
    """
    if checkpoint.source is not None:
        raise CheckpointError(
            f"{checkpoint.origin} is quantized or a GGUF file, and {what} is trained in floats; "
            "name the folder of floats that it is from"
        )
