"""ONNX Runtime with the CPU kernels: the tokens of all rows in one pass, KV buffers in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import ArrayLike, NDArray

from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.kernels import KERNELS, aligned_zeros
from specrt.engine.ort.onnx_file import files_of, mapped_weights
from specrt.engine.protocol import (
    CLOSED,
    Candidates,
    Confidence,
    Engine,
    EngineTraits,
    Feed,
    Logits,
    RowSnapshot,
    Tokens,
    check_bounds,
    pass_size,
)
from specrt.engine.state_bases import NOWHERE
from specrt.errors import EngineError, first_line, shortage
from specrt.geometry import BASE, GROUP, STATE, Geometry, is_ring
from specrt.held_file import HeldFile

TILE = GROUP
"""Positions of a group of keys, and lanes of a vector of values."""


def packed_shape(name: str, heads: int, width: int, batch: int, positions: int) -> tuple[int, ...]:
    """Return the shape of a buffer of the CPU kernels, given its name in the graph contract.

    Shapes: keys [batch, heads, P / 16, width, 16], and others [batch, heads, P, width in whole
        vectors of 16], P being `positions` in whole groups of 16; states [batch, heads, width of
        keys, width of values in whole vectors].
    """
    groups = -(-positions // TILE)
    if name.startswith(("key.", "cross_key.")):
        return batch, heads, groups, width, TILE
    if name.startswith(f"{STATE}."):
        return batch, heads, positions, -(-width // TILE) * TILE
    return batch, heads, groups * TILE, -(-width // TILE) * TILE


def least_position(
    written: Sequence[int], back: int, bases: NDArray[np.int64] | None, row: int
) -> int:
    """Return the least position that a row can go on from; see `EngineTraits.rewind`."""
    least = max(0, written[row] - back) if back else 0
    if bases is None:
        return least
    return max(least, int(bases[row])) if bases[row] >= 0 else NOWHERE


def going_back(geometry: Geometry, max_length: int, ring_width: int) -> int:
    """Return how many positions before its end a row may go on from; 0 where it is all of them."""
    rings = [one for one in geometry.buffers.values() if one.seen and not one.ring]
    lengths = [(one, one.positions(max_length, ring_width)) for one in rings]
    return min((n - one.seen + 1 for one, n in lengths if n < max_length), default=0)


class StateSnapshots:
    """Snapshots of the states of recurrent layers, and of the rings next to them.

    Keys and values of all positions stay in the row, where a shorter text leaves them.
    """

    def __init__(
        self, caches: Mapping[str, NDArray[Any]], geometry: Geometry, written: list[int],
        least: Callable[[int], int], back: int,
    ) -> None:  # fmt: skip
        self._caches, self._geometry, self._written = caches, geometry, written
        self._least, self._back = least, back

    def take(self, row: int) -> RowSnapshot:
        """See `Snapshots.take`."""
        least, most = self._least(row), self._written[row]
        parts = [
            (name, at, self._caches[name][row : row + 1][at].copy())
            for name, at in self._places(least, most)
        ]
        return RowSnapshot(least, most, parts)

    def restore(self, row: int, snapshot: RowSnapshot) -> None:
        """See `Snapshots.restore`."""
        for name, at, array in snapshot.parts:
            self._caches[name][row : row + 1][at] = array
        # The rings hold nothing from before the snapshot's least position, however short its text.
        self._written[row] = max(snapshot.most, snapshot.least + self._back)

    def _places(self, least: int, most: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield where in a row of each cache lies what positions from `least` to `most` need."""
        for name, cache in self._caches.items():
            if name.startswith((BASE, f"{STATE}.")):
                yield name, (slice(None),)
            elif is_ring(name):
                length, seen = cache.shape[2], self._geometry.buffers[name].seen
                ring = np.arange(max(0, least - seen, most - length), most) % length
                yield name, (slice(None), slice(None), ring)


class RowScores(NamedTuple):
    """The scores of some rows of a pass, as views of memory that the next pass overwrites."""

    argmax: Tokens
    logits: Logits
    confidence: Confidence | None
    state: NDArray[np.float32] | None = None
    """Of a head: what a recursive feed goes on from, [B, R, H]."""

    @property
    def candidates(self) -> Candidates | None:
        """None: these graphs compute none."""
        return None


