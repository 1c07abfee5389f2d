"""What the C interface calls where it hosts this runtime: plain values cross the boundary.

Texts are bytes of UTF-8 and token ids are packed as int64, so that each call hands over a few
objects, whatever their length. Every function returns a tuple: 0 and its results, or the number of
a status of `specrt.h` and a message.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from specrt.bundle import read_manifest
from specrt.errors import (
    NOT_ENOUGH_MEMORY,
    BundleError,
    CapacityError,
    EngineError,
    RequestError,
    lacks_memory,
    one_line,
)
from specrt.generator import Generator
from specrt.loading import load
from specrt.params import AUTO, Gamma, SamplingParams

PROTOCOL = 3
"""Raised when what crosses the boundary changes: the C++ side holds this module to it."""

INVALID_ARGUMENT, CALLBACK, INTERNAL, MEMORY = 1, 9, 10, 11

_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (CapacityError, 6),
    (RequestError, INVALID_ARGUMENT),
    (EngineError, 5),
    (BundleError, 4),
)

_AUTO = -1

P = ParamSpec("P")

Result = tuple[Any, ...]

Native = Callable[..., int]

Addresses = tuple[int, int, int]
"""Of a logits processor: its function, what it is called with first, and what counts the owners of
that, one more or one less."""


def _exported(function: Callable[P, Result]) -> Callable[P, Result]:
    """Return a function that returns errors instead of raising them."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return (0, *function(*args, **kwargs))
        except Exception as error:
            return _failure(error)

    return call


def _failure(error: Exception) -> Result:
    if isinstance(error.__cause__, _StoppedError):
        return (CALLBACK, str(error.__cause__).encode())
    status = next((number for kind, number in _STATUSES if isinstance(error, kind)), INTERNAL)
    if lacks_memory(error):
        return (MEMORY, (str(error) or NOT_ENOUGH_MEMORY).encode("utf-8", "replace"))
    text = str(error) if status != INTERNAL else f"{type(error).__name__}: {one_line(str(error))}"
    return (status, text.encode("utf-8", "replace"))


@_exported
def open_bundle(
    path: bytes, python: bytes, threads: int, owns_process: int, memory_bytes: int, cache: int,
    at_exit: int = 0, text_memory_bytes: int = 0,
) -> Result:  # fmt: skip
    """Open a bundle; 0 leaves threads and memory to the runtime.

    `python` is the path of the required interpreter, empty for any. `at_exit` is the address of the
    function that ends the library, for an interpreter that ends first.
    """
    _check_interpreter(os.fsdecode(python))
    if at_exit:
        _before_python_ends(at_exit)
    folder = Path(os.fsdecode(path))
    generator = load(
        folder,
        threads=threads or None,
        owns_process=bool(owns_process),
        memory_bytes=memory_bytes or None,
        prompt_cache=bool(cache),
        text_memory_bytes=text_memory_bytes,
    )
    return (Host(generator, folder),)


@cache
def _before_python_ends(address: int) -> None:
    """Stop generating before this interpreter ends: Python stops its threads where they are."""
    atexit.register(ctypes.CFUNCTYPE(ctypes.c_int32)(address))


def _check_interpreter(required: str) -> None:
    """Refuse an interpreter other than the one that runs: a process has one."""
    here = sys.executable or ""
    if required and os.path.abspath(required) != os.path.abspath(here):  # noqa: PTH100  links stay
        raise RequestError(
            f"python is {required!r}, and this process runs {here or 'one without a path'} "
            "already; leave python out, or open the bundle in a process of its own"
        )


