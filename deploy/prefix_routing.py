"""Which replica takes a request: the one that likely holds its prefix, unless its queue is long.

Rendezvous hashing: each replica has a rank for each prefix, so that a replica that comes or goes
moves only the prefixes that it takes or leaves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

PREFIX_CHARS = 256
"""Characters that make a prefix."""
SPILL = 2
"""How much longer than the shortest queue that of the preferred replica has to be to lose it."""

_CHARS_PER_TOKEN = 4


def prefix_of(body: bytes, chars: int = PREFIX_CHARS) -> str:
    """Return the beginning of the prompt in a request's JSON; empty where there is none."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):  # HAProxy cuts bodies beyond its buffer
        return ""
    if not isinstance(given, dict):
        return ""
    prompt = given.get("prompt") or given.get("messages") or given.get("input") or ""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:chars]
    if not isinstance(prompt, list):
        return ""
    if all(isinstance(token, int) for token in prompt):
        return repr(prompt[: chars // _CHARS_PER_TOKEN])
    return "".join(_text_of(message) for message in prompt)[:chars]


def _text_of(message: Any) -> str:
    if not isinstance(message, dict):
        return str(message)
    return f"{message.get('role')}:{message.get('content')}\n"


def ranked(prefix: str, replicas: Mapping[str, int], spill: int = SPILL) -> list[str]:
    """Return the names of replicas, the best one first.

    `replicas` are the lengths of their queues. Without a prefix the shortest queue wins.
    """
    order = sorted(replicas, key=lambda name: _weight(prefix, name), reverse=True)
    shortest = sorted(order, key=replicas.__getitem__)  # stable: of equal ones the better hash
    if not (prefix and order) or replicas[order[0]] - replicas[shortest[0]] >= spill:
        return shortest
    return [order[0], *(name for name in shortest if name != order[0])]


def _weight(prefix: str, name: str) -> bytes:
    return blake2b(f"{name}\0{prefix}".encode(errors="replace"), digest_size=8).digest()
