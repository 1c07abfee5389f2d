"""The scheduler: requests wait for a slot, run together, and pause while nothing reads them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from time import perf_counter_ns
from typing import TypeVar

import numpy as np

from specrt.completion import Chunk
from specrt.engine.protocol import packs
from specrt.errors import RequestError
from specrt.scheduler.executor import INTERRUPTS, ActiveSlot, BatchExecutor, StepResult
from specrt.scheduler.request import Request
from specrt.scheduler.slots import Slot, SlotTable
from specrt.speculation.compiled_gamma import StepPlan
from specrt.speculation.costs import Costs
from specrt.speculation.pool import DecodingMode, DrafterPool, Models
from specrt.speculation.round import Drafter, Round, Rounds, speculate
from specrt.speculation.shared_step import DraftingRow
from specrt.speculation.target import EngineTarget
from specrt.speculation.text_memory import TextMemory

T = TypeVar("T")

BeginRounds = Callable[[Request, Callable[[], Drafter]], Rounds]
"""Returns the rounds of a request; it is called with what makes its drafter."""


def engine_rounds(request: Request, make_drafter: Callable[[], Drafter]) -> Rounds:
    """Return rounds whose target is an engine of this process."""
    target = EngineTarget(request.caches[0], request.params, request.noise, request.processors)
    return speculate(target, make_drafter(), request.tokens, request.limit)


class EngineLock:
    """Lets one thread run passes at a time, in the order they came, and none from within a pass.

    A plain lock goes to the thread that has just released it, every time, because the others are
    not awake yet. Here a thread that wants the engines again comes after all that wait.

    A signal's handler may run between any two steps here, and want the engines or raise: so both
    locks can be taken again by the thread that has them, and know their owner.
    """

    def __init__(self) -> None:
        self._next = threading.RLock()
        """Held by the thread that is next."""
        self._lock = threading.RLock()
        """Held by the thread that has the engines."""
        self._thread: int | None = None
        self.closed = False
        """Whether no thread has the engines any more, nor will have them."""
        self._clock: tuple[int | None, int] = (perf_counter_ns(), 0)
        """When the engines were released last, None while in use; and how long they were idle."""

    def run(self, work: Callable[[], T], *, when_closed: bool = False) -> T:
        """Call `work` while this thread has the engines.

        Raises: RequestError from within a pass, and after closing unless `when_closed`.
        """
        self.require_outside()
        try:
            with self._next:
                self._lock.acquire()
            try:
                self._thread = threading.get_ident()
                if self.closed and not when_closed:
                    raise _closed()
                released, idle = self._clock
                if released is not None:
                    self._clock = None, idle + perf_counter_ns() - released
                return work()
            finally:
                self._thread = None
                self._clock = perf_counter_ns(), self._clock[1]
        finally:
            try:  # noqa: SIM105 - a call here could be interrupted, and leave it locked
                self._lock.release()
            except RuntimeError:  # not this thread's: it was interrupted while it waited
                pass

    def now_ns(self) -> int:
        """Return the time, which stands still while no thread has the engines."""
        while True:
            clock = released, idle = self._clock
            now = perf_counter_ns()
            if self._clock is clock:  # else another thread has given the engines back meanwhile
                return (now if released is None else released) - idle

    def require_outside(self) -> None:
        """Refuse calls from within a pass, which would wait for themselves."""
        if self._thread == threading.get_ident():
            raise RequestError("a logits processor cannot use the generator that runs it")

    def require_open(self) -> None:
        """Refuse calls after closing, and from within a pass."""
        self.require_outside()
        if self.closed:
            raise _closed()

    def close(self, last: Callable[[], object]) -> None:
        """Let no thread have the engines again, after the one that has them; then call `last`."""

        def end() -> None:
            if not self.closed:
                self.closed = True
                last()

        self.run(end, when_closed=True)


def _closed() -> RequestError:
    return RequestError("this generator was closed; open the bundle again")


class Scheduler:
    """The slots of a pair of engines, and the requests that run on them or wait.

    A request takes the free slot that holds most of its prompt already, and a slot whose request is
    over is taken by the next at once. There is no thread here: a call that fetches a chunk runs
    steps, of all slots, until there is one for its request. A request whose chunks are not fetched
    pauses, and makes room for others that wait, once it has made enough for being read again; it
    goes on where it was, once it is fetched again.

    `rounds` begins the rounds of each request.

    Threads: any may fetch; they run steps in turn.
    """

    def __init__(
        self, models: Models, *, prompt_cache: bool = True, rounds: BeginRounds = engine_rounds,
        text_memory: TextMemory | None = None,
    ) -> None:  # fmt: skip
        self._begin = rounds
        self._engines = [e for e in (models.target, models.draft) if e is not None]
        self._slots = SlotTable(
            self._engines, prompt_cache=prompt_cache, snapshot_bytes=models.snapshot_bytes
        )
        self._executor = BatchExecutor(models.target, models.draft, max(models.gammas) + 2)
        self._waiting: deque[Request] = deque()
        self._running: dict[ActiveSlot, Slot] = {}
        self._shared: StepPlan | None = None
        """What rows share that wait for each other's passes, and for nothing else."""
        self._planned: Sequence[ActiveSlot] = ()
        """What the plan is for."""
        self._rest = self._plain_steps = self._plain_ns = 0
        """Steps that it is still good for, and plain ones since it was made."""
        self._warm = False
        """Whether the last step was a plain one of the same rows: after others it takes longer."""
        if rounds is engine_rounds and len(self._slots) > 1:
            most, padded = max(models.gammas), not packs(models.target)
            costs = models.costs or Costs.assume(most)
            costs = costs.of_one_pass() if models.one_pass else costs
            self._shared = models.auto.step(costs, most, padded=padded)
        self.drafters = DrafterPool(models, self._shared, len(self._slots), text_memory)
        self._text_memory = text_memory
        self.lock = EngineLock()
        self._closing = threading.RLock()
        self._broken_off = False
        """Whether a step began and did not end: a signal's handler raised within it."""

    def __len__(self) -> int:
        """Return how many slots there are."""
        return len(self._slots)

    def submit(self, request: Request) -> None:
        """Let a request wait for a slot."""
        self.lock.run(lambda: self._submit(request))

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
            over = request.over  # read first: another thread may deliver and end it meanwhile
            if chunks:
                try:
                    return chunks.popleft()
                except IndexError:  # another reader was faster
                    continue
            if request.error is not None:
                raise request.error
            if over:
                return None
            self.lock.run(step)
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

        self.lock.run(step)

    def finish_one(self, requests: Collection[Request]) -> Request:
        """Run until one of several requests is over, and return it."""
        while True:
            for request in requests:
                if request.over:
                    return request
            self.lock.run(self._step)

    def forget(self) -> None:
        """Reuse nothing that KV buffers hold now, or will hold of requests that run."""
        self.lock.run(self._forget)

    def _forget(self) -> None:
        self._mend()
        self._sweep()
        for slot in self._slots:
            slot.forget()
        if self._text_memory is not None:
            self._text_memory.forget()

    def close(self, join: Callable[[], object] = lambda: None) -> None:
        """Drop all requests and close the engines, after the pass that may be running.

        `join` waits for threads that run passes; they cannot have the engines any more.
        """
        self.lock.require_outside()
        with self._closing:
            try:
                self.lock.close(self._clear)
                join()
            finally:
                if self.lock.closed:  # else a pass may run: this was interrupted while it waited
                    for engine in self._engines:
                        engine.close()

    def _clear(self) -> None:
        """Drop what refers to the engines' memory: the rounds that have not ended."""
        self._mend()
        for active in list(self._running):
            self._end(active)
        while self._waiting:
            self._release(self._waiting.popleft())
        self.drafters.clear()

    def _step(self) -> None:
        """Run a round of every slot whose request is not paused.

        A chance that is too small for a number is 0 here, however the application has set NumPy.
        """
        if self._broken_off:
            self._mend()
        self._broken_off = True
        with np.errstate(all="ignore"):
            self._run_step()
        self._broken_off = False

    def _mend(self) -> None:
        """Let each request wait or run, not both, and each slot run one or be free."""
        self._running = {a: slot for a, slot in self._running.items() if slot.request is not None}
        running = [_request(slot) for slot in self._running.values()]
        self._waiting = deque(r for r in self._waiting if r not in running)

    def _run_step(self) -> None:
        self._sweep()
        needed = self._admit()
        active = [a for a, slot in self._running.items() if needed or not _request(slot).paused]
        measured = self._shared is not None and self._plan(self._shared, active)
        rounds, began = [], perf_counter_ns()
        try:
            for result in self._executor.step(active):
                self._deliver(result)
                rounds.append(result.round_)
        except BaseException:  # Ctrl-C: most passes can be run again, a slot stopped elsewhere not
            self._mend()
            for one in active:
                if (one.undelivered or one.lost) and one in self._running:
                    error = RequestError("the completion was interrupted")
                    self._deliver(StepResult(one, error=error))
            raise
        if measured and len(active) > 1:
            self._settle(rounds, perf_counter_ns() - began, len(active))

    def _plan(self, shared: StepPlan, active: Sequence[ActiveSlot]) -> bool:
        """Plan what slots draft, or go on with the plan; tell whether all go by it."""
        if self._rest and active == self._planned:
            self._rest -= 1
            return True
        if self._plain_steps:
            made = self._plain_steps * shared.rows
            shared.settle(made, (), 0, self._plain_ns, steps=self._plain_steps)
            self._plain_steps = self._plain_ns = 0
        requests = [_request(self._running[one]) for one in active]
        decoding = [r for r in requests if r.completion.timings.arrivals]
        drafting = [
            DraftingRow(r.policies.drafting, r.caches[-1].lacks(length), r.limit - length)
            for r in decoding
            if r.policies is not None and r.policies.drafting is not None
            for length in (len(r.tokens),)
        ]
        shared.begin(max(1, len(active)), drafting)
        adapt = all(r.policies is not None and r.policies.adapts for r in decoding)
        measured = adapt and len(decoding) == len(active)
        self._warm = self._warm and measured and active == self._planned
        self._planned, self._rest = active, shared.rest if measured else 0
        return measured

    def _settle(self, rounds: Sequence[Round | None], ns: int, slots: int) -> None:
        """Learn what a step of several slots took, unless one of them ended otherwise."""
        shared, executor = self._shared, self._executor
        done = [round_ for round_ in rounds if round_ is not None]
        if shared is None or len(done) < len(rounds):
            return
        drafted, draft_ns = [r.drafted for r in done], executor.draft_ns
        warm, self._warm = self._warm, not executor.draft_passes and not any(drafted)
        if executor.read_prompt or len(done) < slots:  # some slots waited for others to read
            draft_ns = ns
        elif self._warm:
            if warm:
                self._plain_steps, self._plain_ns = self._plain_steps + 1, self._plain_ns + ns
            return
        passes = 0 if any(r.caught_up for r in done) else executor.draft_passes
        shared.settle(
            sum(len(r.tokens) for r in done), drafted, draft_ns, ns - draft_ns, passes,
            executor.drafting,
        )  # fmt: skip

    def _sweep(self) -> None:
        """End what was cancelled."""
        for active in [a for a, slot in self._running.items() if _request(slot).cancelled]:
            self._end(active)

    def _admit(self) -> bool:
        """Give slots to requests that wait, the first of them first; tell whether one lacks one.

        While others run, one source is read in a step: they never wait for more.
        """
        busy = any(not _request(slot).paused for slot in self._running.values())
        for request in list(self._waiting):
            if request.cancelled:
                self._release(request)
            elif request.paused:
                continue
            else:
                # Looked up once: what pauses may be read by another thread meanwhile.
                room = self._slots.free(request) or self._idle(request)
                if room is None:
                    return True
                if self._slots.should_wait(request):
                    continue
                source_read = request.source is not None
                try:
                    slot = room if isinstance(room, Slot) else self._pause(room)
                    source_read = self._start(request, slot) < request.source_positions
                except Exception as error:  # of engines whose rows are copied
                    request.fail(error)
                    self._release(request)
                if busy and source_read:
                    self._waiting.remove(request)
                    return False
            self._waiting.remove(request)
        return False

    def _start(self, request: Request, slot: Slot) -> int:
        """Give a request a slot that is free; return how many tokens of its prompt that holds."""
        rounds = self._rounds(request) if request.rounds is None else request.rounds
        try:
            held = self._slots.take(slot, request)
            if request.rounds is None:
                request.completion.cached_tokens = held
                request.completion.timings.taken_ns = self.lock.now_ns()
                request.rounds = rounds
            self._running[ActiveSlot(slot.index, rounds)] = slot
            return held
        except BaseException:
            slot.invalidate()
            slot.release()
            raise

    def _rounds(self, request: Request) -> Rounds:
        """Return the rounds of a request, drafted with what the policies of others learned."""
        request.policies = policies = self.drafters.borrow()
        counts = request.completion.speculation

        def make_drafter() -> Drafter:
            if request.drafter is not None:
                return request.drafter
            return self.drafters.make(
                policies,
                counts.drafter,
                counts.gamma,
                request.params,
                request.noise,
                request.processors,
                request.caches,
                request.memory_key,
                request.source,
            )

        return self._begin(request, make_drafter)

    def _release(self, request: Request) -> None:
        """Drop what a request that is over has used."""
        if request.rounds is not None:
            request.rounds.close()
        policies, request.policies = request.policies, None
        if policies is not None:
            counts = request.completion.speculation
            mode = DecodingMode.of(request.params, request.processors)
            drafted = counts.drafted > 0
            reason = policies.fallback(counts.drafter, counts.gamma, mode, drafted=drafted)
            counts.fallback = reason or counts.fallback
            self.drafters.give_back(policies)
        memory, key = self._text_memory, request.memory_key
        if memory is not None and key is not None and request.done:
            memory.add(key, request.tokens)
        request.rounds = request.processors = None

    def _idle(self, request: Request) -> ActiveSlot | None:
        """Return one whose request pauses, and has made enough to be read again after another."""
        for active, slot in self._running.items():
            if _request(slot).paused and active.pending is None and slot.may_give_way(request):
                return active
        return None

    def _deliver(self, result: StepResult) -> None:
        """Deliver the result of a slot's step."""
        active, round_, error = result
        slot = self._running[active]
        request = _request(slot)
        try:
            if round_ is not None:
                begins = not request.completion.timings.arrivals
                request.deliver(round_, self.lock.now_ns())
                if begins:  # the prompt was read
                    self._slots.keep(slot)
            elif error is None:
                request.finish()
        except INTERRUPTS:
            raise
        except BaseException as failure:  # of the tokenizer
            request.fail(failure)
        if error is not None:
            request.fail(error)
            slot.invalidate()
        if request.over:
            if error is None:
                self._slots.keep(slot)
            self._end(active)
        active.undelivered = False

    def _end(self, active: ActiveSlot) -> None:
        """Free the slot of a request that is over."""
        slot, self._planned = self._running[active], ()
        try:
            self._release(_request(slot))
        finally:
            slot.release()
            del self._running[active]

    def _pause(self, active: ActiveSlot) -> Slot:
        """Take the slot of a request whose chunks are not fetched."""
        slot = self._running[active]
        self._waiting.append(_request(slot))
        slot.release()
        del self._running[active]
        return slot


def _request(slot: Slot) -> Request:
    assert slot.request is not None, "active slots have requests"
    return slot.request


class RequestSource:
    """The chunks of a request, which waits for a slot from the first fetch on."""

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self._scheduler = scheduler
        self._request = request

    def fetch(self) -> Chunk | None:
        """Return the next chunk, running passes until there is one; None at the end.

        Raises: RequestError, EngineError: what ended it before its time, once.
        """
        try:
            return self._scheduler.fetch(self._request)
        except BaseException:
            self.drop()
            raise

    def cancel(self) -> None:
        """End it before its time; see `Stream.cancel`."""
        self._request.cancel()

    def drop(self) -> None:
        """Discard what is not read yet."""
        self._request.drop()
