"""What a recipe names: checkpoints, graphs, calibration text and vocabularies on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray
from tokenizers import Tokenizer as HubTokenizer

from specrt.bundle import CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER
from specrt.engine.protocol import Source
from specrt.errors import BuildError, CheckpointError, RequestError, first_line
from specrt.held_file import read_file
from specrt.system.memory import size
from specrt.text.control_tokens import read_tokenizer
from specrt.text.prompt_file import read_prompts, read_text
from specrt.text.tokenizer import Tokenizer
from specrt_export.checkpoint.checkpoint import TEXT_PARTS, Checkpoint, QuantizedSource
from specrt_export.checkpoint.gguf.reader import SUFFIX
from specrt_export.checkpoint.scored_entries import SIZE, model_entries
from specrt_export.checkpoint.task import SPEECH, TEXT_GENERATION, UNBOUNDED, ModelTask, task_of
from specrt_export.heads.head_checkpoint import HeadCheckpoint
from specrt_export.heads.head_formats import HEAD_FORMATS, head_format, is_head, read_head
from specrt_export.portable.attachment import check_weights, is_attached
from specrt_export.portable.external_data import MappedWeight, map_weights
from specrt_export.portable.graph import (
    TASK,
    Tokens,
    check_length,
    facts_of,
    part_path,
    parts_beside,
    read_graph,
    source_of,
)
from specrt_export.recipe.compiler_spec import COMPILERS
from specrt_export.recipe.recipe import Recipe
from specrt_export.recipe.recipe_tables import ModelSource

UNUSED = re.compile(
    r"""
    [<\[] \|? _{0,2}                             # <pad>, [unused7], <|reserved_special_token_3|>
    (pad | unused | reserved | extra | dummy | placeholder | filler)
    [\w ]* \|? [>\]]
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Spellings that fill a vocabulary up to a round size and stand for no text."""


def check_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    """Refuse a pair whose ids do not mean the same tokens.

    Accepted at the end of either: embedding rows without a token, and unused or padding tokens.
    Raises: CheckpointError with the first differing id and both its tokens.
    """
    ours, theirs = read_tokens(target), read_tokens(draft, drafts=True)
    for index in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(index), theirs.get(index)
        if mine == other or (_filler(mine) and _filler(other)):
            continue
        raise CheckpointError(
            f"target and draft differ at token id {index}: {_shown(mine)} in {target.origin}, "
            f"{_shown(other)} in {draft.origin}; a draft must share its target's tokenizer, "
            "choose a smaller model of the same family"
        )


def read_tokens(checkpoint: Checkpoint, *, drafts: bool = False) -> dict[int, str]:
    """Return the token of each id of a checkpoint's tokenizer, added tokens included.

    The small Gemma 3 lack rows for added tokens, such as that of a picture. So may a draft: it
    never proposes them, and is silent once its target has one.
    Raises: CheckpointError if it is missing, unreadable, or has ids the model has no row for.
    """
    path, tokenizer = checkpoint.folder / TOKENIZER, _tokenizer(checkpoint)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = {index: token for token, index in vocabulary.items()}
    size = checkpoint.config.get("vocab_size")
    added = tokenizer.get_added_tokens_decoder() if drafts or _lacks_rows(checkpoint) else {}
    last = max((index for index in tokens if index not in added), default=-1)
    if isinstance(size, int) and last >= size:
        raise CheckpointError(
            f"{path} has token id {last} ({tokens[last]!r}), but the model has vocab_size {size}; "
            "the tokenizer belongs to another model"
        )
    return tokens


def _lacks_rows(checkpoint: Checkpoint) -> bool:
    """Tell whether a model has the tokenizer of a larger one that is multimodal."""
    return checkpoint.config.get("model_type") in TEXT_PARTS.values()


def bundled_tokenizer(checkpoint: Checkpoint) -> bytes:
    """Return a target's tokenizer.json without the added tokens that its model has no row for.

    In a prompt they are plain text then.
    """
    data = read_tokenizer(checkpoint.folder / TOKENIZER)
    if not _lacks_rows(checkpoint):
        return data
    tokenizer, size = json.loads(data), checkpoint.config["vocab_size"]
    tokenizer["added_tokens"] = [one for one in tokenizer["added_tokens"] if one["id"] < size]
    return json.dumps(tokenizer, ensure_ascii=False).encode()


def _tokenizer(checkpoint: Checkpoint) -> HubTokenizer:
    """Read the tokenizer of a checkpoint.

    Raises: CheckpointError if it is missing or unreadable.
    """
    path = checkpoint.folder / TOKENIZER
    if not path.exists():
        raise CheckpointError(
            f"{checkpoint.folder} has no {TOKENIZER}; write one with "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        return HubTokenizer.from_buffer(read_file(path))
    # The tokenizers library raises bare Exception for whatever it cannot read.
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a tokenizer ({first_line(error)}); fetch the checkpoint again"
        ) from error


def chat_templates(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the chat templates that are files of their own, by name; one for all is `default`.

    Raises: CheckpointError for one that cannot be read.
    """
    own = checkpoint.folder / CHAT_TEMPLATE
    files = {path.stem: path for path in checkpoint.named_templates}
    files |= {"default": own} if own.exists() else {}
    texts = {}
    for name, path in files.items():
        try:
            texts[name] = read_file(path).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path} cannot be read as a chat template ({first_line(error)}); correct or "
                "remove it"
            ) from error
    return texts


