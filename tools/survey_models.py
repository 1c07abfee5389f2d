"""Writes docs/models.md: what becomes of each model type of transformers that writes a text.

Of each type a tiny random checkpoint is made, exported, and compared with transformers' eager
model: prefill, a verify at an offset, two rows of different lengths of which one is rolled back
over stale keys, and beyond each sliding window; of encoder-decoders, of sources of different
lengths, and beyond near distances. A type is equal, or refused by a reason.

    python tools/survey_models.py                 # all types, to docs/models.md
    python tools/survey_models.py llama gemma3    # these, to standard output
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

INTERNAL = "defect of the exporter"
UNBUILT = "transformers itself builds no small model of the default config"
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
SECONDS = 60
"""Most time that one type may take."""

WINDOW = 8
SIZES: dict[str, Any] = {
    # Whatever a config calls them; those that it lacks are left out.
    **dict.fromkeys(("vocab_size", "n_vocab", "vocab_size_per_layer_input"), 160),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "d_ff"), 64),
    **dict.fromkeys(("head_dim", "global_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 1),
    "mamba_d_ssm": 64,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("moe_num_experts", "num_routed_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "n_group"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 512),
    "max_target_positions": 512,
    "max_source_positions": 64,
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "mamba2": {"hidden_size": 32, "num_heads": 4, "head_dim": 16},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
}  # fmt: skip
"""Options of types whose default has experts, or whose sizes must fit each other."""
OFTEN_REFUSED = ("layer_types", "head_dim", "num_key_value_heads", "sliding_window", "q_lora_rank")
"""Sizes that some types derive from others: left as they are where a type takes no other."""


class Outcome(NamedTuple):
    """What became of one model type."""

    kind: str
    error: float | None
    """Largest error of a logit over the largest logit; None where the type is refused."""
    reason: str = ""
    encodes: bool = False
    """Whether it is an encoder-decoder."""


def save_checkpoint(kind: str, folder: Path) -> None:
    """Write a tiny random checkpoint of a model type, the same every time."""
    import torch
    import transformers

    from specrt_export.checkpoint.task import task_of

    task = task_of(transformers.AutoConfig.for_model(kind).to_dict())
    assert task is not None, "a type that has none was refused"
    factory: Any = task.factory(kind)
    for left_out in ((), *((name,) for name in OFTEN_REFUSED), OFTEN_REFUSED):
        torch.manual_seed(0)
        try:
            config = tiny_config(kind, left_out)
            model = factory.from_config(config, dtype=torch.float32, attn_implementation="eager")
            break
        except Exception:
            if left_out == OFTEN_REFUSED:
                raise
    # Norms and biases start as ones and zeros, where dropping them would not show.
    for tensor in model.state_dict().values():
        if tensor.ndim == 1 and tensor.is_floating_point():
            tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(folder)


def tiny_config(kind: str, left_out: Sequence[str] = ()) -> Any:
    """Return the type's default config with small sizes, but for those left out."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(kind)
    known = {**getattr(default, "attribute_map", {}), **default.to_dict()}
    sizes = {key: SIZES[key] for key in SIZES if key in known}
    if known.get("sliding_window", 0) is None:  # off unless a checkpoint sets it
        sizes.pop("sliding_window", None)
    if known.get("is_encoder_decoder"):
        sizes.pop("is_decoder", None)
    if known.get("kv_lora_rank"):  # each head makes keys and values of what is shared
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if known.get("layer_types"):
        types = sorted(set(known["layer_types"]), reverse=True)[:2]
        sizes["layer_types"] = types * (2 // len(types))
    kept = {key: size for key, size in sizes.items() if key not in left_out}
    return AutoConfig.for_model(kind, **{**kept, **OPTIONS.get(kind, {})})


def survey(kind: str) -> Outcome:
    """Export one model type and compare it with transformers."""
    from transformers import AutoConfig

    from specrt_export.checkpoint.task import task_of

    task = task_of(AutoConfig.for_model(kind).to_dict())
    return _outcome(kind)._replace(encodes=task is not None and task.encodes)


def _outcome(kind: str) -> Outcome:
    from transformers import AutoConfig

    from specrt.errors import ExportError
    from specrt_export.check.equivalence import check_parity
    from specrt_export.checkpoint.checkpoint import Checkpoint
    from specrt_export.portable.exporter import check_support, export_graph

    try:
        check_support(AutoConfig.for_model(kind, **OPTIONS.get(kind, {})).to_dict())
    except ExportError as refusal:
        return Outcome(kind, None, str(refusal))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            save_checkpoint(kind, folder)
        except Exception as error:  # of transformers, whatever it is
            return Outcome(kind, None, f"{UNBUILT}: {_line(error)}")
        try:
            checkpoint = Checkpoint.open(folder)
            graph = export_graph(checkpoint, folder / "model.onnx")
            return Outcome(kind, check_parity(checkpoint, graph.path).error)
        except ExportError as refusal:
            return Outcome(kind, None, str(refusal))
        except Exception as error:
            return Outcome(kind, None, f"{INTERNAL}: {_line(error)}")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]


def _child(kind: str, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    import logging

    logging.disable(logging.CRITICAL)
    pipe.send(survey(kind))


def surveyed(kinds: Sequence[str]) -> Iterator[Outcome]:
    """Survey each type in a process of its own, which may crash or hang."""
    import transformers  # noqa: F401  # once, for all children

    context = multiprocessing.get_context("fork")
    for number, kind in enumerate(kinds, 1):
        print(f"{number} of {len(kinds)}: {kind}", file=sys.stderr)
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(kind, there))
        process.start()
        there.close()
        try:
            outcome = here.recv() if here.poll(SECONDS) else None
        except EOFError:
            outcome = None
        process.kill()
        process.join()
        yield outcome or Outcome(kind, None, f"{UNBUILT} within {SECONDS} s")


