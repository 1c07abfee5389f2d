"""Bundles of recipes, and of checkpoints given in place of a bundle: built once, kept."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

import specrt
from specrt.bundle import DEFAULT_BUNDLE, FORMAT, read_manifest
from specrt.cli.build import build_bundle, installed, named_by_flags, pair_recipe
from specrt.cli.options import GGUF, is_checkpoint, print_notices
from specrt.engine.backends import check_versions, notices
from specrt.engine.kernels import LAYOUT, missing_kernels
from specrt.errors import BuildError, BundleError, CheckpointError, RequestError
from specrt.system.doctor import check_exporter

if TYPE_CHECKING:
    from specrt_export.recipe import Recipe

F = TypeVar("F", bound=Callable[..., Any])

_PART = re.compile(r"(.*-)[0-9]{5}(-of-[0-9]{5}\.gguf)")
"""The name of one of several files that are a model."""

_KINDS = (".json", ".safetensors", ".jinja")
"""Suffixes of what is read of a checkpoint's folder."""


def bundle_argument(command: F) -> F:
    """Add BUNDLE and --draft; a command is given a bundle's folder, which may be in the cache."""

    @wraps(command)
    def opened(*args: Any, bundle: Path, draft: Path | None, **options: Any) -> Any:
        return command(*args, bundle=bundle_of(bundle, draft), **options)

    option = click.option(
        "--draft",
        type=click.Path(path_type=Path),
        metavar="CHECKPOINT",
        help="Where BUNDLE is a checkpoint, a GGUF file or a folder: what drafts for it. Both are "
        "built into the cache on first use.",
    )
    argument = click.argument("bundle", type=click.Path(path_type=Path), default=DEFAULT_BUNDLE)
    return cast(F, argument(option(opened)))


def bundle_of(path: Path, draft: Path | None = None) -> Path:
    """Return the bundle at a path; of a checkpoint that in the cache, built if it is missing.

    The default bundle is that of its recipe where none was built in this folder.
    Raises: SpecrtError.
    """
    if path == DEFAULT_BUNDLE and draft is None and not path.exists():
        return bundle_of_recipe(recipes_folder() / path.name / "recipe.toml")
    if not is_checkpoint(path):
        if draft is not None:
            raise RequestError(
                f"--draft is {str(draft)!r}, and {path} is no checkpoint: a bundle has the draft "
                "that it was built with; leave --draft out, or give a GGUF file or a checkpoint's "
                "folder in place of the bundle"
            )
        return path
    if draft is not None and not is_checkpoint(draft):
        raise CheckpointError(
            f"--draft is {str(draft)!r}; expected a GGUF file or a checkpoint's folder on this "
            "machine. `specrt build --target` also takes hub names"
        )
    pair = f"{path}, drafted for by {draft}," if draft else f"{path}"
    sources = [_identity(one) for one in (path, draft) if one is not None]
    stem = path.stem if path.suffix == GGUF else path.resolve().name
    return _kept(_place(stem, sources), pair, partial(_read_checkpoints, path, draft))


def bundle_of_recipe(recipe: Path) -> Path:
    """Return the bundle of a recipe, in the cache, built if it is missing.

    Raises: SpecrtError.
    """
    folder = recipe.parent
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    facts = [(str(path.relative_to(folder)), path.stat()) for path in files]
    sources = [(name, fact.st_size, fact.st_mtime_ns) for name, fact in facts]
    # The folder has the name that the server gives the model.
    place = _place(folder.name, sources) / folder.name
    return _kept(place, folder.name, partial(_read_recipe, recipe))


def recipes_folder() -> Path:
    """Return the folder of the recipes that come with specrt; in a clone a link to `engines`."""
    return Path(specrt.__file__).parent / "engines"


