"""A device that drafts has the server's own text, whatever it drafts, wherever a link breaks."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import specrt
from cli.conftest import Run, cli  # noqa: F401
from scheduler.support import rows, toys
from serve.remote_support import Proxy, served
from serve.support import until
from shared import nightly_but
from specrt.completion import Completion
from specrt.errors import LinkError, RequestError
from specrt.generator import Generator
from specrt.loading import OpenedDraft
from specrt.params import SamplingParams
from specrt.remote.link import LinkOptions, LinkPool
from specrt.remote.remote_target import remote_generator
from specrt.serve.admission import Admission
from specrt.serve.device_link import DeviceLink
from specrt.serve.metrics import ServerMetrics
from specrt.serve.verify_sessions import VerifyEndpoint, VerifyLimits
from specrt.speculation.drafters import DRAFTERS
from specrt.speculation.round import Verdict
from specrt.text.tokenizer import Tokenizer
from support.rows import packed
from support.toy import TableEngine

PROMPT = [104, 101, 108, 108, 111]
QUICK = LinkOptions(tries=4, first_wait_s=0.001, answer_s=10.0)
EOS = (263,)


@pytest.fixture(scope="module")
def home(tokenizer: Tokenizer) -> Iterator[Generator]:
    """The server's generator, of three rows."""
    with rows(packed, 3, tokenizer, eos_token_ids=EOS) as made:
        yield made


@pytest.fixture(scope="module")
def sessions(home: Generator) -> VerifyEndpoint:
    return VerifyEndpoint(home, VerifyLimits(sessions=8, max_tokens=1000))


@pytest.fixture(scope="module")
def port(sessions: VerifyEndpoint) -> Iterator[int]:
    with served(sessions) as number:
        yield number


@pytest.fixture(scope="module")
def draft_engine(tokenizer: Tokenizer) -> TableEngine:
    return toys(tokenizer.size)[1]


Device = Callable[..., Generator]


@pytest.fixture
def device(port: int, tokenizer: Tokenizer, draft_engine: TableEngine) -> Iterator[Device]:
    """Make devices of a draft engine, which one of them uses at a time, and a link."""
    made: list[Generator] = []

    def make(at: int = port, options: LinkOptions = QUICK, model: bool = True) -> Generator:
        engine = draft_engine if model else None
        server = LinkPool(f"ws://127.0.0.1:{at}", options)
        made.append(remote_generator(server, OpenedDraft(engine, tokenizer, [])))
        return made[-1]

    yield make
    for one in made:
        one.close()


def same(remote: Completion, local: Completion) -> None:
    facts = [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in (remote, local)]
    assert facts[0] == facts[1]


OPTIONS: list[dict[str, Any]] = [
    {"max_tokens": 60},
    {"max_tokens": 60, "ignore_eos": True},
    {"max_tokens": 1000, "ignore_eos": True},  # to the end of the context
    {"max_tokens": 1},
    {"max_tokens": 60, "stop": ("e", "qz"), "ignore_eos": True},
    {"max_tokens": 60, "stop_token_ids": (90, 120, 200), "ignore_eos": True},
    {"max_tokens": 40, "min_tokens": 30, "presence_penalty": 1.5, "logit_bias": {50: 3.0}},
    {"max_tokens": 30, "bad_words": ("a", "th"), "no_repeat_ngram_size": 2, "top_k": 40},
    {"max_tokens": 30, "allowed_token_ids": tuple(range(90, 120)), "ignore_eos": True},
]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 0}], ids=str)
def test_the_text_is_the_servers_own(
    home: Generator, device: Device, sampling: dict[str, Any]
) -> None:
    made, drafted = device(), 0
    for number, options in enumerate(OPTIONS):
        params = SamplingParams(**options, **sampling)
        local = home.generate(PROMPT, params, gamma=0)
        for gamma in (0, 3 + number % 6):
            found = made.generate(PROMPT, params, gamma=gamma)
            same(found, local)
            drafted += found.speculation.drafted
        drafter = list(DRAFTERS)[number % len(DRAFTERS)]
        same(made.generate(PROMPT, params, gamma="auto", drafter=drafter), local)
    assert drafted > 100


def test_a_drawn_seed_is_told_and_one_that_the_server_keeps_costs_acceptance_alone(
    home: Generator, device: Device
) -> None:
    with served(VerifyEndpoint(home, VerifyLimits(reveal_seed=False))) as port:
        params = SamplingParams(max_tokens=30, temperature=1.0, ignore_eos=True)
        found = device(port).generate(PROMPT, params, gamma=3)
        assert found.seed is None
        told = device().generate(PROMPT, params, gamma=3)
        own = home.generate(PROMPT, replace(params, seed=told.seed), gamma=3)
        same(told, own)  # with the same draws, or fewer would be accepted
        assert told.speculation.accepted == own.speculation.accepted > 0
        assert len(found.token_ids) == 30
        assert found.speculation.drafted
        known = replace(params, seed=9)
        same(device(port).generate(PROMPT, known, gamma=3), home.generate(PROMPT, known, gamma=0))


