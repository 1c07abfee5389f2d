"""Text from byte-level tokens as they come: a token is its bytes, whatever stands beside it."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable


class ByteDetokenizer:
    """Joins the bytes of tokens and gives out whole characters.

    One lookup per token, where asking the tokenizer to decode costs more than a round does.
    `bytes_of(token)` is the token's bytes, empty for a special token; `known` keeps them.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], known: dict[int, bytes]) -> None:
        self._bytes_of = bytes_of
        self._known = known
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that became certain."""
        known = self._known
        try:
            data = b"".join([known[i] for i in ids])
        except KeyError:
            ids = list(ids)
            known.update({i: self._bytes_of(i) for i in ids if i not in known})
            data = b"".join([known[i] for i in ids])
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return what was held back; half a character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


def byte_symbols() -> dict[str, int]:
    """Return the byte each printable symbol of a byte-level vocabulary stands for.

    Source: Radford et al. 2019 (GPT-2): printable bytes stand for themselves, the others for the
        code points from 256 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    return {**symbols, **{chr(256 + at): byte for at, byte in enumerate(rest)}}


def token_bytes(token: str, symbols: dict[str, int]) -> bytes:
    """Return the bytes a token spells; one with other characters in it is its own text."""
    try:
        return bytes([symbols[c] for c in token])
    except KeyError:
        return token.encode()