def cache() -> Path:
    """Return the folder of what can be made again, as the XDG Base Directory Specification says.

    Raises: BuildError where there is no home.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        root = named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        raise BuildError(
            "there is no home folder to keep a cache in; name a place with XDG_CACHE_HOME, or build"
            " with `specrt build --target`"
        ) from None
    return root / "specrt"


def _place(stem: str, sources: Sequence[object]) -> Path:
    """Return a place in the cache that is another one whenever the bundle would be."""
    made = {
        "sources": sources,
        "specrt": [specrt.__version__, FORMAT, LAYOUT, bool(missing_kernels())],
        "machine": platform.machine(),
    }
    key = hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem)[:80].lstrip(".") or "pair"
    return cache() / "bundles" / f"{name}-{key}"


def _identity(path: Path) -> list[tuple[str, int, int]]:
    """Return place, size and time of the files of a checkpoint; they are not read."""
    try:
        if path.is_dir():
            files = [one for one in path.iterdir() if one.suffix in _KINDS]
        else:
            model = _model_of(path)
            files = [one for one in path.parent.glob("*.gguf") if model and _model_of(one) == model]
            files = files or [path]
        facts = [(str(one.resolve()), one.stat()) for one in sorted(files)]
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path} cannot be read: {error.strerror}; name a GGUF file, or the "
            "folder of a checkpoint"
        ) from error
    return [(name, fact.st_size, fact.st_mtime_ns) for name, fact in facts]


def _model_of(path: Path) -> tuple[str, ...] | None:
    """Return what the names of all parts of a model have; None for a file that is no part."""
    part = _PART.fullmatch(path.name)
    return part and part.groups()


def _usable(place: Path) -> bool:
    """Tell whether there is a bundle that this machine can read; its files are not hashed yet."""
    try:
        check_versions(place, read_manifest(place))
    except BundleError:
        return False
    return True


def _read_checkpoints(path: Path, draft: Path | None) -> Recipe:
    check_exporter()
    with named_by_flags(None, "BUNDLE"):
        return pair_recipe(str(path), draft=None if draft is None else str(draft))[0]


def _read_recipe(recipe: Path) -> Recipe:
    from specrt_export.recipe import read_recipe

    return read_recipe(recipe)


def _kept(place: Path, pair: str, read: Callable[[], Recipe]) -> Path:
    """Return the bundle at a place in the cache, built if it is missing; of two processes one does.

    Raises: SpecrtError; nothing half-written is left.
    """
    if _usable(place):
        return place
    with installed():
        plan = read()
    with _locked(place):
        if not _usable(place):
            _build(plan, place, pair)
    return place


def _build(plan: Recipe, place: Path, pair: str) -> None:
    print(
        f"note: {pair} is built once, into {place}; `rm -r {shlex.quote(str(place))}` removes it",
        file=sys.stderr,
        flush=True,
    )
    try:
        with installed(), named_by_flags(None, "BUNDLE"):
            found = build_bundle(plan, place) or []
        # What is said of slow kernels is said again when the bundle is opened.
        slow = notices(read_manifest(place))
        print_notices([notice for notice in found if notice not in slow])
    except BuildError as error:
        if not isinstance(error.__cause__, OSError) and "--out" not in str(error):
            raise
        raise _elsewhere(str(error)) from error


def _elsewhere(why: str) -> BuildError:
    return BuildError(
        f"{why}; that is in the cache: name another place with XDG_CACHE_HOME, or build with "
        "`specrt build --target`"
    )


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Keep other processes from building the same bundle; one that is killed keeps none."""
    path = place.with_name(f".{place.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _elsewhere(f"{error.filename or path} cannot be written: {error.strerror}") from error
    try:
        _wait(lock, place)
        yield
    finally:
        os.close(lock)


def _wait(lock: int, place: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        print(f"note: another process builds {place}; waiting", file=sys.stderr, flush=True)
    except OSError:  # a file system without locks: each builds, and the last one stays
        return
    fcntl.flock(lock, fcntl.LOCK_EX)
