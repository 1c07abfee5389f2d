"""What comes over the wire, well-formed or not, harms no text but that of its own session."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as open_websocket

from scheduler.support import rows
from serve.remote_support import served
from serve.support import until
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.remote.frames import (
    PATH,
    PROTOCOL,
    Close,
    Finish,
    FrameError,
    ProposalFrame,
    VerdictFrame,
    close_reason,
)
from specrt.serve.verify_sessions import VerifyEndpoint, VerifyLimits
from specrt.text.tokenizer import Tokenizer
from support.rows import packed

PROMPT = [104, 101, 108, 108, 111]
SAMPLED = {"max_tokens": 24, "temperature": 0.9, "seed": 3, "ignore_eos": True}
IDS = st.lists(st.integers(0, 264), max_size=8)


@pytest.fixture(scope="module")
def home(tokenizer: Tokenizer) -> Iterator[Generator]:
    with rows(packed, 2, tokenizer, eos_token_ids=(263,)) as made:
        yield made


@pytest.fixture(scope="module")
def sessions(home: Generator) -> VerifyEndpoint:
    return VerifyEndpoint(home, VerifyLimits(sessions=6, hello_bytes=4000, idle_s=20))


@pytest.fixture(scope="module")
def port(sessions: VerifyEndpoint) -> Iterator[int]:
    with served(sessions) as number:
        yield number


class Client:
    """A device that is written by somebody else, and may do as it likes."""

    def __init__(self, port: int, tokenizer: Tokenizer) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self._open = open_websocket(
            f"ws://127.0.0.1:{port}{PATH}", sock=self.socket, compression=None, max_size=None
        )
        self.wire = self._open.__enter__()
        self.sha256 = tokenizer.sha256
        self.text: list[int] = []
        self.welcome = self.message("welcome")

    def message(self, kind: str) -> dict[str, Any]:
        frame = self.wire.recv(10)
        assert isinstance(frame, str), frame
        found: dict[str, Any] = json.loads(frame)
        assert found["type"] == kind, found
        return found

    def ask(self, **fields: Any) -> None:
        """Send a hello."""
        usual = {
            "type": "hello", "protocol": PROTOCOL, "tokenizer_sha256": self.sha256,
            "prompt_ids": PROMPT, "params": SAMPLED,
        }  # fmt: skip
        self.wire.send(json.dumps({**usual, **fields}))

    def hello(self, **fields: Any) -> dict[str, Any]:
        self.ask(**fields)
        self.text = list(PROMPT)
        return self.message("ready")

    def begin(self, **fields: Any) -> dict[str, Any]:
        ready = self.hello(**fields)
        self.take(self.verdict(), ProposalFrame(0, len(PROMPT), 1))
        return ready

    def verdict(self) -> VerdictFrame:
        frame = self.wire.recv(10)
        assert isinstance(frame, bytes), frame
        return VerdictFrame.unpack(frame)

    def take(self, verdict: VerdictFrame, asked: ProposalFrame) -> None:
        known = [*asked.ids[: verdict.accepted], *verdict.ids]
        self.text += known[len(self.text) - verdict.base :]

    def propose(self, number: int, ids: Any = (), want: int = 1, back: int = 0) -> VerdictFrame:
        asked = ProposalFrame(number, len(self.text) - back, want, ids)
        self.wire.send(asked.pack())
        verdict = self.verdict()
        assert (verdict.round, verdict.base) == (number, asked.base)
        self.take(verdict, asked)
        return verdict

    def refusal(self) -> tuple[int, str]:
        """Return the code that the server closes with, and the reason in words."""
        error: dict[str, Any] = {}
        while True:
            try:
                frame = self.wire.recv(10)
            except ConnectionClosed as closed:
                end = closed.rcvd
                break
            if isinstance(frame, str) and json.loads(frame)["type"] == "error":
                error = json.loads(frame)
        assert end is not None
        assert (end.code, end.reason) == (error["code"], close_reason(error["message"]))
        return end.code, error["message"]

    def close(self) -> None:
        self._open.__exit__(None, None, None)

    def cut(self) -> None:
        """Vanish without a word."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


Connect = Callable[[], Client]


@pytest.fixture
def client(port: int, tokenizer: Tokenizer) -> Iterator[Connect]:
    made: list[Client] = []

    def connect() -> Client:
        made.append(Client(port, tokenizer))
        return made[-1]

    yield connect
    for one in made:
        one.close()


def expected(home: Generator, **options: Any) -> list[int]:
    params = SamplingParams(**{**SAMPLED, **options})
    return home.generate(PROMPT, params, gamma=0).token_ids


