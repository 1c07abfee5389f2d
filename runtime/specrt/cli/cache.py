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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

import specrt
from specrt.bundle import BUILD_ROOT, DEFAULT_BUNDLE, FILE_NAME, FORMAT, Manifest, read_manifest
from specrt.cli.build import build_bundle, installed, named_by_flags, pair_recipe
from specrt.cli.names import (
    HubName,
    fetch_missing,
    find_checkpoint,
    is_named_checkpoint,
    ready_recipe,
)
from specrt.cli.options import GGUF, print_notices
from specrt.doctor import check_exporter
from specrt.engine.backends import check_versions, notices
from specrt.engine.ort.kernels import LAYOUT, missing_kernels
from specrt.errors import BuildError, BundleError, CheckpointError, RequestError

if TYPE_CHECKING:
    from specrt_export.recipe.recipe import Recipe

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
        help="Where BUNDLE is a checkpoint, a GGUF file, a folder or org/name of the hub: what "
        "drafts for it. Both are built into the cache on first use.",
    )
    argument = click.argument("bundle", type=click.Path(path_type=Path), default=DEFAULT_BUNDLE)
    return cast(F, argument(option(opened)))


def bundle_of(path: Path, draft: Path | None = None) -> Path:
    """Return the bundle at a path; of a pair or a checkpoint its bundle, built if it is missing.

    The default bundle is that of its recipe where none was built in this folder.
    Raises: SpecrtError.
    """
    default = path == DEFAULT_BUNDLE and draft is None and not path.exists()
    recipe = ready_recipe(path.name if default else str(path))
    if recipe is None and is_named_checkpoint(path):
        return _of_checkpoints(path, draft)
    if draft is not None:
        raise RequestError(
            f"--draft is {str(draft)!r}, and {path} is not a checkpoint: a bundle has the draft "
            "that it was built with; leave --draft out, or give a GGUF file or a checkpoint's "
            "folder in place of the bundle"
        )
    if recipe is not None:
        return _of_pair(recipe)
    if not path.exists() and str(path) == path.name:
        _check_pair_name(path.name)
    return path


def _check_pair_name(name: str) -> None:
    """Refuse a name that is almost the one of a pair, unless a bundle is nearer."""
    from specrt_export.checkpoint.ready_recipes import ready_recipes

    near = get_close_matches(name, ready_recipes(), n=1)
    if near and not (BUILD_ROOT / near[0] / FILE_NAME).exists():
        raise BundleError(
            f"there is no bundle and no pair {name!r}; did you mean {near[0]!r}? `specrt list` "
            "lists all"
        )


def _of_checkpoints(target: Path, draft: Path | None) -> Path:
    if draft is not None and not (is_named_checkpoint(draft) or ready_recipe(str(draft))):
        raise CheckpointError(
            f"--draft is {str(draft)!r}; expected a GGUF file or a checkpoint's folder, or "
            "org/name of the hub"
        )
    found = [find_checkpoint(str(one)) for one in (target, draft) if one is not None]
    place = cache() / "bundles" / _name(found[0].source, [one.path for one in found])

    def plan() -> Recipe:
        check_exporter()
        with named_by_flags(None, "BUNDLE"):
            drafts = found[1].source if draft is not None else None
            return pair_recipe(found[0].source, draft=drafts)[0]

    if not _usable(place):
        _build(f"{target}, drafted for by {draft}," if draft else f"{target}", plan, place)
    return place


def _of_pair(recipe: Path) -> Path:
    """Return the bundle of a ready pair: what `make engines` built, or one in the cache."""
    from specrt_export.checkpoint.ready_recipes import checkpoints_of, hub_names_of

    name = recipe.parent.name
    if _usable(BUILD_ROOT / name):
        return BUILD_ROOT / name
    remote = hub_names_of(recipe)
    fetch_missing([HubName(one) for one in remote])
    found = [
        find_checkpoint(one).path if one in remote else recipe.parent / one
        for one in checkpoints_of(recipe)
    ]
    place = cache() / "bundles" / _name(name, [recipe, *found])

    def plan() -> Recipe:
        from specrt_export.recipe.recipe import read_recipe

        return read_recipe(recipe)

    if not _usable(place):
        _build(name, plan, place)
    return place


def bundles() -> Iterator[tuple[Path, Manifest]]:
    """Yield the bundles in engines/build and in the cache."""
    for place in (BUILD_ROOT, cache() / "bundles"):
        for path in sorted(place.glob(f"*/{FILE_NAME}")):
            with suppress(BundleError):
                yield path.parent, read_manifest(path.parent)


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


def _name(source: str, read: list[Path]) -> str:
    """Return a name that is another one whenever the bundle would be."""
    made = {
        "checkpoints": [_identity(one) for one in read],
        "specrt": [specrt.__version__, FORMAT, LAYOUT, bool(missing_kernels())],
        "machine": platform.machine(),
    }
    key = hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16]
    path = Path(source)
    stem = path.stem if path.suffix == GGUF else path.resolve().name
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', stem)[:80].lstrip('.') or 'pair'}-{key}"


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
    """Return what the names of all parts of a model have; None for a file that is not a part."""
    part = _PART.fullmatch(path.name)
    return part and part.groups()


def _usable(place: Path) -> bool:
    """Tell whether there is a bundle that this machine can read; its files are not hashed yet."""
    try:
        check_versions(place, read_manifest(place))
    except BundleError:
        return False
    return True


def _build(label: str, make_plan: Callable[[], Recipe], place: Path) -> None:
    """Build a bundle into the cache; of two processes one does.

    Raises: SpecrtError; nothing half-written is left.
    """
    with installed():
        plan = make_plan()
    with _locked(place):
        if _usable(place):
            return
        print(
            f"note: {label} is built once, into {place}; `rm -r {shlex.quote(str(place))}` removes "
            "it",
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