class OrtEngine:
    """A saved graph of the CPU kernels, over the KV buffers of one or more rows.

    A pass costs what its tokens cost, of whichever rows. A row has the same bits next to any others
    and at every width.

    Shapes: the KV buffers are as `packed_shape` says; `features`, what a target leaves at each
        position for a head, is [batch, max_length, H], and None without a head.
    Threads: forward passes of one engine must not overlap.
    """

    def __init__(self, session: Any, weights: tuple[Any, ...], spec: EngineSpec) -> None:
        self.geometry = spec.geometry
        self.batch = batch = spec.batch
        self.max_length = max_length = spec.max_length
        self.max_width = max_width = spec.max_width
        self._session, self._weights = session, weights
        self.max_rows = max_width
        self._ring_width = spec.ring_width
        self._back = going_back(self.geometry, max_length, spec.ring_width)
        self._caches = self._allocate()
        self.read_only: dict[str, NDArray[Any]] = {}
        """What passes read besides: inputs that stay where they are, by name."""
        tokens = batch * max_width
        self._tokens, self._slots, self._positions, self._rows = np.zeros((4, tokens), np.int64)
        self._numbers = np.arange(max(tokens, max_length))
        self.features, self._passed, self._hidden = head_memory(session, batch, max_length, tokens)
        # A head may see one key more than its target, further back.
        self._back = max(0, self._back - (self.features is not None))
        scored = widths(session.get_outputs())["logits"]
        self._written = [0] * batch
        """Of each row, the end of what was written since its text began."""
        # Not by a method: an engine that referred to itself would keep its memory for a while.
        bases = next((one for name, one in self._caches.items() if name.startswith(BASE)), None)
        rewind = partial(least_position, self._written, self._back, bases)
        self.traits = EngineTraits(
            scored=scored, features=self.features, buffers=self._caches, rewind=rewind,
            snapshots=self._snapshots(bases, rewind),
        )  # fmt: skip
        self._scores: dict[str, NDArray[Any]] = {}
        self._values: dict[tuple[str, int], Any] = {}
        """What passes of other sizes were bound to, by name and size: the library's values, which
        are bound again in a ninth of the time."""
        self._binding: Any = None
        self._bound = 0, 0
        """Tokens and scored rows of the pass that is bound."""

    def _snapshots(
        self, bases: NDArray[np.int64] | None, least: Callable[[int], int]
    ) -> StateSnapshots | None:
        """Return what takes snapshots of states; windows forget keys that one would need."""
        if bases is None or self.geometry.windows - {0}:
            return None
        return StateSnapshots(self._caches, self.geometry, self._written, least, self._back)

    def _allocate(self) -> dict[str, NDArray[Any]]:
        """Allocate the KV buffers; the pages of a zeroed array cost memory only once written."""
        shapes = {}
        for name, one in self.geometry.buffers.items():
            positions = one.positions(self.max_length, self._ring_width)
            shapes[name] = packed_shape(name, one.heads, one.width, self.batch, positions)
        bases = [name.replace(STATE, BASE) for name in shapes if name.startswith(f"{STATE}.")]
        self.check_shapes(shapes | dict.fromkeys(bases, (self.batch,)))
        caches: dict[str, NDArray[Any]] = {n: aligned_zeros(shape) for n, shape in shapes.items()}
        return caches | {name: np.zeros(self.batch, np.int64) for name in bases}

    def check_shapes(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a graph whose inputs have other shapes than the manifest says.

        Raises: EngineError.
        """
        there = {i.name: tuple(i.shape) for i in self._session.get_inputs()}
        for name, shape in expected.items():
            if there.get(name) != shape:
                raise EngineError(
                    f"the engine's {name} has shape {there.get(name)}, and the manifest says "
                    f"{shape}; they do not belong together: build the bundle again"
                )

    def lend(self, buffers: Mapping[str, NDArray[np.float32]]) -> None:
        """Let passes read buffers of a target in place, by the names of their inputs.

        Raises: EngineError for other shapes than the graph's.
        """
        self.check_shapes({name: buffer.shape for name, buffer in buffers.items()})
        self.read_only |= buffers

    def _note(self, feeds: Sequence[Feed]) -> None:
        """Note how far rows are about to be written, where they do not hold it all.

        Raises: EngineError for a row that would go back to what its rings have lost.
        """
        for feed in feeds:
            least = self.traits.rewind(feed.row)
            if 0 < feed.start < least:
                raise EngineError(
                    f"row {feed.row} was to go on from position {feed.start}; its layers remember "
                    f"enough from position {least} on, or from 0 with its text read again"
                )
        for feed in feeds:  # once none of them is refused
            known = self._written[feed.row] if feed.start else 0
            self._written[feed.row] = max(known, feed.start + len(feed.tokens))

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> RowScores:
        """Run one pass of every row; see `Engine.forward`."""
        batch = np.asarray(tokens, np.int64)
        _, scored = pass_size(self, batch, rows)
        starts = np.broadcast_to(np.asarray(start, np.int64), (self.batch,)).tolist()
        fed = enumerate(zip(batch, starts, strict=True))
        self.forward_rows([Feed(row, own, at, scored) for row, (own, at) in fed])
        found = self._scored(0, self.batch * scored)
        return RowScores(
            found.argmax.reshape(self.batch, scored),
            found.logits.reshape(self.batch, scored, -1),
            None if found.confidence is None else found.confidence.reshape(self.batch, scored),
        )

    def forward_rows(self, feeds: Sequence[Feed]) -> tuple[RowScores, ...]:
        """Run one pass over some of the rows; see `PackedEngine.forward_rows`."""
        check_feeds(self, feeds)
        if self._back or self.geometry.recurs:
            self._note(feeds)
        count = scored = 0
        for feed in feeds:
            end, last = count + len(feed.tokens), scored + feed.rows
            if self._hidden is not None:
                self._hidden[0, count:end] = check_hidden(feed)
            self._tokens[count:end] = feed.tokens
            self._slots[count:end] = feed.row
            self._positions[count:end] = self._numbers[feed.start : feed.start + end - count]
            self._rows[scored:last] = self._numbers[end - feed.rows : end]
            count, scored = end, last
        if self._bound != (count, scored):
            self._bind(count, scored)
        run_bound(self._session, self._binding, count)
        outputs, first, begin = [], 0, 0
        for feed in feeds:
            outputs.append(self._scored(first, first + feed.rows))
            first += feed.rows
            if self.features is not None and self._passed is not None:
                end = begin + len(feed.tokens)
                keep_features(self.features, feed, self._passed[0, begin:end])
                begin = end
        return tuple(outputs)

    def _bind(self, count: int, scored: int) -> None:
        """Bind what has another size than in the pass before; KV buffers are bound once."""
        if self._session is None:
            raise EngineError(CLOSED)
        if self._binding is None:
            self._binding = self._bound_buffers()
        tokens, rows = self._bound
        self._bound = 0, 0  # an interruption leaves it half bound
        if not self._scores or self._scores["argmax"].shape[1] < scored:
            self._reserve_scores(scored)
            rows = 0
        if tokens != count:
            self._bind_input("input_ids", self._tokens[None], count)
            self._bind_input("slots", self._slots, count)
            self._bind_input("positions", self._positions, count)
            if self._hidden is not None:
                value = self._value("hidden", self._hidden[:, :count], count)
                self._binding.bind_ortvalue_input("hidden", value)
            if self._passed is not None:
                value = self._value("feature", self._passed[:, :count], count)
                self._binding.bind_ortvalue_output("feature", value)
        if rows != scored:
            self._bind_input("rows", self._rows, scored)
            for name, memory in self._scores.items():
                value = self._value(name, memory[:, :scored], scored)
                self._binding.bind_ortvalue_output(name, value)
        self._bound = count, scored

    def _bound_buffers(self) -> Any:
        """Return a binding of what every pass reads and writes in place.

        Of all of it, or an interruption leaves some out.
        """
        binding = self._session.io_binding()
        for name, cache in self._caches.items():
            bind_input(binding, name, cache)
            bind_output(binding, f"present_{name}", cache)
        for name, array in self.read_only.items():
            bind_input(binding, name, array)
        return binding

    def _bind_input(self, name: str, memory: NDArray[Any], size: int) -> None:
        self._binding.bind_ortvalue_input(name, self._value(name, memory[..., :size], size))

    def _value(self, name: str, array: NDArray[Any], size: int) -> Any:
        """Return an array as a value of the library, which uses its memory."""
        if (name, size) not in self._values:
            self._values[name, size] = ort.OrtValue.ortvalue_from_numpy(array)
        return self._values[name, size]

    def _reserve_scores(self, rows: int) -> None:
        """Allocate scores of so many rows, at least twice as many as before."""
        most = max(rows, 2 * self._scores["argmax"].shape[1]) if self._scores else rows
        scores: dict[str, NDArray[Any]] = {"argmax": np.zeros((1, most), np.int64)}
        for output in self._session.get_outputs():
            if output.name in ("logits", "state"):  # a trimmed draft scores fewer than it knows
                scores[output.name] = np.zeros((1, most, output.shape[-1]), np.float32)
            elif output.name == "confidence":
                scores["confidence"] = np.zeros((1, most), np.float32)
        self._values.clear()
        self._scores = scores  # all or none: what an interruption left out would never be bound

    def _scored(self, first: int, last: int) -> RowScores:
        """Return the scores of rows that follow each other."""
        argmax, logits = self._scores["argmax"], self._scores["logits"]
        confidence, state = self._scores.get("confidence"), self._scores.get("state")
        return RowScores(
            argmax[:, first:last],
            logits[:, first:last],
            None if confidence is None else confidence[:, first:last],
            None if state is None else state[:, first:last],
        )

    def copy_row(self, source: int, to: int, length: int) -> None:
        """Copy the first `length` positions of a row to another; see `PackedEngine.copy_row`."""
        check_copy(self, source, to, length)
        if source == to:
            return
        for name, cache in self._caches.items():
            if name.startswith((BASE, f"{STATE}.")):
                cache[to] = cache[source]
                continue
            count = -(-length // TILE) if name.startswith("key") else length
            cache[to, :, :count] = cache[source, :, :count]
        self._written[to] = self._written[source]
        if self.features is not None:
            self.features[to, :length] = self.features[source, :length]

    def close(self) -> None:
        """Drop the session, the binding and the KV buffers."""
        self._caches.clear()
        self._values.clear()
        self._session = self._binding = None
        self._bound = 0, 0
        self._weights = ()


def check_rows(engine: Engine, feeds: Sequence[Feed]) -> None:
    """Refuse feeds of no rows, of rows that are not there, or of one twice.

    Raises: EngineError.
    """
    rows = {feed.row for feed in feeds}
    if not rows or len(rows) < len(feeds) or min(rows) < 0 or max(rows) >= engine.batch:
        raise EngineError(
            f"a pass was asked of rows {[feed.row for feed in feeds]}; expected some of 0 to "
            f"{engine.batch - 1}, each once"
        )


def check_feeds(engine: Engine, feeds: Sequence[Feed]) -> None:
    """Refuse feeds that no pass can have.

    Raises: EngineError.
    """
    check_rows(engine, feeds)
    for feed in feeds:
        width = len(feed.tokens)
        check_bounds(engine, width, feed.start, feed.start)
        if not 1 <= feed.rows <= width:
            raise EngineError(
                f"{feed.rows} positions of row {feed.row} were to be scored in a pass of {width} "
                f"tokens; expected 1 to {width}"
            )


def widths(ports: Sequence[Any]) -> dict[str, int]:
    """Return the last dimension of each input or output of a session, by name."""
    return {port.name: port.shape[-1] if port.shape else 1 for port in ports}


def head_memory(
    session: Any, batch: int, max_length: int, tokens: int
) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None, NDArray[np.float32] | None]:
    """Return the memory that only a target with a head has, or only a head; None for the rest.

    Shapes: features of all positions [batch, max_length, H], those of a pass [1, tokens, H]; what
        a head reads in a pass [1, tokens, H].
    """
    left, read = widths(session.get_outputs()).get("feature"), widths(session.get_inputs())
    features = np.zeros((batch, max_length, left), np.float32) if left else None
    passed = np.zeros((1, tokens, left), np.float32) if left else None
    hidden = np.zeros((1, tokens, read["hidden"]), np.float32) if "hidden" in read else None
    return features, passed, hidden


def keep_features(features: NDArray[np.float32], feed: Feed, passed: NDArray[np.float32]) -> None:
    """Keep the features of a feed at its positions, for the head."""
    features[feed.row, feed.start : feed.start + len(passed)] = passed


def check_hidden(feed: Feed) -> NDArray[np.float32]:
    """Return what a head reads next to each token of a feed.

    Raises: EngineError where there is nothing.
    """
    if feed.hidden is None:
        raise EngineError("a head was fed without the features of its target")
    return feed.hidden


def check_copy(engine: Engine, source: int, to: int, length: int) -> None:
    """Refuse to copy what no row has.

    Raises: EngineError.
    """
    if not {source, to} <= {*range(engine.batch)} or not 0 <= length <= engine.max_length:
        raise EngineError(
            f"{length} positions of row {source} were to be copied to row {to}; expected rows from "
            f"0 to {engine.batch - 1}, and up to {engine.max_length} positions"
        )


def silent_options() -> Any:
    """Return options of a session that has the kernels, and writes no log lines.

    What fails is in its exception.
    Raises: EngineError where SPECRT_KERNELS names kernels that cannot run here.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4  # fatal
    if KERNELS.is_file():
        try:
            options.register_custom_ops_library(str(KERNELS))
        except Exception as error:  # the library raises its own pybind types
            raise EngineError(f"{KERNELS.name} cannot be used: {first_line(error)}") from error
    return options


def open_session(
    path: Path, files: Mapping[str, HeldFile], threads: int
) -> tuple[Any, tuple[Any, ...]]:
    """Open a saved graph; return its session, and the weights that must live as long.

    Weights are used where `files`, those next to the graph, have them mapped.
    Raises: EngineError when the library refuses it, or a file is not among them.
    """
    options = silent_options()
    # The graph was optimised when it was compiled.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if shared_pool:
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = _own_threads(files, threads)
        options.inter_op_num_threads = 1
    read = files_of(path, files)
    weights = mapped_weights(path, files)
    values = tuple(
        [ort.OrtValue.ortvalue_from_numpy_with_onnx_type(w.array, w.type) for w in weights]
    )
    for weight, value in zip(weights, values, strict=True):
        options.add_initializer(weight.name, value)
    try:
        with _empty_files(path, read) as folder:
            options.add_session_config_entry(_FOLDER, str(folder))
            session = ort.InferenceSession(
                bytes(files[path.name].data), options, providers=["CPUExecutionProvider"]
            )
    except Exception as error:  # the library raises its own pybind types
        reason = first_line(error)
        remedy = shortage(error) or "build the bundle again with the version installed here"
        raise EngineError(
            f"ONNX Runtime {ort.__version__} cannot open {path}: {reason}; {remedy}"
        ) from error
    for name in (path.name, *read):
        files[name].release()
    return session, values


@contextmanager
def _empty_files(path: Path, names: Iterable[str]) -> Iterator[Path]:
    """Give a folder of empty files, or the graph's where none can be made.

    The library wants the files of weights to exist, though it is handed what is in them. So it
    fails where it reads them after all.
    """
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()
        except OSError:
            folder = path.parent
        yield folder


def share_pool(threads: int) -> None:
    """Create the one thread pool that every session of this process runs on.

    Two pools of spinning threads on the same cores make a target three times slower, so without
    a shared pool the draft has one thread. With it, target and draft use all of them in turn.
    Only the owner of a process may call this: afterwards ONNX Runtime refuses every session of
    the process that has threads of its own.
    """
    if not shared_pool:
        with suppress(Exception):  # the application has one already: then that is the pool
            ort.set_global_thread_pool_sizes(threads, 1)
        shared_pool.append(threads)


shared_pool: list[int] = []
"""The threads of the shared pool, once there is one: the library has no way to ask."""

_SMALL_BYTES = 64 << 20

_FOLDER = "session.model_external_initializers_file_folder_path"


def _own_threads(files: Mapping[str, HeldFile], threads: int) -> int:
    """Return the threads of a session's own pool: one for an engine as small as a draft."""
    size = sum(len(file.data) for file in files.values())
    return 1 if size < _SMALL_BYTES else threads


def run_bound(session: Any, binding: Any, width: int) -> None:
    """Run one pass over bound memory.

    Raises: EngineError with the library's reason.
    """
    try:
        session.run_with_iobinding(binding)
    except Exception as error:  # the library raises its own pybind types
        reason = "; ".join(filter(None, (first_line(error), shortage(error))))
        raise EngineError(f"ONNX Runtime failed in a pass of width {width}: {reason}") from error


def bind_input(binding: Any, name: str, array: NDArray[Any]) -> None:
    """Let a pass read an input from an array, which must outlive the binding."""
    binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def bind_output(binding: Any, name: str, array: NDArray[Any]) -> None:
    """Let a pass write an output into an array, which must outlive the binding."""
    binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
