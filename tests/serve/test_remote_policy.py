"""When a device lets the server decode on alone, and when it drafts; costs are made up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from specrt.remote.frames import ProposalFrame, VerdictFrame
from specrt.remote.remote_target import BACK_SHARE, RUN_TRIPS, LinkedDrafter, RemoteTarget
from specrt.speculation.round import NOTHING, Passes, Proposal, Round, run_rounds, speculate

PROMPT = [1, 2, 3]
STEP_US = 5000
TRIP_NS = 20e6
AHEAD = int(RUN_TRIPS * TRIP_NS / (1000 * STEP_US))
LIMIT = 90


class Wire:
    """A server that answers at once, and whose text counts up; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[ProposalFrame, int]] = []
        """With how many tokens the device had when it asked."""
        self._answers: deque[bytes] = deque()
        self.target: RemoteTarget | None = None

    def send(self, frame: bytes) -> None:
        asked = ProposalFrame.unpack(frame)
        assert self.target is not None
        self.asked.append((asked, len(self.target._text)))
        self.answer(asked.round, asked.base, 1 if asked.ids else asked.want)

    def answer(self, number: int, base: int, want: int) -> None:
        for at in range(base, min(base + want, LIMIT)):
            self._answers.append(VerdictFrame(number, at, STEP_US, 0, 0, (at,)).pack())

    def receive(self, goes_on: Callable[[], bool]) -> bytes:
        return self._answers.popleft()


class Scripted:
    """Proposes one wrong token where it is told to; notes what it observes."""

    def __init__(self, drafts: Callable[[int], bool]) -> None:
        self._drafts = drafts
        self.asked_at: list[int] = []
        self.seen: list[Round] = []

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        yield from ()
        self.asked_at.append(len(tokens))
        return Proposal([0], None, "scripted") if self._drafts(len(tokens)) else NOTHING

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        self.seen.append(round_)


def ran(drafts: Callable[[int], bool], trip_ns: float = TRIP_NS) -> tuple[Wire, Scripted]:
    """Make a text over a link of so much delay, by a drafter that drafts at some lengths."""
    welcome = SimpleNamespace(gammas=(0, 1, 2), step_us=STEP_US, vocab_size=LIMIT)
    server: Any = SimpleNamespace(
        welcome=welcome, trip_ns=trip_ns, streams=True, note_trip=lambda ns: None
    )
    request: Any = SimpleNamespace(tokens=list(PROMPT), limit=LIMIT, cancelled=False)
    target, wire, drafter = RemoteTarget(server, request), Wire(), Scripted(drafts)
    wire.target, target._link = target, wire  # type: ignore[assignment]
    target._asked = ProposalFrame(0, len(PROMPT), 2)
    wire.answer(0, len(PROMPT), 2)
    tokens = request.tokens
    rounds: Iterator[Round] = run_rounds(
        speculate(target, LinkedDrafter(drafter, target, LIMIT), tokens, LIMIT)
    )
    for _ in rounds:
        pass
    assert tokens == [*PROMPT, *range(len(PROMPT), LIMIT)]
    return wire, drafter


def test_a_server_that_decodes_alone_is_told_to_go_on_before_it_waits() -> None:
    wire, drafter = ran(lambda at: False)
    for asked, have in wire.asked[1:]:
        assert not asked.ids
        assert 0 < asked.base - have <= AHEAD
    assert len(wire.asked) <= LIMIT / AHEAD + 2
    assert all(round_.verify_ns == 1000 * STEP_US for round_ in drafter.seen)


def test_a_device_that_will_draft_reads_first_what_is_under_way() -> None:
    wire, _ = ran(lambda at: 30 <= at < 50)
    drafted = [(asked.base, have) for asked, have in wire.asked if asked.ids]
    assert drafted
    assert all(base == have for base, have in drafted)
    bases = [base for base, _ in drafted]
    assert bases == list(range(bases[0], 50))  # it drafts as long as it will
    assert 30 <= bases[0] <= 30 + 3 * AHEAD
    behind = [asked for asked, _ in wire.asked if asked.base >= 50]
    assert not any(asked.ids for asked in behind)
    assert behind[0].base == 50
    assert all(have < asked.base for asked, have in wire.asked if asked.base > 50)


def test_to_leave_a_run_costs_the_delay_twice_and_to_draft_on_a_share_more() -> None:
    _, drafter = ran(lambda at: 30 <= at < 50)
    first, *others = [round_ for round_ in drafter.seen if round_.drafted]
    assert first.verify_ns >= TRIP_NS  # this server answers at once: the second delay alone
    assert others
    assert all(BACK_SHARE * TRIP_NS <= round_.verify_ns < TRIP_NS for round_ in others)


def test_on_a_quick_link_every_token_may_be_drafted() -> None:
    wire, drafter = ran(lambda at: False, trip_ns=1e5)
    assert all((asked.want, asked.base) == (1, have) for asked, have in wire.asked)
    assert set(drafter.asked_at) == set(range(5, LIMIT - 1))
