"""One contract for every way to complete a prompt: method, stream, task, session, LLM, C host."""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from scheduler.support import LONG, alone, target_of
from specrt import c_host
from specrt.errors import BundleError, CapacityError, EngineError, RequestError, SpecrtError
from specrt.generator import Generator
from specrt.llm import LLM
from specrt.params import SamplingParams
from specrt.session import Session
from specrt.text.tokenizer import Tokenizer

PROMPT = "the thing"
LETTERS = tuple(b"then ig")
RAISED: dict[int, type[SpecrtError]] = {
    1: RequestError, 4: BundleError, 5: EngineError, 6: CapacityError,
}  # fmt: skip
Options = dict[str, Any]
Surface = Callable[[Generator, str, Options, int], Options]


def by_many(made: Generator, prompt: str, options: Options, gamma: int) -> Options:
    ((done,),) = made.generate_many([prompt], SamplingParams.of(**options), gamma=gamma)
    return {**done.to_json(), "error": done.error}


def by_task(made: Generator, prompt: str, options: Options, gamma: int) -> Options:
    task = made.agenerate(prompt, SamplingParams.of(**options), gamma=gamma)
    return asyncio.run(task).to_json()


def by_astream(made: Generator, prompt: str, options: Options, gamma: int) -> Options:
    stream = made.astream(prompt, SamplingParams.of(**options), gamma=gamma)

    async def read() -> Options:
        assert "".join([chunk.text async for chunk in stream]) == stream.completion.text
        return stream.completion.to_json()

    return asyncio.run(read())


def by_session(made: Generator, prompt: str, options: Options, gamma: int) -> Options:
    session = Session(made, params=SamplingParams.of(**options), gamma=gamma)
    stream, text, ids = session.stream(prompt), "", list[int]()
    for chunk in stream:
        text, ids = text + chunk.text, ids + chunk.token_ids
        assert stream.completion.token_ids == ids
        assert 0 <= chunk.accepted <= len(chunk.token_ids)
    assert stream.completion.text == text
    assert [m["content"] for m in session.messages] == [prompt, text]
    return stream.completion.to_json()


def by_llm(made: Generator, prompt: str, options: Options, gamma: int) -> Options:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specrt.llm.load", lambda *_, **__: made)
        llm = LLM("bundle", num_speculative_tokens=gamma)
    (output,) = llm.generate(prompt, SamplingParams.of(**options))
    (one,) = output.outputs
    for name in ("text", "token_ids", "finish_reason", "stop_reason"):
        assert getattr(one, name) == getattr(output.completion, name)
    return {**output.completion.to_json(), "error": one.error}


