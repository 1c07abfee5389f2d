"""Draft here, verify there: a generator whose target is a server's, over one WebSocket.

Tokens cross the link, and nothing else: the device proposes, the server answers with its own text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from numpy.typing import ArrayLike

from specrt.engine.protocol import EngineTraits, Output
from specrt.errors import EngineError, LinkError, RequestError, how_to_install
from specrt.generator import Generator
from specrt.geometry import Geometry
from specrt.loading import OpenedDraft, open_draft
from specrt.params import AUTO, SamplingParams
from specrt.remote.frames import (
    PROTOCOL,
    FrameError,
    ProposalFrame,
    VerdictFrame,
    field_of,
    ids_of,
    other_tokenizer,
    pack_message,
)
from specrt.remote.link import BrokenError, Link, LinkOptions, LinkPool
from specrt.sampling.noise import Noise
from specrt.scheduler.request import Request
from specrt.speculation.costs import Costs
from specrt.speculation.drafters import NO_DRAFTER
from specrt.speculation.pool import Models
from specrt.speculation.round import (
    NOTHING,
    Drafter,
    Passes,
    Proposal,
    Round,
    Rounds,
    Verdict,
    speculate,
)

RUN_TRIPS = 2
"""How many times the link's delay the server decodes on for, alone, while the device weighs whether
to draft: so it is told to go on before it would have to wait."""

BACK_SHARE = 0.25
"""Part of the link's delay that each draft counts for the way back to a server that goes on alone:
a text stays easy for some rounds alone."""

_MOST_WANT = 0xFFFF


def connect(
    url: str,
    draft: str | Path,
    *,
    threads: int | None = None,
    owns_process: bool = False,
    link: LinkOptions | None = None,
) -> Generator:
    """Return a generator that drafts with a bundle here, and whose target is a server's.

    `url` is that of `specrt serve --verify`, as ws://HOST:8080; `draft` a bundle, of which the
    draft model and the tokenizer are opened and the target need not be there. The text is the
    server's own for the seed, whatever is drafted. `threads` and `owns_process`: see `load`.
    Raises: LinkError, BundleError, EngineError, RequestError.
    """
    try:
        import websockets  # noqa: F401
    except ModuleNotFoundError:
        raise RequestError(
            f"a target on a server needs websockets, which is not installed: "
            f"{how_to_install('serve')}"
        ) from None
    server = LinkPool(url, link or LinkOptions())
    try:
        welcome = server.welcome
        opened = open_draft(
            draft, threads=threads, owns_process=owns_process, bos_token_id=welcome.bos_token_id
        )
        if opened.tokenizer.sha256 != welcome.tokenizer_sha256:
            if opened.engine is not None:
                opened.engine.close()
            raise LinkError(other_tokenizer(welcome.tokenizer_sha256, opened.tokenizer.sha256))
    except BaseException:
        server.close()
        raise
    return remote_generator(server, opened)


def remote_generator(server: LinkPool, draft: OpenedDraft) -> Generator:
    """Return a generator over what is open already, which it closes."""
    batch = draft.engine.batch if draft.engine is not None else 1
    models = Models(
        RemoteEngine(server, batch),
        draft.engine,
        server.welcome.gammas,
        gamma=AUTO,
        costs=_costs(server),
        sampling=draft.sampling,
    )
    return Generator(
        models,
        draft.tokenizer,
        server.welcome.eos_token_ids,
        draft.notices,
        rounds=lambda request, make_drafter: _rounds(server, models, request, make_drafter),
    )


def _costs(server: LinkPool) -> Costs | None:
    """Return what rounds cost, as far as the server and a ping tell; rounds correct it.

    To draft is to wait for the link; a token that the server decodes alone does not.
    """
    welcome, trip_ns = server.welcome, server.trip_ns
    if not welcome.step_us or not trip_ns:
        return None
    assumed, step_ns = Costs.assume(max(welcome.gammas)), 1e3 * welcome.step_us
    trip_ns *= 1.0 + BACK_SHARE
    verify_ns = [step_ns, *(trip_ns + step_ns * steps for steps in assumed.verify_ns[1:])]
    return Costs(tuple(verify_ns), tuple(step_ns * steps for steps in assumed.draft_ns))


def _rounds(
    server: LinkPool, models: Models, request: Request, make_drafter: Callable[[], Drafter]
) -> Rounds:
    """Run the rounds of a request whose target is a server's."""
    counts, params = request.completion.speculation, request.params
    alone = 0 in (counts.gamma, max(models.gammas)) or counts.drafter == NO_DRAFTER
    with closing(RemoteTarget(server, request)) as target:
        # The token after the first tells what one costs that the server decodes alone.
        first = 1 + max(1, target.run_ahead * server.streams) if counts.gamma == AUTO else 1
        target.begin(wire_params(request), _MOST_WANT if alone else first)
        request.limit = target.limit
        if target.seed is not None:
            request.completion.seed, request.noise = target.seed, Noise(target.seed)
        elif params.seed is None:  # the draws are the server's secret: its likeliest are drafted
            request.params = replace(params, temperature=0.0)
            request.completion.seed = None
        if request.processors is not None:  # else the first they learn of is a token of the text
            request.processors.learn(request.tokens)
        most = inf if models.draft is None else models.draft.max_length
        drafter = LinkedDrafter(make_drafter(), target, most)
        yield from speculate(target, drafter, request.tokens, request.limit)