def model_types() -> list[str]:
    """Return the model types of the installed transformers that write a text."""
    from specrt.bundle import TASKS
    from specrt_export.checkpoint.task import classes_for

    return sorted({kind for task in TASKS for kind in classes_for(task)})


INTRODUCTION = """# Models

Every model type of transformers {version} for text generation, text to text or speech to text, as a
tiny random checkpoint: exported, then compared with transformers' eager model (prefill, a verify at
an offset, two rows of different lengths of which one is rolled back over stale keys, and beyond
each sliding window; rows of an encoder-decoder are texts of sources of different lengths, once of
300 positions). {equal} of {all} types export and are equal; the others are refused by name. *Error*
is the largest error of a logit over the largest logit; that of Gemma 4 is rounding, since its
attention scales no scores, and eager is further from float64 than the graph is. A refusal is about
the type's default config: a dense model of a type whose default has experts may export, as
`nemotron_h` was tried; `gemma4_text`, without experts by default, exports with them.
Mixtures of experts run on ort-cpu with specrt's kernels; other backends refuse them.
`gemma4_assistant` and `gemma4_unified_assistant` are heads, which [draft](drafting.md#heads).

This page is written by `python tools/survey_models.py`.
"""
SHORT = (
    (rf"{UNBUILT}.*", UNBUILT),
    (
        r"\w+ numbers positions from its padding token.*",
        "positions numbered from the padding token",
    ),
    (r"it is a mixture of experts \(.*", "experts that do not use the experts interface"),
    (r"\w+ has experts of a kind that.*", "experts without a gate, with biases or another gate"),
    (r"transformers' \w+ computes attention itself.*", "does not use the attention interface"),
    (
        r"its layers change their state by another rule.*",
        "a state that changes neither by the gated delta rule nor by one decay of each head",
    ),
    (r"it is one part of a multimodal model.*", "multimodal; its text model may export"),
    (r"it adds ALiBi.*", "ALiBi positions"),
    (r"\w+ builds its attention mask itself.*", "builds its attention mask itself"),
    (r"\w+ adds '(\w+)' to its attention.*", r"its attention has a term of its own, `\1`"),
    (r"\w+ puts \S+ together from several.*", "weights put together from several stored ones"),
    (r"\S+ attends to its text in layers .*", "does not use the attention interface"),
    (r"its encoder attends to blocks of.*", "an encoder that attends to blocks of a long source"),
    (r"its encoder and its decoder have a config.*", "an encoder and a decoder of a config each"),
    (r"\S+ reads speech otherwise than.*", "reads speech otherwise than as log-mel features"),
    (r"\S+ names its layers and widths in.*", "sizes that have names of their own"),
    (r"\w+ computes positions otherwise.*", "computes positions otherwise than by a table"),
    (r"\w+ computes its relative bias in.*", "relative biases not of each query and key"),
    (r"the model's attention mask is neither.*", "a mask neither causal nor a sliding window"),
    (r"the model in .*DataDependentOutputException.*", "what it computes depends on values"),
    (r"the model in \S+ does not trace \((.*)\);.*", r"does not trace: \1"),
)
"""A refusal, and how the page says it, without what differs from type to type."""


def page(outcomes: Sequence[Outcome]) -> str:
    """Return docs/models.md."""
    import transformers

    equal = [one for one in outcomes if one.error is not None]
    groups: dict[str, list[str]] = {}
    for one in outcomes:
        if one.error is None:
            groups.setdefault(_reason(one), []).append(f"`{one.kind}`")
    refused = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    head = INTRODUCTION.format(
        version=transformers.__version__, equal=len(equal), all=len(outcomes)
    )
    lines = [
        *_table("Decoders", [one for one in equal if not one.encodes]),
        *_table("Encoder-decoders", [one for one in equal if one.encodes]),
        *("## Refused", "", "| reason | model types |", "| --- | --- |"),
        *(f"| {reason} | {', '.join(kinds)} |" for reason, kinds in refused),
        "",
    ]
    return head + "\n" + "\n".join(lines)


def _table(title: str, equal: Sequence[Outcome]) -> list[str]:
    rows = [f"| `{one.kind}` | {one.error:.0e} |" for one in equal]
    return [f"## {title}", "", "| model type | error |", "| --- | ---: |", *rows, ""]


def _reason(outcome: Outcome) -> str:
    """Return why a type is refused, in the words of the page."""
    reason = outcome.reason.removeprefix(f"{outcome.kind} cannot be exported: ")
    for pattern, plain in SHORT:
        reason = re.sub(pattern, plain, reason)
    return reason.replace("|", "\\|")


def arguments() -> list[str]:
    """Return the types that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", metavar="TYPE", help="[default: all, to the page]")
    kinds: list[str] = parser.parse_args().kinds
    if unknown := sorted({*kinds} - {*model_types()}):
        parser.error(
            f"no type of model that writes a text is called {', '.join(unknown)}; {PAGE} lists all"
        )
    return kinds


def main(kinds: Sequence[str]) -> int:
    """Survey types; return 1 where the exporter failed by an error that is not a refusal."""
    outcomes = []
    for one in surveyed(kinds or model_types()):
        outcomes.append(one)
        if kinds:
            print(one.kind, one.reason if one.error is None else f"{one.error:.1e}", sep=": ")
    if not kinds:
        PAGE.write_text(page(outcomes), encoding="utf-8")
    return int(any(one.reason.startswith(INTERNAL) for one in outcomes))


if __name__ == "__main__":
    sys.exit(main(arguments()))
