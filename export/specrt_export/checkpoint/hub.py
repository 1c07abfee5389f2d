"""The hub of models: what of it is on this machine, and how the rest is fetched.

The cache is the one of huggingface_hub, which finds the model, its hashes and its token. The bytes
are received here: that library throws away what a process that ended has received, and compares
no hashes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrt.errors import CheckpointError, reason_of
from specrt.system.memory import size
from specrt_export.checkpoint.hub_cache import (
    COMMIT,
    INDEX,
    MAIN,
    SINGLE,
    cache,
    cached_models,
    cached_snapshot,
    has_weights,
    repository,
)
from specrt_export.checkpoint.ready_recipes import ready_hub_names

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

ADAPTER = "adapter_config.json"
"""Of a low-rank adapter, which transformers adds to the model that it names."""

CONFIG_FILES = ("config.json", ADAPTER)

NAMED_TEMPLATES = "additional_chat_templates"
"""A folder of chat templates for purposes, as transformers writes them: NAME.jinja."""

WANTED_FILES = (
    *CONFIG_FILES,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    f"{NAMED_TEMPLATES}/*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    SINGLE,
    INDEX,
    "model-*.safetensors",
)
"""What building reads of a model."""

Show = Callable[[int, int], None]
"""Is given the bytes that are here, and all that are wanted."""

_QUIET_S = 30.0
"""How long a hub may say nothing."""

_TRIES = 5
"""Connections in a row that bring nothing."""

_LONGEST_WAIT_S = 300.0
"""Of what a hub may ask for: its limits count requests in five minutes."""

_SAID_S = 2.0
"""A wait that is told of."""

_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

_PIECE = 1 << 20


def endpoint() -> str:
    """Return the address of the hub, or of its mirror."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


@dataclass(frozen=True)
class HubFile:
    """A file of a model, as the hub lists it."""

    name: str
    bytes: int
    blob: str
    """Its name in the cache: the sha256 of a large file, git's id of a small one."""

    def is_at(self, path: Path) -> bool:
        """Tell whether a file is the one that the hub has."""
        digest = hashlib.sha256()
        if len(self.blob) == 40:
            digest = hashlib.sha1(b"blob %d\0" % self.bytes, usedforsecurity=False)
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
        return digest.hexdigest() == self.blob


@dataclass(frozen=True)
class Snapshot:
    """Files of a model at one commit."""

    model: str
    revision: str
    commit: str
    files: tuple[HubFile, ...] = ()
    """Empty where the hub was not reached and what is here serves."""

    @property
    def folder(self) -> Path:
        """The folder that the files are put in."""
        return repository(self.model) / "snapshots" / self.commit

    @property
    def missing(self) -> list[HubFile]:
        """The files that are not here."""
        return [file for file in self.files if not (self.folder / file.name).exists()]

    @property
    def missing_bytes(self) -> int:
        """What is to be received, without what an earlier download left."""
        return sum(file.bytes - self._here(file) for file in self.missing)

    def fetch(self, show: Show = lambda done, total: None) -> Path:
        """Receive what is missing, and return the folder.

        What a download that broke off has received is kept, and the next one goes on there.
        Raises: CheckpointError.
        """
        missing = self.missing
        total, done = sum(file.bytes for file in missing), 0
        self._check_space()
        with explained(self.model, self.revision):
            for file in missing:
                self._receive(file, partial(_show_after, show, done, total))
                done += file.bytes
            if cached_snapshot(self.model, self.revision) != self.folder:
                ref = repository(self.model) / "refs" / self.revision
                ref.parent.mkdir(parents=True, exist_ok=True)
                ref.write_text(self.commit, encoding="utf-8")
        return self.folder

    def _blob(self, file: HubFile) -> Path:
        return repository(self.model) / "blobs" / file.blob

    def _part(self, file: HubFile) -> Path:
        blob = self._blob(file)
        return blob.with_name(f"{blob.name}.incomplete")

    def _here(self, file: HubFile) -> int:
        if self._blob(file).exists():
            return file.bytes
        return min(_length(self._part(file)), file.bytes)

    def _check_space(self) -> None:
        place = next(p for p in (cache(), *cache().parents) if p.exists())
        wanted, free = self.missing_bytes, shutil.disk_usage(place).free
        if wanted > free:
            raise CheckpointError(
                f"{self.model} takes {size(wanted)} more, and {size(free)} are free at {cache()}; "
                "free some (`specrt list` says what is here), or name another place with HF_HOME"
            )

    def _receive(self, file: HubFile, show: Callable[[int], None]) -> None:
        """Put a file where it belongs; of two processes one receives it."""
        from filelock import FileLock

        blob, part, link = self._blob(file), self._part(file), self.folder / file.name
        lock = cache() / ".locks" / repository(self.model).name / f"{file.blob}.lock"
        for path in (blob, link, lock):
            path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if not blob.exists():
                resumed = _length(part) > 0
                self._complete(file, part, show)
                if not file.is_at(part) and resumed:  # what was here may be of something else
                    part.unlink()
                    self._complete(file, part, show)
                self._check_hash(file, part)
                part.replace(blob)
            with suppress(FileExistsError):
                link.symlink_to(os.path.relpath(blob, link.parent))
        show(file.bytes)

    def _check_hash(self, file: HubFile, part: Path) -> None:
        if not file.is_at(part):
            part.unlink()
            raise CheckpointError(
                f"{file.name} of {self.model} did not arrive as the hub lists it (hash "
                f"{file.blob[:12]}...) and was removed; fetch it again, or from another HF_ENDPOINT"
            )

    def _complete(self, file: HubFile, part: Path, show: Callable[[int], None]) -> None:
        """Receive the rest of a file, over as many connections as it takes."""
        from huggingface_hub import errors

        part.touch()
        if _length(part) > file.bytes:
            part.write_bytes(b"")
        tries, most = 0, _length(part)
        while (begins := _length(part)) < file.bytes:
            try:
                self._receive_from(file, part, begins, show)
                failed: Exception = OSError(f"the hub sent {begins} of {file.bytes} bytes")
            except errors.HTTPError as error:  # type: ignore[attr-defined]
                failed = error
            if _length(part) > most:  # not of `begins`: a hub without ranges begins again
                tries, most = 0, _length(part)
                continue
            tries += 1
            pause = _pause(failed, tries)
            if pause is None or tries == _TRIES:
                raise failed
            _wait(pause)

    def _receive_from(
        self, file: HubFile, part: Path, begins: int, show: Callable[[int], None]
    ) -> None:
        """Receive what one connection brings of a file's bytes from `begins` on."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
        )

        url = hf_hub_url(self.model, file.name, revision=self.commit, endpoint=endpoint())
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if begins:
            headers["Range"] = f"bytes={begins}-"
        with get_session().stream("GET", url, headers=headers, timeout=_QUIET_S) as response:
            hf_raise_for_status(response)
            whole = response.status_code != 206
            with part.open("wb" if whole else "ab") as kept:
                here = 0 if whole else begins
                for piece in response.iter_raw():
                    kept.write(piece[: file.bytes - here])
                    here = min(here + len(piece), file.bytes)
                    show(here)


def _show_after(show: Show, before: int, total: int, here: int) -> None:
    show(before + here, total)


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _pause(error: Exception, tries: int) -> float | None:
    """Return how many seconds to wait before the next try; None where none will do."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    if status == 429:
        told = _asked_wait(response)
        return told if told <= _LONGEST_WAIT_S else None
    return 2.0 ** (tries - 1) if status == 0 or status >= 500 else None