def wire_params(request: Request) -> dict[str, Any]:
    """Return the parameters of a request as a server reads them: those that are not the default.

    Raises: RequestError for those that cannot cross the link.
    """
    params = request.params
    if params.n != 1:
        raise RequestError(
            f"n is {params.n}; a server that verifies makes one completion of a seed: ask for each "
            "with a seed of its own"
        )
    if params.logits_processors:
        raise RequestError(
            "logits_processors are functions of this device, and the target is the server's; "
            "leave them out"
        )
    usual = SamplingParams()
    values = {f.name: getattr(params, f.name) for f in fields(params)}
    given = {name: value for name, value in values.items() if value != getattr(usual, name)}
    try:
        read: dict[str, Any] = json.loads(json.dumps(given, default=_plain))
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"the options cannot be sent to a server ({error}); expected what JSON has"
        ) from None
    return read


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"one is of type {type(value).__name__}")


class RemoteEngine:
    """The engine of a server: its shape here, its passes there."""

    def __init__(self, server: LinkPool, batch: int) -> None:
        welcome = server.welcome
        self.geometry = Geometry.uniform(1, 1, 1, 1, welcome.vocab_size, welcome.max_length)
        self.batch, self.max_length = batch, welcome.max_length
        self.max_width = self.max_rows = max(welcome.gammas) + 1
        self.traits = EngineTraits()
        self._server = server

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Output:
        """Refuse: logits never cross the link."""
        raise EngineError(f"the target runs on {self._server.url}; expected passes of the draft")

    def close(self) -> None:
        """Close the links."""
        self._server.close()