def _filler(token: str | None) -> bool:
    return token is None or UNUSED.fullmatch(token) is not None


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)


PIECE = 512
"""Tokens that are scored one after another, the earlier ones as context of the later."""

MOST, FEWEST = 2048, 256
"""Tokens scored, spread over the whole text, and those a text needs to say anything."""

MOST_FITTED, FEWEST_FITTED = 6144, 2048
"""The same of tokens that codes are found on; more of them cost time in proportion."""


@dataclass(frozen=True)
class CalibrationPieces:
    """Pieces of a text: those that models are scored on, and those that codes are found on."""

    scored: list[Tokens]
    fitted: list[Tokens]
    """Of one length, but for texts of sources; none of them is scored."""
    sources: Sequence[Source] = ()
    """What each piece that is scored is a text of, where they are texts of sources."""
    fitted_sources: Sequence[Source] = ()
    """The same of each piece that codes are found on."""


def read_calibration(
    path: Path, tokenizer: Tokenizer, context: int, *, fits: bool = False
) -> CalibrationPieces:
    """Read a text file, or prompts from JSON lines, as pieces of up to `context` tokens.

    Prompts follow one another, as if they were one text.
    Raises: BuildError for a file that is missing, malformed or too short; `fits` is for one that
    codes are to be found on, too.
    """
    try:
        lines = path.suffix == ".jsonl"
        texts = [p.text for p in read_prompts(path)] if lines else [read_text(path)]
        tokens = [token for text in texts if text for token in tokenizer.encode(text)]
    except RequestError as error:
        raise BuildError(f"quality.calibration: {error}") from error
    if len(tokens) < FEWEST:
        raise BuildError(
            f"quality.calibration: {path} comes to {len(tokens)} tokens; expected {FEWEST} or more "
            "of text like what the model will be used for"
        )
    pieces = _pieces(np.array(tokens, np.int64), min(PIECE, context))
    left = sum(map(len, pieces.fitted))
    if fits and left < FEWEST_FITTED:
        raise _too_short_to_fit(path, len(tokens), left)
    return pieces