def _wait(seconds: float) -> None:
    if seconds > _SAID_S:
        logging.getLogger(__name__).warning("note: the hub asks to wait %.0f s", seconds)
    time.sleep(seconds)


def _asked_wait(response: Any) -> float:
    """Return the seconds that a hub asks to wait."""
    found = re.fullmatch(r"\d+", response.headers.get("Retry-After", ""))
    found = found or re.search(r"(?<=;t=)\d+", response.headers.get("RateLimit", ""))
    return float(found[0]) if found else 10.0


def look_up(
    name: str, revision: str | None, wanted: Sequence[str],
    enough: Callable[[Path], bool] | None = None,
) -> Snapshot:  # fmt: skip
    """Return the files of a model that match one of some patterns.

    Where the hub is not reached the snapshot that is here serves, if it is `enough`: by default if
    it has its weights, where these are wanted.
    Raises: CheckpointError.
    """
    with explained(name, revision or MAIN):
        try:
            info = _listed(name, revision)
        except Exception as error:
            here = cached_snapshot(name, revision or "")
            serves = enough or (lambda here: SINGLE not in wanted or has_weights(here))
            if not _is_unreachable(error) or here is None or not serves(here):
                raise
            return Snapshot(name, revision or MAIN, here.name)
    names = [one.rfilename for one in info.siblings or ()]
    folder = any(one.endswith((".safetensors", ".bin")) for one in names)
    if any(map(_form, names)) and "*.gguf" not in wanted and not folder:
        raise CheckpointError(f"{name} holds GGUF files; name one, {_choice(name, names)}")
    files = [_file(name, one) for one in info.siblings or () if _matches(one.rfilename, wanted)]
    return Snapshot(name, revision or MAIN, _checked(name, COMMIT, info.sha), tuple(files))


