"""Open a bundle: engines, tokenizer and what was measured about them, held to this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from specrt.bundle import Bundle
from specrt.speculation.costs import Costs
from specrt.engine import TENSORRT, Engine, open_engine, share_threads
from specrt.errors import BundleError, RequestError
from specrt.generate import Generator
from specrt.manifest import Manifest, ModelRecord
from specrt.memory import available_bytes
from specrt.models import AUTO, Gamma, Models
from specrt.text import Tokenizer
from specrt.tune import measure_costs
from specrt.tuning import Tuning, read_tuning
from specrt.whole import WholeRounds


def load(
    bundle: str | Path,
    *,
    threads: int | None = None,
    owns_process: bool = False,
    memory_bytes: int | None = None,
    prompt_cache: bool = True,
) -> Generator:
    """Open a bundle for generation; `specrt.open` and `specrt.load` are this one function.

    What it returns closes itself behind a `with`, and gives all memory back. Nothing of the
    process is touched: no signal handler, no logging, no filter of warnings, no environment.

    `threads` is the number of cores to use for the pair; every one this process may run on when
    None. `owns_process` says that nothing else in this process uses the engine library: target
    and draft then share one thread pool, which makes the draft faster; see `share_pool`.
    `memory_bytes` is the most the weights and full KV buffers may take, what is available when
    None: where the draft model does not fit beside the target, it is not opened. `prompt_cache`
    lets a prompt begin where the KV buffers hold its first tokens already.
    Raises: BundleError, EngineError, RequestError.
    """
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    tokenizer = Tokenizer(opened.file("tokenizer.json"), manifest.bos_token_id)
    _check_vocabulary(tokenizer, manifest)
    cores = _cores(threads)
    absent = _no_room(manifest, available_bytes() if memory_bytes is None else memory_bytes)
    if owns_process:
        _share_threads(manifest, cores)
    # Costs measured with a shared pool will do without one: what counts is their ratios.
    tuning, ignored = read_tuning(opened, cores)
    even = tuning is None or tuning.even
    target, draft = _open_pair(opened, cores, even, has_room=absent is None)
    models = Models(
        target,
        draft,
        manifest.gammas,
        gamma=_default_gamma(manifest, tuning),
        drafter=_default_drafter(draft, tuning),
        measure=_costs(tuning, tokenizer),
        absent=absent,
        rounds=_whole_rounds(manifest, target, draft),
    )
    notices = [notice for notice in (ignored, absent) if notice]
    return Generator(models, tokenizer, manifest.eos_token_ids, notices, prompt_cache=prompt_cache)


def _whole_rounds(manifest: Manifest, target: Engine, draft: Engine | None) -> WholeRounds | None:
    """Return what runs whole rounds, where one library and device run both models."""
    if manifest.backend_of(manifest.target) not in TENSORRT:
        return None
    from specrt.engines.tensorrt.opening import whole_rounds

    return whole_rounds(target, draft)


def _share_threads(manifest: Manifest, cores: int) -> None:
    """Let target and draft share threads, if one library runs both."""
    backends = {manifest.backend_of(m) for m in (manifest.target, manifest.draft) if m}
    if len(backends) == 1:
        share_threads(manifest.backend_of(manifest.target), cores)


def _costs(tuning: Tuning | None, tokenizer: Tokenizer) -> Callable[[Models], Costs]:
    """Return where costs come from: what was tuned here, else measured when first needed."""
    if tuning is not None:
        known = tuning.costs
        return lambda models: known
    return lambda models: measure_costs(models, tokenizer)


def _default_gamma(manifest: Manifest, tuning: Tuning | None) -> Gamma:
    """Return the recipe's gamma where it names one, else what tuning found best, else auto."""
    if manifest.gamma is not None:
        return manifest.gamma
    if tuning is None:
        return AUTO
    return 0 if tuning.drafter == "none" else tuning.gamma


def _default_drafter(draft: Engine | None, tuning: Tuning | None) -> str:
    """Return the drafter that tuning found best, where it can be had.

    Where plain decoding was best the default gamma is 0, and one that is asked for drafts.
    """
    best = tuning.drafter if tuning else ""
    unfit = ("none", "model", "cascade") if draft is None else ("none",)
    return "" if best in unfit else best


def _no_room(manifest: Manifest, most: int | None) -> str | None:
    """Say why the draft must stay closed, where target and draft do not fit together."""
    if manifest.draft is None or most is None:
        return None
    both = manifest.host_bytes()
    if both <= most:
        return None
    return (
        f"the draft model is not opened: target and draft take {both >> 20} MiB with their KV "
        f"buffers full, and {most >> 20} MiB may be used"
    )


def _open_pair(
    bundle: Bundle, cores: int, even: bool, has_room: bool
) -> tuple[Engine, Engine | None]:
    """Open the target, and the draft where there is one and room for it."""
    manifest = bundle.manifest
    target = _open_model(bundle, manifest.target, cores, even=even)
    if manifest.draft is None or not has_room:
        return target, None
    try:
        return target, _open_model(bundle, manifest.draft, cores, beside=target)
    except BaseException:
        target.close()
        raise


def _open_model(
    bundle: Bundle, model: ModelRecord, threads: int, *, even: bool = False,
    beside: Engine | None = None,
) -> Engine:  # fmt: skip
    manifest = bundle.manifest
    spare = model is manifest.target and model.quantized
    return open_engine(
        manifest.backend_of(model),
        bundle.file(model.engine),
        model.geometry,
        batch=manifest.batch,
        max_length=manifest.max_length,
        max_width=manifest.max_width,
        threads=threads,
        spare=spare,
        even=spare and even,
        widens=model.half_stored,
        beside=beside,
    )


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
