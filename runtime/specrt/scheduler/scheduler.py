"""Completions that share engines: they wait for a slot, run together, and make room."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from time import perf_counter_ns
from typing import TypeVar

from specrt.completion import Chunk
from specrt.engine.protocol import PackedEngine
from specrt.errors import RequestError
from specrt.scheduler.executor import INTERRUPTS, ActiveSlot, BatchExecutor, StepResult
from specrt.scheduler.request import Request
from specrt.scheduler.slots import Slot, SlotTable
from specrt.speculation.costs import Costs
from specrt.speculation.pool import DecodingMode, DrafterPool, Models
from specrt.speculation.round import Rounds, speculate
from specrt.speculation.target import EngineTarget

T = TypeVar("T")


class EngineLock:
    """One thread runs passes at a time, and none from within a pass.

    Who had a turn and wants the next one is behind all who wait: a lock alone goes to who asks
    while nobody is awake yet, which is the thread that has just let it go, every time.

    A signal's handler may run between any two steps here, and want a turn itself or raise: so the
    locks can be taken again by the thread that has them, and know whose they are.
    """

    def __init__(self) -> None:
        self._line = threading.RLock()
        """Held by the one who has the next turn."""
        self._lock = threading.RLock()
        """Held by the one who has this turn."""
        self._thread: int | None = None
        self.closed = False
        """Whether nobody has a turn any more, nor will have one."""
        self._clock: tuple[int | None, int] = (perf_counter_ns(), 0)
        """When the last turn ended, None in a turn; and how long nobody had one until then."""

    def run(self, work: Callable[[], T], *, refuses: bool = True) -> T:
        """Do what nobody else may do meanwhile; `refuses` tells whether closing ends that.

        Raises: RequestError from within a pass, and after closing.
        """
        self.require_apart()
        try:
            with self._line:
                self._lock.acquire()
            try:
                self._thread = threading.get_ident()
                if refuses and self.closed:
                    raise _closed()
                left, idle = self._clock
                if left is not None:
                    self._clock = None, idle + perf_counter_ns() - left
                return work()
            finally:
                self._thread = None
                self._clock = perf_counter_ns(), self._clock[1]
        finally:
            try:  # noqa: SIM105 - a call here could be interrupted, and leave it locked
                self._lock.release()
            except RuntimeError:  # not his: he was interrupted while he waited
                pass

    def now_ns(self) -> int:
        """Return the time, of which none passes while nobody has a turn."""
        left, idle = self._clock
        return (perf_counter_ns() if left is None else left) - idle

    def require_apart(self) -> None:
        """Refuse calls from within a pass, which would wait for themselves."""
        if self._thread == threading.get_ident():
            raise RequestError("a logits processor cannot use the generator that runs it")

    def require_open(self) -> None:
        """Refuse calls after closing, and from within a pass."""
        self.require_apart()
        if self.closed:
            raise _closed()

    def close(self, last: Callable[[], object]) -> None:
        """Let nobody have a turn any more, after the one that is running; do something last."""

        def end() -> None:
            if not self.closed:
                self.closed = True
                last()

        self.run(end, refuses=False)


def _closed() -> RequestError:
    return RequestError("this generator was closed; open the bundle again")


class CostCache:
    """What passes cost here, measured when first asked for.

    Knows no drafter: they know it, and a circle would keep engines that nobody refers to open.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._costs: Costs | None = None

    @property
    def known(self) -> bool:
        """Whether they were measured."""
        return self._costs is not None

    def costs(self) -> Costs:
        """Return the costs of passes; measuring them overwrites all buffers."""
        if self._costs is None:
            assert self._models.measure is not None, "nothing was given to measure costs with"
            self._costs = self._models.measure(self._models)
        return self._costs


