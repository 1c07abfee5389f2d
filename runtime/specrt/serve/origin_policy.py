"""Which web pages may use a server: a browser that reaches it sends it requests of any page.

No page can forge two headers. `Host` is the name in the page's own address where a stranger made
that name point here (DNS rebinding). `Origin` names the page that sends a request elsewhere.

Source: cross-origin protection as in Go's net/http (filippo.io/csrf); hosts as ollama has them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from ipaddress import ip_address

ANY = "*"

_SAFE = ("GET", "HEAD")
"""Methods that run nothing; without CORS headers no other page reads their answers."""


class OriginPolicy:
    """Tells hosts and origins that may use a server from others."""

    def __init__(self, hosts: Collection[str], origins: Collection[str]) -> None:
        """`hosts` may be in addresses of the server, `origins` are of pages elsewhere."""
        self._hosts = {host.lower() for host in hosts}
        self._origins = origins

    def refuses_host(self, host: str) -> str | None:
        """Return why a name is not one of this server; None if it is."""
        name = _without_port(host.lower()).removesuffix(".")
        if ANY in self._hosts or name in self._hosts or _is_local(name):
            return None
        return (
            f"{name[:80]!r} may be any web page's name for this server; --allow-host takes the "
            "names that it has"
        )

    def refuses_origin(self, method: str, headers: Mapping[bytes, bytes]) -> str | None:
        """Return why a page may not send this request; None if it may."""
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        page = "another site" if origin is None else origin.decode("latin-1")
        if method in _SAFE or ANY in self._origins or page in self._origins:
            return None
        if site is not None:
            own = site in (b"same-origin", b"none")
        else:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            there = page.lower().partition("://")[2]
            # A proxy may leave the port out.
            own = origin is None or (host != "" and host in (there, _without_port(there)))
        if own:
            return None
        return f"a page of {page[:80]!r} may not use this server; --allow-origin lets it"


def _without_port(host: str) -> str:
    return re.sub(r":\d*$", "", host)


def _is_local(name: str) -> bool:
    """Tell whether a name is an address, or one that no server of the public DNS answers for."""
    if re.fullmatch(r"[a-z0-9_-]+|.+\.localhost", name):
        return True
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