def read_source_pairs(
    path: Path, tokenizer: Tokenizer, start: Sequence[int], context: int, max_source: int,
    *, fits: bool = False,
) -> CalibrationPieces:  # fmt: skip
    """Read sources and texts of them from JSON lines, as an encoder-decoder is scored on.

    A line is `{"prompt": SOURCE, "completion": TEXT}`. Texts begin with `start`, and are cut at
    `context` tokens. Lines whose source is longer than `max_source` tokens are left out.
    Raises: BuildError for a file that is missing, malformed or too short; `fits` is for one that
    codes are to be found on, too.
    """
    expected = 'expected lines such as {"prompt": "SOURCE", "completion": "TEXT"}'
    if path.suffix != ".jsonl":
        raise BuildError(
            f"quality.calibration: {path} is no .jsonl file, and the model makes its text of a "
            f"source; {expected}"
        )
    pairs: list[tuple[Source, Tokens]] = []
    try:
        for line in read_prompts(path):
            if not line.completion.strip() or not line.text.strip():
                raise BuildError(
                    f"quality.calibration: {line.place} lacks a prompt or a completion; {expected}"
                )
            source = np.array(tokenizer.encode(line.text), np.int64)
            # What follows the last token of a text is nothing that the model learned.
            text = [*start, *tokenizer.encode(line.completion)][:-1][:context]
            if len(source) <= max_source:
                pairs.append((source, np.array(text, np.int64)))
    except RequestError as error:
        raise BuildError(f"quality.calibration: {error}") from error
    return pieces_of_sources(path, pairs, lambda source: source, fits=fits)


Unread = TypeVar("Unread")


