"""The timing cache: what kernels were measured to cost, so that the next build need not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specrt_export.compile.tensorrt.place import written_aside

SUFFIX = ".timing"


class TimingCache:
    """A file of timings beside a plan, where the library times kernels at all."""

    def __init__(self, library: Any, path: Path) -> None:
        self.path = path
        self.note = ""
        """What became of it, or why there is none."""
        self._used = not library.flavour.timing_cache_needs_gpu
        self._cache: Any = None
        if not self._used:
            self.note = f"none: {library.backend} times kernels on the device, not while it builds"

    def attach(self, config: Any) -> None:
        """Give a builder what an earlier build measured; a file it does not take is left aside."""
        if not self._used:
            return
        earlier = self.path.read_bytes() if self.path.is_file() else b""
        self._cache = config.create_timing_cache(earlier)
        taken = config.set_timing_cache(self._cache, False)
        self.note = "read and kept" if earlier and taken else "begun"
        if not taken:
            self._cache = config.create_timing_cache(b"")
            config.set_timing_cache(self._cache, False)
            self.note = f"begun anew, because {self.path.name} is of another version or GPU"

    def keep(self, config: Any) -> None:
        """Write what is known now.

        Raises: BuildError for what the disk refused.
        """
        cache = config.get_timing_cache() if self._used else None
        if cache is None:
            return
        with written_aside(self.path) as file:
            file.write(memoryview(cache.serialize()))
