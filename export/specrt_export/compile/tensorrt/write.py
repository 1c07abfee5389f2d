"""Compile a network, and write the plan as it comes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, BinaryIO

from specrt.engines.tensorrt.journal import Log
from specrt.engines.tensorrt.library import Library
from specrt.errors import BuildError
from specrt_export.compile.tensorrt.monitor import Watch
from specrt_export.compile.tensorrt.options import PlanOptions
from specrt_export.compile.tensorrt.report import printable

_HEAD_BYTES = 64
_LONGEST = 400


@dataclass(frozen=True)
class Written:
    """A plan in a file."""

    size: int
    sha256: str
    head: bytes
    """Its first bytes."""


def write_plan(
    library: Library,
    builder: Any,
    network: Any,
    config: Any,
    file: BinaryIO,
    watch: Watch,
    options: PlanOptions,
) -> Written:
    """Compile a network into a file.

    Raises: what stopped the build, or BuildError with the library's reason.
    """
    sink = _Sink(file)
    with library.messages() as log:
        made = _compile(library.module, builder, network, config, sink, watch)
    watch.check()
    if not made or not sink.size:
        raise _failed(log, options)
    return Written(sink.size, sink.digest.hexdigest(), sink.head)


class _Sink:
    """Where a plan goes: a file, its hash, and its first bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest, self.size, self.head = hashlib.sha256(), 0, b""

    def write(self, data: Any) -> int:
        """Take a part of the plan."""
        self._file.write(data)
        self.digest.update(data)
        self.head = (self.head + bytes(data[:_HEAD_BYTES]))[:_HEAD_BYTES]
        self.size += len(data)
        return len(data)


def _compile(
    module: Any, builder: Any, network: Any, config: Any, sink: _Sink, watch: Watch
) -> bool:
    """Compile into a sink: through a stream where there is one, which saves a copy of the plan."""
    if not hasattr(builder, "build_serialized_network_to_stream"):
        plan = builder.build_serialized_network(network, config)
        if plan is None or watch.stopping():
            return False
        return sink.write(memoryview(plan)) > 0

    class Writer(module.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            module.IStreamWriter.__init__(self)

        def write(self, data: Any) -> int:
            # An exception must not pass through the library; 0 makes it give up.
            try:
                return 0 if watch.stopping() else sink.write(data)
            except OSError as error:
                watch.error = watch.error or error
                return 0

    writer = Writer()
    return bool(builder.build_serialized_network_to_stream(network, config, writer))


def _failed(log: Log, options: PlanOptions) -> BuildError:
    """Return the error for a build that the library gave up, with its own reason."""
    # A CPU-only build says several times that there is no driver, which is not why it failed.
    errors = [message.text for message in log.messages if message.is_error]
    telling = [text for text in errors if "cudaError 35" not in text] or errors
    reason = printable(telling[0], _LONGEST) if telling else "no reason given"
    remedy = "lower the graph again, or try another version of the library"
    if "workspace" in reason:
        given = options.workspace_mib
        remedy = f"workspace_mib is {given}; give more, or leave it out"
    elif "memory" in reason.lower():
        remedy = "free memory, or choose a smaller precision"
    return BuildError(f"TensorRT could not build the plan: {reason}; {remedy}")
