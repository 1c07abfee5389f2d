"""Write a file out of sight and put it in place in one step, or leave nothing behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from specrt.errors import BuildError
from specrt_export.compile.room import no_room


@contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write; at the end it takes the place of `path`.

    Whatever stops the writing, what was at `path` is as it was and the file is gone.
    Raises: BuildError for what the disk refused.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(".part", f".{path.name}.", path.parent)
    except OSError as error:
        raise BuildError(
            f"{path} cannot be written ({error.strerror or error}); build elsewhere with --out"
        ) from error
    aside = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
        aside.chmod(0o644)
        aside.replace(path)
    except OSError as error:
        raise no_room(path) from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
