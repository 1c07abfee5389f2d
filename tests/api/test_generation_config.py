"""What a generation config implies is what transformers makes of it, and what is wrong is said."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.errors import BundleError, RequestError
from specrt.generation_config import GenerationConfig, read_generation_config, read_sampling
from specrt.params import SamplingParams
from specrt.sampling.processors import build_processors
from specrt.text.tokenizer import Tokenizer
from support.conditioned import reader

VOCABULARY, END = 12, 5
SCORES = np.random.default_rng(3).standard_normal(VOCABULARY).astype(np.float32)
PATH = Path("generation_config.json")

forced, ruled = st.integers(0, 5), st.lists(st.integers(6, 11), max_size=4)
ids = st.integers(0, VOCABULARY - 1)
configs = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "no_repeat_ngram_size": st.integers(0, 3),
        "bad_words_ids": st.lists(st.lists(ids, min_size=1, max_size=3), min_size=1, max_size=3),
        "suppress_tokens": ruled,
        "begin_suppress_tokens": ruled,
        "forced_bos_token_id": forced,
        "forced_eos_token_id": forced | st.lists(forced, min_size=1, max_size=2),
        "min_length": st.integers(0, 9),
        "min_new_tokens": st.integers(0, 9),
        "num_beams": st.integers(1, 4),
        "max_length": st.just(20),
    },
)


def read(config: Any, start: int = 1) -> GenerationConfig:
    data = config if isinstance(config, bytes) else json.dumps(config).encode()
    return read_generation_config(PATH, data, start=start, vocabulary=VOCABULARY)


def of_transformers(config: dict[str, Any], start: int, most: int) -> Callable[[list[int]], Any]:
    """Return what edits scores after a text that ends with `most` tokens of output."""
    torch = pytest.importorskip("torch", reason="needs the export extra")
    library = pytest.importorskip("transformers.generation")

    class Model(library.GenerationMixin):  # type: ignore[name-defined, misc]
        config = SimpleNamespace(is_encoder_decoder=True)

    made = library.GenerationConfig(**{**config, "max_length": start + most})
    made._eos_token_tensor = torch.tensor([END])
    processors = Model()._get_logits_processor(made, input_ids_seq_length=start)
    return lambda text: processors(torch.tensor([text]), torch.tensor(SCORES[None]))[0].numpy()


@given(configs, st.integers(1, 3), st.lists(ids, max_size=8), st.integers(0, 3))
@settings(deadline=None, max_examples=60)
def test_a_config_means_what_it_does_in_transformers(
    config: dict[str, Any], start: int, output: list[int], drafted: int
) -> None:
    begin, most = [3, 4, 2][:start], len(output) + 1 + len(config) % 2
    options = read(config, start).options
    options["min_tokens"] = min(options.get("min_tokens", 0), most)  # as a request has it
    params = SamplingParams(**options, max_tokens=most)
    built = build_processors(params, None, [END], VOCABULARY, emitted=most)
    expected = of_transformers(config, start, most)([*begin, *output])
    found = SCORES
    if built is not None:
        built.learn(begin)
        known = max(0, len(output) - drafted)
        for end in range(1, known + 1):
            built.learn([*begin, *output[:end]])
        found = built.edit(SCORES, output[known:])
    if len(output) + 1 < most or "forced_eos_token_id" in config or not options["min_tokens"]:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_beams_and_what_is_not_honoured_are_told_in_a_line_each() -> None:
    told = read({"num_beams": 4, "encoder_no_repeat_ngram_size": 3, "sequence_bias": None}).notices
    assert len(told) == 2
    assert "4 beams; texts are decoded with one" in told[0]
    assert "encoder_no_repeat_ngram_size, which is not honoured" in told[1]
    assert read({"num_beams": 1, "early_stopping": True, "transformers_version": "5"}) == ({}, [])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b"{", "cannot be read"),
        (b"[]", "holds a list; expected an object"),
        ({"num_beams": "4"}, "num_beams is '4'; expected a whole number"),
        ({"min_length": -1}, "min_length is -1"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused_in_a_line(config: Any, words: str) -> None:
    with pytest.raises(BundleError, match=words) as refused:
        read(config)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("generation_config.json cannot be read (")


def test_how_a_model_is_sampled_is_read_where_it_is_sampled() -> None:
    def sampling(**config: Any) -> dict[str, Any]:
        return read_sampling(PATH, json.dumps(config).encode())

    assert sampling(temperature=0.6) == sampling(do_sample=False, top_p=0.9) == {}
    assert sampling(do_sample=True) == {"temperature": 1.0}
    given = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.1}
    assert sampling(do_sample=True, max_length=9, **given) == given
    for wrong in ({"temperature": "hot"}, {"top_p": 7}, {"top_k": 20.5}):
        with pytest.raises(BundleError, match=f"cannot be read .{next(iter(wrong))} is "):
            sampling(do_sample=True, **wrong)


def greedy(tokenizer: Tokenizer, given: Sequence[tuple[str, Any]] = (), **options: Any) -> Any:
    """Return a text of a bundle with options of its own, by a request with others."""
    made = reader(tokenizer, options=options)
    texts = {
        drafter: made.generate([7, 8, 9], SamplingParams(**{"max_tokens": 20, **dict(given)}),
                               gamma=4, drafter=drafter).token_ids
        for drafter in ("none", "model", "ngram", "cascade")
    }  # fmt: skip
    assert len({tuple(text) for text in texts.values()}) == 1
    return texts["model"]


def test_a_bundle_s_options_hold_where_a_request_leaves_them_out(tokenizer: Tokenizer) -> None:
    plain = greedy(tokenizer)
    forced = greedy(tokenizer, forced_bos_token_id=(9,), forced_eos_token_id=(4,))
    assert (forced[0], forced[-1]) == (9, 4)
    own = greedy(tokenizer, [("forced_bos_token_id", 11)], forced_bos_token_id=(9,))
    assert own[0] == 11
    assert greedy(tokenizer, [("suppress_tokens", ())], suppress_tokens=(plain[0],)) == plain
    assert plain[3] not in greedy(tokenizer, suppress_tokens=(plain[3],))
    once = greedy(tokenizer, no_repeat_ngram_size=1)
    assert len(set(once)) == len(once)
    few = greedy(tokenizer, [("max_tokens", 3)], min_tokens=50)  # no refusal of a short request
    assert len(few) == 3


def test_beams_are_refused_by_a_sentence() -> None:
    for name, value in {"num_beams": 4, "use_beam_search": True, "best_of": 3}.items():
        with pytest.raises(RequestError, match=f"{name} is {value}, and beams are not speculated"):
            SamplingParams.of(**{name: value})
    assert SamplingParams.of(num_beams=1, use_beam_search=False) == SamplingParams()
    with pytest.raises(TypeError):
        replace(SamplingParams(), num_beams=1)  # type: ignore[call-arg]
