"""What the C interface calls, called from Python."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrt import c_host as embedded
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.text import Tokenizer

PROMPT = "def area(radius):\n"


@pytest.fixture(scope="module")
def host(codelet: Path) -> Iterator[embedded.Host]:
    status, opened = embedded.open_bundle(os.fsencode(codelet), b"", 1, 0, 0, 1)
    assert status == 0
    yield opened
    assert opened.close() == (0,)


def asked(**given: Any) -> bytes:
    params = {"max_tokens": 12, "seed": 3, **given.pop("params", {})}
    return json.dumps({"params": params, **given}).encode()


def read(run: embedded.Run) -> tuple[str, list[int]]:
    text, ids = b"", array("q")
    while len(told := run.next()) > 1:
        assert told[0] == 0, told
        assert 0 <= told[3] <= len(told[2]) // 8
        text += told[1]
        ids.frombytes(told[2])
    assert told == (0,)
    return text.decode(), list(ids)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_it_streams_what_the_generator_streams(
    host: embedded.Host, generator: Generator, temperature: float
) -> None:
    params = SamplingParams(max_tokens=12, seed=3, temperature=temperature)
    expected = generator.generate(PROMPT, params, gamma=2)
    ids = array("q", generator.tokenizer.encode(PROMPT)).tobytes()
    for prompt, is_text in ((PROMPT.encode(), 1), (ids, 0)):
        status, run = host.begin(
            prompt, is_text, asked(params={"temperature": temperature}, gamma=2)
        )
        assert status == 0
        assert read(run) == (expected.text, expected.token_ids)
        counts = expected.speculation
        status, *stats = run.stats()
        assert status == 0
        assert stats[0] == expected.prompt_tokens
        assert stats[2:7] == [
            counts.rounds, counts.drafted, counts.evaluated, counts.accepted, counts.emitted
        ]  # fmt: skip
        assert stats[10:] == [3, 2, b"model", b"length", b""]
        assert json.loads(run.json()[1])["token_ids"] == expected.token_ids


def test_gamma_and_drafter_are_the_bundles_unless_named(host: embedded.Host) -> None:
    for given, gamma, drafter in (
        ({"gamma": -1}, -1, None),
        ({"drafter": "ngram"}, None, b"ngram"),
    ):
        told = host.begin(b"import os\n", 1, asked(**given))[1].stats()
        assert gamma in (None, told[12])
        assert drafter in (None, told[13])


def test_info_tells_what_the_bundle_is(host: embedded.Host, generator: Generator) -> None:
    target = generator.models.target
    assert host.info() == (
        0, b"codelet", b"ort-cpu", b"fp32", target.max_length, target.geometry.vocab_size,
        1, 8, 1, 1, "\n".join(generator.notices).encode(),
    )  # fmt: skip


def test_texts_become_ids_and_back(host: embedded.Host, generator: Generator) -> None:
    status, ids = host.encode("żółw = 1\n".encode())
    assert (status, list(memoryview(ids).cast("q"))) == (
        0,
        generator.tokenizer.encode("żółw = 1\n"),
    )
    assert host.decode(ids) == (0, "żółw = 1\n".encode())


def test_cancelling_ends_it(host: embedded.Host) -> None:
    run = host.begin(PROMPT.encode(), 1, asked(params={"max_tokens": 900, "ignore_eos": True}))[1]
    assert len(run.next()) == 4
    assert run.cancel() == (0,)
    assert run.next() == (0,)
    assert json.loads(run.json()[1])["finish_reason"] == "cancelled"


def test_errors_are_told_with_their_status(host: embedded.Host, tmp_path: Path) -> None:
    size = host.info()[5]
    context = array("q", [5] * (host.info()[4] + 1)).tobytes()
    for status, said, told in (
        (1, b"temperature is -1", host.begin(b"x", 1, asked(params={"temperature": -1}))),
        (1, b"did you mean", host.begin(b"x", 1, asked(params={"max_token": 1}))),
        (1, b"gamma 77 is not among", host.begin(b"x", 1, asked(gamma=77))),
        (1, b"drafter", host.begin(b"x", 1, asked(drafter="models"))),
        (1, b"not UTF-8 at byte 1", host.begin(b"x\xff", 1, asked())),
        (1, b"not UTF-8 at byte 0", host.encode(b"\xff")),
        (1, b"vocabulary", host.decode(array("q", [size]).tobytes())),
        (6, b"the context of this bundle", host.begin(context, 0, asked())),
        (4, b"is not a bundle", embedded.open_bundle(os.fsencode(tmp_path), b"", 0, 0, 0, 1)),
        (1, b"runs " + sys.executable.encode(), embedded.open_bundle(b"x", b"/no", 0, 0, 0, 1)),
    ):
        assert told[0] == status, told
        assert said in told[1], told


def test_an_error_on_the_way_is_told_by_next(host: embedded.Host) -> None:
    banned = list(range(4, host.info()[5]))
    run = host.begin(PROMPT.encode(), 1, asked(params={
        "allowed_token_ids": banned[:1], "no_repeat_ngram_size": 1,
    }))[1]  # fmt: skip
    told = run.next()
    while len(told) == 4:
        told = run.next()
    assert told[0] == 1
    assert b"no token is left" in told[1]


FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_float), ctypes.c_size_t,
)  # fmt: skip
HOLD = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)


def addresses(*functions: Any) -> list[int]:
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]


def test_processors_are_called_by_address_and_let_go_of(
    host: embedded.Host, generator: Generator
) -> None:
    prompt = generator.tokenizer.encode(PROMPT)
    held, seen = [], []

    @FUNCTION  # type: ignore[untyped-decorator]
    def only(user: int, ids: Any, count: int, scores: Any, size: int) -> int:
        seen.append((user, ids[: len(prompt)]))
        for token in range(size):
            scores[token] = float(token == 65)
        return 0

    hold = HOLD(lambda user, by: held.append((user, by)))
    function, counted = addresses(only, hold)
    given = asked(params={"max_tokens": 3}, processors=[[function, 77, counted]])
    run = host.begin(PROMPT.encode(), 1, given)[1]
    assert held == [(77, 1)]
    assert read(run)[1] == [65, 65, 65]
    assert seen
    assert all(one == (77, prompt) for one in seen)
    del run
    assert held == [(77, 1), (77, -1)]


def test_a_processor_may_end_the_generation(host: embedded.Host) -> None:
    hold = HOLD(lambda user, by: None)
    refuse = FUNCTION(lambda *_: 3)
    function, counted = addresses(refuse, hold)
    run = host.begin(PROMPT.encode(), 1, asked(processors=[[function, 0, counted]]))[1]
    status, said = run.next()
    assert (status, said[:42]) == (9, b"the logits processor number 1 returned 3, ")


def test_a_bug_is_told_by_its_type(host: embedded.Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("no more")

    monkeypatch.setattr(Tokenizer, "encode", fails)
    assert host.encode(b"x") == (10, b"ZeroDivisionError: no more")
