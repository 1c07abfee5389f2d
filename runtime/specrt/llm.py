"""The names people know from vLLM, thin over a generator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

from specrt.completion import Completion
from specrt.errors import RequestError
from specrt.loading import load
from specrt.logprobs import Entry
from specrt.params import SamplingParams

Prompt = str | Sequence[int]
"""Text or token ids; a mapping with `prompt` or `prompt_token_ids` will do too."""


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

    @property
    def cumulative_logprob(self) -> float | None:
        """The log-probability of all tokens together; None where `logprobs` was not asked for."""
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
    """What specrt itself reports of each: counts of the rounds, times, seed."""

    @property
    def completion(self) -> Completion:
        """The first of `completions`."""
        return self.completions[0]


class LLM:
    """A bundle behind vLLM's offline interface.

    `model` is a bundle's directory; `num_speculative_tokens` is gamma (the bundle's default when
    None, 0 for plain decoding).
    """

    def __init__(
        self,
        model: str | Path,
        *,
        num_speculative_tokens: int | None = None,
        threads: int | None = None,
    ) -> None:
        self._generator = load(model, threads=threads)
        self._gamma = num_speculative_tokens

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or several, on all rows of the bundle.

        Parameters are shared, or one for each prompt. A completion that fails on the way has the
        finish reason `error` and harms no other.
        Raises: RequestError, CapacityError before any work, also when the numbers of prompts and
            parameters differ.
        """
        many = _as_prompts(prompts)
        encode = self._generator.tokenizer.encode
        ids = [encode(p) if isinstance(p, str) else list(p) for p in many]
        found = self._generator.generate_many(ids, sampling_params, gamma=self._gamma)
        return [
            _output(number, prompt, tokens, completions)
            for number, (prompt, tokens, completions) in enumerate(
                zip(many, ids, found, strict=True)
            )
        ]

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


def _output(
    number: int, prompt: Prompt, tokens: list[int], completions: list[Completion]
) -> RequestOutput:
    """Return what vLLM would say of a prompt and its completions."""
    outputs = [
        CompletionOutput(
            done.index, done.text, done.token_ids, done.finish_reason, done.stop_reason,
            done.logprobs, done.error,
        )
        for done in completions
    ]  # fmt: skip
    text = prompt if isinstance(prompt, str) else None
    told = next((d.prompt_logprobs for d in completions if d.prompt_logprobs is not None), None)
    return RequestOutput(str(number), text, tokens, told, outputs, completions)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt, text or token ids, from several."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; expected text, token ids, or a list of either")
    many: list[Any] = [prompts] if isinstance(prompts, Mapping) else list(prompts)
    if many and isinstance(many[0], SupportsIndex):
        return [many]
    return [_unpacked(prompt) for prompt in many]


def _unpacked(prompt: Any) -> Prompt:
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
    return prompt if isinstance(prompt, str) else list(prompt)