def test_frames_are_as_the_table_says() -> None:
    """docs/remote.md, for implementers in other languages."""
    propose = ProposalFrame(7, 300, 1, (5, 70000))
    assert propose.pack().hex() == "070000002c0100000100020500000070110100"
    verdict = VerdictFrame(7, 300, 1500, 1, Finish.STOP, (9,))
    assert verdict.pack().hex() == "070000002c010000dc05000001010109000000"
    assert ProposalFrame.unpack(propose.pack()) == propose
    assert VerdictFrame.unpack(verdict.pack()) == verdict
    text = (Path(__file__).parents[2] / "docs" / "remote.md").read_text(encoding="utf-8")
    assert propose.pack().hex(" ") in text
    assert verdict.pack().hex(" ") in text
    for code in Close:
        assert f"| {int(code)} |" in text, code


@given(st.binary(max_size=40))
def test_no_bytes_are_read_as_more_than_they_are(data: bytes) -> None:
    for kind in (ProposalFrame, VerdictFrame):
        try:
            frame = kind.unpack(data)
        except FrameError:
            continue
        assert frame.pack() == data


def test_whatever_is_proposed_the_text_is_that_of_the_seed(
    home: Generator, port: int, tokenizer: Tokenizer
) -> None:
    right = [*PROMPT, *expected(home)]
    plans = st.lists(st.tuples(IDS, st.integers(0, 8), st.integers(0, 3), st.integers(1, 5)))

    @settings(max_examples=25)
    @given(plans)
    def hold(plan: list[tuple[list[int], int, int, int]]) -> None:
        with closing(Client(port, tokenizer)) as client:
            client.begin()
            for number, (wrong, honest, back, want) in enumerate(plan, 1):
                have = len(client.text)
                base = have - min(back, have - len(PROMPT))
                ids = [*right[base : base + honest], *wrong][:8]
                verdict = client.propose(number, ids, 1 if ids else want, have - base)
                assert verdict.accepted <= len(ids)
                assert client.text == right[: len(client.text)]
                if verdict.finish:
                    done = client.message("done")
                    assert client.text == right
                    text = home.generate(PROMPT, SamplingParams(**SAMPLED), gamma=0).text
                    assert done["text_sha256"] == sha256(text.encode()).hexdigest()
                    return
                for _ in range(0 if ids else want - (len(client.text) - base)):
                    if len(client.text) >= min(base + want, len(right)):
                        break
                    client.take(client.verdict(), ProposalFrame(number, base, want))
                if len(client.text) == len(right):
                    client.message("done")
                    return

    hold()


def test_a_link_that_broke_is_taken_up_again_anywhere(home: Generator, client: Connect) -> None:
    right = [*PROMPT, *expected(home)]
    one = client()
    token = one.begin()["session"]
    one.propose(1, want=6)
    for length in (len(PROMPT), len(PROMPT) + 2, len(one.text)):
        two = client()
        two.ask(session=token, length=length)
        ready = two.message("ready")
        assert (ready["finish"], ready["seed"]) == (0, 3)
        two.text = right[:length] + ready["tokens"]
        assert two.text == right[: len(two.text)]
        two.propose(7, right[len(two.text) : len(two.text) + 2])
        assert two.text == right[: len(two.text)]
    code, reason = one.refusal()  # it still had the session when another took it up
    assert (code, "took this session up" in reason) == (Close.TAKEN_OVER, True)
    two.wire.send(ProposalFrame(9, len(two.text), 100).pack())
    while len(two.text) < len(right):
        two.take(two.verdict(), ProposalFrame(9, len(two.text), 100))
    assert two.message("done")["finish_reason"] == "length"
    assert two.text == right


def long(*ids: int) -> bytes:
    return ProposalFrame(1, len(PROMPT) + 1, 1, ids).pack()


BAD: list[tuple[str | bytes, int, str]] = [
    (b"", Close.REFUSED, "0 bytes; expected 11"),
    (b"\0" * 1032, Close.TOO_BIG, "1032 bytes; expected up to 1031"),
    (long(*range(9)), Close.REFUSED, "has 9 ids; expected up to 8"),
    (long(265), Close.REFUSED, "the id 265; expected ids of the vocabulary, 0 to 264"),
    (ProposalFrame(1, 90, 1).pack(), Close.REFUSED, "base_length is 90; the prompt has 5 tokens"),
    ("[]", Close.REFUSED, "no `type`"),
    ('{"type": "goodbye"}', Close.REFUSED, "`goodbye` frame came; expected `hello`"),
]


