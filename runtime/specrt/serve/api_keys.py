"""API keys: whose a request is, what each key may use, and the file they are read from."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import ceil
from pathlib import Path
from time import monotonic

from specrt.errors import RequestError, did_you_mean
from specrt.serve.admission import OverloadError
from specrt.text.prompt_file import read_text

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MINUTE_S = 60.0
_MOST = 10**12


@dataclass(frozen=True)
class KeyLimits:
    """What a key may use; None sets no bound."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and of generated text."""
    concurrency: int | None = None
    """Completions that run or wait at once."""


_LIMITS = tuple(field.name for field in fields(KeyLimits))


KEY_COUNTERS = {
    "key_requests": "Requests of a key that generate.",
    "key_requests_refused": "Requests above a limit of their key.",
    "key_prompt_tokens": "Tokens of a key's prompts.",
    "key_generation_tokens": "Tokens generated for a key.",
}


class TokenBucket:
    """What may be used in a minute; it fills evenly, and a debt is paid back first."""

    def __init__(self, per_minute: int | None) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute or 0)
        self._at = monotonic()

    def change(self, per_minute: int | None) -> None:
        """Allow more or less in a minute; what was used stays used."""
        self._fill()
        used = 0.0 if self.per_minute is None else self.per_minute - self._left
        self.per_minute, self._left = per_minute, (per_minute or 0) - used

    def take(self, count: int) -> None:
        """Use some of it, more than there is too."""
        self._fill()
        self._left -= count

    def wait_s(self) -> int:
        """Return in how many seconds there is some again; 0 where there is, or without a bound."""
        if self.per_minute is None:
            return 0
        self._fill()
        return ceil(max(0.0, 1 - self._left) * _MINUTE_S / self.per_minute)

    def _fill(self) -> None:
        now, most = monotonic(), float(self.per_minute or 0)
        self._left = min(most, self._left + (now - self._at) * most / _MINUTE_S)
        self._at = now