class Supplies:
    """Lends drafters to requests: what the policies of one learned serves the next.

    `rows` is how many may run at once, `load` tells how many do.
    """

    def __init__(self, models: Models, rows: int, load: Callable[[], int]) -> None:
        self._models = models
        self._rows = rows
        self._load = load
        self._prices = CostCache(models)
        self._drafters: list[DrafterPool] = []
        """Those that no request uses, with what their policies learned."""

    def rounds(self, request: Request) -> Rounds:
        """Return the rounds of a request, drafted with what the policies of others learned."""
        drafters = self._drafters.pop() if self._drafters else self._new_drafters()
        request.drafters = drafters
        counts, params, rules = request.completion.speculation, request.params, request.rules
        drafter = drafters.make(
            counts.drafter, counts.gamma, params, request.noise, rules, request.caches
        )
        judge = EngineTarget(request.caches[0], params, request.noise, rules)
        return speculate(judge, drafter, request.tokens, request.limit)

    def take_back(self, request: Request) -> None:
        """Let go of what a request that is over has used."""
        if request.rounds is not None:
            request.rounds.close()
        drafters, request.drafters = request.drafters, None
        if drafters is not None:
            counts = request.completion.speculation
            manner = DecodingMode.of(request.params, request.rules)
            found = drafters.fallback(counts.drafter, counts.gamma, manner)
            counts.fallback = found or counts.fallback
            if len(self._drafters) < self._rows:
                self._drafters.append(drafters)
        request.rounds = request.rules = None

    def unpriced(self, request: Request) -> bool:
        """Tell whether what passes cost must be known for it, and is not."""
        counts = request.completion.speculation
        return not self._prices.known and DrafterPool.weighs(counts.drafter, counts.gamma)

    def measure(self) -> None:
        """Measure what passes cost, which overwrites all buffers."""
        self._prices.costs()

    def clear(self) -> None:
        """Let go of all drafters, which refer to the engines."""
        self._drafters.clear()

    def _new_drafters(self) -> DrafterPool:
        several = isinstance(self._models.target, PackedEngine)
        return DrafterPool(self._models, self._prices.costs, self._load if several else None)


