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
        import httpx
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, HfHubHTTPError
    except ImportError as error:
        raise CheckpointError(
            f"no folder {name}, and fetching it from the hub needs huggingface_hub: "
            'pip install "specrt[export]"'
        ) from error
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError) as error:
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