class ApiKey:
    """One client: its name, and what it uses. Several secrets may have one name."""

    def __init__(self, name: str, owner: str, limits: KeyLimits) -> None:
        self.name = name
        """For the log and the metrics."""
        self.owner = owner
        """Whose prefixes its requests share; empty for everyone's."""
        self.revoked = False
        """Whether no secret opens the server for it any more."""
        self.counts = dict.fromkeys(KEY_COUNTERS, 0)
        self._running = 0
        self.limits = limits
        """What it may use."""
        self._requests = TokenBucket(limits.requests_per_minute)
        self._tokens = TokenBucket(limits.tokens_per_minute)

    def change(self, limits: KeyLimits) -> None:
        """Set other limits; what was used stays used."""
        self.limits = limits
        self._requests.change(limits.requests_per_minute)
        self._tokens.change(limits.tokens_per_minute)

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Hold so many completions.

        Raises: OverloadError where a limit is used up; RequestError for more at once than it has.
        """
        try:
            self._require(count)
        except OverloadError:
            self.counts["key_requests_refused"] += 1
            raise
        self.counts["key_requests"] += 1
        self._requests.take(1)
        self._running += count
        try:
            yield
        finally:
            self._running -= count

    def use(self, *, prompt: int = 0, generated: int = 0) -> None:
        """Count tokens that were read or generated."""
        self.counts["key_prompt_tokens"] += prompt
        self.counts["key_generation_tokens"] += generated
        self._tokens.take(prompt + generated)

    def _require(self, count: int) -> None:
        most = self.limits.concurrency
        if most is not None and count > most:
            raise RequestError(
                f"the request has {count} completions, and the key {self.name!r} has {most} at "
                "once; send fewer prompts, or a smaller n"
            )
        if most is not None and self._running + count > most:
            raise self._exceeded(f"has {self._running} of {most} completions at once", 1)
        for budget, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if wait_s := budget.wait_s():
                raise self._exceeded(f"has used its {budget.per_minute} {what} of a minute", wait_s)

    def _exceeded(self, what: str, wait_s: int) -> OverloadError:
        return OverloadError(f"the key {self.name!r} {what}; try again later", wait_s)


class ApiKeys:
    """The keys that open a server; without any it is open to all. For one event loop."""

    def __init__(
        self, lines: Sequence[str] = (), file: Path | None = None, *, share_prefixes: bool = False
    ) -> None:
        """`lines` are as in the file. With `share_prefixes` no key owns its prefixes.

        Raises: RequestError; see `read`.
        """
        self._lines = lines
        self.file = file
        self._share_prefixes = share_prefixes
        self._by_secret: dict[bytes, ApiKey] = {}
        self._clients: dict[str, ApiKey] = {}
        """By their names, or by a hash of the secret."""
        self._unnamed = 0
        """How many keys without a name there were."""
        self.read()

    def __len__(self) -> int:
        """Return how many clients have a key."""
        return len(self._clients)

    def __iter__(self) -> Iterator[ApiKey]:
        """Go through all clients."""
        return iter([*self._clients.values()])

    def read(self) -> None:
        """Read the file again. What a key has used is kept; requests of one that is gone go on.

        Raises: RequestError for a file that cannot be used: then the keys are as before.
        """
        by_secret: dict[bytes, ApiKey] = {}
        clients: dict[str, ApiKey] = {}
        limits: dict[str, KeyLimits] = {}
        for place, line in self._read_lines():
            secret, name, given = _parse(place, line)
            client = name or hashlib.sha256(secret).hexdigest()
            if secret in by_secret:
                raise RequestError(f"{place} has a key that an earlier one has; leave it out")
            if limits.setdefault(client, given) != given:
                raise RequestError(
                    f"{place} gives {name!r} other limits than an earlier key of that name; give "
                    "both the same"
                )
            if client not in clients:
                clients[client] = self._clients.get(client) or self._new(name, client, given)
            by_secret[secret] = clients[client]
        for client, key in self._clients.items():
            key.revoked = client not in clients
        for client, key in clients.items():
            key.change(limits[client])
        self._by_secret, self._clients = by_secret, clients

    def _new(self, name: str, client: str, limits: KeyLimits) -> ApiKey:
        self._unnamed += not name
        owner = "" if self._share_prefixes else client
        return ApiKey(name or f"key {self._unnamed}", owner, limits)

    def find(self, given: bytes) -> ApiKey | None:
        """Return the key of a secret; the time it takes does not tell how much of it is right."""
        known = [
            key for secret, key in self._by_secret.items() if hmac.compare_digest(given, secret)
        ]
        return known[0] if known else None

    def _read_lines(self) -> Iterator[tuple[str, str]]:
        """Yield where each key is, and its line."""
        file, count = self.file, 0
        for number, line in enumerate(read_text(file).splitlines() if file else (), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                count += 1
                yield f"{file}, line {number},", line
        if file is not None and not count:
            raise RequestError(f"{file} holds no key; expected one a line")
        for line in self._lines:
            yield "an API key", line


def _parse(place: str, line: str) -> tuple[bytes, str, KeyLimits]:
    """Return the secret, the name and the limits of a line.

    Raises: RequestError, which does not tell the secret.
    """
    secret, *options = line.split() or [""]
    if not secret:
        raise RequestError(f"{place} is empty; leave it out, or give one")
    name, limits = "", dict[str, int]()
    for option in options:
        field, is_pair, value = option.partition("=")
        if not is_pair:
            raise RequestError(f"{place} has blanks, and no key has any; write {_FORM}")
        if field in limits or (field == "name" and name):
            raise RequestError(f"{place} has {field} twice; leave one out")
        if field == "name" and _NAME.fullmatch(value):
            name = value
        elif field in _LIMITS and value.isascii() and value.isdigit() and 0 < int(value) <= _MOST:
            limits[field] = int(value)
        elif field in _LIMITS or field == "name":
            expected = "a whole number from 1" if field in _LIMITS else "letters, digits, . _ and -"
            raise RequestError(f"{place} has {field} {value[:80]!r}; expected {expected}")
        else:
            known = ("name", *_LIMITS)
            raise RequestError(f"{place} has the option {field[:80]!r}{did_you_mean(field, known)}")
    return secret.encode(), name, KeyLimits(**limits)


_FORM = (
    "KEY name=NAME requests_per_minute=N tokens_per_minute=N concurrency=N, all but KEY optional"
)
