"""Fetch a checkpoint from a model hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specrt.errors import CheckpointError


def download(name: str, revision: str | None, files: Sequence[str]) -> Path:
    """Return the local snapshot of a hub model, downloading what of `files` is not cached.

    Raises: CheckpointError in place of every error of the hub and the network.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"no folder {name}, and fetching it from the hub needs huggingface_hub: "
            'pip install "specrt[export]"'
        ) from error
    # The root of what the hub's HTTP library raises, whichever library that is.
    network = errors.HTTPError  # type: ignore[attr-defined]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except (network, errors.HFValidationError, OSError) as error:
        raise _explained(name, revision, error) from error


def _explained(name: str, revision: str | None, error: Exception) -> CheckpointError:
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"{name} at revision {revision!r}" if revision else name
    if isinstance(error, GatedRepoError):
        remedy = "access is gated: accept its terms on the hub, then `hf auth login`"
    elif isinstance(error, RevisionNotFoundError):
        remedy = "the model has no such revision: give a branch, a tag or a commit of it"
    elif isinstance(error, RepositoryNotFoundError):
        remedy = "no folder and no hub model has this name, or it is private (`hf auth login`)"
    else:
        remedy = "check the network, or give a local folder"
    reason = str(error).strip().partition("\n")[0]
    return CheckpointError(f"cannot fetch {where}: {remedy} ({type(error).__name__}: {reason})")