@pytest.mark.parametrize("frame", BAD, ids=range(len(BAD)))
def test_a_bad_frame_ends_its_own_session_alone(
    home: Generator, client: Connect, sessions: VerifyEndpoint, frame: tuple[str | bytes, int, str]
) -> None:
    bytes_, code, reason = frame
    right = [*PROMPT, *expected(home)]
    good, bad, before = client(), client(), len(sessions)
    good.begin()
    bad.begin()
    bad.wire.send(bytes_)
    found = bad.refusal()
    assert (found[0], reason in found[1]) == (code, True), found
    good.propose(1, right[6:8])
    assert good.text == right[: len(good.text)]
    assert expected(home) == right[len(PROMPT) :]
    assert len(sessions) == before + 1


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"protocol": 2}, Close.REFUSED, "protocol is 2; this server speaks 1"),
        ({"protocol": "1"}, Close.REFUSED, "`protocol` of `hello` is of type str; expected int"),
        ({"tokenizer_sha256": "ab" * 32}, Close.OTHER_TOKENIZER, "ab" * 32),
        ({"session": "none"}, Close.UNKNOWN_SESSION, "this session is not here"),
        ({"session": 3}, Close.REFUSED, "`session` of `hello` is of type int"),
        ({"prompt_ids": [1, 265]}, Close.REFUSED, "`prompt_ids` holds '265'"),
        ({"prompt_ids": "abc"}, Close.REFUSED, "expected list"),
        ({"prompt_ids": []}, Close.REFUSED, "the prompt has no tokens"),
        ({"params": {"temprature": 1}}, Close.REFUSED, "did you mean 'temperature'"),
        ({"params": {"max_tokens": 5000}}, Close.REFUSED, "max_tokens is 5000; expected up to"),
        ({"params": 3}, Close.REFUSED, "expected dict"),
        ({"prompt": "\ud800"}, Close.REFUSED, "surrogates"),
        ({"tokenizer_sha256": "\udfff"}, Close.REFUSED, "surrogates"),
        ({"params": {"\ud800": 1}}, Close.REFUSED, "surrogates"),
        ({"prompt_ids": None, "prompt": "\U0001f600" * 50}, Close.REFUSED, "context"),
    ],
)
def test_a_hello_is_refused_in_words(
    client: Connect, fields: dict[str, Any], code: int, reason: str, tokenizer: Tokenizer
) -> None:
    one = client()
    one.ask(**fields)
    found = one.refusal()
    assert (found[0], reason in found[1]) == (code, True), found
    if code == Close.OTHER_TOKENIZER:
        assert tokenizer.sha256 in found[1]


def test_a_defect_ends_its_link_with_a_code(
    client: Connect, home: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = client()
    with monkeypatch.context() as broken:
        broken.setattr(home, "paced", lambda *_, **__: 1 / 0)
        one.ask()
        assert one.refusal()[0] == Close.FAILED
    client().begin()


def test_a_proposal_before_a_hello_is_refused(client: Connect) -> None:
    one = client()
    one.wire.send(ProposalFrame(1, 5, 1).pack())
    assert one.refusal()[0] == Close.REFUSED


def test_a_device_that_never_answers_loses_its_session(tokenizer: Tokenizer) -> None:
    limits = VerifyLimits(idle_s=0.15)
    with rows(packed, 1, tokenizer) as home:
        sessions = VerifyEndpoint(home, limits)
        with served(sessions) as port:
            silent, idle, cut = (Client(port, tokenizer) for _ in range(3))
            token = silent.begin()["session"]
            cut.begin()
            cut.cut()
            for one in (silent, idle):
                assert one.refusal()[0] == Close.IDLE
            until(lambda: len(sessions) == 0)
            with closing(Client(port, tokenizer)) as late:
                late.ask(session=token)
                assert late.refusal()[0] == Close.UNKNOWN_SESSION
            assert expected(home)


def test_sessions_and_links_are_limited(tokenizer: Tokenizer) -> None:
    with rows(packed, 1, tokenizer) as home:
        sessions = VerifyEndpoint(home, VerifyLimits(sessions=2, links=4))
        with served(sessions) as port:
            made = [Client(port, tokenizer) for _ in range(4)]
            for one in made[:2]:
                one.begin()
            made[2].ask()
            code, reason = made[2].refusal()
            assert (code, "2 sessions run, which is the limit" in reason) == (Close.FULL, True)
            extra = [Client(port, tokenizer)]  # in the place of the one that was refused
            with pytest.raises(AssertionError, match="4 devices are linked"):
                Client(port, tokenizer)
            made[0].cut()  # one that is gone makes room
            time.sleep(0.1)
            made[3].begin()
            for one in made + extra:
                one.close()


def test_a_server_that_ends_its_sessions_says_so(tokenizer: Tokenizer) -> None:
    with rows(packed, 1, tokenizer) as home:
        sessions = VerifyEndpoint(home)
        with served(sessions) as port, closing(Client(port, tokenizer)) as one:
            one.begin()
            sessions.close()
            one.wire.send(ProposalFrame(1, 6, 1).pack())
            assert one.refusal()[0] == Close.GONE
