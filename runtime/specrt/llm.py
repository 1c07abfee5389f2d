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
    stop_reason: int | str | None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    completion: Completion
    """What specrt itself reports: counts of the rounds, times, seed."""


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
        """Complete one prompt or several; parameters are shared, or one for each prompt.

        Raises: RequestError, also when the numbers of prompts and parameters differ.
        """
        many = _as_prompts(prompts)
        params: list[SamplingParams | None]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * len(many)
        else:
            params = list(sampling_params)
        if len(params) != len(many):
            raise RequestError(
                f"{len(many)} prompts and {len(params)} sampling params were given; give one for "
                "each prompt, or one for all"
            )
        return [self._one(i, p, q) for i, (p, q) in enumerate(zip(many, params, strict=True))]

    def _one(self, index: int, prompt: Prompt, params: SamplingParams | None) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        ids = self._generator.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        done = self._generator.generate(ids, params, gamma=self._gamma)
        output = CompletionOutput(
            0, done.text, done.token_ids, done.finish_reason, done.stop_reason
        )
        return RequestOutput(str(index), text, ids, [output], done)

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
