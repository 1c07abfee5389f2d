"""Parts of the native library, held to what the Python runtime answers."""

from __future__ import annotations

import codecs
import hashlib
import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models

from cpp import drafting, sampling
from cpp.conftest import NativeCalls, onnxruntime_library
from cpp.native_calls import Case, Document
from specrt.bundle import Bundle
from specrt.engine.backends import open_engine
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.protocol import Feed, PackedEngine
from specrt.generator import Generator
from specrt.text.detokenizer import StopStrings

# ---- text ----

BYTES = bytes.fromhex("417F80BFC0C2C3A9E0A09FEDEFBBF0908FF4F5FF00")
"""Beginnings, middles and limits of characters, and what begins none."""
WORDS = ("a", "b", "é", "日", "ab", "\n", "😀", "aa")
ODD = (
    "a", "b", " ", "  ", "\n", "\t", "\r\n", "é", "e\u0301", "日", "😀", "👩\u200d👧", "def ",
    "x=", "_", "1", "23", "'s", "'LL", "\u00a0", "\u3000", "\u200b", "\ufb01", "ß", "\ufeff",
    "\x7f", "\x02", "\u0627", "ह", "…", "<", ">", "</", "\u2028", "Ⅷ", "²", "<|endoftext|>",
)  # fmt: skip


def decoded() -> Iterator[Case]:
    """Yield pieces of bytes, and the text that is certain with each."""
    chance = random.Random(7)
    for _ in range(1000):
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        pieces = [
            bytes(chance.choices(BYTES, k=chance.randrange(4)))
            for _ in range(chance.randrange(1, 6))
        ]
        if chance.random() < 0.3:
            whole = "".join(chance.choices(WORDS, k=5)).encode()
            at = chance.randrange(len(whole))
            pieces = [whole[:at], whole[at:]]
        texts = [*map(decoder.decode, pieces), decoder.decode(b"", final=True)]
        valid = "\ufffd" not in b"".join(pieces).decode(errors="replace")
        call = {"call": "decoded", "pieces": [piece.hex() for piece in pieces]}
        yield call, {"texts": texts, "valid": valid}


def stopped() -> Iterator[Case]:
    """Yield pieces of text, what may be shown with each, and what ended it or was held back."""
    chance = random.Random(8)
    for _ in range(1000):
        stops, pieces = (
            ["".join(chance.choices(WORDS, k=chance.randrange(1, most))) for _ in range(count)]
            for count, most in ((chance.randrange(3), 4), (chance.randrange(1, 9), 3))
        )
        finder, shown, met = StopStrings(tuple(stops)), [], None
        for piece in pieces:
            text, met = finder.push(piece)
            shown.append(text)
            if met is not None:
                break
        shown.append(finder.finish() if met is None else met)
        yield {"call": "stopped", "stops": stops, "pieces": pieces}, shown


EXACT: tuple[Callable[[], Iterator[Case]], ...] = (decoded, stopped, sampling.rules, drafting.built)
ROUNDED = (sampling.sampling, sampling.verify, sampling.logprobs)
"""What goes through an exponential or a logarithm, which libraries round in ways of their own."""


@pytest.mark.parametrize("cases", [*EXACT, *ROUNDED])
def test_answers_are_those_of_python(
    native_calls: NativeCalls, cases: Callable[[], Iterator[Case]]
) -> None:
    made = [*cases()]
    if cases is sampling.sampling:  # where rounding decides nothing can be compared
        assert len(made) > 1000
    native_calls.check(made, within=1e-12 if cases in ROUNDED else 0.0)


def test_a_difference_is_found(native_calls: NativeCalls) -> None:
    made = [*drafting.built()]
    made[7][1][-1] += 1
    with pytest.raises(AssertionError, match=f"1 of {len(made)}"):
        native_calls.check(made)


PIECES = ("▁hello", "▁world", "▁", "▁▁", "a", "é", "日", "b▁c", " ", "▁<0x41>")
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS: dict[str, Any] = {
    "llama": decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence([*LLAMA]),
    "nested": decoders.Sequence([decoders.Sequence([*LLAMA]), decoders.Strip(" ", 1, 0)]),
    "t5": decoders.Metaspace(prepend_scheme="always"),
    "metaspace": decoders.Metaspace(prepend_scheme="never"),
}
FIRST_BYTE = 3
A = FIRST_BYTE + 256 + PIECES.index("a")


