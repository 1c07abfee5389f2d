"""Opens a bundle: `load`, which is `open`, too."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrt.bundle import GENERATION_CONFIG, TOKENIZER, Bundle, Manifest, ModelRecord
from specrt.engine.backends import backend_of, check_versions, host_bytes, notices, open_engine
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.head_engine import trimmed
from specrt.engine.protocol import Engine, FusedRounds
from specrt.errors import BundleError, RequestError
from specrt.generation_config import GenerationConfig, read_generation_config, read_sampling
from specrt.generator import Generator
from specrt.params import AUTO, Gamma
from specrt.speculation.drafters import DRAFTERS, available_drafters
from specrt.speculation.pool import Models
from specrt.speculation.text_memory import DEFAULT_BYTES, TextMemory
from specrt.system.memory import available_bytes, size
from specrt.text.tokenizer import Tokenizer
from specrt.tuning.tuning_record import Tuning, read_tuning


def load(
    bundle: str | Path,
    *,
    threads: int | None = None,
    owns_process: bool = False,
    memory_bytes: int | None = None,
    prompt_cache: bool = True,
    text_memory_bytes: int = DEFAULT_BYTES,
    text_memory_file: str | Path | None = None,
) -> Generator:
    """Open a bundle for generation; `specrt.open` and `specrt.load` are this one function.

    The generator is a context manager that closes itself and frees all memory. The process stays
    as it was: no signal handler, no logging, no filter of warnings. Of the environment `import
    specrt` sets `ORT_DISABLE_TELEMETRY` where nothing else has.

    `threads` is the number of cores to use for the pair; every one this process may run on when
    None. `owns_process` promises that nothing else in this process uses the engine library: target
    and draft then share one thread pool, which makes the draft faster; see `share_threads`.
    `memory_bytes` is the most the weights and full KV buffers may take, what is available when
    None: where the draft model does not fit next to the target, it is not opened. `prompt_cache`
    lets a prompt begin where the KV buffers hold its first tokens already.

    `text_memory_bytes` bounds the memory for finished texts, from which lookup drafts into others
    of the same `memory_key`; 0 turns it off. It is read from `text_memory_file`, where that
    exists, and written there when the generator is closed.
    Raises: BundleError, EngineError, RequestError.
    """
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    check_versions(opened.path, manifest)
    text = bytes(opened.held[TOKENIZER].data)
    tokenizer = Tokenizer(opened.file(TOKENIZER), manifest.bos_token_id, text)
    _check_vocabulary(tokenizer, manifest)
    vocabulary = hashlib.sha256(text).hexdigest()
    texts = TextMemory(text_memory_bytes)
    save = None
    if text_memory_file is not None:
        file = Path(text_memory_file)
        if not text_memory_bytes:
            raise RequestError("text_memory_file was given, and text_memory_bytes is 0; leave one")
        texts.read(file, vocabulary, manifest.target.geometry.vocab_size)
        save = partial(texts.save, file, vocabulary)
    cores = _cores(threads)
    absent = _no_room(manifest, available_bytes() if memory_bytes is None else memory_bytes)
    if owns_process:
        _share_threads(manifest, cores)
    # Costs measured with a shared pool will do without one: what counts is their ratios.
    tuning, ignored = read_tuning(opened, cores)
    config = _generation_config(opened)
    target, draft = _open_pair(opened, cores, has_room=absent is None)
    encoder = manifest.target.encoder
    models = Models(
        target,
        draft,
        manifest.gammas,
        gamma=_default_gamma(manifest, tuning),
        drafter=_default_drafter(manifest, draft, tuning),
        snapshot_bytes=manifest.snapshot_bytes,
        costs=tuning.costs if tuning else None,
        absent=absent,
        rounds=_whole_rounds(manifest, target, draft),
        draft_kind=(manifest.draft or manifest.target).engine_kind,
        decoder_start=manifest.decoder_start,
        features=(encoder.features, encoder.frames) if encoder and encoder.features else None,
        options=config.options,
        sampling=_sampling(opened),
    )
    told = [*notices(manifest), *(notice for notice in (ignored, absent) if notice)]
    told += config.notices
    return Generator(
        models,
        tokenizer,
        manifest.eos_token_ids,
        told,
        prompt_cache=prompt_cache,
        text_memory=texts if text_memory_bytes else None,
        on_close=save,
    )


def _generation_config(bundle: Bundle) -> GenerationConfig:
    """Return what the checkpoint's generation config implies: nothing but of encoder-decoders.

    Raises: BundleError for one that cannot be.
    """
    manifest = bundle.manifest
    if manifest.target.encoder is None or GENERATION_CONFIG not in bundle.held:
        return GenerationConfig({}, [])
    return read_generation_config(
        bundle.file(GENERATION_CONFIG),
        bytes(bundle.held[GENERATION_CONFIG].data),
        start=len(manifest.decoder_start),
        vocabulary=manifest.target.geometry.vocab_size,
    )


def _sampling(bundle: Bundle) -> dict[str, Any]:
    """Return how the checkpoint is meant to be sampled.

    Raises: BundleError for a generation config that cannot be.
    """
    held = bundle.held.get(GENERATION_CONFIG)
    return {} if held is None else read_sampling(bundle.file(GENERATION_CONFIG), bytes(held.data))


class OpenedDraft(NamedTuple):
    """What a device needs whose target is a server's."""

    engine: Engine | None
    """None in a bundle without a draft model."""
    tokenizer: Tokenizer
    notices: list[str]
    sampling: Mapping[str, Any] = MappingProxyType({})
    """See `Models.sampling`."""