class RemoteTarget:
    """The target of one completion, at the other end of a link that may break.

    A link that broke is made again, and the session goes on with what the server has committed.
    Where the server decodes alone it sends several tokens for one request, so that none waits for
    the link; nothing is drafted until they are read.
    """

    def __init__(self, server: LinkPool, request: Request) -> None:
        self._server = server
        self._request = request
        self.server_gamma = max(server.welcome.gammas)
        """Most tokens that the server verifies in a pass."""
        self.max_gamma = 0
        """Most tokens that are worth drafting: none while more of the text is under way."""
        self._link: Link | None = None
        self._session = ""
        self._prompt = len(request.tokens)
        self._text = list(request.tokens)
        """Prompt and text as the server told them; it may be ahead of what was committed here."""
        self._asked = ProposalFrame(0, self._prompt, 1)
        """What the server answers now, or answered last."""
        self._asked_ns = 0
        self._drains = False
        """Whether the device will draft, once what the server decodes alone was read."""
        self.left_run = False
        """Whether the device drafted last, and before that the server decoded alone."""
        self._finish = 0
        self.seed: int | None = None
        """What the server draws with; None where it does not tell."""
        self.limit = request.limit
        self.plain_ns = 0.0
        """What the server takes for a token that it decodes alone; 0 until that is known."""

    @property
    def _end(self) -> int:
        """Up to where the server goes on by itself."""
        asked = self._asked
        return min(self.limit, asked.base + (1 if asked.ids else asked.want))

    def begin(self, params: dict[str, Any], want: int) -> None:
        """Begin a session: the server reads the prompt, and decodes `want` tokens alone.

        Raises: LinkError, RequestError.
        """
        hello = pack_message(
            "hello",
            protocol=PROTOCOL,
            tokenizer_sha256=self._server.welcome.tokenizer_sha256,
            params=params,
            prompt_ids=self._text,
            want=want,
        )
        ready = self._begun(hello, fresh=False)
        self._session = field_of(ready, "session", str, "")
        self.seed = field_of(ready, "seed", int)
        self.limit = min(self.limit, field_of(ready, "limit", int, self.limit))
        self._asked = ProposalFrame(0, self._prompt, want)

    def verify(self, tokens: Sequence[int], proposal: Proposal) -> Passes[Verdict]:
        """Ask the server, unless it told already what follows; no pass runs here.

        Raises: LinkError that says what was kept.
        """
        yield from ()
        base, ids = len(tokens), tuple(proposal.tokens)
        try:
            if base >= max(self._end, len(self._text)) and not self._finish:
                self._ask(self._next(base, ids))
            self._hear_until(base)
        except LinkError as error:
            raise LinkError(
                f"{error}; {base - self._prompt} tokens of the text were kept in `completion`"
            ) from None
        known = self._text[base:]
        most = min(len(ids), len(known) - 1)  # where the text ends, its last token is the next one
        accepted = next((i for i in range(most) if ids[i] != known[i]), most)
        more = max(self._end, len(self._text)) > base + accepted + 1
        self.max_gamma = 0 if more else self.server_gamma
        return Verdict(accepted, known[accepted])

    def close(self) -> None:
        """End the session."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _goes_on(self) -> bool:
        return not self._request.cancelled

    @property
    def run_ahead(self) -> int:
        """How many tokens the server decodes alone while it is told to go on; 0 on a quick link."""
        plain_ns = self.plain_ns or 1e3 * self._server.welcome.step_us
        trips = RUN_TRIPS * self._server.trip_ns / plain_ns if plain_ns else 0.0
        return int(min(trips, _MOST_WANT // 2))

    @property
    def trip_ns(self) -> float:
        """What the link takes of a round."""
        return self._server.trip_ns

    def weighs(self) -> bool:
        """Tell whether it is time to let the server go on alone, or else to draft."""
        run = self._end - len(self._text)
        return not (self._asked.ids or self._finish or self._drains) and 0 < run <= self.run_ahead

    def go_on(self, alone: bool) -> None:
        """Let the server decode on alone, which it does; or draft once that is read."""
        self._drains = not alone
        asked, end = self._asked, self._end
        want = min(self.run_ahead, self.limit - end)
        if alone and want > 0:
            with suppress(LinkError):  # it is told again when the answer is heard
                self._send(ProposalFrame(asked.round, end, want))
            self._asked = replace(asked, want=end + want - asked.base)

    def _next(self, base: int, ids: Sequence[int]) -> ProposalFrame:
        """Return the next proposal."""
        number, self._drains = self._asked.round + 1, False
        self._server.streams, self.left_run = not ids, bool(ids) and not self._asked.ids
        if ids:
            return ProposalFrame(number, base, 1, ids)
        return ProposalFrame(number, base, min(max(1, 2 * self.run_ahead), self.limit - base))

    def _begun(self, hello: str, *, fresh: bool, reason: str = "") -> dict[str, Any]:
        """Return what the server answers to a `hello`, which is sent again where a link breaks.

        Raises: LinkError.
        """
        for number in range(self._server.options.tries + 1):
            self._server.pause(max(0, number - 1))  # a link that was kept may have broken since
            self._link = self._server.take(self._goes_on, fresh=fresh or number > 0)
            try:
                self._link.send(hello)
                return self._link.message("ready", self._goes_on)
            except BrokenError as broken:
                self.close()
                reason = str(broken)
        raise LinkError(f"the link to {self._server.url} breaks again and again ({reason})")

    def _ask(self, propose: ProposalFrame) -> None:
        """Send a proposal; where the link broke that is noticed when the answer is heard."""
        self._asked, self._asked_ns = propose, perf_counter_ns()
        self._send(propose)

    def _send(self, propose: ProposalFrame) -> None:
        if self._link is not None:
            try:
                self._link.send(propose.pack())
            except BrokenError:
                self.close()

    def _hear_until(self, base: int) -> None:
        """Take in frames until the text goes on behind `base`, over new links where they break.

        Raises: LinkError.
        """
        tries = 0
        while len(self._text) <= base:
            before = len(self._text)
            if self._finish:
                raise LinkError(
                    f"the server ended the text after {before - self._prompt} tokens, and this "
                    "device did not; expected the same version of specrt on both"
                )
            try:
                self._hear()
            except BrokenError as broken:
                self.close()
                tries += 1
                if tries > self._server.options.tries:
                    raise LinkError(
                        f"the link to {self._server.url} broke {tries} times without a token "
                        f"({broken})"
                    ) from None
                self._server.pause(tries - 1)
                self._resume(str(broken))
        if self._finish and self._link is not None:
            with suppress(BrokenError):
                self._link.message("done", self._goes_on)
                self._server.give_back(self._link)
                self._link = None

    def _hear(self) -> None:
        """Take in one frame of the server's answer."""
        if self._link is None:
            raise BrokenError("the connection was closed")
        frame = self._link.receive(self._goes_on)
        if isinstance(frame, str):
            raise FrameError("the server sent a text frame; expected a verdict")
        verdict = VerdictFrame.unpack(frame)
        if verdict.round == self._asked.round:
            self._take(verdict)

    def _take(self, verdict: VerdictFrame) -> None:
        """Append what a verdict tells; what is known already is told again after a retry."""
        text, asked = self._text, self._asked
        if verdict.base > len(text) or verdict.accepted > len(asked.ids):
            raise FrameError(
                f"a verdict is about position {verdict.base} and accepts {verdict.accepted} "
                f"tokens; this device has {len(text)} and proposed {len(asked.ids)}"
            )
        if verdict.round and verdict.base == asked.base:
            spent_ns = perf_counter_ns() - self._asked_ns
            self._server.note_trip(spent_ns - 1000 * verdict.verify_us)
        known = [*asked.ids[: verdict.accepted], *verdict.ids]
        if max(known, default=0) >= self._server.welcome.vocab_size:
            raise FrameError(f"a verdict holds the id {max(known)}; expected ids of the vocabulary")
        text += known[len(text) - verdict.base :]
        self._finish = verdict.finish
        if verdict.ids and not asked.ids and verdict.base > self._prompt:
            self.plain_ns = 1000.0 * verdict.verify_us / len(verdict.ids)

    def _resume(self, reason: str) -> None:
        """Take the session up over another link, and ask for what is left of the answer."""
        hello = pack_message(
            "hello", protocol=PROTOCOL, session=self._session, length=len(self._text)
        )
        ready = self._begun(hello, fresh=True, reason=reason)
        asked, end = self._asked, self._end
        self._text += ids_of(ready, "tokens", self._server.welcome.vocab_size)
        self._finish = field_of(ready, "finish", int, 0)
        have = len(self._text)
        if self._finish or have >= end:
            return
        self._ask(asked if have == asked.base else ProposalFrame(asked.round, have, end - have))


