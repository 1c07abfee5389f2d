"""The frames between a device that drafts and a server that verifies; docs/remote.md has the table.

Text frames are JSON objects with a `type`. Binary frames are little-endian: `ProposalFrame` goes
up, `VerdictFrame` comes down. Only tokens cross.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Any

from specrt.errors import LinkError

PROTOCOL = 1

PATH = "/v1/verify"
"""Where a server has the WebSocket."""

MOST_DRAFTED = 255
"""Tokens in one binary frame."""

REASON_BYTES = 123
"""What a WebSocket's close frame has room for."""


class Close(IntEnum):
    """Why a server closes a WebSocket; docs/remote.md tells what becomes of the session."""

    DONE = 1000
    GONE = 1001
    TOO_BIG = 1009
    FAILED = 1011
    RESTARTS = 1012
    REFUSED = 4400
    UNKNOWN_SESSION = 4404
    IDLE = 4408
    TAKEN_OVER = 4409
    OTHER_TOKENIZER = 4412
    FULL = 4429


class Finish(IntEnum):
    """Whether, and how, a text ended."""

    OPEN = 0
    STOP = 1
    LENGTH = 2

    @classmethod
    def of(cls, reason: str | None) -> Finish:
        """Return what a finish reason is on the wire."""
        return {None: cls.OPEN, "stop": cls.STOP}.get(reason, cls.LENGTH)


class FrameError(LinkError):
    """A frame that is none of the protocol, or says what cannot be; `code` closes the WebSocket."""

    def __init__(self, message: str, code: int = Close.REFUSED) -> None:
        super().__init__(message)
        self.code = code


_PROPOSE = Struct("<IIHB")
_VERIFIED = Struct("<IIIBBB")


def _ids(frame: bytes, header: Struct, count: int, name: str) -> tuple[int, ...]:
    """Return the ids after a header.

    Raises: FrameError where there are not as many as it says.
    """
    expected = header.size + 4 * count
    if len(frame) != expected:
        raise FrameError(
            f"a `{name}` frame of {len(frame)} bytes says that it has {count} ids; expected "
            f"{expected} bytes"
        )
    return Struct(f"<{count}I").unpack_from(frame, header.size)


def _short(frame: bytes, header: Struct, name: str) -> FrameError | None:
    if len(frame) >= header.size:
        return None
    return FrameError(
        f"a `{name}` frame has {len(frame)} bytes; expected {header.size} and 4 for each id"
    )


@dataclass(frozen=True)
class ProposalFrame:
    """What a device drafted after the first `base` tokens of prompt and text."""

    round: int
    base: int
    want: int
    """With no ids: how many tokens the server decodes alone, each sent as it comes."""
    ids: Sequence[int] = ()

    MOST_BYTES = _PROPOSE.size + 4 * MOST_DRAFTED

    def pack(self) -> bytes:
        """Return the frame."""
        ids = self.ids
        return _PROPOSE.pack(self.round, self.base, self.want, len(ids)) + Struct(
            f"<{len(ids)}I"
        ).pack(*ids)

    @classmethod
    def unpack(cls, frame: bytes) -> ProposalFrame:
        """Read a frame.

        Raises: FrameError.
        """
        if error := _short(frame, _PROPOSE, "propose"):
            raise error
        number, base, want, count = _PROPOSE.unpack_from(frame)
        return cls(number, base, want, _ids(frame, _PROPOSE, count, "propose"))


@dataclass(frozen=True)
class VerdictFrame:
    """What the text has after its first `base` tokens: `accepted` proposed ids, then `ids`."""

    round: int
    """Of the proposal it answers; 0 answers a `hello`."""
    base: int
    verify_us: int
    """What the server took, waiting for a row included."""
    accepted: int
    finish: int
    ids: Sequence[int] = ()

    def pack(self) -> bytes:
        """Return the frame."""
        ids = self.ids
        header = _VERIFIED.pack(
            self.round, self.base, min(self.verify_us, 0xFFFFFFFF), self.accepted, self.finish,
            len(ids),
        )  # fmt: skip
        return header + Struct(f"<{len(ids)}I").pack(*ids)

    @classmethod
    def unpack(cls, frame: bytes) -> VerdictFrame:
        """Read a frame.

        Raises: FrameError.
        """
        if error := _short(frame, _VERIFIED, "verdict"):
            raise error
        number, base, verify_us, accepted, finish, count = _VERIFIED.unpack_from(frame)
        ids = _ids(frame, _VERIFIED, count, "verdict")
        return cls(number, base, verify_us, accepted, finish, ids)


def pack_message(kind: str, **fields: Any) -> str:
    """Return a text frame."""
    return json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))


def read_message(text: str) -> dict[str, Any]:
    """Read a text frame.

    Raises: FrameError for what is not JSON object with a `type`, or has half of a surrogate pair.
    """
    try:
        message = json.loads(text)
        if "\\u" in text:  # no frame can hold such a half again
            pack_message("", message=message).encode()
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("; use sys.")[0]  # a number of 4,300 digits
        raise FrameError(f"a text frame is not JSON ({reason}); expected an object") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise FrameError("a text frame has no `type`; expected a JSON object with one")
    return message


def field_of(message: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Return a field of a message, of one type, or the default where it is missing or null.

    Raises: FrameError for one of another type.
    """
    value = message.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise FrameError(
            f"`{name}` of `{message['type']}` is of type {type(value).__name__}; expected "
            f"{kind.__name__}"
        )
    return value


def ids_of(message: Mapping[str, Any], name: str, vocabulary: int) -> list[int]:
    """Return the token ids of a message, none where they are missing.

    Raises: FrameError for what is not an id.
    """
    ids: list[Any] = field_of(message, name, list, [])
    for token in ids:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise FrameError(
                f"`{name}` holds {str(token)[:20]!r}; expected token ids, 0 to {vocabulary - 1}"
            )
    return ids


def close_reason(message: str) -> str:
    """Return as much of a message as a close frame holds; an `error` frame before it has it all."""
    return message.encode()[:REASON_BYTES].decode(errors="ignore")


def other_tokenizer(server: str, device: object) -> str:
    """Return why two tokenizers do not go together."""
    return (
        f"the server's tokenizer has the sha256 {server} and the device's {device}; expected the "
        "same file: take a draft bundle built for the server's target"
    )
