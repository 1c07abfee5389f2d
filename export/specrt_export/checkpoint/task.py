"""What a checkpoint is for, and the sizes of it by one set of names, as optimum knows both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrt.bundle import TASKS
from specrt.errors import ExportError

TEXT_GENERATION, TEXT_TO_TEXT, SPEECH = TASKS

UNBOUNDED = 1 << 20
"""Positions of a model whose positions are relative, which has no table that ends."""


@dataclass(frozen=True)
class ModelTask:
    """What a checkpoint is for, and how transformers builds its model."""

    name: str
    """One of `TASKS`."""
    encodes: bool = False
    """Whether the checkpoint has an encoder; a draft without one reads its target's."""

    @property
    def conditioned(self) -> bool:
        """Whether a text is of a source."""
        return self.name != TEXT_GENERATION

    def loader(self, kind: str) -> Any:
        """Return the class of transformers that loads checkpoints of a type for this task."""
        if self.conditioned and not self.encodes:
            return ModelTask(TEXT_GENERATION).factory(kind)
        return self.factory(kind)

    def factory(self, kind: str) -> Any:
        """Return the class of transformers that builds whole models of a type for this task."""
        from optimum.exporters.tasks import TasksManager

        return TasksManager.get_model_class_for_task(self.name, model_type=kind)


def task_of(config: Mapping[str, Any]) -> ModelTask | None:
    """Tell what the checkpoint of a config.json is for; None where it is for nothing held here.

    The class that wrote it decides; without one, what its model type is for first of all.
    """
    kind, written = config.get("model_type"), config.get("architectures") or ()
    classes = {name: classes_for(name).get(str(kind), ()) for name in TASKS}
    there = [name for name in TASKS if classes[name]]
    named = [name for name in there if set(classes[name]) & set(written)]
    sources = [name for name in there if name != TEXT_GENERATION]
    if named:
        found = named[0]
    elif sources and config.get("is_encoder_decoder", True):
        found = sources[0]
    elif there:
        found = there[0]
    else:
        return None
    if found == TEXT_GENERATION and SPEECH in there:
        # A decoder of speech alone still attends to a source: another model's.
        return ModelTask(SPEECH)
    return ModelTask(found, encodes=found != TEXT_GENERATION)


def classes_for(task: str) -> dict[str, Sequence[str]]:
    """Return the classes of each model type for a task, of those that write a text.

    By optimum's table, because `TasksManager.infer_task_from_model` says of a class with several
    tasks the first: of BART, "fill-mask".
    """
    from optimum.exporters.tasks import TasksManager

    mapping: dict[str, Any] = TasksManager._TRANSFORMERS_TASKS_TO_MODEL_MAPPINGS[task]
    listed = {kind: (n,) if isinstance(n, str) else tuple(n) for kind, n in mapping.items()}
    return {
        kind: names
        for kind, names in listed.items()
        if not all(n.endswith("ForCTC") for n in names)
    }


_DECODER = {
    "num_layers": ("decoder_layers", "num_decoder_layers"),
    "num_attention_heads": ("decoder_attention_heads",),
}
"""Sizes of a decoder next to an encoder, whose own the common names are; either may be there."""


def normalized(config: Any) -> Any:
    """Return the sizes of a model's decoder, as optimum normalizes them: num_layers, hidden_size.

    Raises: ExportError for a type whose sizes have names that optimum does not know.
    """
    from optimum.utils.normalized_config import NormalizedConfigManager, NormalizedTextConfig

    kind = str(config.model_type)
    try:
        make = NormalizedConfigManager.get_normalized_config_class(kind)
    except KeyError:  # most decoders, which have the common names
        make = NormalizedTextConfig
    sizes = make(config)
    for size, names in _DECODER.items():
        for name in names:
            if getattr(config, name, None) is not None:
                setattr(sizes, size.upper(), name)
    if not sizes.has_attribute("num_layers") or not sizes.has_attribute("hidden_size"):
        raise ExportError(
            f"{kind} names its layers and widths in a way of its own; expected num_hidden_layers "
            "and hidden_size, or a type that optimum knows. Export another model"
        )
    return sizes
