"""The tokenizer of a bundle, which reads control tokens in templates and not in contents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HubTokenizer
from tokenizers.models import WordLevel

from specrt.errors import BundleError, RequestError, SpecrtError, first_line, shortage
from specrt.text.control_tokens import is_control, read_tokenizer
from specrt.text.detokenizer import (
    CONTEXT,
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    read_spelling,
)
from specrt.text.encoder import Encoder, encoding_of, state_of
from specrt.text.traced_text import ChatPrompt


class Tokenizer:
    """The tokenizer of a bundle, read from its `tokenizer.json`."""

    def __init__(
        self, path: Path, bos_token_id: int | None = None, data: bytes | None = None
    ) -> None:
        """Read a file with its neighbours; `data` is what was read of it, or of a bundle's.

        A bundle's names all special tokens itself; see `read_tokenizer`.
        """
        try:
            found = read_tokenizer(path) if data is None else data
            self._tokenizer: Any = HubTokenizer.from_buffer(found)
        except SpecrtError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise BundleError(
                f"{path} is not a tokenizer: {first_line(error)}; "
                f"{shortage(error) or 'build the bundle again'}"
            ) from error
        self.sha256 = hashlib.sha256(found).hexdigest()
        """Of what was read."""
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.bos_token_id = bos_token_id
        self._spelling = read_spelling(state_of(self._tokenizer.decoder))
        self._bytes: dict[int, bytes] = {}
        self._encoders: dict[tuple[str, ...] | None, Encoder] = {}

    @cached_property
    def size(self) -> int:
        """The largest id the tokenizer knows, plus one; ids may be sparse."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def spells(self) -> bool:
        """Whether each token stands for bytes, whatever stands next to it."""
        return self._spelling is not None

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that are not text."""
        return frozenset(self._controls)

    @cached_property
    def _controls(self) -> dict[int, str]:
        """The names of special tokens."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.special}

    def control_name(self, token: int) -> str:
        """Return the name of a special token; empty for others."""
        return self._controls.get(token, "")

    def to_json(self) -> str:
        """Return what a `tokenizer.json` would hold."""
        return str(self._tokenizer.to_str())

    def encode(
        self, text: str, *, special: bool = True, parse_special: bool = True, behind: int = 0
    ) -> list[int]:
        """Return the ids of a prompt, or of what is `behind` so many of its characters.

        `special` adds the tokenizer's own special tokens. The text of a control token becomes that
        token with `parse_special`, and is text like any other without; in a `ChatPrompt` those of
        the template become tokens and those of contents do not, and no special tokens are added.
        An empty prompt is the BOS token alone.
        Raises: RequestError for an empty prompt where there is no BOS token, and for a text that
            is not valid Unicode.
        """
        try:
            text.encode()  # the library only says that half a surrogate pair is not a str
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode at character {error.start}: {error.reason}; "
                "pass text decoded as UTF-8"
            ) from None
        encoder = self._encoder(text)
        if not parse_special:
            ids = encoder.plain(text[behind:], "middle" if behind else "start")
            if special and not behind:
                ids = [*self._added[0], *ids, *self._added[1]]
        elif behind or isinstance(text, ChatPrompt):
            ids = encoder.parsed(text, behind)
        else:
            ids = [*encoding_of(self._tokenizer, text, special=special).ids]
        if ids or behind:
            return ids
        if self.bos_token_id is None:
            raise RequestError(
                "the prompt is empty and this model has no BOS token to start from; "
                "give at least one character"
            )
        return [self.bos_token_id]

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of text after other text, whatever it holds.

        A name that can only be spelled as a control token is one.
        """
        encoder = self._encoder("")
        try:
            return encoder.plain(text, "middle")
        except RequestError:
            return [*encoding_of(self._tokenizer, text).ids]

    def _encoder(self, text: str) -> Encoder:
        """Return what reads a text; a template's prompt may have more control tokens."""
        template = text.literals if isinstance(text, ChatPrompt) else None
        made = self._encoders.get(template)
        if made is None:
            added = self._tokenizer.get_added_tokens_decoder().items()
            names = {i: token.content for i, token in added}
            more = {i: name for i, name in names.items() if is_control(name, template or ())}
            made = Encoder(self._tokenizer, more | self._controls)
            self._encoders[template] = made
        return made

    def fewest(self, text: str) -> int:
        """Return how many tokens a text has at least, told by its length; 0 where that tells none.

        To tokenize a text of megabytes takes seconds, and hundreds of bytes for each of its own.
        """
        return len(text) // self._longest if self._longest else 0

    @cached_property
    def _longest(self) -> int:
        """The most characters that become one token; 0 where there is no bound."""
        state = json.loads(self.to_json())
        first, model = state["pre_tokenizer"] or {}, state["model"]
        parts = first.get("pretokenizers", [first])
        kept = all(
            part.get("type") in ("ByteLevel", "Digits") or part.get("behavior") == "Isolated"
            for part in parts
        )
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        whole = (
            kept
            and any(part.get("type") == "ByteLevel" for part in parts)
            and sum(len(word) == 1 for word in vocabulary) >= _BYTES  # else some are dropped
            and not any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
        )
        normalizer = (state["normalizer"] or {}).get("type")
        if not whole or model["type"] != "BPE" or normalizer not in (None, "NFC"):
            return 0
        return max(map(len, vocabulary)) * (1 if normalizer is None else _COMPOSED)

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before a text, and after it."""
        encoding = self._tokenizer.post_process(_one_token(), add_special_tokens=True)
        pairs = list(zip(encoding.ids, encoding.special_tokens_mask, strict=True))
        before = [token for token, _ in takewhile(lambda pair: pair[1], pairs)]
        after = [token for token, _ in takewhile(lambda pair: pair[1], reversed(pairs))]
        return before, after[::-1]

    def decode(self, ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """Return the text that ids add after others, special tokens left out."""
        if self._spelling is None and not before:
            return self._decoded([*filter(self._is_text, ids)])
        detokenizer = self.detokenizer(before)
        return detokenizer.push(ids) + detokenizer.finish()

    def name(self, token: int) -> str | None:
        """Return what the file calls a token, control tokens too; None for an unknown id."""
        found: str | None = self._tokenizer.id_to_token(token)
        return found

    def piece(self, token: int) -> str:
        """Return the text of a token after others; parts of characters are U+FFFD."""
        if self._spelling is None:
            return self.decode([token], before=[token])
        return self._bytes_of(token).decode(errors="replace")

    def text_of(self, token: int) -> str | None:
        """Return the text of a token after others; None for bytes that are not text."""
        try:
            return self.bytes_of(token).decode()
        except UnicodeDecodeError:
            return None

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token after others; none for special tokens."""
        return self.piece(token).encode() if self._spelling is None else self._bytes_of(token)

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """Return what turns the tokens of one completion of a prompt into text.

        Its text is what they add to the prompt's: a space at the beginning is dropped where no
        text stands before, and half a character is completed.
        """
        if self._spelling is None:
            known = [*islice(filter(self._is_text, reversed(prompt)), CONTEXT)]
            return WindowDetokenizer(self._decoded, known[::-1], self._is_text)
        before = b""
        for token in reversed(prompt):
            if len(before) >= _LONGEST_CHARACTER:
                break
            before = self._bytes_of(token) + before
        first = self._first_bytes if self._spelling.drops_space else None
        return ByteDetokenizer(self._bytes_of, self._bytes, first, before)

    def _bytes_of(self, token: int, *, first: bool = False) -> bytes:
        name = None if token in self.special else self._tokenizer.id_to_token(token)
        assert self._spelling is not None, "another decoder spells no bytes"
        return b"" if name is None else self._spelling.bytes_of(name, first=first)

    def _is_text(self, token: int) -> bool:
        return token not in self.special and self._tokenizer.id_to_token(token) is not None

    def _first_bytes(self, token: int) -> bytes:
        return self._bytes_of(token, first=True)

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


_LONGEST_CHARACTER = 4
"""Bytes of UTF-8."""


_BYTES = 256

_COMPOSED = 4
"""Most characters that NFC makes one of."""


def _one_token() -> Any:
    """Return an encoding of one token, which no special tokens stand beside."""
    return HubTokenizer(WordLevel({"": 0}, "")).encode("a")
