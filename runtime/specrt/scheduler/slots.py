"""The slots of a pair of engines: what each holds in its KV buffers, and which one suits a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from specrt.engine.protocol import ConditionedEngine, Engine, PackedEngine, RowSnapshot, Source
from specrt.scheduler.request import CommonPrefix, Request, same_source
from specrt.speculation.kv_cache import KVCache

READ_AGAIN = 3
"""Most tokens that are read again later for each one that a text made on a slot it gives away."""


class Slot:
    """One row of the KV buffers of target and draft.

    The buffers hold a prefix of `tokens`, as long as each cache says; it stays when a request is
    over, for the next that begins alike. So does the source that the text is of, if any: for a
    request of an equal source no encoder runs.
    """

    def __init__(self, index: int, engines: Sequence[Engine]) -> None:
        self.index = index
        self.tokens: list[int] = []
        """Its request's, which may go on elsewhere later; they only grow."""
        self.caches = [KVCache(engine) for engine in engines]
        """What each model holds, the target first."""
        self.snapshots: list[list[RowSnapshot]] = [[] for _ in engines]
        """Of each model, what was taken of the text here, the latest last."""
        self.source: Source | None = None
        """What the encoder read for the row; None where it read nothing, or that is not known."""
        self.readers = 0
        """How many of the engines were, the target first."""
        self.salt = ""
        """With whose requests the text here is shared."""
        self.request: Request | None = None
        self.used = 0
        """When it was taken last, as a count of requests."""
        self.begin = 0
        """How many tokens its request had then."""
        self.forgotten = False
        """Whether what it holds of its request's text serves no other."""

    def common(self, request: Request) -> int:
        """Return how many first tokens the text here shares with a request's."""
        return self._prefix(request).length()

    def _prefix(self, request: Request) -> CommonPrefix:
        known = request.prefixes.get(self.index)
        if known is None or known.first is not self.tokens:
            same = self.salt == request.cache_salt and same_source(self.source, request.source)
            known = CommonPrefix(self.tokens, request.tokens, shareable=same)
            request.prefixes[self.index] = known
        return known

    def holds_source(self, request: Request) -> bool:
        """Return whether the row holds the source of a request, for all that read it.

        One that was read for a request of another salt counts as another.
        """
        if request.source is None:
            return True
        return self.readers >= request.readers and self._prefix(request).shareable

    def shared(self, request: Request) -> int:
        """Return how many first tokens of a request the target's buffers hold already.

        Those of its source count, which come before.
        """
        if self.forgotten or not self.holds_source(request):
            return 0
        return request.source_positions + self._kept(0, self.common(request))

    def _kept(self, model: int, most: int) -> int:
        """Return from which position on, up to `most`, a model can go on with the text here.

        It is 0 where its layers have forgotten what came before, and no snapshot holds it.
        """
        cache = self.caches[model]
        length = min(cache.length, most)
        if length >= cache.engine.traits.rewind(self.index):
            return length
        ends = [min(one.most, length) for one in self.snapshots[model] if one.least <= length]
        return max(ends, default=0)

    def keep(self) -> None:
        """Take a snapshot of what the models hold, where a longer text would change it."""
        for cache, taken in zip(self.caches, self.snapshots, strict=True):
            snapshots = cache.engine.traits.snapshots
            if snapshots is not None and cache.length and not self.forgotten:
                snapshot = snapshots.take(self.index)
                if snapshot.least <= cache.length:
                    taken.append(replace(snapshot, most=min(snapshot.most, cache.length)))

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of its snapshots."""
        return sum(one.nbytes for taken in self.snapshots for one in taken)

    def _go_back(self, model: int, length: int) -> None:
        """Let a model go on from a position of the text here, by a snapshot if it must."""
        engine = self.caches[model].engine
        if length >= engine.traits.rewind(self.index):
            return
        found = [one for one in self.snapshots[model] if one.least <= length <= one.most]
        if found and engine.traits.snapshots is not None:
            engine.traits.snapshots.restore(self.index, found[-1])

    def soon(self, request: Request) -> int:
        """Return how many first tokens of a request its own one will have read soon."""
        if not self.holds_source(request):
            return 0
        return request.source_positions + self.common(request)

    def may_give_way(self, request: Request) -> bool:
        """Tell whether its own request has made enough to be read again after another one."""
        again = self.caches[0].length - self.common(request)
        if self.request is not None and not self.holds_source(request):
            again += self.request.source_positions
        return again <= READ_AGAIN * (len(self.tokens) - self.begin)

    def take(self, request: Request, holder: Slot, used: int) -> int:
        """Take a request, with what `holder`, mostly this slot, holds of its text and its source.

        Returns how many tokens of its prompt, or of its source, are not read again.
        Raises: EngineError for a source that cannot be read.
        """
        holds = holder.holds_source(request)
        most = min(holder.common(request), len(request.tokens) - 1) if holds else 0
        lengths = [holder._kept(model, most) for model in range(len(holder.caches))]
        if holder is not self:
            self.invalidate()  # even if the copy fails
            for cache, length in zip(self.caches, lengths, strict=True):
                assert isinstance(cache.engine, PackedEngine), "other engines copy no rows"
                cache.engine.copy_row(holder.index, self.index, length)
        self.snapshots = [
            [replace(one, most=min(one.most, most)) for one in taken if one.least <= most > 0]
            for taken in holder.snapshots
        ]
        for model, length in enumerate(lengths):
            self._go_back(model, length)
        if holds:
            self.source, self.readers = holder.source, holder.readers
        else:
            self._condition(request)
        for cache, length in zip(request.caches, lengths, strict=True):
            cache.length = length
        self.tokens, self.begin = request.tokens, len(request.tokens)
        self.salt = request.cache_salt
        self.caches = request.caches
        self.request = request
        request.has_slot = True
        self.used = used
        if request.source is None:
            return lengths[0]
        return request.source_positions if holds else 0

    def _condition(self, request: Request) -> None:
        """Let the engines read the source of a request, the target first."""
        assert request.source is not None, "a row without a source holds that of every other"
        self.invalidate()
        for cache in self.caches[: request.readers]:
            cast(ConditionedEngine, cache.engine).condition(self.index, request.source)
        self.source, self.readers = request.source, request.readers

    def release(self) -> None:
        """Drop the request; what the buffers hold of its text stays."""
        most = 0 if self.forgotten else len(self.tokens)
        caches = [KVCache(c.engine, min(c.length, most)) for c in self.caches]
        if self.request is not None:
            self.request.has_slot = False
        readers = 0 if self.forgotten else self.readers
        # At once: no call is between these, in which a signal's handler could raise.
        self.caches, self.readers, self.forgotten, self.request = caches, readers, False, None

    def forget(self) -> None:
        """Reuse nothing of what the buffers hold, now or once the request is over."""
        if self.request is not None:
            self.forgotten, self.snapshots = True, [[] for _ in self.caches]
        else:
            self.invalidate()

    def invalidate(self) -> None:
        """Count the buffers as empty: they were overwritten, and a request reads its text again."""
        self.readers = 0
        self.snapshots = [[] for _ in self.caches]
        for cache in self.caches:
            cache.length = 0


WORTHWHILE = 16
"""Fewest saved tokens for which a slot is copied, or a request waits until one holds them."""


class SlotTable:
    """All slots; with `prompt_cache` what they hold of earlier requests is reused."""

    def __init__(
        self, engines: Sequence[Engine], *, prompt_cache: bool, snapshot_bytes: int = 0
    ) -> None:
        self._prompt_cache, self._snapshot_bytes = prompt_cache, snapshot_bytes
        self._copies = all(isinstance(engine, PackedEngine) for engine in engines)
        self._slots = [Slot(i, engines) for i in range(engines[0].batch)]
        self._taken = 0

    def __len__(self) -> int:
        """Return how many slots there are."""
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        """Go through all slots."""
        return iter(self._slots)

    def free(self, request: Request) -> Slot | None:
        """Return the free slot that holds most of a text, else the one that was free longest.

        A short text is not worth what another slot holds; a source is, which costs an encoder.
        """
        least = WORTHWHILE if request.source is None else 1

        def worth(slot: Slot) -> tuple[int, int]:
            shared = slot.shared(request)
            return (shared if shared >= least else 0, -slot.used)

        return max((s for s in self._slots if s.request is None), key=worth, default=None)

    def keep(self, slot: Slot) -> None:
        """Take a snapshot of what a slot holds; the slots used longest ago give theirs up."""
        if not (self._prompt_cache and self._snapshot_bytes):
            return
        slot.keep()
        while sum(s.snapshot_bytes for s in self._slots) > self._snapshot_bytes:
            oldest = min((s for s in self._slots if any(s.snapshots)), key=lambda s: s.used)
            oldest.snapshots = [taken[1:] for taken in oldest.snapshots]

    def should_wait(self, request: Request) -> bool:
        """Tell whether a slot that runs will soon hold much more of a text than any does now."""
        if not self._copies or request.fresh or not self._prompt_cache:
            return False
        have = max(slot.shared(request) for slot in self._slots)
        running = [s for s in self._slots if s.request and not (s.request.paused or s.forgotten)]
        soon = max((s.soon(request) for s in running), default=0)
        return soon >= have + WORTHWHILE

    def take(self, slot: Slot, request: Request) -> int:
        """Give a request a slot, with what this or another one holds of its text; see `Slot`."""
        holder = slot
        if request.fresh or not self._prompt_cache:
            slot.forget()
        elif self._copies:
            best = max(self._slots, key=lambda s: s.shared(request))
            if best.shared(request) >= slot.shared(request) + WORTHWHILE:
                holder = best
        self._taken += 1
        return slot.take(request, holder, self._taken)
