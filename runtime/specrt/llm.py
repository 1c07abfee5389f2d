"""vLLM's offline interface: `LLM`, its prompts, and the objects it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex, TypeGuard

import numpy as np
from numpy.typing import NDArray

from specrt.completion import Completion
from specrt.errors import RequestError
from specrt.loading import load
from specrt.params import SamplingParams
from specrt.prompts import Prompt
from specrt.records import shown
from specrt.sampling.distribution import Entry
from specrt.speculation.text_memory import DEFAULT_BYTES


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """`stop`, `length`, or `error` for one that failed on the way; `error` says why."""
    stop_reason: int | str | None
    logprobs: list[Entry] | None = None
    error: str | None = None

    def __repr__(self) -> str:
        names = ("index", "text", "token_ids", "finish_reason", "stop_reason", "error")
        return shown(self, *names, "cumulative_logprob")

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of all tokens together; None without `logprobs`."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(entry[token].logprob for token, entry in pairs)


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Entry | None] | None
    outputs: list[CompletionOutput]
    completions: list[Completion]
    """The same as specrt's own records: counts of the rounds, times, seed."""

    def __repr__(self) -> str:
        return shown(self, "request_id", "prompt", "prompt_token_ids", "outputs")

    @property
    def completion(self) -> Completion:
        """The first of `completions`."""
        return self.completions[0]


class LLM:
    """A bundle with vLLM's offline interface.

    `model` is a bundle's directory; `num_speculative_tokens` is gamma (the bundle's default when
    None, 0 for plain decoding). `text_memory_bytes`: see `load`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        num_speculative_tokens: int | None = None,
        threads: int | None = None,
        text_memory_bytes: int = DEFAULT_BYTES,
    ) -> None:
        self._generator = load(model, threads=threads, text_memory_bytes=text_memory_bytes)
        self._gamma = num_speculative_tokens

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        parse_special: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or several, on all rows of the bundle.

        Parameters are shared, or one for each prompt. A completion that fails, also one whose
        prompt is too long, has the finish reason `error` and harms no other. `parse_special`: see
        `GenerateOptions`.
        Raises: RequestError before any work for options that no prompt could have, also when the
            numbers of prompts and parameters differ.
        """
        many = _as_prompts(prompts)
        results = self._generator.generate_many(
            many, sampling_params, gamma=self._gamma, parse_special=parse_special
        )
        pairs = enumerate(zip(many, results, strict=True))
        return [_output(number, prompt, done) for number, (prompt, done) in pairs]

    def close(self) -> None:
        """Close the engines."""
        self._generator.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _output(number: int, prompt: Prompt, completions: list[Completion]) -> RequestOutput:
    """Return a prompt and its completions as vLLM does."""
    outputs = [
        CompletionOutput(
            done.index, done.text, done.token_ids, done.finish_reason, done.stop_reason,
            done.logprobs, done.error,
        )
        for done in completions
    ]  # fmt: skip
    text = prompt if isinstance(prompt, str) else None
    ranks = next((d.prompt_logprobs for d in completions if d.prompt_logprobs is not None), None)
    tokens = prompt if isinstance(prompt, list) else [*completions[0].prompt_token_ids]
    return RequestOutput(str(number), text, tokens, ranks, outputs, completions)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt, text or token ids, or several as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; expected text, token ids, or a list of either")
    alone = isinstance(prompts, Mapping) or _is_features(prompts)
    many: list[Any] = [prompts] if alone else list(prompts)
    if many and isinstance(many[0], SupportsIndex) and getattr(many[0], "ndim", 0) == 0:
        return [many]
    return [_unpack(prompt) for prompt in many]


def _unpack(prompt: Any) -> Prompt:
    """Return the text or the token ids of a prompt, which may be in a mapping as vLLM's are."""
    if isinstance(prompt, Mapping):
        known = [key for key in ("prompt", "prompt_token_ids") if key in prompt]
        if len(known) != 1 or len(prompt) != 1:
            raise RequestError(
                f"a prompt has the keys {', '.join(map(repr, prompt))}; expected 'prompt' or "
                "'prompt_token_ids'"
            )
        prompt = prompt[known[0]]
    if not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt is {prompt!r}; expected text or token ids")
    return prompt if isinstance(prompt, str) or _is_features(prompt) else list(prompt)


def _is_features(prompt: object) -> TypeGuard[NDArray[np.float32]]:
    """Return whether a prompt is one of speech."""
    return isinstance(prompt, np.ndarray) and prompt.ndim == 2 and prompt.dtype.kind == "f"