def pieces_of_sources(
    path: Path, pairs: Sequence[tuple[Unread, Tokens]], read: Callable[[Unread], Source],
    *, fits: bool = False,
) -> CalibrationPieces:  # fmt: skip
    """Return pairs from the whole file, whose texts come to `MOST` tokens; read their sources.

    Where codes are to be found, too, `MOST_FITTED` tokens of the others are for that.
    Raises: BuildError for fewer than `FEWEST` or `FEWEST_FITTED`.
    """
    lengths = [len(text) for _, text in pairs]
    total = sum(lengths)
    scored = _spread(len(pairs), MOST * len(pairs) // max(1, total))
    rest = [at for at in range(len(pairs)) if fits and at not in set(scored)]
    left = sum(lengths[at] for at in rest)
    fitted = [rest[at] for at in _spread(len(rest), MOST_FITTED * len(rest) // max(1, left))]
    found = CalibrationPieces(
        [pairs[at][1] for at in scored], [pairs[at][1] for at in fitted],
        [read(pairs[at][0]) for at in scored], [read(pairs[at][0]) for at in fitted],
    )  # fmt: skip
    if total < FEWEST:
        raise BuildError(
            f"quality.calibration: {path} comes to {total} tokens of texts whose sources fit; "
            f"expected {FEWEST} or more, of texts like what the model will be used for"
        )
    if fits and left < FEWEST_FITTED:
        raise _too_short_to_fit(path, total, left)
    return found


def _too_short_to_fit(path: Path, total: int, left: int) -> BuildError:
    return BuildError(
        f"quality.calibration: {path} comes to {total} tokens, which leaves {left} besides those "
        f"that are scored, and quantizer 'gptq' takes {FEWEST_FITTED} or more; give it "
        f'{MOST + MOST_FITTED} tokens of text, or use quantizer = "search"'
    )


def _pieces(tokens: Tokens, length: int) -> CalibrationPieces:
    """Cut tokens into whole pieces, `MOST` tokens of them scored; a short text is one piece."""
    if len(tokens) < length:
        return CalibrationPieces([tokens], [])
    whole = tokens[: len(tokens) // length * length].reshape(-1, length)
    scored = _spread(len(whole), MOST // length)
    rest = [at for at in range(len(whole)) if at not in scored]
    fitted = [rest[at] for at in _spread(len(rest), MOST_FITTED // length)]
    return CalibrationPieces([whole[at] for at in scored], [whole[at] for at in fitted])


def _spread(there: int, most: int) -> list[int]:
    """Return places in a list, at the same distances."""
    places = np.linspace(0, there - 1, min(there, max(1, most))).round()
    return [int(place) for place in places]


@dataclass(frozen=True)
class ModelInputs:
    """One model of the pair."""

    role: str
    checkpoint: Checkpoint
    graph: Path | None
    """None where the recipe names no graph: it is exported as part of the build."""
    hub: str = ""
    """The name that the checkpoint was fetched by; empty where it was there."""
    head: HeadCheckpoint | None = None
    """The head that drafts, with both models of its pair; None where a model drafts, or nothing."""
    entries: NDArray[np.int64] | None = None
    """Of a draft: the target's id of each entry that it scores, rising; None where it scores all.
    """


def find_inputs(recipe: Recipe) -> list[ModelInputs]:
    """Find checkpoints and graphs of a recipe, the target first.

    Raises: CheckpointError, BuildError naming recipe and key when something is not there.
    """
    found = [_find(recipe, role, source) for role, source in recipe.sources.items()]
    if recipe.draft is None:
        return found
    draft, layers = found[1], recipe.draft.layers
    if not is_head(draft.checkpoint):
        if layers:
            raise BuildError(
                f"{recipe.path}: draft.layers is {list(layers)}, and {draft.checkpoint.origin} is "
                "no head, but a model; remove it"
            )
        entries = model_entries(draft.checkpoint)
        if entries is not None and not recipe.spec_of("draft").heads:
            raise BuildError(
                f"{recipe.path}: {draft.checkpoint.origin} scores {len(entries)} entries only, and "
                f"{recipe.backend_of('draft')} runs no such draft: build the pair for "
                f"{_run_heads()}, or with a draft that scores all"
            )
        return [found[0], replace(draft, entries=entries)]
    _check_head(recipe, found)
    head = read_head(draft.checkpoint, found[0].checkpoint, layers)
    if recipe.engine.max_length < head.config.least_length:
        raise BuildError(
            f"{recipe.path}: engine.max_length is {recipe.engine.max_length}, and the head in "
            f"[draft] drafts nothing in so few; expected {head.config.least_length} or more"
        )
    target, draft = (replace(model, head=head) for model in found)
    return [target, replace(draft, entries=head.entries)]


def _check_head(recipe: Recipe, inputs: list[ModelInputs]) -> None:
    """Refuse what no pair with a head can have.

    Raises: BuildError.
    """
    kind = head_format(inputs[-1].checkpoint)
    assert kind is not None, "a draft that is no head"
    able = HEAD_FORMATS[kind].backends
    backends = [recipe.backend_of(model.role) for model in inputs]
    for model, backend in zip(inputs, backends, strict=True):
        source = recipe.sources[model.role]
        refused = {
            f"{model.role}.graph is set, and a graph for a head is made with it: remove it":
                model.graph is not None,
            f"{backend} runs no {kind} heads yet: build the pair for {' or '.join(able)}, or "
            "with a draft model": backend not in able,
            f"its backend is {backends[-1]} and the target's {backends[0]}, and it reads what the "
            "target leaves in memory: name one for both": backends[0] != backends[-1],
            f"{model.role}.bits is {source.bits!r}, and a head's are not chosen: set `precision`":
                bool(source.bits) and model.role == "draft",
        }  # fmt: skip
        for problem, found in refused.items():
            if found:
                raise BuildError(f"{recipe.path}: the draft is a head; {problem}")


def _run_heads() -> str:
    return " or ".join(name for name, spec in COMPILERS.items() if spec.heads)


def _find(recipe: Recipe, role: str, source: ModelSource) -> ModelInputs:
    local = recipe.folder / source.checkpoint
    name = local if local.is_dir() or local.suffix == SUFFIX else source.checkpoint
    try:
        checkpoint = Checkpoint.open(name, source.revision or None, weight_only=source.weight_only)
    except CheckpointError as error:
        raise CheckpointError(f"{recipe.path}: {role}.checkpoint: {error}") from error
    graph = recipe.folder / source.graph if source.graph else None
    if graph is not None and not graph.is_file():
        raise BuildError(
            f"{graph} does not exist; make it with `specrt export {name} --out {graph}`, or "
            f"remove `{role}.graph` from {recipe.path} to export it as part of the build"
        )
    if role == "target" and SIZE in checkpoint.config and not is_head(checkpoint):
        raise CheckpointError(
            f"{recipe.path}: target.checkpoint: {checkpoint.origin} scores "
            f"{checkpoint.config[SIZE]} entries only; it is a draft, name it in [draft]"
        )
    hub = "" if Path(name).expanduser().exists() else source.checkpoint
    return ModelInputs(role, checkpoint, graph, hub)


def quantized_sources(inputs: Iterable[ModelInputs]) -> dict[str, QuantizedSource]:
    """Return what the models are stored in that may hold codes."""
    there = {model.role: model.checkpoint.source for model in inputs}
    return {role: source for role, source in there.items() if source is not None}


def calibration_path(recipe: Recipe) -> Path:
    """Return where the recipe's calibration text is."""
    return recipe.folder / recipe.quality.calibration


def most_source(recipe: Recipe, checkpoint: Checkpoint) -> int:
    """Return the positions of the longest source of text that an engine will read.

    Raises: BuildError for more than the encoder was trained for.
    """
    trained = checkpoint.config.get("max_position_embeddings")
    most = trained if isinstance(trained, int) else UNBOUNDED
    return recipe.engine.source_positions(most, features=False)


def check_inputs(recipe: Recipe, inputs: list[ModelInputs], out: Path) -> None:
    """Refuse, before any work, a pair that does not fit together or a disk too small for it.

    Raises: CheckpointError, BuildError, ExportError.
    """
    target = inputs[0].checkpoint
    if model_task(inputs[0]).conditioned:  # whose sizes of vocabularies may be two
        _tokenizer(target)
    else:
        read_tokens(target)
    chat_templates(target)
    for model in (model for model in inputs[1:] if model.head is None):
        check_vocabulary(target, model.checkpoint)
    end_tokens(target)
    begin_token(target)
    for model in inputs:
        if model.graph is not None and is_attached(model.graph):
            check_graph(model.graph, model.checkpoint, recipe.engine.max_length)
    _check_tasks(recipe, inputs)
    needed = sum(_disk_bytes(recipe, model) for model in inputs) * 5 // 4 + (16 << 20)
    free = _free(out.parent)
    if free < needed:
        raise BuildError(
            f"{out.parent} has {size(free)} free, and the build needs about {size(needed)}; free "
            "some, or build elsewhere with --out"
        )


def model_task(model: ModelInputs) -> ModelTask:
    """Tell what a model is for, as its graph says, or its configuration where it has none yet."""
    if model.head is not None:
        return ModelTask(TEXT_GENERATION)
    if model.graph is None:
        return task_of(model.checkpoint.config) or ModelTask(TEXT_GENERATION)
    facts = facts_of(onnx.load(model.graph, load_external_data=False))
    encodes = "encoder" in parts_beside(model.graph)
    return ModelTask(facts.get(TASK, TEXT_GENERATION), encodes)


def _check_tasks(recipe: Recipe, inputs: list[ModelInputs]) -> None:
    """Refuse what no encoder-decoder, or no pair with one, can have.

    Raises: BuildError.
    """
    tasks = {model.role: model_task(model) for model in inputs}
    target = tasks["target"]
    refused = {
        f"{inputs[0].checkpoint.origin} has no encoder; name a whole model as the target, and this "
        "in [draft]": target.conditioned and not target.encodes,
        f"the target is for {target.name}, and the draft for {tasks[inputs[-1].role].name}; choose "
        "a draft of the same kind": len({task.name for task in tasks.values()}) > 1,
    }  # fmt: skip
    for model in inputs:
        role, name = model.role, str(model.checkpoint.origin)
        problem = recipe.source_problem(role, name, reads=target.conditioned)
        refused[problem] = bool(problem)
    for problem, found in refused.items():
        if found:
            raise BuildError(f"{recipe.path}: {problem}")


def check_graph(graph: Path, checkpoint: Checkpoint, max_length: int) -> None:
    """Hold a portable graph to its checkpoint, and to the positions asked for.

    Raises: BuildError, CheckpointError, ExportError.
    """
    check_length(check_weights(graph, checkpoint), max_length, checkpoint.folder)


_CODE_BYTES = {"int4": 0.5, "fp4": 0.5, "int8": 1.0, "fp8": 1.0}


def _disk_bytes(recipe: Recipe, model: ModelInputs) -> int:
    """Return about what building one model takes."""
    ends, precision = model.checkpoint.config.get("vocab_size"), recipe.precisions[model.role]
    coded = model.checkpoint.coded
    total = sum(
        prod(weight.shape) * precision.disk_bytes(end=weight.shape[:1] == (ends,))
        for name, weight in model.checkpoint.weights.items()
        if name not in coded
    )
    # Codes, fp32 scales and minimums, in the kept graph's folder and in the engine.
    total += sum(
        2 * prod(weight.shape) * (_CODE_BYTES[weight.precision] + 8 / weight.block)
        for weight in coded.values()
    )
    return int(total * recipe.spec_of(model.role).disk_factor)


def _free(folder: Path) -> int:
    """Make a folder where it is missing, and return the bytes that fit in."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except (OSError, ValueError) as error:  # a NUL in a name is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise BuildError(
            f"{folder} cannot be made a folder ({reason}); build elsewhere with --out"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BuildError(f"{folder} may not be written to; build elsewhere with --out")
    return free


def end_tokens(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the tokens that end a text: none, one or several.

    Raises: CheckpointError for what are no token ids of the model.
    """
    path, value = _setting(checkpoint, "eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        _check_id(checkpoint, path, "eos_token_id", token)
    return tuple(ids)


def begin_token(checkpoint: Checkpoint) -> int | None:
    """Return the token that an empty prompt begins with, if there is one.

    Raises: CheckpointError for what is no token id of the model.
    """
    path, value = _setting(checkpoint, "bos_token_id")
    if value is None:
        return None
    return _check_id(checkpoint, path, "bos_token_id", value)


def decoder_start(checkpoint: Checkpoint, task: str) -> tuple[int, ...]:
    """Return the tokens that a text of a source begins with; none for a task without sources.

    Of Whisper they also name the language (English, where no setting says which), the task
    (to transcribe) and that there are no timestamps.
    Raises: CheckpointError for what are no token ids of the model, or where none is named.
    """
    if task == TEXT_GENERATION:
        return ()
    for key in ("decoder_start_token_id", "bos_token_id"):
        path, first = _setting(checkpoint, key)
        if first is not None:
            break
    else:
        raise CheckpointError(
            f"{path} has no decoder_start_token_id; expected the token that a text begins with: "
            "add it to generation_config.json"
        )
    start = [_check_id(checkpoint, path, key, first)]
    return tuple(start) + (_spoken(checkpoint) if task == SPEECH else ())


def _spoken(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return what follows the first token of a text of speech."""
    _, languages = _setting(checkpoint, "lang_to_id")
    found = _forced(checkpoint) if languages is None else []
    if languages is not None:
        path, language = _setting(checkpoint, "language")
        code = f"<|{str(language or 'en').strip('<|>').lower()}|>"
        if not isinstance(languages, dict) or code not in languages:
            raise CheckpointError(
                f"{path} has language {short(language)}, which its lang_to_id does not; expected "
                "a code such as 'en': correct generation_config.json"
            )
        found.append((path, "lang_to_id", languages[code]))
        _, tasks = _setting(checkpoint, "task_to_id")
        _, wanted = _setting(checkpoint, "task")
        known = tasks if isinstance(tasks, dict) else {}
        found.append((path, f"task_to_id[{wanted}]", known.get(wanted or "transcribe")))
    path, silent = _setting(checkpoint, "no_timestamps_token_id")
    if silent is not None and silent not in [value for _, _, value in found]:
        found.append((path, "no_timestamps_token_id", silent))
    return tuple(_check_id(checkpoint, *one) for one in found)


def _forced(checkpoint: Checkpoint) -> list[tuple[Path, str, Any]]:
    """Return what older settings force after the first token: pairs of a position and an id."""
    path, pairs = _setting(checkpoint, "forced_decoder_ids")
    try:
        return [
            (path, "forced_decoder_ids", token)
            for _, token in sorted(pairs or ())
            if token is not None
        ]
    except (TypeError, ValueError):
        raise CheckpointError(
            f"{path} has forced_decoder_ids {short(pairs)}; expected pairs of a position and a "
            "token id: correct the file, or fetch it again"
        ) from None


SETTINGS = (
    "min_length", "min_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids",
    "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "num_beams", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "exponential_decay_length_penalty",
)  # fmt: skip
"""Settings of how to write a text, which older checkpoints have in config.json."""


def generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's generation_config.json, or what of it its config.json holds.

    As transformers does, the second is read only where there is no such file.
    Raises: CheckpointError for a file that cannot be read.
    """
    if (checkpoint.folder / GENERATION_CONFIG).is_file():
        return _generation_settings(checkpoint)
    return {k: checkpoint.config[k] for k in SETTINGS if checkpoint.config.get(k) is not None}


def shares_encoder(target: tuple[Path, Path], draft: tuple[Path, Path]) -> bool:
    """Tell whether a draft reads the hidden states of its target: they are the same, bit for bit.

    Each is the graph of a decoder, with others beside it, and the folder of its weights.
    Raises: CheckpointError for a draft without an encoder whose states are not its target's size.
    """
    (graph, folder), (other, other_folder) = target, draft
    ours, theirs = (source_of(read_graph(part_path(one, "cross"))) for one in (graph, other))
    assert ours is not None, "a cross graph has the sizes of its source"
    assert theirs is not None, "a cross graph has the sizes of its source"
    if not part_path(other, "encoder").is_file():
        if (ours.width, ours.max_source) != (theirs.width, theirs.max_source):
            raise CheckpointError(
                f"{other_folder} has no encoder, and attends to {theirs.max_source} states of "
                f"{theirs.width}; its target's are {ours.max_source} of {ours.width}: choose a "
                "draft that was made of this target"
            )
        return True
    one, two = (read_graph(part_path(path, "encoder")) for path in (graph, other))
    if one.graph.node != two.graph.node:
        return False
    weights = {weight.name: weight for weight in map_weights(two, other_folder)}
    inline = {t.name: t for t in two.graph.initializer if t.name not in weights}
    mine = map_weights(one, folder)
    return all(
        tensor == inline.get(tensor.name)
        for tensor in one.graph.initializer
        if tensor.name not in {weight.name for weight in mine}
    ) and all(_same_bytes(weight, weights.get(weight.name)) for weight in mine)


def _same_bytes(one: MappedWeight, other: MappedWeight | None) -> bool:
    return (
        other is not None
        and one.onnx_type == other.onnx_type
        and one.array.shape == other.array.shape
        and one.array.tobytes() == other.array.tobytes()
    )


def _setting(checkpoint: Checkpoint, key: str) -> tuple[Path, Any]:
    """Return a setting and the file it is from."""
    value = _generation_settings(checkpoint).get(key)
    if value is None:
        return checkpoint.folder / "config.json", checkpoint.config.get(key)
    return checkpoint.folder / GENERATION_CONFIG, value


def _generation_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    path = checkpoint.folder / GENERATION_CONFIG
    try:
        settings = json.loads(read_file(path)) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {first_line(error)}; fetch it again") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} holds {short(settings)}; expected an object, fetch it again")
    return settings


def _check_id(checkpoint: Checkpoint, path: Path, key: str, value: Any) -> int:
    size = checkpoint.config.get("decoder_vocab_size") or checkpoint.config.get("vocab_size")
    last = size - 1 if type(size) is int else None
    if type(value) is int and value >= 0 and (last is None or value <= last):
        return value
    known = "0 or more" if last is None else f"from 0 to {last}"
    raise CheckpointError(
        f"{path} has {key} {short(value)}; expected token ids {known}: correct the file, or fetch "
        "it again"
    )