def open_draft(
    bundle: str | Path,
    *,
    threads: int | None = None,
    owns_process: bool = False,
    bos_token_id: int | None = None,
) -> OpenedDraft:
    """Open draft model and tokenizer of a bundle; the target's files need not be there.

    `bos_token_id` is the one of the target. The rest is as for `load`.
    Raises: BundleError, EngineError, RequestError.
    """
    opened = Bundle.open(bundle, without_target=True)
    manifest = opened.manifest
    if manifest.target.encoder is not None:
        raise RequestError(
            f"{opened.path} is an encoder-decoder, whose target reads sources of its own: no "
            "device drafts for it; leave --remote out"
        )
    tokenizer = Tokenizer(opened.file(TOKENIZER), bos_token_id, bytes(opened.held[TOKENIZER].data))
    draft, cores = manifest.draft, _cores(threads)
    if draft is None or draft.kind:
        lacks = "has no draft model" if draft is None else "has a head, which needs its target here"
        return OpenedDraft(
            None, tokenizer, [f"{opened.path} {lacks}: n-gram lookup drafts"], _sampling(opened)
        )
    backend = backend_of(manifest, draft)
    backend.check_versions(opened.path, manifest.versions)
    if owns_process:
        backend.share_threads(cores)
    notice = backend.notice(manifest.versions)
    engine = _open_model(opened, draft, cores)
    return OpenedDraft(engine, tokenizer, [notice] if notice else [], _sampling(opened))


def _whole_rounds(manifest: Manifest, target: Engine, draft: Engine | None) -> FusedRounds | None:
    """Return what runs whole rounds, where one library and device run both models."""
    return backend_of(manifest, manifest.target).fused_rounds(target, draft)


def _share_threads(manifest: Manifest, cores: int) -> None:
    """Let target and draft share threads, if one library runs both."""
    if len({manifest.backend_of(model) for model in manifest.models}) == 1:
        backend_of(manifest, manifest.target).share_threads(cores)


def _default_gamma(manifest: Manifest, tuning: Tuning | None) -> Gamma:
    """Return the recipe's gamma where it names one, else what tuning found best, else auto."""
    if manifest.gamma is not None:
        return manifest.gamma
    if tuning is None:
        return AUTO
    return 0 if _plain(tuning) else tuning.gamma


