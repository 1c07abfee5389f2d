"""Prompts: text, token ids or speech, and what the text of a completion begins with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import index
from reprlib import repr as short
from typing import Any, NamedTuple, NoReturn, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from specrt.engine.protocol import ConditionedEngine, Source
from specrt.errors import CapacityError, RequestError, one_line
from specrt.params import SamplingParams
from specrt.speculation.pool import Models
from specrt.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | NDArray[np.float32]
"""Text or token ids; for a bundle that reads speech, features [channels, frames].

Of an encoder-decoder it is the source: what the encoder reads."""


_LONGEST_TOKEN = 256
"""Characters that a token is taken to have at most, where the tokenizer does not say it."""


class TextStart(NamedTuple):
    """What a prompt makes a text begin with."""

    tokens: Sequence[int]
    prompt: Sequence[int]
    """The token ids of the prompt; none of speech."""
    positions: int
    """Of the prompt."""
    source: Source | None = None
    """What the encoder reads."""


class PromptReader:
    """Reads the prompts of a bundle: here of a decoder, whose text continues its prompt."""

    continues = True
    """Whether a text continues its prompt, which then takes KV positions."""
    _limit_name = "context of this bundle"
    _option = "max_length"

    def __init__(self, models: Models, tokenizer: Tokenizer) -> None:
        self._models = models
        self._tokenizer = tokenizer
        self._last = models.target.geometry.vocab_size - 1

    @property
    def limit(self) -> int:
        """Most tokens of a prompt."""
        return self._models.target.max_length

    def tokens(self, prompt: Prompt, *, parse_special: bool = True) -> list[int]:
        """Return the tokens of a prompt; see `GenerateOptions` for `parse_special`.

        Raises: RequestError for another type and an unknown id, CapacityError above `limit`.
        """
        given: Any = prompt
        if isinstance(prompt, str):
            self._check_source(prompt)
            self.check_length(prompt)
            given = self._tokenizer.encode(prompt, parse_special=parse_special)
        number = getattr(given, "shape", None) == ()  # an array, and nothing to go through
        if number or isinstance(given, bytes) or not isinstance(given, Iterable):
            raise RequestError(
                f"the prompt is of type {type(given).__name__}; expected text or token ids"
            )
        tokens = self.token_ids(given)
        if not tokens:
            raise RequestError("the prompt has no tokens; give at least one")
        if len(tokens) > self.limit:
            raise CapacityError(
                f"the prompt has {len(tokens)} tokens, and the {self._limit_name} is {self.limit}; "
                f"shorten the prompt, or build with a larger `{self._option}`"
            )
        return tokens

    def check_length(self, text: str) -> None:
        """Refuse a text that is far too long, before it is tokenized.

        Raises: CapacityError.
        """
        fewest = max(self._tokenizer.fewest(text), len(text) // _LONGEST_TOKEN)
        if fewest > self.limit:
            raise CapacityError(
                f"the prompt has {len(text)} characters, which are {fewest} tokens or more, and "
                f"the {self._limit_name} is {self.limit}; shorten the prompt"
            )

    def token_ids(self, given: Iterable[object]) -> list[int]:
        """Return token ids of any integer type as ints.

        Raises: RequestError for one that is not in the vocabulary.
        """
        return [_token_id(token, self._last) for token in given]

    def start(self, prompt: Prompt, params: SamplingParams, *, parse_special: bool) -> TextStart:
        """Return what a prompt makes a text begin with.

        Raises: RequestError, CapacityError.
        """
        self._begin(params.decoder_start)
        tokens = self.tokens(prompt, parse_special=parse_special)
        return TextStart(tokens, tokens, len(tokens))

    def first_tokens(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return what a text begins with whose prompt has these tokens."""
        return prompt

    def check_params(self, params: SamplingParams) -> None:
        """Raise RequestError for options that no prompt here could have."""

    def require_text(self, remedy: str = "use `specrt transcribe FILE.wav`") -> None:
        """Raise RequestError where a prompt is speech, with what else to do."""

    def require_continuing(self, remedy: str) -> None:
        """Raise RequestError where a prompt is the source of its text, with what else to do."""

    def _check_source(self, prompt: str) -> None:
        """Refuse a text that cannot be a source, where it is one."""

    def _begin(self, given: Sequence[int] | None) -> Sequence[int]:
        """Return what the text of an encoder-decoder begins with: the request's own, if any.

        Raises: RequestError.
        """
        if given is not None:
            raise RequestError(
                f"decoder_start is {[*given]}, and this bundle is not an encoder-decoder: a text "
                "begins with its prompt; leave it out"
            )
        return ()