class LinkedDrafter:
    """A drafter whose proposals go over a link.

    A plain round is taken to cost what the server takes for a token: it goes on alone, told so in
    time, so that the link's delay is part of none. To let it go on alone again after drafts takes
    the delay once more: a draft is taken to cost a share of that, the first after a run all.
    """

    def __init__(self, inner: Drafter, target: RemoteTarget, most: float) -> None:
        """`most` is how many tokens the draft has room for."""
        self._inner = inner
        self._target = target
        self._most = most

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        """Return what the drafter proposes, nothing while there is no room."""
        target = self._target
        left = int(min(self._most, target.limit - 1) - len(tokens))
        if room <= 0 and target.weighs():
            ahead = min(left, target.server_gamma)
            proposal = (yield from self._inner.propose(tokens, ahead)) if ahead > 0 else NOTHING
            target.go_on(alone=not proposal.tokens)
        room = min(room, left)
        return (yield from self._inner.propose(tokens, room)) if room > 0 else NOTHING

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Let the drafter learn."""
        target = self._target
        if not round_.drafted and target.plain_ns:
            round_ = round_._replace(verify_ns=int(target.plain_ns))
        elif round_.drafted:
            back = target.trip_ns * (1.0 if target.left_run else BACK_SHARE)
            round_ = round_._replace(verify_ns=int(round_.verify_ns + back))
        self._inner.observe(tokens, round_)