def _plain(tuning: Tuning) -> bool:
    """Tell whether plain decoding was best."""
    return bool(tuning.drafter) and not DRAFTERS[tuning.drafter].policies


def _default_drafter(manifest: Manifest, draft: Engine | None, tuning: Tuning | None) -> str:
    """Return the drafter that tuning found best, else the recipe's; empty where neither can run.

    Where plain decoding was best the default gamma is 0, and a request with another gamma drafts.
    """
    known = available_drafters(has_model=draft is not None)
    wanted = (tuning.drafter if tuning else "", manifest.drafter)
    return next((name for name in wanted if name in known), "")


def _no_room(manifest: Manifest, most: int | None) -> str | None:
    """Return why the draft must stay closed, None where target and draft fit together."""
    if manifest.draft is None or most is None:
        return None
    both = host_bytes(manifest)
    if both <= most:
        return None
    return (
        f"the draft model is not opened: target and draft take {size(both)} with their KV "
        f"buffers full, and {size(most)} may be used"
    )


def _open_pair(bundle: Bundle, cores: int, has_room: bool) -> tuple[Engine, Engine | None]:
    """Open the target, and the draft where there is one and room for it."""
    manifest = bundle.manifest
    target = _open_model(bundle, manifest.target, cores)
    try:
        if manifest.draft is None or not has_room:
            return target, None
        return target, _open_model(bundle, manifest.draft, cores, target)
    except BaseException:
        target.close()
        raise


def _open_model(
    bundle: Bundle, model: ModelRecord, threads: int, target: Engine | None = None
) -> Engine:
    if model.encoder is not None and model.vocab_map:
        raise BundleError(
            f"{bundle.path} has a draft with an encoder that scores some entries only, which this "
            "specrt does not run yet; build it with a draft that scores all"
        )
    engine = open_engine(EngineSpec.of(bundle, model, threads, target))
    scored = engine.traits.scored or model.geometry.vocab_size
    try:
        entries = _scored_entries(bundle, model.vocab_map) if model.vocab_map else None
        said = model.geometry.vocab_size if entries is None else len(entries)
        if scored != said:
            raise BundleError(
                f"{bundle.file(model.engine)} scores {scored} entries of the vocabulary, and the "
                f"bundle says {said}; they do not belong together: build the bundle again"
            )
        if entries is None:
            return engine
        return trimmed(engine, entries)
    except BaseException:
        engine.close()
        raise


def _scored_entries(bundle: Bundle, name: str) -> NDArray[np.int32]:
    """Return the ids that a trimmed draft scores.

    Raises: BundleError for others than ids of the target's vocabulary, each once.
    """
    data, known = bytes(bundle.held[name].data), bundle.manifest.target.geometry.vocab_size
    entries = np.frombuffer(data, "<i4", len(data) // 4)
    sound = len(data) == 4 * len(entries) > 0 and np.all(np.diff(entries) > 0)
    if not sound or entries[0] < 0 or entries[-1] >= known:
        raise BundleError(
            f"{bundle.file(name)} has no rising ids from 0 to {known - 1}; build the bundle again "
            "with `specrt build RECIPE`"
        )
    return entries


def _cores(threads: int | None) -> int:
    """Return how many cores to use; more than there are only get in each other's way."""
    there = len(os.sched_getaffinity(0))
    if threads is None:
        return there
    if not isinstance(threads, int) or not 1 <= threads <= there:
        raise RequestError(
            f"threads is {threads!r}; expected a whole number from 1 to {there}, the cores this "
            "process may use"
        )
    return threads


def _check_vocabulary(tokenizer: Tokenizer, manifest: Manifest) -> None:
    known, scored = tokenizer.size, manifest.target.geometry.vocab_size
    if known > scored:
        raise BundleError(
            f"the tokenizer has ids up to {known - 1}, and the model scores {scored}; they do not "
            "belong together: build the bundle again from one checkpoint"
        )
