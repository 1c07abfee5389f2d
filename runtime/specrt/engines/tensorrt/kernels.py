"""Kernels that TensorRT for RTX makes on the device, kept beside the plan for the next time."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

SUFFIX = ".kernels"


class KernelCache:
    """A file of kernels made at run time; without it every process makes them anew.

    The library itself holds what it reads to its version, the GPU and the driver, and leaves what
    does not fit aside. A folder that cannot be written to is no reason to complain.
    """

    def __init__(self, plan: Path) -> None:
        self.path = plan.with_suffix(SUFFIX)
        self._cache: Any = None
        self._known = b""

    def attach(self, config: Any) -> None:
        """Let a context use the kernels, and add its own."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            with suppress(OSError):
                self._known = self.path.read_bytes()
            if self._known and not self._cache.deserialize(self._known):
                self._known = b""
        config.set_runtime_cache(self._cache)

    def keep(self) -> None:
        """Write the kernels down where there are new ones; never raises."""
        cache, self._cache = self._cache, None
        made = cache.serialize() if cache is not None else None
        data = b"" if made is None else bytes(made)
        if not data or data == self._known:
            return
        aside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        with suppress(OSError):
            try:
                aside.write_bytes(data)
                aside.replace(self.path)
            finally:
                aside.unlink(missing_ok=True)