def sentencepiece(kind: str, folder: Path) -> HubTokenizer:
    """Write a tokenizer whose vocabulary is of bytes and a few pieces; return Python's of it."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    vocabulary = {name: token for token, name in enumerate(names)}
    made = HubTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = DECODERS[kind]
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.add_tokens(["<▁tool>"])
    made.save(str(folder / "tokenizer.json"))
    return made


def units(chance: random.Random, size: int, *, has_bytes: bool) -> list[list[int]]:
    """Return tokens, together where only all of them are characters."""
    more = [[FIRST_BYTE + byte for byte in word.encode()] for word in "aé日😀\n "]
    pieces = [[1], [2], *([FIRST_BYTE + 256 + at] for at in range(len(PIECES) + 1))]
    return chance.choices([*pieces, *(more if has_bytes else [])], k=size)


@pytest.mark.parametrize("kind", DECODERS)
def test_a_completion_is_the_text_of_all_tokens_less_that_of_the_prompt(
    native_calls: NativeCalls, tmp_path: Path, kind: str
) -> None:
    tokenizer, chance, cases = sentencepiece(kind, tmp_path), random.Random(kind), []
    for _ in range(300):
        whole = units(chance, chance.randrange(1, 9), has_bytes=kind not in ("t5", "metaspace"))
        ends = [sum(map(len, whole[: at + 1])) for at in range(len(whole))]
        ids = [token for unit in whole for token in unit]
        # What is certain once so many tokens are there: the text of those that make characters.
        certain = [
            tokenizer.decode(ids[: max((end for end in ends if end <= size), default=0)])
            for size in range(len(ids) + 1)
        ]
        at = chance.randrange(len(ids))
        sizes = sorted({at, *(chance.randrange(at, len(ids)) for _ in range(3)), len(ids)})
        pieces = [ids[one:other] for one, other in pairwise(sizes)]
        texts = [certain[other].removeprefix(certain[one]) for one, other in pairwise(sizes)]
        call = {"call": "detokenized", "folder": str(tmp_path), "prompt": ids[:at]}
        piece = tokenizer.decode([A, ids[-1]]).removeprefix("a")
        cases.append(({**call, "pieces": pieces}, [*texts, "", certain[-1], piece]))
    native_calls.check(cases)


def test_texts_are_encoded_as_in_python(
    native_calls: NativeCalls, codelet: Path, generator: Generator
) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai")
    chance = random.Random(3)
    texts = ["".join(chance.choices(ODD, k=chance.randrange(1, 14))) for _ in range(2000)]
    library = Path(genai.__file__).parent / "libonnxruntime-genai.so"
    call = {"call": "encoded", "bundle": str(codelet), "tokenizer": str(library), "texts": texts}
    expected = [generator.tokenizer.encode(text) for text in texts]
    native_calls.check([({**call, "parse_special": True}, expected)])
    (plain,) = native_calls([{**call, "parse_special": False}])
    for text, ids, parsed in zip(texts, plain, expected, strict=True):
        assert generator.tokenizer.special.isdisjoint(ids)
        assert generator.tokenizer.decode(ids) == text
        assert (ids == parsed) == ("<|endoftext|>" not in text)


# ---- passes ----


def _passes(bundle: Bundle, role: str) -> tuple[list[Document], list[Any]]:
    """Run widths up to nine, going back, and wide ones; return them, and what each left."""
    manifest = bundle.manifest
    model = getattr(manifest, role)
    engine = open_engine(EngineSpec.of(bundle, model))
    rng, passes, left = np.random.default_rng(6), [], []
    widest = min(engine.max_width, 33)
    plan = [(widest, 0, 1)]
    plan += [(w, widest + w, r) for w in range(1, min(9, widest) + 1) for r in (w, 1)]
    plan += [(min(5, widest), 9, 3), (1, 4, 1), (widest, 2, 2)]
    for width, start, rows in plan:
        tokens = rng.integers(0, model.geometry.vocab_size, width).tolist()
        if isinstance(engine, PackedEngine):
            output = engine.forward_rows([Feed(0, tokens, start, rows)])[0]
        else:
            output = engine.forward([tokens], start, rows)
        passes.append({"tokens": tokens, "start": start, "rows": rows})
        logits, sure = (
            None if values is None else hashlib.sha256(values.tobytes()).hexdigest()
            for values in (output.logits, output.confidence)
        )
        left.append({"argmax": output.argmax.ravel().tolist(), "logits": logits,
                     "confidence": sure})  # fmt: skip
    for width, start in ((engine.max_width + 1, 0), (1, engine.max_length), (0, 0)):
        passes.append({"tokens": [0] * width, "start": start, "rows": 1})
        left.append(5)  # SPECRT_ENGINE
    engine.close()
    return passes, left


@pytest.mark.parametrize("owns_process", [False, True])
def test_passes_leave_the_same_bits_as_in_python(
    native_calls: NativeCalls, codelet: Path, owns_process: bool
) -> None:
    bundle = Bundle.open(codelet)
    (target, left), (draft, left_by_draft) = (_passes(bundle, role) for role in ("target", "draft"))
    call = {
        "call": "passes", "bundle": str(codelet), "library": str(onnxruntime_library()),
        "owns_process": owns_process, "target": target, "draft": draft,
    }  # fmt: skip
    twice = [answer for answer in (*left, *left_by_draft) for _ in range(2)]
    native_calls.check([(call, twice)])
