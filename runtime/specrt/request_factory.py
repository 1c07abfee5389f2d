"""Turns a caller's arguments into requests: prompts as tokens, checked parameters, processors."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import index
from time import perf_counter_ns
from typing import SupportsIndex

from specrt.completion import Completion, SpeculationStats, Timings
from specrt.engine.protocol import Engine
from specrt.errors import CapacityError, RequestError
from specrt.params import Gamma, SamplingParams
from specrt.sampling.grammar import GrammarRules, Grammars
from specrt.sampling.noise import Noise
from specrt.sampling.processors import (
    AllowedTokens,
    BadWords,
    Custom,
    LogitBias,
    LogitsProcessors,
    MinTokens,
    NoRepeatNgram,
    OutputPenalties,
    Processor,
    RepetitionPenalty,
)
from specrt.scheduler.request import OutputProcessor, Request
from specrt.scheduler.scheduler import Scheduler
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.pool import DrafterPool, Models
from specrt.text import Tokenizer

Prompt = str | Sequence[int]
"""Text or token ids."""


def prompt_tokens(prompt: Prompt, tokenizer: Tokenizer, target: Engine) -> list[int]:
    """Return the tokens of a prompt for a target.

    Raises: RequestError for what is no prompt, CapacityError for one above the context.
    """
    vocab, context = target.geometry.vocab_size, target.max_length
    given = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise RequestError(
            f"the prompt is of type {type(given).__name__}; expected text or token ids"
        )
    tokens = [_token_id(token, vocab) for token in given]
    if not tokens:
        raise RequestError("the prompt has no tokens; give at least one")
    if len(tokens) > context:
        raise CapacityError(
            f"the prompt has {len(tokens)} tokens, and the context of this bundle is "
            f"{context}; shorten the prompt, or build with a larger `max_length`"
        )
    return tokens


def several_prompts(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return prompts as a list.

    Raises: RequestError for one prompt, or none, in the place of several.
    """
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts is of type {type(prompts).__name__}; expected a list of prompts, each text "
            "or token ids"
        )
    return list(prompts)


