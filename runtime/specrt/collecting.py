"""Several requests run to their ends, on as many rows as there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from specrt.batch import Batch
from specrt.completion import Completion
from specrt.errors import SpecrtError
from specrt.request import Request


def collected(
    batch: Batch, many: Sequence[Sequence[Request]], rows: int
) -> Iterator[list[Completion]]:
    """Run all requests, so many at once, and yield the completions of each prompt, in order."""
    requests = [request for one in many for request in one]
    for request in requests:
        request.patient = True
    told = 0
    try:
        for _ in _run(batch, requests, rows):
            while told < len(many) and all(r.completion.finish_reason for r in many[told]):
                yield [request.completion for request in many[told]]
                told += 1
    finally:
        for request in requests:
            request.drop()


def _run(batch: Batch, requests: Iterable[Request], rows: int) -> Iterator[None]:
    """Run requests to their ends, so many at once, yielding at each; a failure is its own."""
    running: list[Request] = []
    for request in requests:
        if len(running) == rows:
            _settle(batch, running)
            yield
        batch.submit(request)
        running.append(request)
    while running:
        _settle(batch, running)
        yield


def _settle(batch: Batch, running: list[Request]) -> None:
    done = batch.settle(running)
    running.remove(done)
    if done.error is not None:
        if not isinstance(done.error, SpecrtError):
            raise done.error
        done.completion.error = str(done.error)
        done.completion.finish_reason = "error"