class Host:
    """An open bundle."""

    def __init__(self, generator: Generator, folder: Path) -> None:
        self._generator = generator
        self._manifest = read_manifest(folder)

    @_exported
    def info(self) -> Result:
        """Return the fields of `specrt_info`, in its order."""
        models, manifest = self._generator.models, self._manifest
        return (
            manifest.name.encode(),
            manifest.backend_of(manifest.target).encode(),
            manifest.precision.encode(),
            models.target.max_length,
            models.target.geometry.vocab_size,
            models.target.batch,
            max(models.gammas),
            int(models.draft is not None),
            1,
            "\n".join(self._generator.notices).encode(),
            -1 if manifest.bos_token_id is None else manifest.bos_token_id,
            _packed(sorted(manifest.eos_token_ids)),
        )

    @_exported
    def memory(self) -> Result:
        """Return the bytes of the weights of the open models, and of their full KV buffers."""
        manifest = self._manifest
        draft = manifest.draft if self._generator.models.draft is not None else None
        models = [manifest.target, *([] if draft is None else [draft])]
        return sum(model.weight_bytes for model in models), manifest.kv_bytes(*models)

    @_exported
    def encode(self, text: bytes) -> Result:
        """Return the token ids of a text."""
        return (_packed(self._generator.tokenizer.encode(_text(text))),)

    @_exported
    def decode(self, ids: bytes) -> Result:
        """Return the text of token ids."""
        tokens = _ids(ids)
        size = self._generator.models.target.geometry.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise RequestError(f"token {wrong} is not in the vocabulary; expected 0 to {size - 1}")
        return (self._generator.tokenizer.decode(tokens).encode(),)

    @_exported
    def bytes_of(self, token: int) -> Result:
        """Return the bytes that a token adds to a text."""
        return (self._generator.tokenizer.bytes_of(token),)

    @_exported
    def begin(self, prompt: bytes, is_text: int, options: bytes) -> Result:
        """Begin to complete a prompt; `options` is a JSON object.

        It has the options of `SamplingParams` under `params`, `gamma` and `drafter` where they are
        not left to the bundle, `parse_special`, and the addresses of `processors`.
        """
        request = json.loads(_text(options))
        processors: list[Addresses] = request.pop("processors", [])
        functions = [
            CallbackProcessor(at, *addresses) for at, addresses in enumerate(processors, 1)
        ]
        params = SamplingParams.of(**request.pop("params"), logits_processors=functions)
        gamma: Gamma | None = request.get("gamma")
        given = _text(prompt) if is_text else _ids(prompt)
        stream = self._generator.stream(
            given,
            params,
            gamma=AUTO if gamma == _AUTO else gamma,
            drafter=request.get("drafter"),
            parse_special=request.get("parse_special", True),
        )
        return (Run(stream),)

    @_exported
    def close(self) -> Result:
        """Close the bundle, after the pass that may be running."""
        self._generator.close()
        return ()


class Run:
    """A completion that runs."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def next(self) -> Result:
        """Return text, ids and how many of these were drafted; nothing more at the end."""
        try:
            chunk = next(self._stream, None)
        except Exception as error:
            return _failure(error)
        if chunk is None:
            return (0,)
        return (0, chunk.text.encode(), array("q", chunk.token_ids).tobytes(), chunk.accepted)

    def cancel(self) -> Result:
        """End it, from any thread."""
        self._stream.cancel()
        return (0,)

    @_exported
    def stats(self) -> Result:
        """Return the fields of the C++ `Stats`, in its order."""
        done = self._stream.completion
        counts, times = done.speculation, done.timings
        return (
            done.prompt_tokens,
            done.cached_tokens,
            counts.rounds,
            counts.drafted,
            counts.evaluated,
            counts.accepted,
            counts.emitted,
            times.ttft_ms,
            times.itl_ms,
            times.tokens_per_second,
            done.seed,
            _AUTO if counts.gamma == AUTO else counts.gamma,
            counts.drafter.encode(),
            (done.finish_reason or "").encode(),
            (counts.fallback or "").encode(),
            times.queue_ms,
        )

    @_exported
    def logprobs(self, of_prompt: int) -> Result:
        """Return how many entries each token has; then all tokens, ranks and logarithms."""
        done = self._stream.completion
        given = (done.prompt_logprobs or [None])[1:] if of_prompt else done.logprobs or []
        entries = [entry or {} for entry in given]
        every = [(token, value) for entry in entries for token, value in entry.items()]
        return (
            _packed([len(entry) for entry in entries]),
            _packed([token for token, _ in every]),
            _packed([value.rank for _, value in every]),
            array("d", [value.logprob for _, value in every]).tobytes(),
        )

    @_exported
    def json(self) -> Result:
        """Return the object that `specrt generate --json` prints."""
        return (json.dumps(self._stream.completion.to_json()).encode(),)


class _StoppedError(Exception):
    """A logits processor of the application stopped the generation."""


_FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_size_t,
)  # fmt: skip

_HOLD = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)


class CallbackProcessor:
    """A logits processor of the application; the interpreter is released while it runs."""

    def __init__(self, number: int, function: int, user: int, hold: int) -> None:
        self.__name__ = f"number {number}"
        self._function: Native = _FUNCTION(function)
        self._hold = _HOLD(hold)
        self._user = user
        self._hold(user, 1)

    def __call__(self, token_ids: Sequence[int], scores: NDArray[np.float32]) -> Any:
        """Edit a row of scores in place, and return it."""
        ids = np.array(token_ids, np.int64)
        status = self._function(
            self._user, ids.ctypes.data, len(ids), scores.ctypes.data, len(scores)
        )
        if status:
            raise _StoppedError(
                f"the logits processor {self.__name__} returned {status}, which ends the "
                "generation; expected 0 to go on"
            )
        return scores

    def __del__(self) -> None:
        self._hold(self._user, -1)


def _text(given: bytes) -> str:
    try:
        return given.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the text is not UTF-8 at byte {error.start}: {error.reason}; pass UTF-8"
        ) from None


def _ids(packed: bytes) -> list[int]:
    ids = array("q")
    ids.frombytes(packed)
    return ids.tolist()


def _packed(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()