class SourcePromptReader(PromptReader):
    """Reads the prompts of an encoder-decoder: each is the source of its text."""

    continues = False
    _limit_name = "longest source of this bundle"
    _option = "max_source"

    def __init__(self, models: Models, tokenizer: Tokenizer, target: ConditionedEngine) -> None:
        super().__init__(models, tokenizer)
        self._target = target

    @property
    def limit(self) -> int:
        """Most tokens of a source."""
        return self._target.max_source

    def start(self, prompt: Prompt, params: SamplingParams, *, parse_special: bool) -> TextStart:
        """Return what a source makes a text begin with; see `PromptReader.start`."""
        first = self._begin(params.decoder_start)
        tokens = self.tokens(prompt, parse_special=parse_special)
        return TextStart(first, tokens, len(tokens), _kept(np.array(tokens, np.int64)))

    def first_tokens(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return what every text begins with."""
        return self._models.decoder_start

    def check_params(self, params: SamplingParams) -> None:
        """Refuse log-probabilities of a source, which no model scores."""
        if params.prompt_logprobs is not None:
            raise RequestError(
                f"prompt_logprobs is {params.prompt_logprobs}, and the prompt of an "
                "encoder-decoder is its source, which is read and not scored; leave it out"
            )

    def require_continuing(self, remedy: str) -> NoReturn:
        """Refuse, with what else to do."""
        raise RequestError(
            f"this bundle is an encoder-decoder, whose prompt is a source it reads once: {remedy}"
        )

    def _check_source(self, prompt: str) -> None:
        """Refuse a source without text: its tokens would be those that every source has."""
        if not prompt.strip():
            raise RequestError(
                f"the prompt is {prompt!r}, and this bundle reads it as the source of its text; "
                "give at least one word"
            )

    def _begin(self, given: Sequence[int] | None) -> Sequence[int]:
        most = self._models.target.max_length
        if given is None:
            return self._models.decoder_start
        if not 0 < len(given) <= most:
            raise RequestError(
                f"decoder_start has {len(given)} tokens; expected 1 to {most}, the context of this "
                "bundle"
            )
        wrong = [token for token in given if not 0 <= token <= self._last]
        if wrong:
            raise RequestError(
                f"decoder_start holds {wrong[0]}; expected ids of the vocabulary, 0 to {self._last}"
            )
        return given


class SpeechPromptReader(SourcePromptReader):
    """Reads the features of recordings, which are sources too."""

    def start(self, prompt: Prompt, params: SamplingParams, *, parse_special: bool) -> TextStart:
        """Return what a recording makes a text begin with; see `PromptReader.start`."""
        first = self._begin(params.decoder_start)
        return TextStart(first, (), self.limit, _kept(self._features(prompt)))

    def require_text(self, remedy: str = "use `specrt transcribe FILE.wav`") -> NoReturn:
        """Refuse, with what else to do."""
        raise RequestError(f"this bundle reads speech, and a text was given; {remedy}")

    def _features(self, given: object) -> NDArray[np.float32]:
        """Return a copy of features.

        Raises: RequestError for another type or shape, and for values that are not finite.
        """
        shape = self._models.features
        assert shape is not None, "prompt_reader takes this class for features alone"
        expected = f"an array of features {[*shape]}, as `specrt.speech` has it"
        if not isinstance(given, np.ndarray):
            raise RequestError(
                f"the prompt is of type {type(given).__name__}, and this bundle reads speech; "
                f"expected {expected}"
            )
        if given.shape != shape or not np.issubdtype(given.dtype, np.floating):
            raise RequestError(
                f"the prompt is an array {list(given.shape)} of {given.dtype}; expected {expected}"
            )
        with np.errstate(over="ignore"):  # what is too large for 32 bits is refused as infinite
            features: NDArray[np.float32] = np.array(given, np.float32)
        if not np.isfinite(features).all():
            raise RequestError(f"the prompt holds values that are not finite; expected {expected}")
        return features


def prompt_reader(models: Models, tokenizer: Tokenizer) -> PromptReader:
    """Return what reads the prompts of a bundle."""
    if models.conditioned is None:
        return PromptReader(models, tokenizer)
    reader = SourcePromptReader if models.features is None else SpeechPromptReader
    return reader(models, tokenizer, models.conditioned)


def several_prompts(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return prompts as a list.

    Raises: RequestError for a single prompt.
    """
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts is of type {type(prompts).__name__}; expected a list of prompts, each text "
            "or token ids"
        )
    return list(prompts)


def _kept(source: Source) -> Source:
    source.flags.writeable = False
    return source


def _token_id(token: object, last: int) -> int:
    """Return a token id of any integer type as an int."""
    number = -1
    if type(token) is int:  # at once: the check of a protocol takes microseconds
        number = token
    elif isinstance(token, SupportsIndex) and not isinstance(token, bool):
        with suppress(TypeError):  # arrays have the verb, and most of them no index
            number = index(token)
    if not 0 <= number <= last:
        given = one_line(short(token))  # of an array, which has lines
        raise RequestError(f"token id {given} is not in the vocabulary of 0 to {last}")
    return number
