"""A server of an encoder-decoder: completions of sources, and no conversations."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve.support import Live, serving
from specrt.errors import RequestError
from specrt.serve.verify_sessions import VerifyLimits
from specrt.text.tokenizer import Tokenizer
from support.conditioned import greedy_text, reader

IS_ONE = "this bundle is an encoder-decoder"
TEXTS = ["one two", "ab", "the sea and the sea and the sea", "zz zz zz zz"]


@pytest.fixture(scope="module")
def live(tokenizer: Tokenizer) -> Iterator[Live]:
    """A server of two rows."""
    with serving(reader(tokenizer, 2)) as found:
        yield found


def text_of(live: Live, source: str, new: int) -> str:
    made = live.service.generator
    ids = greedy_text(made, made.tokenizer.encode(source), new)
    return made.tokenizer.decode(ids, list(made.models.decoder_start))


def test_a_prompt_is_the_source_of_its_completion(live: Live) -> None:
    options = {"max_tokens": 16, "temperature": 0}
    whole = live.post("/v1/completions", prompt=TEXTS, **options)
    assert [c["text"] for c in whole["choices"]] == [text_of(live, text, 16) for text in TEXTS]
    tokens = [len(live.service.generator.tokenizer.encode(text)) for text in TEXTS]
    assert whole["usage"]["prompt_tokens"] == sum(tokens)

    def one(text: str) -> str:
        more = {"stream_options": {"include_speculation": True}}
        events = live.events("/v1/completions", prompt=text, **options, **more)
        return "".join(event["choices"][0]["text"] for event in events if event["choices"])

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(one, TEXTS)] == [text_of(live, text, 16) for text in TEXTS]
    assert "kv_cache_usage_perc" in live.http.get("/metrics").text


def test_what_is_no_source_is_refused(live: Live) -> None:
    for named, prompt, options in (
        ("at least one word", " ", {}), ("longest source", "a" * 10**5, {}),
        ("prompt_logprobs", "ab", {"prompt_logprobs": 1}), ("leave echo out", "ab", {"echo": True}),
        ("decoder_start", "ab", {"decoder_start": [10**6]}), ("beams", "ab", {"num_beams": 4}),
    ):  # fmt: skip
        assert named in live.refusal("/v1/completions", 400, prompt=prompt, **options)


def test_conversations_are_refused(live: Live) -> None:
    messages = [{"role": "user", "content": "ab"}]
    assert IS_ONE in live.refusal("/v1/chat/completions", 400, messages=messages)
    assert IS_ONE in live.refusal("/v1/messages", 400, messages=messages, max_tokens=5)
    assert IS_ONE in live.refusal("/v1/responses", 400, input="ab")


def test_no_device_drafts_for_it(tokenizer: Tokenizer) -> None:
    made = reader(tokenizer)
    with pytest.raises(RequestError, match=f"{IS_ONE}.*leave --verify out"):
        serving(made, verify=VerifyLimits()).__enter__()
