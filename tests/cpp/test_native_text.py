"""The native runtime's text: characters from bytes as they come, and where a text must end."""

from __future__ import annotations

import codecs
import json
import random
from pathlib import Path
from typing import Any

import pytest

from cpp.conftest import BuildLibrary, run_check
from specrt.generator import Generator
from specrt.text import StopStrings

BYTES = (0x41, 0x7F, 0x80, 0xBF, 0xC0, 0xC2, 0xC3, 0xA9, 0xE0, 0xA0, 0x9F, 0xED, 0xEF, 0xBB, 0xF0,
         0x90, 0x8F, 0xF4, 0xF5, 0xFF, 0x00)  # fmt: skip
"""Beginnings, middles and limits of characters, and what begins none."""
WORDS = ("a", "b", "é", "日", "ab", "\n", "😀", "aa")


def decoded(chance: random.Random) -> dict[str, Any]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    pieces = [
        [chance.choice(BYTES) for _ in range(chance.randrange(4))]
        for _ in range(chance.randrange(1, 6))
    ]
    if chance.random() < 0.3:
        whole = "".join(chance.choice(WORDS) for _ in range(5)).encode()
        at = chance.randrange(len(whole))
        pieces = [[*whole[:at]], [*whole[at:]]]
    texts = [decoder.decode(bytes(piece)) for piece in pieces]
    texts.append(decoder.decode(b"", final=True))
    every = bytes(byte for piece in pieces for byte in piece)
    try:
        every.decode()
        valid = True
    except UnicodeDecodeError:
        valid = False
    return {"pieces": pieces, "texts": texts, "valid": valid}


def stopped(chance: random.Random) -> dict[str, Any]:
    def some(most: int) -> str:
        return "".join(chance.choice(WORDS) for _ in range(chance.randrange(1, most)))

    stops = [some(4) for _ in range(chance.randrange(3))]
    finder = StopStrings(tuple(stops))
    pieces = [some(3) for _ in range(chance.randrange(1, 9))]
    shown = []
    for piece in pieces:
        text, met = finder.push(piece)
        shown.append(f"{text}|{met or ''}")
        if met:
            return {"stops": stops, "pieces": pieces, "shown": shown}
    return {"stops": stops, "pieces": pieces, "shown": [*shown, finder.finish()]}


def test_text_is_the_python_runtimes(built_library: BuildLibrary, tmp_path: Path) -> None:
    chance = random.Random(7)
    vectors = tmp_path / "text.json"
    vectors.write_text(
        json.dumps(
            {
                "utf8": [decoded(chance) for _ in range(4000)],
                "stops": [stopped(chance) for _ in range(4000)],
            }
        )
    )
    run_check(built_library("native", sanitize=True), "text", vectors)


ODD = (
    "a", "b", " ", "  ", "\n", "\t", "\r\n", "é", "e\u0301", "日", "😀", "👩\u200d👧", "def ",
    "x=", "_", "1", "23", "'s", "'LL", "\u00a0", "\u3000", "\u200b", "\ufb01", "ß", "\ufeff",
    "\x7f", "\x02", "\u0627", "ह", "…", "<", ">", "</", "\u2028", "Ⅷ", "²", "<|endoftext|>",
)  # fmt: skip


def test_texts_are_encoded_as_in_python(
    built_library: BuildLibrary, codelet: Path, generator: Generator, tmp_path: Path
) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai")
    chance = random.Random(3)
    texts = ["".join(chance.choices(ODD, k=chance.randrange(1, 14))) for _ in range(2000)]
    vectors = tmp_path / "encode.json"
    vectors.write_text(
        json.dumps(
            {
                "bundle": str(codelet),
                "tokenizer": str(Path(genai.__file__).parent / "libonnxruntime-genai.so"),
                "texts": [{"text": t, "ids": generator.tokenizer.encode(t)} for t in texts],
            }
        )
    )
    run_check(built_library("native", sanitize=True), "encode", vectors)
