"""From what a request asks for to the rules of its completion."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from specrt.errors import RequestError
from specrt.grammar import GrammarRules
from specrt.grammars import Grammars
from specrt.params import SamplingParams
from specrt.processors import (
    AllowedTokens,
    BadWords,
    Custom,
    LogitBias,
    MinTokens,
    NoRepeatNgram,
    OutputPenalties,
    RepetitionPenalty,
)
from specrt.rules import Processor, Rules
from specrt.text import Tokenizer


def rules_of(
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    ends: Collection[int],
    vocabulary: int,
    grammars: Grammars | None = None,
) -> Rules | None:
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
    return Rules(made, vocabulary) if made else None


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
