"""Sessions of devices that draft: each is a request whose drafter is at the end of a WebSocket.

The device proposes token ids; the text is what this server generates for the request's seed,
whatever was proposed. docs/remote.md describes the frames.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from time import perf_counter_ns
from typing import Any

from starlette.websockets import WebSocket

from specrt.aio import PacedStream
from specrt.completion import Completion
from specrt.errors import CapacityError, RequestError, SpecrtError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.remote.frames import (
    MOST_DRAFTED,
    PROTOCOL,
    Close,
    Finish,
    FrameError,
    ProposalFrame,
    VerdictFrame,
    field_of,
    ids_of,
    other_tokenizer,
    pack_message,
    read_message,
)
from specrt.serve.admission import OverloadError
from specrt.serve.device_link import DeviceLink, LinkEndedError
from specrt.serve.request_log import RequestRecord, record_of
from specrt.speculation.round import NOTHING, Passes, Proposal, Round

log = logging.getLogger("specrt.serve")

AHEAD = 8
"""Tokens that are decoded alone before those in front of them are sent."""

TIMED, TIMED_S = 6, 1.0
"""Tokens that show what one takes, and the most time for them."""

RESUMABLE = (1001, 1005, 1006, 1013, 1014)
"""Codes with which a device, or what is between, may leave a link and come back; with others its
session ends."""


@dataclass(frozen=True)
class VerifyLimits:
    """What one server grants to all devices, and to each."""

    sessions: int = 64
    """Sessions whose text has not ended; each holds a request, and a row while it runs."""
    links: int = 256
    """WebSockets, those between two sessions included."""
    idle_s: float = 60.0
    """How long a device may send nothing, or be gone, before its session ends."""
    max_tokens: int = 4096
    """Of one session."""
    hello_bytes: int = 1 << 20
    """Of a text frame."""
    reveal_seed: bool = True
    """Whether a device learns the seed, with which it drafts what the server will draw."""


class WireDrafter:
    """Proposes what a device sent, as far as it fits after the text."""

    SOURCE = "remote"

    def __init__(
        self, gammas: Collection[int], on_round: Callable[[Round], object] = lambda _: None
    ) -> None:
        """`on_round` is called with each round, in the thread of the passes."""
        self._gammas = sorted(gammas)
        self._on_round = on_round
        self._offer: tuple[int, Sequence[int]] = (0, ())

    def offer(self, base: int, ids: Sequence[int]) -> None:
        """Take what is proposed after the first `base` tokens, for the next round alone."""
        self._offer = base, ids

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        """Return the tokens offered, in a number that passes were built for.

        What was committed since the device drafted is left out where the device had it right.
        """
        yield from ()
        (base, ids), self._offer = self._offer, (0, ())
        behind = len(tokens) - base
        if not 0 <= behind < len(ids) or list(ids[:behind]) != tokens[base:]:
            return NOTHING
        most = min(len(ids) - behind, room)
        count = max((gamma for gamma in self._gammas if gamma <= most), default=0)
        return Proposal(ids[behind : behind + count], None, self.SOURCE) if count else NOTHING

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Learn nothing: the device does."""
        self._on_round(round_)


class VerifySession:
    """One text: its request, and the link of its device while there is one."""

    def __init__(
        self, stream: PacedStream, drafter: WireDrafter, record: RequestRecord, admitted: ExitStack
    ) -> None:
        self.token = secrets.token_urlsafe(16)
        self.record = record
        self.admitted = admitted
        """What its key holds for it."""
        self.ended = False
        self.stream = stream
        self.drafter = drafter
        self.link: DeviceLink | None = None
        self.expiry: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        """Whether the text has ended."""
        return self.stream.since(len(self.stream.prompt))[1]

    def end(self) -> None:
        """Give back what its key holds for it, count what it used, and log it; once."""
        done, key = self.stream.completion, self.record.key
        with self.admitted:
            if self.ended:
                return
            self.ended = True
            if key is not None:
                key.use(prompt=done.prompt_tokens, generated=len(done.token_ids))
            self.record.end(done)
            self.record.write()

    def answers(self, propose: ProposalFrame) -> bool:
        """Whether a proposal needs an answer: not to decode on after the end, told in `done`."""
        last = len(self.stream.prompt) + len(self.stream.completion.token_ids)
        ended = self.over and self.stream.completion.finish_reason is not None
        return not (ended and not propose.ids and last <= propose.base <= self.stream.limit)

    def check(self, propose: ProposalFrame, vocabulary: int, gamma_max: int) -> None:
        """Refuse a proposal that no device makes that follows the protocol.

        Raises: FrameError.
        """
        first = len(self.stream.prompt)
        last = first + len(self.stream.completion.token_ids)
        if not first <= propose.base <= last:
            raise FrameError(
                f"base_length is {propose.base}; the prompt has {first} tokens, and prompt and "
                f"text {last}: expected one of these, or between"
            )
        if len(propose.ids) > gamma_max:
            raise FrameError(
                f"a proposal has {len(propose.ids)} ids; expected up to {gamma_max}, the "
                "largest of `gammas`"
            )
        wrong = [token for token in propose.ids if token >= vocabulary]
        if wrong:
            raise FrameError(
                f"a proposal holds the id {wrong[0]}; expected ids of the vocabulary, 0 to "
                f"{vocabulary - 1}"
            )


