"""Many clients at once: a bounded queue, clients that go away, a server that ends."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from scheduler.support import Gate, rows, target_of
from serve.support import Live, serving, until
from specrt.text.tokenizer import Tokenizer
from support.rows import packed

TEXT = "/v1/completions"
LONG = {"prompt": "ab", "max_tokens": 100, "ignore_eos": True, "temperature": 0}


def metrics(live: Live) -> dict[str, float]:
    """Return the samples that have no other label than the model's name, by their names."""
    return samples(live.http.get("/metrics").text)


def samples(exposition: str) -> dict[str, float]:
    families = text_string_to_metric_families(exposition)
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if set(sample.labels) == {"model_name"}
    }


def test_a_full_queue_is_429_and_the_rest_are_answered(tokenizer: Tokenizer) -> None:
    toys = rows(packed, 2, tokenizer)
    with serving(toys, max_queue=3) as live, ThreadPoolExecutor(8) as pool:
        gate = Gate(target_of(toys))
        waiting = [pool.submit(live.post, TEXT, **LONG) for _ in range(5)]
        assert gate.inside.wait(30)
        until(lambda: live.service.admission.running + live.service.admission.waiting == 5)
        answer = live.http.post(TEXT, json=LONG)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        gate.go.set()
        texts = {one.result()["choices"][0]["text"] for one in waiting}
        assert len(texts) == 1
        assert live.post(TEXT, **LONG)["choices"][0]["text"] in texts


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_row(tokenizer: Tokenizer, stream: bool) -> None:
    toys = rows(packed, 1, tokenizer)
    with serving(toys) as live:
        admission = live.service.admission
        gate = Gate(target_of(toys))
        body = json.dumps({**LONG, "stream": stream}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        address = live.http.base_url.host, live.http.base_url.port
        with socket.create_connection(address, 30) as link:
            link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert gate.inside.wait(30)
        until(lambda: not admission.live)
        gate.go.set()
        assert len(live.post(TEXT, **LONG)["choices"][0]["text"]) > 0
        assert (admission.running, admission.waiting) == (0, 0)


def test_others_are_answered_while_constraints_are_compiled(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    llguidance = pytest.importorskip("llguidance", reason="needs the structured extra")
    many, compiled = 40, threading.Event()  # more than there are threads for all
    honest = llguidance.LLMatcher.grammar_from_regex

    def compiling(expression: str) -> Any:
        assert compiled.wait(60)
        return honest(expression)

    monkeypatch.setattr(llguidance.LLMatcher, "grammar_from_regex", compiling)
    with (
        serving(rows(packed, 1, tokenizer, eos_token_ids=[263])) as live,
        ThreadPoolExecutor(many) as clients,
    ):
        for number in range(many):
            body = {"prompt": "a", "guided_regex": f"a{number}"}
            clients.submit(httpx.post, live.url + TEXT, json=body, timeout=60)
        try:
            until(lambda: live.service.admission.admitted == many)
            assert (
                httpx.post(live.url + TEXT, json={**LONG, "max_tokens": 2}, timeout=5).status_code
                == 200
            )
        finally:
            compiled.set()


def test_metrics_count_what_was_done(tokenizer: Tokenizer) -> None:
    toys = rows(packed, 2, tokenizer)
    with serving(toys, metrics_prefix="vllm") as live:
        told = live.post(TEXT, **LONG, gamma=4)
        live.http.post(TEXT, json={**LONG, "gamma": 4, "stream": True})
        live.refusal(TEXT, 400, prompt="x", temperature=-1)
        until(lambda: not live.service.admission.live)
        counts = told["metrics"]["specrt"]
        seen = metrics(live)
        assert seen["vllm:prompt_tokens_total"] == 4
        assert seen["vllm:generation_tokens_total"] == 200
        assert seen["vllm:spec_decode_num_draft_tokens_total"] == 2 * counts["drafted"]
        assert seen["vllm:spec_decode_num_accepted_tokens_total"] == 2 * counts["accepted"]
        assert seen["vllm:time_to_first_token_seconds_count"] == 2
        assert seen["vllm:e2e_request_latency_seconds_count"] == 2
        assert seen["vllm:num_requests_running"] == seen["vllm:num_requests_waiting"] == 0
        assert seen["vllm:kv_cache_usage_perc"] == 0
        text = live.http.get("/metrics").text
        accepted = {
            sample.labels["position"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        }
        positions = [accepted[str(i)] for i in range(len(accepted))]
        assert positions == [2 * n for n in counts["accepted_at"] if n]
        assert 'finished_reason="length"' in text
        assert 'status="400"' in text
