"""Completions that share engines: they wait for a row, run together, and make room."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns

from specrt.completion import Chunk
from specrt.costs import Costs
from specrt.drafters import Drafters, Manner
from specrt.errors import RequestError
from specrt.lockstep import Event, Lockstep, Runner
from specrt.models import Models
from specrt.request import Request
from specrt.row import Row, common, copies
from specrt.speculate import Rounds, speculate
from specrt.target import EngineTarget

WORTH = 16
"""Tokens that must be saved for a copy from another row, or for waiting until it holds them."""


class Batch:
    """The rows of a pair of engines, and the requests that run on them or wait.

    A request takes the free row that holds most of its prompt already, and a row that is done is
    taken by the next at once. Nothing runs by itself: whoever fetches a chunk runs steps, of all
    rows, until there is one for it. A request whose chunks are not fetched pauses, and makes room
    for others that wait; it goes on where it was, once it is fetched again.

    Threads: any may fetch; they run steps in turn.
    """

    def __init__(self, models: Models, *, keeps: bool = True) -> None:
        engines = [e for e in (models.target, models.draft) if e is not None]
        self._models = models
        self._keeps = keeps
        self._rows = [Row(i, engines) for i in range(models.target.batch)]
        self._copies = all(map(copies, engines))
        self._lockstep = Lockstep(models.target, models.draft, max(models.gammas) + 2)
        self._waiting: deque[Request] = deque()
        self._running: dict[Runner, Row] = {}
        self._costs: Costs | None = None
        self._drafters: list[Drafters] = []
        """Those that no request uses, with what their policies learned."""
        self._turn = threading.Lock()
        self._thread: int | None = None
        self._closed = False
        self._taken = 0
        self._idle_ns = 0
        self._paused_ns = perf_counter_ns()

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._rows)

    @property
    def load(self) -> int:
        """How many rows are at work."""
        return len(self._running)

    def now_ns(self) -> int:
        """Return the time. None passes while nobody fetches."""
        now = perf_counter_ns()
        if self._thread is None:
            self._idle_ns += now - self._paused_ns
            self._paused_ns = now
        return now - self._idle_ns

    def submit(self, request: Request) -> None:
        """Let a request wait for a row."""
        with self.turn():
            self._waiting.append(request)

    def fetch(self, request: Request) -> Chunk | None:
        """Return the next chunk of a request, running what it takes; None at its end.

        Raises: RequestError, EngineError: what ended it before its time.
        """
        while not request.chunks:
            if request.error is not None:
                raise request.error
            if request.done:
                return None
            with self.turn():
                if not request.chunks and not request.over:
                    self._step()
        return request.chunks.popleft()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep everyone else from running passes.

        Raises: RequestError from within a pass, and after closing.
        """
        self.require_apart()
        with self._turn:
            self.require_open()
            now = perf_counter_ns()
            self._idle_ns += now - self._paused_ns
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._paused_ns = perf_counter_ns()
                self._thread = None

    def require_open(self) -> None:
        """Raise RequestError after closing."""
        if self._closed:
            raise RequestError("this generator was closed; load the bundle again")

    def require_apart(self) -> None:
        """Refuse calls from within a pass, which would wait for themselves."""
        if self._thread == threading.get_ident():
            raise RequestError("a logits processor cannot use the generator that runs it")

    def forget(self) -> None:
        """Take it that the KV buffers of rows that nobody uses hold nothing."""
        with self.turn():
            for row in self._rows:
                if row.request is None:
                    row.forget()

    def close(self) -> None:
        """Close the engines, after the pass that may be running."""
        self.require_apart()
        with self._turn:
            self._closed = True
            for engine in (self._models.target, self._models.draft):
                if engine is not None:
                    engine.close()

    def _step(self) -> None:
        """Run a round of every row whose reader keeps up."""
        self._sweep()
        self._admit()
        active = [runner for runner, row in self._running.items() if not _paused(row)]
        for event in self._lockstep.step(active):
            self._heed(event)

    def _sweep(self) -> None:
        """Drop requests that nobody wants any more."""
        for runner, row in list(self._running.items()):
            if row.request is None or row.request.cancelled:
                self._end(runner)
        self._waiting = deque(r for r in self._waiting if not r.cancelled)

    def _admit(self) -> None:
        """Give rows to those that wait, the first of them first."""
        for request in list(self._waiting):
            if request.paused or self._expects(request):
                continue
            row = self._free_row(request)
            if row is None:
                return
            if self._unpriced(request) and not self._price():
                return
            self._waiting.remove(request)
            self._begin(request, row)

    def _expects(self, request: Request) -> bool:
        """Tell whether a row that reads its prompt will hold much more of it than any does now."""
        if not self._copies or request.fresh or not self._keeps:
            return False
        have = max(row.shared(request.tokens) for row in self._rows)
        later = (common(row.tokens, request.tokens) for row in self._running.values())
        return max(later, default=0) >= have + WORTH

    def _free_row(self, request: Request) -> Row | None:
        """Return the free row that holds most of a text, one that pauses if there is none."""
        free = [row for row in self._rows if row.request is None]
        if not free:
            idle = (r for r, row in self._running.items() if _paused(row) and r.asked is None)
            runner = next(idle, None)
            if runner is None:
                return None
            free = [self._pause(runner)]

        def worth(row: Row) -> tuple[int, int]:
            shared = row.shared(request.tokens)
            return (shared if shared >= WORTH else 0, -row.used)

        return max(free, key=worth)

    def _begin(self, request: Request, row: Row) -> None:
        source = row
        if self._copies:
            best = max(self._rows, key=lambda r: r.shared(request.tokens))
            if best.shared(request.tokens) >= row.shared(request.tokens) + WORTH:
                source = best
        if request.fresh or not self._keeps:
            row.forget()
            source = row
        self._taken += 1
        row.take(request, source, self._taken)
        if request.rounds is None:
            request.completion.cached_tokens = row.caches[0].length
            request.rounds = self._rounds(request)
        self._running[Runner(row.index, request.rounds)] = row

    def _rounds(self, request: Request) -> Rounds:
        """Run the rounds of a request with the policies of one that is over."""
        drafters = self._drafters.pop() if self._drafters else self._new_drafters()
        counts, params, rules = request.completion.speculation, request.params, request.rules
        drafter = drafters.make(
            counts.drafter, counts.gamma, params, request.noise, rules, request.caches
        )
        judge = EngineTarget(request.caches[0], params, request.noise, rules)
        try:
            yield from speculate(judge, drafter, request.tokens, request.limit)
        finally:
            manner = Manner.of(params, rules)
            found = drafters.fallback(counts.drafter, counts.gamma, manner)
            counts.fallback = found or counts.fallback
            self._drafters.append(drafters)

    def _new_drafters(self) -> Drafters:
        if len(self._rows) == 1:
            return Drafters(self._models, self._measured)
        return Drafters(self._models, self._measured, lambda: self.load)

    def _heed(self, event: Event) -> None:
        """Deliver what a row came to."""
        runner, round_, error = event
        row = self._running[runner]
        request = row.request
        assert request is not None, "rows at work have requests"
        if round_ is not None:
            try:
                request.deliver(round_, self.now_ns())
            except Exception as failure:  # of the tokenizer
                request.fail(failure)
        elif error is not None:
            request.fail(error)
            row.forget()
        else:
            request.finish()
        if request.over:
            self._end(runner)

    def _end(self, runner: Runner) -> None:
        runner.rounds.close()
        self._running.pop(runner).release()

    def _pause(self, runner: Runner) -> Row:
        """Take a row from a request that waits for its reader."""
        row = self._running.pop(runner)
        assert row.request is not None, "rows at work have requests"
        self._waiting.append(row.request)
        row.release()
        return row

    def _unpriced(self, request: Request) -> bool:
        """Tell whether what passes cost must be known, and is not."""
        counts = request.completion.speculation
        return self._costs is None and Drafters.weighs(counts.drafter, counts.gamma)

    def _price(self) -> bool:
        """Measure what passes cost, which overwrites all buffers; not while a pass is pending."""
        if any(runner.asked for runner in self._running):
            return False
        self._measured()
        for row in self._rows:
            row.forget()
        return True

    def _measured(self) -> Costs:
        """Return what passes cost here, measured when first asked for."""
        if self._costs is None:
            assert self._models.measure is not None, "nothing was given to measure costs with"
            self._costs = self._models.measure(self._models)
        return self._costs


def _paused(row: Row) -> bool:
    return row.request is not None and row.request.paused