def _listed(name: str, revision: str | None) -> ModelInfo:
    """Return what the hub says of a model; its limits are waited for."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    tries = 0
    while True:
        try:
            return HfApi(endpoint()).model_info(
                name, revision=revision, files_metadata=True, timeout=_QUIET_S
            )
        except HfHubHTTPError as error:
            tries += 1
            pause = _pause(error, tries)
            if pause is None or tries == _TRIES:
                raise
            _wait(pause)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    depth, parts = name.count("/"), name.split("/")
    fits = any(fnmatchcase(name, one) and one.count("/") == depth for one in patterns)
    return fits and ".." not in parts


def _file(model: str, found: Any) -> HubFile:
    large = found.lfs
    blob = _checked(model, _BLOB, large.sha256 if large else found.blob_id)
    return HubFile(found.rfilename, int(large.size if large else found.size or 0), blob)


def _checked(model: str, form: re.Pattern[str], value: object) -> str:
    """Return a hash that the hub names; it is going to be the name of a file."""
    if isinstance(value, str) and form.fullmatch(value):
        return value
    raise CheckpointError(
        f"the hub says {value!r} of {model}, where a hash was expected; check HF_ENDPOINT"
    )


def download(
    name: str, revision: str | None, wanted: Sequence[str], show: Show = lambda done, total: None
) -> Path:
    """Return the folder of a hub model, receiving what of `wanted` is not in the cache.

    Raises: CheckpointError in place of every error of the hub and the network.
    """
    return look_up(name, revision, wanted).fetch(show)


_FORM = re.compile(
    r"(?:^|[-_.])((?:IQ|TQ|Q)\d\w*|B?F(?:16|32)|MXFP4\w*)(?:-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE
)
"""The end of a file's name, with the format that most of its weights are in."""


def gguf_snapshot(name: str, form: str) -> Snapshot:
    """Return the files of a repository that are a model in one format, such as `Q4_K_M`.

    Raises: CheckpointError naming the formats there are.
    """
    whole = look_up(name, None, ("*.gguf",), lambda here: bool(gguf_files(here, form)))
    names = [file.name for file in whole.files] or [one.name for one in whole.folder.glob("*.gguf")]
    files = tuple(file for file in whole.files if _form(file.name) == _spelled(form))
    if not _is_read(_spelled(form)) or _spelled(form) not in map(_form, names):
        raise CheckpointError(f"{name} has no file in {form} that is read; {_choice(name, names)}")
    return replace(whole, files=files)


def gguf_files(folder: Path, form: str) -> list[Path]:
    """Return the files in a folder that are a model in one format."""
    return sorted(path for path in folder.glob("*.gguf") if _form(path.name) == _spelled(form))


def _spelled(form: str) -> str:
    """Return what `_form` tells of a file that somebody names, by Unsloth's prefix or without."""
    return form.upper().removeprefix("UD-")


def _form(name: str) -> str:
    found = _FORM.search(name)
    return found[1].upper() if found else ""


def _is_read(form: str) -> bool:
    """Tell whether files in a format can be built: `Q4_K_M` is a mixture of Q4_K and others."""
    from specrt_export.checkpoint.gguf.blocks import FORMATS  # which needs what only building needs

    # Nothing is stored as Q8_K: Q8_K_XL is Q8_0 and floats.
    known = {"Q8_K", *(one.name for one in FORMATS.values())}
    return form in known or re.sub(r"_(XS|S|M|L|XL)$", "", form) in known


def _choice(model: str, names: Iterable[str]) -> str:
    forms = sorted(filter(_is_read, {_form(name) for name in names}))
    return f"there is {', '.join(f'{model}:{form}' for form in forms) or 'none that is'}"


@contextmanager
def explained(name: str, revision: str) -> Iterator[None]:
    """Say in one line what the hub, the network or the disk refused, and what to do about it."""
    try:
        from huggingface_hub import errors
    except ImportError as error:
        raise CheckpointError(
            f"fetching {name} from the hub needs huggingface_hub: `pip install huggingface_hub`"
        ) from error
    # The root of what the hub's HTTP library raises, whichever library that is.
    network = errors.HTTPError  # type: ignore[attr-defined]
    try:
        yield
    except (network, ValueError, OSError) as error:  # a name or an address that is none, too
        at = "" if revision == MAIN else f" at revision {revision!r}"
        raise CheckpointError(
            f"fetching {name} from the hub{at} failed: {_remedy(name, error)} ({reason_of(error)})"
        ) from error


def _is_unreachable(error: Exception) -> bool:
    """Tell whether no hub answered, or one that is out of order."""
    response = getattr(error, "response", None)
    return response is None or response.status_code >= 500


def _remedy(name: str, error: Exception) -> str:
    from huggingface_hub import errors

    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and it is not whole in the cache; unset it, or fetch before"
    if isinstance(error, errors.GatedRepoError):
        from huggingface_hub import get_token

        then = "wait until access is granted" if get_token() else "`hf auth login`, or set HF_TOKEN"
        return f"access is gated: accept its terms at {endpoint()}/{name}, then {then}"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the model has no such revision: give a branch, a tag or a commit of it"
    if isinstance(error, errors.RepositoryNotFoundError):
        near = get_close_matches(name, {*ready_hub_names(), *cached_models()} - {name}, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        return f"no hub model has this name, or it is private (`hf auth login`){meant}"
    if status in (401, 403):
        return "the token is refused: `hf auth login` again, or correct HF_TOKEN"
    if status == 429:
        asked = _asked_wait(response)
        return f"the hub asks to wait {asked:.0f} s; try again then, `hf auth login` allows more"
    if getattr(error, "errno", None) is not None and not isinstance(error, ConnectionError):
        return f"free room at {cache()}, or name another place with HF_HOME"
    return f"check the network and HF_ENDPOINT ({endpoint()}), then the name"
