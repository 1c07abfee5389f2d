"""Read what was built out of the builder's messages and the first bytes of the plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from specrt.engines.tensorrt.journal import Message
from specrt.engines.tensorrt.record import Compiled, Kernel, Profile

_KERNEL = re.compile(
    r"^Name: (.*?)_myl(\d+)_\d+, LayerType: (\w+), .*?TacticName: ([^,]*?), StreamId", re.M
)
_CONSTRUCTING = re.compile(r"Constructing optimization profile number (\d+) ")
_ACTIVATION = re.compile(r"Total Activation Memory: (\d+) bytes")
_WEIGHTS = re.compile(r"Total Weights Memory: (\d+) bytes")

_NO_KERNELS = ("shape_call", "signal", "wait")
"""Kinds of entries that launch nothing: sizes, and order between streams."""
_STUB = "__myelin_CASK_STUB"
"""The tactic of products that are chosen on the device; their name says what they are."""

_MASK_AT = 32
_CAPABILITIES = {0x01: "7.5", 0x02: "8.0", 0x04: "8.6", 0x08: "8.9", 0x10: "12.0", 0x20: "12.1"}
"""Bits of the mask in the head of a plan of tensorrt-rtx (seen with 1.7.1)."""

_NAME_MOST = 120
_MESSAGES_MOST = 16


def compiled(messages: Iterable[Message], profiles: Iterable[Profile]) -> tuple[Compiled, ...]:
    """Return what became of each profile; without kernels where the library listed none."""
    listed = list(messages)
    kernels: dict[int, Counter[tuple[str, str]]] = {}
    for number, name, kind in _kernels(listed):
        kernels.setdefault(number, Counter())[name, kind] += 1
    activation = dict(_activation(listed))
    return tuple(
        Compiled(
            profile.name,
            activation.get(number, 0),
            tuple(
                Kernel(name, kind, count)
                for (name, kind), count in kernels.get(number, Counter()).items()
            ),
        )
        for number, profile in enumerate(profiles)
    )


def _kernels(messages: Iterable[Message]) -> Iterator[tuple[int, str, str]]:
    for message in messages:
        if "TacticName: " not in message.text:
            continue
        for name, number, kind, tactic in _KERNEL.findall(message.text):
            if kind not in _NO_KERNELS:
                yield int(number), _label(name, tactic), kind


def _label(name: str, tactic: str) -> str:
    """Return a name that is the same for the same kernel in another layer or another build."""
    if tactic and tactic != _STUB:
        return re.sub(r"_0x[0-9a-f]+", "", tactic)[:_NAME_MOST]
    plain = re.sub(r" \[profile \d+\]|_U\d+", "", name)
    return re.sub(r"\d+", "#", plain)[:_NAME_MOST]


def _activation(messages: Iterable[Message]) -> Iterator[tuple[int, int]]:
    number = 0
    for message in messages:
        begun, total = _CONSTRUCTING.search(message.text), _ACTIVATION.search(message.text)
        number = int(begun[1]) if begun else number
        if total:
            yield number, int(total[1])


def weight_bytes(messages: Iterable[Message]) -> int:
    """Return the bytes of weights that the plan takes on the device; 0 where it was not said."""
    found = (_WEIGHTS.search(message.text) for message in messages)
    return max((int(match[1]) for match in found if match), default=0)


def highlights(messages: Iterable[Message]) -> tuple[str, ...]:
    """Return the library's distinct warnings, but for those that say what is always so."""
    lines = dict.fromkeys(
        printable(message.text)
        for message in messages
        if message.severity == "warning" and "has Int64 binding" not in message.text
    )
    return tuple(lines)[:_MESSAGES_MOST]


def printable(text: str, most: int = 240) -> str:
    """Return the first line of a message, as a record can hold it."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return "".join(mark if mark.isprintable() else " " for mark in line.strip())[:most]


@dataclass(frozen=True)
class Header:
    """What the first bytes of a plan say."""

    magic: bytes
    capabilities: tuple[str, ...]
    """Those a plan of tensorrt-rtx is for; empty for other plans."""


def read_header(head: bytes) -> Header:
    """Read the first bytes of a plan, 64 of them or more."""
    magic = head[:4]
    if magic != b"vtrt" or len(head) <= _MASK_AT:
        return Header(magic, ())
    mask = head[_MASK_AT]
    return Header(magic, tuple(name for bit, name in _CAPABILITIES.items() if mask & bit))
