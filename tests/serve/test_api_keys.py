"""API keys: whose prefixes a request starts from, what a key may use, the file of keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scheduler.support import rows, shared_prompt
from serve.support import Live, serving, until
from specrt.aio import PacedStream
from specrt.errors import RequestError
from specrt.loading import OpenedDraft
from specrt.params import SamplingParams
from specrt.remote.link import LinkError, LinkOptions, LinkPool
from specrt.remote.remote_target import remote_generator
from specrt.serve.api_keys import ApiKeys, KeyLimits
from specrt.serve.verify_sessions import VerifyLimits
from specrt.text.tokenizer import Tokenizer
from support.rows import packed

TEXT = "/v1/completions"
PROMPT = shared_prompt(60)
BODY = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def cached(live: Live, key: str, **body: Any) -> int:
    """Return how many tokens of the prompt were held, as a key is told."""
    return held(live.http.post(TEXT, json=BODY | body, headers=bearer(key)).json()["usage"])


@contextmanager
def several_rows(tokenizer: Tokenizer, **options: Any) -> Iterator[Live]:
    with serving(rows(packed, 4, tokenizer), **options) as live:
        yield live


def test_no_key_is_told_what_anothers_prompts_hold(tokenizer: Tokenizer) -> None:
    keys = ("one name=alice", "two", "three name=alice")
    with several_rows(tokenizer, api_keys=keys) as live:
        assert cached(live, "one") == 0
        assert cached(live, "two") == 0
        for key in ("one", "two", "three"):  # the third is the first one's client
            assert cached(live, key) >= 59
        assert cached(live, "one", cache_salt="of one user") == 0
        assert cached(live, "two", cache_salt="of one user") == 0
        assert cached(live, "two", cache_salt="of one user") >= 59
        chat = {"messages": [{"role": "user", "content": "a long way to go " * 3}]}
        for path, body in (
            ("/v1/chat/completions", chat | {"max_tokens": 2}),
            ("/v1/responses", {"input": chat["messages"], "max_output_tokens": 2}),
            ("/v1/messages", chat | {"max_tokens": 2}),
        ):
            live.service.generator.forget()
            told = [
                live.http.post(path, json=body, headers=bearer(key)).json()["usage"]
                for key in ("one", "two", "two")
            ]
            first, second, again = map(held, told)
            assert (first, second) == (0, 0)
            assert again > 40


def held(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    found: int = details.get("cached_tokens", details.get("cache_read_input_tokens"))
    return found


def counts(live: Live) -> dict[str, dict[str, float]]:
    families = text_string_to_metric_families(live.http.get("/metrics").text)
    found: dict[str, dict[str, float]] = {}
    for family in families:
        for sample in family.samples:
            if "key" in sample.labels:
                name = sample.name.removeprefix("specrt_key_").removesuffix("_total")
                found.setdefault(sample.labels["key"], {})[name] = sample.value
    return found


def test_each_key_has_limits_and_counts_of_its_own(tokenizer: Tokenizer) -> None:
    keys = (
        "a name=slow requests_per_minute=2", "b name=few concurrency=2",
        "c name=short tokens_per_minute=70", "d",
    )  # fmt: skip
    with several_rows(tokenizer, api_keys=keys) as live:

        def status(key: str, path: str = TEXT, **body: Any) -> int:
            answer = live.http.post(path, json=BODY | body, headers=bearer(key))
            if answer.status_code == 429:
                assert 1 <= int(answer.headers["retry-after"]) <= 61
                assert "name" not in answer.text
            return answer.status_code

        assert [status("a") for _ in range(3)] == [200, 200, 429]
        assert status("d") == 200
        assert status("b", n=3) == 400
        assert status("b", n=2) == 200
        assert [status("c") for _ in range(3)] == [200, 200, 429]  # a debt is paid back first
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        assert live.http.post("/v1/messages", json=chat, headers=bearer("c")).json()["error"] == {
            "type": "rate_limit_error",
            "message": "the key 'short' has used its 70 tokens of a minute; try again later",
        }
        assert live.http.get("/v1/models", headers=bearer("c")).status_code == 200
        told = counts(live)
        assert told["slow"] == {
            "requests": 2, "requests_refused": 1, "prompt_tokens": 120, "generation_tokens": 8,
        }  # fmt: skip
        assert told["few"]["generation_tokens"] == 8
        assert told["short"]["requests_refused"] == 2
        assert set(told) == {"slow", "few", "short", "key 1"}


def test_a_file_is_read_again_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the office\n\n  one name=alice concurrency=3\ntwo\n")
    keys = ApiKeys(("extra",), file)
    alice, other = keys.find(b"one"), keys.find(b"two")
    assert alice is not None
    assert other is not None
    assert [key.name for key in keys] == ["alice", "key 1", "key 2"]
    assert alice.limits == KeyLimits(concurrency=3)
    assert [keys.find(given) for given in (b"", b"on", b"# of the office", b"three")] == [None] * 4
    with alice.admit(2):
        file.write_text("rotated name=alice concurrency=2\nthree\n")
        keys.read()
        assert keys.find(b"one") is None
        assert keys.find(b"rotated") is alice
        assert keys.find(b"extra") is not None
        assert (alice.revoked, other.revoked) == (False, True)
        with pytest.raises(Exception, match="2 of 2 completions at once"), alice.admit(1):
            pass
        assert [key.name for key in keys] == ["alice", "key 3", "key 2"]
        file.write_text("")
        with pytest.raises(RequestError, match="holds no key"):
            keys.read()
        assert keys.find(b"rotated") is alice


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("a b", "has blanks"),
        ("a nme=x", "did you mean 'name'"),
        ("a name=", "letters, digits"),
        ("a name=x/y", "letters, digits"),
        ("a concurrency=0", "from 1"),
        ("a concurrency=1 concurrency=9", "concurrency twice"),
        ("a name=x name=y", "name twice"),
        ("a tokens_per_minute=many", "from 1"),
        ("a\nb\na", "line 3"),
        ("a name=x concurrency=1\nb name=x", "other limits"),
    ],
)
def test_lines_that_are_no_keys_are_named_and_no_secret_is(
    tmp_path: Path, lines: str, named: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(lines.replace("a", "s3cret", 1))
    if lines.endswith("\na"):
        file.write_text("s3cret\nb\ns3cret")
    with pytest.raises(RequestError, match=named) as failure:
        ApiKeys((), file)
    assert "s3cret" not in str(failure.value)


def test_devices_have_their_keys_limits_and_prefixes(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("one name=alice requests_per_minute=2\ntwo name=bob\n")
    toys = rows(packed, 4, tokenizer)
    options = {"api_key_file": file, "verify": VerifyLimits()}
    with serving(toys, **options) as live:

        def device(key: str) -> Any:
            link = LinkOptions(tries=1, answer_s=10.0, api_key=key)
            server = LinkPool(live.url.replace("http", "ws"), link)
            return remote_generator(server, OpenedDraft(None, tokenizer, []))

        few = SamplingParams(max_tokens=4, ignore_eos=True)
        begin, streams = live.service.generator.paced, list[PacedStream]()

        def paced(*given: Any, **more: Any) -> PacedStream:
            streams.append(begin(*given, **more))
            return streams[-1]

        monkeypatch.setattr(live.service.generator, "paced", paced)
        with device("one") as alice, device("two") as bob:
            for one in (alice, bob, bob, alice):
                one.generate(PROMPT, few)
            held = [stream.completion.cached_tokens > 0 for stream in streams]
            assert held == [False, False, True, True]
            with pytest.raises(LinkError, match="has used its 2 requests of a minute"):
                alice.generate(PROMPT, few)
            until(lambda: counts(live)["bob"]["generation_tokens"] == 8)
            file.write_text("one name=alice\n")
            live.service.metrics.keys.read()
            with pytest.raises((LinkError, RequestError), match="no longer"):
                bob.generate(PROMPT, few)
