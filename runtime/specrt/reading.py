"""Reading a request: its chunks as they are asked for, from whichever thread asks."""

from __future__ import annotations

from specrt.batch import Batch
from specrt.completion import Chunk
from specrt.request import Request


class Reading:
    """A request that is read; it begins to wait for a row when its first chunk is asked for."""

    def __init__(self, batch: Batch, request: Request) -> None:
        self._batch = batch
        self._request = request

    def fetch(self) -> Chunk | None:
        """Return the next chunk, running passes where there is none; None at the end.

        Raises: RequestError, EngineError: what ended it before its time, once.
        """
        try:
            return self._batch.fetch(self._request)
        except BaseException:
            self.drop()
            raise

    def cancel(self) -> None:
        """End it before its time; see `Stream.cancel`."""
        self._request.cancel()

    def drop(self) -> None:
        """Give up what is not read yet."""
        self._request.drop()