def sure(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a call of the C host gives back, and raise the error that it names instead."""
    if result[0]:
        raise RAISED[result[0]](result[1].decode())
    return result[1:]


def begun(made: Generator, prompt: str, options: Options, gamma: int, **others: bool) -> c_host.Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c_host, "load", lambda *_, **__: made)
        patch.setattr(c_host, "read_manifest", lambda _: None)
        (host,) = sure(c_host.open_bundle(b"bundle", b"", 0, 0, 0, 1))
    asked = json.dumps({"params": options, "gamma": gamma, **others}).encode()
    text = prompt.encode(errors="surrogateescape")
    return sure(host.begin(text, 1, asked))[0]  # type: ignore[no-any-return]


def by_host(made: Generator, prompt: str, options: Options, gamma: int) -> Options:
    run, text, ids = begun(made, prompt, options, gamma), b"", array("q")
    while chunk := sure(run.next()):
        text = text + chunk[0]
        assert 0 <= chunk[2] <= len(chunk[1]) // 8
        ids.frombytes(chunk[1])
    found: Options = json.loads(sure(run.json())[0])
    assert (text.decode(), list(ids)) == (found["text"], found["token_ids"])
    counts, stats = found["speculation"], sure(run.stats())
    numbers = [counts[n] for n in ("rounds", "drafted", "evaluated", "accepted", "emitted")]
    assert [stats[0], *stats[2:7]] == [found["prompt_tokens"], *numbers]
    assert stats[10:13] == (found["seed"], counts["gamma"], counts["drafter"].encode())
    assert stats[13] == found["finish_reason"].encode()
    assert [round(ms, 3) for ms in (stats[7], stats[15])] == [found["ttft_ms"], found["queue_ms"]]
    return found


SURFACES = [by_many, by_task, by_astream, by_session, by_llm, by_host]
every_surface = pytest.mark.parametrize("surface", SURFACES, ids=lambda s: s.__name__[3:])

CASES: list[Options] = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    {"temperature": 1.0, "seed": 3, "verifier": "rejection"},
    {"allowed_token_ids": LETTERS, "stop": ["ht", "e"], "stop_token_ids": [ord("i")]},
    {"logprobs": 2, "prompt_logprobs": 1, "repetition_penalty": 1.2},
]


def steady(found: Options) -> Options:
    """Leave out what a clock decides, and the seed that nobody named."""
    changing = (
        "seed",
        "queue_ms",
        "ttft_ms",
        "itl_ms",
        "tokens_per_second",
        "cached_tokens",
        "error",
    )
    kept: Options = json.loads(json.dumps({k: found[k] for k in found if k not in changing}))
    return kept


@every_surface
@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(o) or "greedy")
def test_every_surface_gives_the_same_completion(
    made: Generator, tokenizer: Tokenizer, surface: Surface, options: Options
) -> None:
    options = {"max_tokens": 40, **options}
    params, one = SamplingParams.of(**options), alone(tokenizer)
    plain = one.generate(PROMPT, params, gamma=0).to_json()
    assert steady(surface(made, PROMPT, options, 0)) == steady(plain)
    found = surface(made, PROMPT, options, 3)
    assert steady(found) == steady(one.generate(PROMPT, params, gamma=3).to_json())
    if params.verifier == "match":
        assert (found["token_ids"], found["text"]) == (plain["token_ids"], plain["text"])
    ends = (*options.get("stop", ()), *options.get("stop_token_ids", ()))
    assert not ends or found["stop_reason"] in ends
    assert len(found["token_ids"]) == 40 or found["finish_reason"] == "stop"


WRONG: list[tuple[str, Options, int, type[SpecrtError], str]] = [
    ("a", {}, 99, RequestError, "gamma 99 is not among those this bundle was built for: 0, 1"),
    ("a", {"n": 3}, 2, RequestError, "n is 3"),
    ("a", {"temprature": 1}, 2, RequestError, "did you mean 'temperature'"),
    ("a", {"verifier": "typical"}, 2, RequestError, "verifier is 'typical'"),
    ("", {}, 2, RequestError, "the prompt is empty and this model has no BOS token"),
    ("ab\udcff", {}, 2, RequestError, "not (valid Unicode at character|UTF-8 at byte) 2"),
    ("x" * 300, {}, 2, CapacityError, "300 tokens, and the context of this bundle is 128"),
]


@every_surface
def test_every_surface_refuses_before_any_pass(made: Generator, surface: Surface) -> None:
    lists = surface in (by_many, by_llm)
    for prompt, options, gamma, error, told in WRONG:
        if lists and prompt != "a":  # whose other prompts go on
            found = surface(made, prompt, options, gamma)
            assert (found["finish_reason"], found["token_ids"]) == ("error", [])
            assert re.match(rf"prompts\[0\]: .*{told}", found["error"])
        elif not lists or "n" not in options:
            with pytest.raises(error, match=told) as refused:
                surface(made, prompt, options, gamma)
            assert type(refused.value) is error
    assert target_of(made).calls == []
    made.close()
    with pytest.raises(RequestError, match="this generator was closed; open the bundle again"):
        surface(made, PROMPT, {}, 2)


@every_surface
@pytest.mark.parametrize("at", [0, 4])
def test_every_surface_tells_of_a_pass_that_failed_and_goes_on(
    made: Generator, tokenizer: Tokenizer, surface: Surface, at: int
) -> None:
    options, engine = {"max_tokens": 30, "ignore_eos": True}, target_of(made)
    honest = engine.forward

    def forward(*args: Any) -> Any:
        if len(engine.calls) == at:
            raise EngineError("the device is gone")
        return honest(*args)

    engine.forward = forward
    if surface in (by_many, by_llm):  # which harm no other prompt
        found = surface(made, PROMPT, options, 0)
        assert (found["finish_reason"], found["error"]) == ("error", "the device is gone")
    else:
        with pytest.raises(EngineError, match="the device is gone"):
            surface(made, PROMPT, options, 0)
    engine.forward = honest
    expected = alone(tokenizer).generate(PROMPT, SamplingParams.of(**options))
    assert surface(made, PROMPT, options, 3)["token_ids"] == expected.token_ids


# Each with what reads a chunk, what cancels, and the completion.
Running = tuple[Callable[[], Any], Callable[[], Any], Callable[[], Options]]


def running_session(made: Generator) -> Running:
    stream = Session(made, params=LONG).stream(PROMPT)
    return lambda: next(stream, None), stream.cancel, stream.completion.to_json


def running_task(made: Generator) -> Running:
    stream = made.astream(PROMPT, LONG)

    async def read() -> Any:
        return await anext(stream, None)

    return lambda: asyncio.run(read()), stream.cancel, stream.completion.to_json


def running_host(made: Generator) -> Running:
    run = begun(made, PROMPT, {"max_tokens": 100, "ignore_eos": True}, 4)
    return lambda: sure(run.next()), run.cancel, lambda: json.loads(sure(run.json())[0])


@pytest.mark.parametrize(
    "run", [running_session, running_task, running_host], ids=["session", "astream", "host"]
)  # fmt: skip
@pytest.mark.parametrize("read", [0, 2])
def test_cancelling_ends_every_surface_and_frees_its_row(
    made: Generator, tokenizer: Tokenizer, run: Callable[[Generator], Running], read: int
) -> None:
    chunk, cancel, completion = run(made)
    assert all(chunk() for _ in range(read))
    for _ in range(2):
        cancel()
        assert not chunk()
    found, one = completion(), alone(tokenizer)
    assert found["finish_reason"] == "cancelled"
    assert (len(found["token_ids"]) > 0) == (read > 0)
    whole = one.generate(PROMPT, LONG)
    assert found["token_ids"] == whole.token_ids[: len(found["token_ids"])]
    assert whole.text.startswith(found["text"])
    assert (target_of(made).calls == []) == (read == 0)
    short = SamplingParams(max_tokens=5, ignore_eos=True)
    for text, (done,) in zip("bc", made.generate_many([*"bc"], short, gamma=0), strict=True):
        assert done.token_ids == one.generate(text, short).token_ids