class VerifyEndpoint:
    """The sessions of all devices, as rows of a generator among its other requests.

    For one event loop; `endpoint` is the WebSocket route, to be added at `PATH`.
    """

    def __init__(
        self,
        generator: Generator,
        limits: VerifyLimits | None = None,
        *,
        name: str = "",
        draining: Callable[[], bool] = lambda: False,
        on_round: Callable[[Round], object] = lambda _: None,
    ) -> None:
        """`draining` tells whether no session begins any more; see `WireDrafter` for `on_round`."""
        self._draining = draining
        self._on_round = on_round
        self.limits = limits or VerifyLimits()
        self._generator = generator
        self._name = name
        self._sessions: dict[str, VerifySession] = {}
        self._links: set[DeviceLink] = set()
        self._beginning = 0
        """How many sessions are on their way."""
        models = generator.models
        self._vocabulary = models.target.geometry.vocab_size
        self._step_us = models.costs.verify_ns[0] / 1e3 if models.costs is not None else 0.0
        """What a token takes that is decoded alone, as tuned and then as seen; 0 when unknown."""
        self._gammas = sorted(gamma for gamma in models.gammas if gamma <= MOST_DRAFTED)

    def __len__(self) -> int:
        """Return how many sessions there are, or begin, whose text has not ended."""
        return self._beginning + sum(not session.over for session in self._sessions.values())

    @property
    def running(self) -> list[Completion]:
        """The texts that hold a row."""
        streams = [session.stream for session in list(self._sessions.values())]
        return [stream.completion for stream in streams if stream.has_row]

    @property
    def waiting(self) -> int:
        """How many sessions wait for a row, not for their device."""
        return sum(session.stream.waits_for_row for session in list(self._sessions.values()))

    @property
    def links(self) -> int:
        """How many WebSockets are open."""
        return len(self._links)

    async def endpoint(self, websocket: WebSocket) -> None:
        """Serve one WebSocket to its end; what goes wrong in it concerns no other."""
        await websocket.accept()
        record = record_of(websocket.scope)
        limits = self.limits
        link = DeviceLink(websocket, record, idle_s=limits.idle_s, text_bytes=limits.hello_bytes)
        self._links.add(link)
        try:
            if len(self._links) > self.limits.links:
                raise FrameError(
                    f"{self.limits.links} devices are linked, which is the limit here", Close.FULL
                )
            await self._serve(link)
        except LinkEndedError as end:
            self._leave(link, resumable=end.code in RESUMABLE)
        except SpecrtError as error:
            self._leave(link, resumable=False)
            await link.close(_code_of(error), str(error))
        except Exception:  # a defect
            self._leave(link, resumable=False)
            log.exception("a device's session failed")
            await link.close(Close.FAILED, "the server failed; its log says why")
        except BaseException:
            self._leave(link, resumable=False)
            raise
        finally:
            self._links.discard(link)
            link.forget()

    def close(self) -> None:
        """End all sessions, as when the server ends."""
        for session in list(self._sessions.values()):
            self._drop(session)

    async def _serve(self, link: DeviceLink) -> None:
        await self._time_a_step()
        await link.send(self._welcome())
        session: VerifySession | None = None
        while True:
            frame = await link.receive()
            if session is not None and session.token not in self._sessions:
                raise _ended()
            if session is not None and session.link is not link:
                raise LinkEndedError(Close.TAKEN_OVER)
            if isinstance(frame, str):
                if session is not None:
                    self._drop(session)
                session = await self._hello(link, frame)
            elif session is None:
                raise FrameError("a binary frame came before `hello`; begin with that")
            else:
                propose = ProposalFrame.unpack(frame)
                if not session.answers(propose):
                    continue
                session.check(propose, self._vocabulary, self._gammas[-1])
                await self._verify(link, session, propose)

    async def _time_a_step(self) -> None:
        """Decode a few tokens alone where nothing has told yet what one takes."""
        if self._step_us or self._draining():
            return
        with suppress(SpecrtError, asyncio.TimeoutError):  # rows may be taken: devices find out
            few = SamplingParams(max_tokens=TIMED, ignore_eos=True)
            done = await asyncio.wait_for(self._generator.agenerate([0], few, gamma=0), TIMED_S)
            self._step_us = self._step_us or 1e3 * done.timings.itl_ms

    def _welcome(self) -> str:
        """Return what a device has to know before it begins."""
        made = self._generator
        return pack_message(
            "welcome",
            protocol=PROTOCOL,
            model=self._name,
            tokenizer_sha256=made.tokenizer.sha256,
            vocab_size=self._vocabulary,
            max_length=made.models.target.max_length,
            gammas=self._gammas,
            eos_token_ids=made.eos_token_ids,
            bos_token_id=made.tokenizer.bos_token_id,
            step_us=round(self._step_us),
            limits=asdict(self.limits),
        )

    async def _hello(self, link: DeviceLink, frame: str) -> VerifySession:
        """Begin a session, or take one up again."""
        message = read_message(frame)
        if message["type"] != "hello":
            raise FrameError(f"a `{message['type'][:40]}` frame came; expected `hello`")
        version = field_of(message, "protocol", int, 0)
        if version != PROTOCOL:
            raise FrameError(f"protocol is {version}; this server speaks {PROTOCOL}")
        token = field_of(message, "session", str)
        if token is not None:
            return await self._resume(link, token, field_of(message, "length", int, 0))
        return await self._begin(link, message)

    async def _begin(self, link: DeviceLink, message: dict[str, Any]) -> VerifySession:
        if self._draining():
            raise FrameError("the server is shutting down; connect to another one", Close.GONE)
        if link.record.key is not None and link.record.key.revoked:
            raise RequestError("the key of this link is no longer one of the server's")
        tokenizer, device = self._generator.tokenizer, message.get("tokenizer_sha256")
        if device != tokenizer.sha256:
            raise FrameError(
                other_tokenizer(tokenizer.sha256, str(device)[:80]), Close.OTHER_TOKENIZER
            )
        text = field_of(message, "prompt", str)
        prompt = ids_of(message, "prompt_ids", self._vocabulary) if text is None else text
        params = self._params(field_of(message, "params", dict, {}))
        special = field_of(message, "parse_special", bool, True)
        want = field_of(message, "want", int, 1)
        self._make_room()
        if len(self) >= self.limits.sessions:
            raise FrameError(
                f"{len(self)} sessions run, which is the limit here; try again later", Close.FULL
            )
        drafter, record = WireDrafter(self._gammas, self._on_round), link.record.session()
        self._beginning += 1
        try:  # in a thread: a large grammar takes a while to compile
            with ExitStack() as admitted:
                if record.key is not None:
                    admitted.enter_context(record.key.admit(1))
                stream = await asyncio.to_thread(
                    self._generator.paced,
                    prompt,
                    params,
                    drafter,
                    name=drafter.SOURCE,
                    parse_special=special,
                    cache_salt=record.cache_salt(),
                )
                session = VerifySession(stream, drafter, record, admitted.pop_all())
        finally:
            self._beginning -= 1
        session.link = link
        self._sessions[session.token] = session
        base = len(stream.prompt)
        given = {} if text is None else {"prompt_ids": stream.prompt}
        await link.send(self._ready(session, base, **given))
        await self._verify(link, session, ProposalFrame(0, base, max(1, want)))
        return session

    def _make_room(self) -> None:
        """Drop sessions whose link broke, the oldest first, where there are too many of them."""
        most = self.limits.sessions
        for session in [s for s in self._sessions.values() if s.link is None]:
            if len(self) < most and len(self._sessions) < 2 * most:
                return
            self._drop(session)

    def _params(self, options: dict[str, Any]) -> SamplingParams:
        """Return the parameters of a session.

        Raises: RequestError for those that have no meaning here.
        """
        params, most = SamplingParams.of(**options), self.limits.max_tokens
        if params.max_tokens > most:
            raise RequestError(f"max_tokens is {params.max_tokens}; expected up to {most} here")
        if params.verifier != "match":
            raise RequestError(
                f"verifier is {params.verifier!r}; expected 'match', which needs no distributions"
            )
        if params.logprobs is not None or params.prompt_logprobs is not None:
            raise RequestError("logprobs were asked for; only tokens cross the link: leave it out")
        return params

    async def _resume(self, link: DeviceLink, token: str, length: int) -> VerifySession:
        """Give a session to another link, and tell it what its device lacks."""
        session = self._sessions.get(token)
        if session is None or session.record.key is not link.record.key:
            raise FrameError(
                "this session is not here: it ended, or was idle for over "
                f"{self.limits.idle_s:g} s; begin again",
                Close.UNKNOWN_SESSION,
            )
        session.check(ProposalFrame(0, length, 1), self._vocabulary, 0)
        if session.expiry is not None:
            session.expiry.cancel()
        earlier, session.link = session.link, link
        if earlier is not None:
            await earlier.close(Close.TAKEN_OVER, "another link took this session up")
        await link.send(self._ready(session, length))
        if session.over:
            await link.send(self._done(session))
        return session

    def _ready(self, session: VerifySession, length: int, **more: Any) -> str:
        stream = session.stream
        tokens, over = stream.since(length)
        return pack_message(
            "ready",
            session=session.token,
            prompt_tokens=len(stream.prompt),
            limit=stream.limit,
            seed=self._seed(session),
            tokens=tokens,
            finish=_finish(session, over),
            **more,
        )

    def _seed(self, session: VerifySession) -> int | None:
        return session.stream.completion.seed if self.limits.reveal_seed else None

    def _done(self, session: VerifySession) -> str:
        """Return how a text ended, and by what a device may know that it has the same."""
        done = session.stream.completion
        return pack_message(
            "done",
            finish_reason=done.finish_reason,
            stop_reason=done.stop_reason,
            seed=self._seed(session),
            tokens=len(done.token_ids),
            text_sha256=hashlib.sha256(done.text.encode()).hexdigest(),
            cached_tokens=done.cached_tokens,
            speculation=done.speculation.to_json(),
        )

    async def _verify(
        self, link: DeviceLink, session: VerifySession, propose: ProposalFrame
    ) -> None:
        """Answer a proposal: by the text that is there, or by a round, or by several without ids.

        The answer is a function of the text, so that a proposal may be sent again.
        """
        stream, base, ids = session.stream, propose.base, propose.ids
        end = base + (1 if ids else max(1, propose.want))
        link.on_end = stream.wake
        if ids:
            session.drafter.offer(base, ids)
        while True:
            began = perf_counter_ns()
            await stream.reach(base + 1, min(end - base, AHEAD) - 1, lambda: link.open)
            link.require_open()
            spent_us = (perf_counter_ns() - began) // 1000
            tokens, over = stream.since(base)
            finish = _finish(session, over)
            if not ids and tokens and base > propose.base:
                step_us = spent_us / len(tokens)
                self._step_us += (step_us - self._step_us) / (16 if self._step_us else 1)
            for frame in _frames(propose, base, spent_us, _shared(ids, tokens), tokens, finish):
                await link.send(frame)
            base, ids = base + len(tokens), ()
            if over:
                session.end()
                return await link.send(self._done(session))
            if base >= end:
                return None

    def _leave(self, link: DeviceLink, *, resumable: bool) -> None:
        """End the sessions of a link, or keep them for a while where it broke."""
        for session in [s for s in self._sessions.values() if s.link is link]:
            session.link = None
            if resumable:
                loop = asyncio.get_running_loop()
                session.expiry = loop.call_later(self.limits.idle_s, self._drop, session)
            else:
                self._drop(session)

    def _drop(self, session: VerifySession) -> None:
        """Forget a session; its row is free at once."""
        if session.expiry is not None:
            session.expiry.cancel()
        session.link = None
        self._sessions.pop(session.token, None)
        session.stream.drop()
        session.end()