def test_streams_share_a_device_and_a_server(home: Generator, device: Device) -> None:
    made = device()
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=2, ignore_eos=True)
    prompts = [[7, 8, 9], [60, 61], PROMPT]
    streams = [made.stream(prompt, params, gamma=3) for prompt in prompts]
    others = [home.stream(prompt, params, gamma=2) for prompt in prompts]
    for _ in range(4):
        for stream in streams + others:
            next(stream)
    for prompt, stream, other in zip(prompts, streams, others, strict=True):
        local = home.generate(prompt, params, gamma=0)
        same(stream.finish(), local)
        same(other.finish(), local)
    several = made.generate_many(prompts, params, gamma=4)
    for prompt, (done,) in zip(prompts, several, strict=True):
        same(done, home.generate(prompt, params, gamma=0))


def test_a_server_that_believes_its_devices_is_found_out(
    home: Generator, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of all of the above."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    local = home.generate(PROMPT, params, gamma=0)

    def accept(drafted: Sequence[int], best: Sequence[int]) -> Verdict:
        return Verdict(len(drafted), best[len(drafted)])

    monkeypatch.setattr("specrt.speculation.target.match_greedy", accept)
    assert device().generate(PROMPT, params, gamma=3).token_ids != local.token_ids


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("every", nightly_but([601], [61, 601]))
def test_a_link_may_be_cut_at_any_byte(
    home: Generator, device: Device, port: int, gamma: int, every: int
) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=6, ignore_eos=True)
    local = home.generate(PROMPT, params, gamma=0)
    whole = Proxy(port)
    try:
        device(whole.port).generate(PROMPT, params, gamma=gamma)
        length = whole.up + whole.down
        for cut in range(gamma, length + 40, every):
            whole.cuts = [cut, cut + 400, cut // 2 + 900]
            same(device(whole.port).generate(PROMPT, params, gamma=gamma), local)
        assert whole.connections > 2 * length / every
    finally:
        whole.close()


def test_a_link_that_breaks_without_end_is_an_error_that_says_what_was_kept(
    home: Generator, device: Device, port: int
) -> None:
    proxy = Proxy(port)
    try:
        made = device(proxy.port)
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        stream = made.stream(PROMPT, params, gamma=2)
        for _ in range(4):
            next(stream)
        kept = len(stream.completion.token_ids)
        proxy.cuts = [700] * 100
        proxy.cut_all()
        with pytest.raises(LinkError, match=f"{kept} tokens of the text were kept") as error:
            stream.finish()
        assert "broke" in str(error.value) or "no link to" in str(error.value)
        local = home.generate(PROMPT, params, gamma=0)
        assert stream.completion.token_ids == local.token_ids[:kept]
    finally:
        proxy.close()


def test_a_link_that_a_server_closed_meanwhile_is_not_used_again(
    home: Generator, tokenizer: Tokenizer, draft_engine: TableEngine
) -> None:
    with served(VerifyEndpoint(home, VerifyLimits(idle_s=0.2))) as port:
        pool = LinkPool(f"ws://127.0.0.1:{port}", QUICK)
        with remote_generator(pool, OpenedDraft(draft_engine, tokenizer, [])) as made:
            params = SamplingParams(max_tokens=9)
            for _ in range(2):
                same(made.generate(PROMPT, params), home.generate(PROMPT, params))
                kept = pool.take(lambda: True)
                pool.give_back(kept)
                until(lambda kept=kept: not kept.alive)


def test_a_device_that_stops_ends_its_session(sessions: VerifyEndpoint, device: Device) -> None:
    made, before = device(), len(sessions)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    for end in ("cancel", "close", None):
        stream = made.stream(PROMPT, params, gamma=2)
        next(stream)
        assert len(sessions) == before + 1
        if end is not None:
            getattr(stream, end)()
        del stream
        made.generate(PROMPT, SamplingParams(max_tokens=2))  # a step is where rows are freed
        until(lambda: len(sessions) == before)


@pytest.mark.parametrize("code", nightly_but([1001, 4400], [1001, 1009, 1011, 1012, 4400]))
def test_a_device_tries_no_other_link_where_the_server_closes_for_good(
    device: Device, monkeypatch: pytest.MonkeyPatch, port: int, code: int
) -> None:
    async def closed(self: VerifyEndpoint, link: DeviceLink, *_: Any) -> None:
        await link._websocket.close(code)

    proxy = Proxy(port)
    try:
        made = device(proxy.port)
        stream = made.stream(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True), gamma=2)
        next(stream)
        monkeypatch.setattr(VerifyEndpoint, "_verify", closed)
        with pytest.raises(LinkError, match=rf"code {code}; \d+ tokens.*were kept"):
            stream.finish()
        assert proxy.connections == 1
    finally:
        proxy.close()