def shared_params(
    count: int, params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """Return the parameters of each of several prompts.

    Raises: RequestError when the numbers differ.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params) if isinstance(params, Iterable) else [params]
    wrong = next((one for one in each if not isinstance(one, SamplingParams)), None)
    if wrong is not None:
        raise RequestError(f"params holds {wrong!r}; expected SamplingParams")
    if len(each) != count:
        raise RequestError(
            f"{count} prompts and {len(each)} sampling params were given; give one for each "
            "prompt, or one for all"
        )
    return each


def _token_id(token: object, vocab: int) -> int:
    """Return a token id of any integer type as an int."""
    whole = isinstance(token, SupportsIndex) and not isinstance(token, bool)
    number = index(token) if whole else -1  # type: ignore[arg-type]
    if not 0 <= number < vocab:
        raise RequestError(f"token id {token!r} is not in the vocabulary of 0 to {vocab - 1}")
    return number


def build_processors(
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    ends: Collection[int],
    vocabulary: int,
    grammars: Grammars | None = None,
) -> LogitsProcessors | None:
    """Return the rules of a request, in vLLM's order; None where it asks for none.

    Only bad words and a structure need a tokenizer. `grammars` keeps what was compiled for other
    requests. A structure comes last: no other processor lets in again what it ruled out.

    Raises: RequestError for token ids that there are not, and a structure that cannot be kept to.
    """
    _check("stop_token_ids", params.stop_token_ids, vocabulary)
    made = list(_processors(params, tokenizer, ends, vocabulary))
    structure = params.structure
    if structure is not None:
        if grammars is None:
            assert tokenizer is not None, "a structure is kept in tokens"
            grammars = Grammars(tokenizer, ends, vocabulary)
        kept = grammars.processor(structure, params.stop_token_ids)
        return GrammarRules(made, kept, vocabulary)
    return LogitsProcessors(made, vocabulary) if made else None


def _processors(
    params: SamplingParams, tokenizer: Tokenizer | None, ends: Collection[int], vocabulary: int
) -> Iterator[Processor]:
    p = params
    if p.allowed_token_ids is not None:
        _check("allowed_token_ids", p.allowed_token_ids, vocabulary)
        yield AllowedTokens(p.allowed_token_ids)
    if p.bad_words:
        assert tokenizer is not None, "words are spelled in tokens"
        words = [ids for word in p.bad_words for ids in _spellings(tokenizer, word)]
        words = [ids for ids in words if max(ids) < vocabulary]
        if words:
            yield BadWords(words)
    stops = {*p.stop_token_ids, *ends}
    if p.min_tokens and stops:
        yield MinTokens(p.min_tokens, sorted(s for s in stops if s < vocabulary))
    if p.logit_bias:
        _check("logit_bias", p.logit_bias, vocabulary)
        yield LogitBias(p.logit_bias)
    yield from (Custom(function) for function in p.logits_processors)
    if p.repetition_penalty != 1.0:
        yield RepetitionPenalty(p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        yield OutputPenalties(p.presence_penalty, p.frequency_penalty)
    if p.no_repeat_ngram_size:
        yield NoRepeatNgram(p.no_repeat_ngram_size)


def _spellings(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """Return a word's tokens at the beginning of a text and after a space."""
    found = [tokenizer.encode(text, special=False) for text in (word, f" {word}")]
    return [ids for at, ids in enumerate(found) if ids and ids not in found[:at]]


def _check(name: str, ids: Collection[int], vocabulary: int) -> None:
    wrong = [token for token in ids if not 0 <= token < vocabulary]
    if wrong:
        raise RequestError(
            f"{name} holds {wrong[0]}; expected ids of the vocabulary, 0 to {vocabulary - 1}"
        )


class RequestFactory:
    """Makes requests of prompts and options. Threads: any may ask."""

    def __init__(
        self,
        models: Models,
        tokenizer: Tokenizer,
        eos: Collection[int],
        drafters: DrafterPool,
        batch: Scheduler,
    ) -> None:
        self._models = models
        self._tokenizer = tokenizer
        self._eos = frozenset(eos)
        self._grammars = Grammars(tokenizer, self._eos, models.target.geometry.vocab_size)
        self._drafters = drafters
        self._batch = batch

    def one(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        gamma: Gamma | None,
        drafter: str | None,
    ) -> Request:
        """Return the one request of a stream, after every check.

        Raises: RequestError, CapacityError.
        """
        given: object = params
        if not isinstance(given, SamplingParams | None):
            raise RequestError(f"params is {given!r}; expected SamplingParams")
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n is {params.n}: a stream is one completion; use generate_many")
        (request,) = self.requests(prompt, params, gamma, drafter)
        return request

    def requests(
        self, prompt: Prompt, params: SamplingParams, gamma: Gamma | None, drafter: str | None
    ) -> list[Request]:
        """Return the requests of a prompt, after every check.

        Raises: RequestError, CapacityError.
        """
        turn, called_ns = self._batch.turn, perf_counter_ns()
        turn.require_open()
        gamma, chosen = self._drafters.check_gamma(gamma), self._drafters.check_drafter(drafter)
        if params.n > len(self._batch):
            raise RequestError(
                f"n is {params.n}, and this bundle was built for {len(self._batch)} at once: ask "
                f"for fewer, or build with `batch = {params.n}`"
            )
        tokens = prompt_tokens(prompt, self._tokenizer, self._models.target)
        seed = params.seed if params.seed is not None else int.from_bytes(os.urandom(6), "big")
        made = []
        for number in range(params.n):
            counts = SpeculationStats(gamma, chosen)
            if drafter is None:
                counts.fallback = self._models.absent
            completion = Completion(len(tokens), seed, counts, Timings(0), index=number)
            made.append(self._request(list(tokens), params, completion))
        began_ns = turn.now_ns() - (perf_counter_ns() - called_ns)
        for request in made:
            request.completion.timings.began_ns = began_ns
        return made

    def _request(
        self, tokens: list[int], params: SamplingParams, completion: Completion
    ) -> Request:
        models = self._models
        rules = build_processors(
            params, self._tokenizer, self._eos, models.target.geometry.vocab_size, self._grammars
        )
        return Request(
            tokens,
            # The last token is never fed, so one more than fits the buffers can be committed.
            min(len(tokens) + params.max_tokens, models.target.max_length + 1),
            params,
            completion,
            Noise(completion.seed, completion.index),
            rules,
            OutputProcessor(completion, params, self._eos, self._tokenizer),
            [KVCache(e) for e in (models.target, models.draft) if e is not None],
            fresh=params.prompt_logprobs is not None,
        )