def _finish(session: VerifySession, over: bool) -> Finish:
    """Return whether a text ended.

    Raises: FrameError where it was ended from outside.
    """
    reason = session.stream.completion.finish_reason
    if over and reason is None:
        raise _ended()
    return Finish.of(reason) if over else Finish.OPEN


def _ended() -> FrameError:
    return FrameError("the server ended this session; begin again", Close.GONE)


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many first tokens are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def _frames(
    propose: ProposalFrame,
    base: int,
    spent_us: int,
    accepted: int,
    tokens: Sequence[int],
    finish: Finish,
) -> list[bytes]:
    """Return the frames of an answer: one, or more where a frame has no room for all tokens."""
    rest = tokens[accepted:]
    parts = [rest[at : at + MOST_DRAFTED] for at in range(0, len(rest), MOST_DRAFTED)] or [()]
    frames = []
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        end = finish if last else Finish.OPEN
        frames.append(VerdictFrame(propose.round, base, spent_us, accepted, end, part).pack())
        base, spent_us, accepted = base + accepted + len(part), 0, 0
    return frames


def _code_of(error: SpecrtError) -> int:
    if isinstance(error, FrameError):
        return error.code
    if isinstance(error, OverloadError):
        return Close.FULL
    return Close.REFUSED if isinstance(error, RequestError | CapacityError) else Close.FAILED