def test_what_cannot_cross_the_link_is_refused_by_name(device: Device) -> None:
    made = device()
    for options, reason in (
        ({"logits_processors": (lambda tokens, scores: scores,)}, "logits_processors"),
        ({"verifier": "rejection"}, "verifier is 'rejection'"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 1001}, "max_tokens is 1001; expected up to 1000"),
        ({"extra_args": {"x": object()}}, "x|sent"),
    ):
        with pytest.raises(specrt.SpecrtError, match=reason):
            made.generate(PROMPT, SamplingParams(**options))
    (several,) = made.generate_many([PROMPT], SamplingParams(n=2))
    assert all("n is 2" in str(done.error) for done in several)
    assert made.generate(PROMPT, SamplingParams(max_tokens=3)).token_ids


def test_who_connects_is_told_what_is_wrong(
    port: int, tokenizer: Tokenizer, codelet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for url in ("http://127.0.0.1:80", "127.0.0.1", "ws://", "ws://host:99999999"):
        with pytest.raises(RequestError, match="expected ws://HOST:PORT"):
            specrt.connect(url, codelet)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        free = closed.getsockname()[1]
        with pytest.raises(LinkError, match=r"no link to .* in 4 tries .*serve --verify"):
            specrt.connect(f"ws://127.0.0.1:{free}", codelet, link=QUICK)
    with pytest.raises(LinkError, match=r"answered with status 40[34]; .* api_key"):
        specrt.connect(f"ws://127.0.0.1:{port}/other", codelet, link=QUICK)
    with pytest.raises(LinkError, match=tokenizer.sha256) as error:
        specrt.connect(f"ws://127.0.0.1:{port}", codelet, link=QUICK)
    assert sha256((codelet / "tokenizer.json").read_bytes()).hexdigest() in str(error.value)
    monkeypatch.setitem(__import__("sys").modules, "websockets", None)
    with pytest.raises(RequestError, match="needs websockets, which is not installed"):
        specrt.connect(f"ws://127.0.0.1:{port}", codelet)


def test_the_command_needs_no_target(
    generator: Generator,
    codelet: Path,
    tmp_path: Path,
    cli: Run,  # noqa: F811
) -> None:
    bundle = tmp_path / "draft"
    shutil.copytree(codelet, bundle)
    shutil.rmtree(bundle / "target")
    generator.forget()
    prompt = "def fibonacci(n):\n"
    with served(VerifyEndpoint(generator)) as port:
        url = f"ws://127.0.0.1:{port}"
        for options in (
            ("--temperature", 0), ("--temperature", 0, "--gamma", 0),
            ("--temperature", 0.8, "--top-p", 1, "--seed", 3, "--gamma", 4),
        ):  # fmt: skip
            ran = cli("generate", bundle, "--prompt", prompt, "--remote", url, "--max-tokens", 40,
                      "--json", *options)  # fmt: skip
            assert (ran.status, ran.err) == (0, "")
            found = json.loads(ran.out)
            params = SamplingParams(max_tokens=40)
            if "--seed" in options:
                params = replace(params, temperature=0.8, seed=3)
            local = generator.generate(prompt, params, gamma=0)
            assert (found["text"], found["token_ids"]) == (local.text, local.token_ids)
        ran = cli("generate", bundle, "--prompt", "a", "--remote", url, "--memory", 9)
        assert "leave one of them out" in ran.refusal
    ran = cli("generate", bundle, "--prompt", "a", "--remote", "nowhere")
    assert "expected ws://HOST:PORT" in ran.refusal


def test_metrics_tell_what_devices_do(home: Generator, device: Device) -> None:
    metrics = ServerMetrics("specrt", "toy", Admission(3, 8), 100)
    draining: list[bool] = []
    sessions = VerifyEndpoint(home, draining=lambda: bool(draining), on_round=metrics.device_round)
    metrics.devices = sessions

    def seen() -> dict[str, float]:
        families = text_string_to_metric_families(metrics.exposition().decode())
        return {s.name.removeprefix("specrt_"): s.value for f in families for s in f.samples}

    with served(sessions) as port:
        made = device(port)
        stream = made.stream(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True), gamma=3)
        next(stream)
        assert (seen()["verify_sessions"], seen()["verify_links"]) == (1, 1)
        counts = stream.finish().speculation
        until(lambda: seen()["verify_sessions"] == 0)
        assert 0 < seen()["verify_rounds_total"] <= counts.rounds
        assert 0 < seen()["verify_draft_tokens_total"] <= counts.drafted
        assert 0 < seen()["verify_accepted_tokens_total"] <= counts.accepted
        draining.append(True)
        with pytest.raises(LinkError, match="the server is shutting down"):
            made.generate(PROMPT, SamplingParams(max_tokens=3))