class Scheduler:
    """The rows of a pair of engines, and the requests that run on them or wait.

    A request takes the free row that holds most of its prompt already, and a row that is done is
    taken by the next at once. Nothing runs by itself: whoever fetches a chunk runs steps, of all
    rows, until there is one for it. A request whose chunks are not fetched pauses, and makes room
    for others that wait; it goes on where it was, once it is fetched again.

    Threads: any may fetch; they run steps in turn.
    """

    def __init__(self, models: Models, *, keeps: bool = True) -> None:
        self._engines = [e for e in (models.target, models.draft) if e is not None]
        self._rows = SlotTable(self._engines, keeps=keeps)
        self._lockstep = BatchExecutor(models.target, models.draft, max(models.gammas) + 2)
        self._waiting: deque[Request] = deque()
        self._running: dict[ActiveSlot, Slot] = {}
        load = self._load = [0]
        """How many rows take part in a step."""
        self._supplies = Supplies(models, len(self._rows), lambda: load[0])
        self.turn = EngineLock()
        self._closing = threading.RLock()

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._rows)

    def submit(self, request: Request) -> None:
        """Let a request wait for a row."""
        self.turn.run(lambda: self._submit(request))

    def _submit(self, request: Request) -> None:
        if not request.submitted:
            request.submitted = True
            self._waiting.append(request)

    def fetch(self, request: Request) -> Chunk | None:
        """Return the next chunk of a request, running what it takes; None where none will come.

        Raises: RequestError, EngineError: what ended it before its time.
        """
        chunks = request.chunks

        def step() -> None:
            if not chunks and not request.over:
                self._submit(request)
                self._step()

        while not request.cancelled:
            over = request.over  # asked first: another thread may deliver and end it meanwhile
            if chunks:
                try:
                    return chunks.popleft()
                except IndexError:  # another reader was faster
                    continue
            if request.error is not None:
                raise request.error
            if over:
                return None
            self.turn.run(step)
        return None

    def advance(self, requests: Collection[Request]) -> None:
        """Run a step for requests, if one of them needs it.

        Raises: RequestError after closing.
        """

        def step() -> None:
            for request in requests:
                self._submit(request)
            if any(request.runnable for request in requests):
                self._step()

        self.turn.run(step)

    def settle(self, requests: Collection[Request]) -> Request:
        """Run until one of several requests is over, and return it."""
        while True:
            for request in requests:
                if request.over:
                    return request
            self.turn.run(self._step)

    def forget(self) -> None:
        """Let nobody begin with what KV buffers hold now, or will of those that run."""
        self.turn.run(self._forget)

    def _forget(self) -> None:
        self._sweep()
        for row in self._rows:
            row.forget()

    def close(self, join: Callable[[], object] = lambda: None) -> None:
        """Let go of all requests and close the engines, after the pass that may be running.

        `join` waits for who runs passes by himself: he has no turn any more.
        """
        self.turn.require_apart()
        with self._closing:
            try:
                self.turn.close(self._clear)
                join()
            finally:
                if self.turn.closed:  # else a pass may run: it was interrupted while it waited
                    for engine in self._engines:
                        engine.close()

    def _clear(self) -> None:
        """Let go of what refers to the engines' memory: the rounds that have not ended."""
        for runner in list(self._running):
            self._end(runner)
        while self._waiting:
            self._supplies.take_back(self._waiting.popleft())
        self._supplies.clear()

    def _step(self) -> None:
        """Run a round of every row whose reader keeps up."""
        self._sweep()
        if self._waiting:
            self._admit()
        active = [r for r, row in self._running.items() if not _request(row).paused]
        self._load[0] = len(active)
        try:
            for event in self._lockstep.step(active):
                self._deliver(event)
        except BaseException:  # Ctrl-C: a pass can be run again, a row stopped elsewhere cannot
            for runner in active:
                if runner.undelivered and runner in self._running:
                    self._deliver(
                        StepResult(runner, error=RequestError("the completion was interrupted"))
                    )
            raise

    def _sweep(self) -> None:
        """End what nobody wants any more."""
        for runner in [r for r, row in self._running.items() if _request(row).cancelled]:
            self._end(runner)

    def _admit(self) -> None:
        """Give rows to those that wait, the first of them first."""
        for request in list(self._waiting):
            if request.cancelled:
                self._supplies.take_back(request)
            elif request.paused or self._rows.expected(request):
                continue
            else:
                try:
                    if not self._seat(request):
                        return
                except Exception as error:  # of engines that are measured or copied
                    request.fail(error)
                    self._supplies.take_back(request)
            self._waiting.remove(request)

    def _seat(self, request: Request) -> bool:
        """Give a request a row; return whether there was one."""
        row = self._free_row(request)
        if row is None or (self._supplies.unpriced(request) and not self._price()):
            return False
        rounds = self._supplies.rounds(request) if request.rounds is None else request.rounds
        try:
            self._rows.take(row, request)
            if request.rounds is None:
                request.completion.cached_tokens = row.caches[0].length
                request.rounds = rounds
            self._running[ActiveSlot(row.index, rounds)] = row
        except BaseException:
            row.lose()
            row.release()
            raise
        return True

    def _free_row(self, request: Request) -> Slot | None:
        """Return a free row, that of a request that pauses if there is none."""
        row = self._rows.free(request)
        if row is not None:
            return row
        running = self._running.items()
        idle = (r for r, row in running if _request(row).paused and r.asked is None)
        runner = next(idle, None)
        return None if runner is None else self._pause(runner)

    def _deliver(self, event: StepResult) -> None:
        """Deliver what a row came to."""
        runner, round_, error = event
        row = self._running[runner]
        request = _request(row)
        try:
            if round_ is not None:
                request.deliver(round_, self.turn.now_ns())
            elif error is None:
                request.finish()
        except INTERRUPTS:
            raise
        except BaseException as failure:  # of the tokenizer
            request.fail(failure)
        if error is not None:
            request.fail(error)
            row.lose()
        if request.over:
            self._end(runner)
        runner.undelivered = False

    def _end(self, runner: ActiveSlot) -> None:
        """Let a row go whose request is over."""
        row = self._running[runner]
        try:
            self._supplies.take_back(_request(row))
        finally:
            row.release()
            del self._running[runner]

    def _pause(self, runner: ActiveSlot) -> Slot:
        """Take a row from a request that waits for its reader."""
        row = self._running.pop(runner)
        self._waiting.append(_request(row))
        row.release()
        return row

    def _price(self) -> bool:
        """Measure what passes cost, which overwrites all buffers; not while a pass is pending."""
        if any(runner.asked for runner in self._running):
            return False
        for row in self._rows:
            row.lose()
        self._supplies.measure()
        return True


def _request(row: Slot) -> Request:
    assert row.request is not None, "rows at work have requests"
    return row.request
