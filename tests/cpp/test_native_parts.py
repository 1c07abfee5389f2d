"""Parts of the native library, held to what the Python runtime answers."""

from __future__ import annotations

import codecs
import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as HubTokenizer

from cpp import drafting, sampling
from cpp.conftest import NativeCalls, onnxruntime_library
from cpp.native_calls import Case, Document
from specrt.bundle import Bundle
from specrt.engine.backends import open_engine
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.protocol import Feed, PackedEngine
from specrt.generator import Generator
from specrt.text.detokenizer import StopStrings
from specrt.text.tokenizer import Tokenizer
from support.toy import STYLES, Style
from support.toy import sentencepiece as written

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


def many_stops() -> Iterator[Case]:
    """Yield a text and more stop strings than can be looked for one by one."""
    stops = [f"{number}." for number in range(10**5)]
    pieces = [f"{number:x} " for number in range(3000)]
    call = {"call": "stopped", "stops": stops, "pieces": [*pieces, "4", "2."]}
    yield call, [*pieces, "", "", "42."]


def windowed() -> Iterator[Case]:
    """Yield tokens that a decoder puts spaces between, also after those of a prompt."""
    chance = random.Random(9)
    for _ in range(100):
        ids = [chance.randrange(1000) for _ in range(chance.randrange(1, 40))]
        at = chance.randrange(len(ids))
        texts = [f"{' ' * (number > 0)}{token}" for number, token in enumerate(ids)]
        special = [1000] * chance.choice([0, 9])  # which are not text
        pieces = [[*special, token] for token in ids[at:]]
        call = {"call": "windowed", "prompt": ids[:at], "pieces": pieces}
        yield call, [*texts[at:], ""]


def cancelled() -> Iterator[Case]:
    """Yield a prompt that is cancelled in its second pass: what was read until then counts."""
    read = [{"tokens": [1] * 4, "start": start, "scores": [0.0], "best": 0, "confidence": []}
            for start in (0, 4)]  # fmt: skip
    engine = {"vocabulary": 1, "width": 4, "passes": read}
    yield {"call": "cancelled", "engine": engine, "tokens": [1] * 10}, 8


EXACT: tuple[Callable[[], Iterator[Case]], ...] = (
    decoded, stopped, many_stops, windowed, cancelled, sampling.rules, drafting.built,
    drafting.ngram,
)  # fmt: skip
ROUNDED = (sampling.sampling, sampling.verify, sampling.logprobs, drafting.draft)
"""What goes through an exponential or a logarithm, which libraries round in ways of their own."""


@pytest.mark.parametrize("cases", [*EXACT, *ROUNDED])
def test_answers_are_those_of_python(
    native_calls: NativeCalls, cases: Callable[[], Iterator[Case]]
) -> None:
    made = [*cases()]
    if cases is sampling.sampling:  # where rounding decides nothing can be compared
        assert len(made) > 1000
    if cases is drafting.draft:  # drafts that caught up, and drafts by rejection
        rounds = [told for _, answer in made for told in answer["rounds"]]
        assert sum(told["caught_up"] for told in rounds) > 100
        assert sum(bool(told["drawn_from"]) for told in rounds) > 100
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


def test_bytes_that_are_no_text_are_shown_as_they_come(
    native_calls: NativeCalls, tmp_path: Path
) -> None:
    sentencepiece("llama", tmp_path)
    chance, cases = random.Random(5), []
    for data in (b"\x80" * 3000, *(bytes(chance.choices(BYTES, k=30)) for _ in range(300))):
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        texts = [decoder.decode(data[at : at + 1]) for at in range(len(data))]
        texts.append(decoder.decode(b"", final=True))
        call = {"call": "detokenized", "folder": str(tmp_path), "prompt": [A]}
        pieces = [[FIRST_BYTE + byte] for byte in data]
        alone = data[-1:].decode(errors="replace")
        cases.append(({**call, "pieces": pieces}, [*texts, "a" + "".join(texts), alone]))
    native_calls.check(cases)


def test_half_a_character_of_the_prompt_is_completed_and_never_lost_twice(
    native_calls: NativeCalls, tmp_path: Path
) -> None:
    sentencepiece("gemma", tmp_path)
    begun = [FIRST_BYTE + byte for byte in "日".encode()[:2]]
    call = {"call": "detokenized", "folder": str(tmp_path), "prompt": begun}
    rest = FIRST_BYTE + "日".encode()[2]
    native_calls.check(
        [
            ({**call, "pieces": [[rest], [A]]}, ["日", "a", "", "日a", "a"]),
            ({**call, "pieces": [[A]]}, ["a", "", "\ufffda", "a"]),
            ({**call, "pieces": [[1]]}, ["", "", "\ufffd", ""]),
        ]
    )


def test_an_old_tokenizer_library_is_named_with_the_release_that_will_do(
    native_calls: NativeCalls, codelet: Path
) -> None:
    other = str(onnxruntime_library())
    call = {"call": "encoded", "bundle": str(codelet), "tokenizer": other, "texts": ["a"],
            "parse_special": True}  # fmt: skip
    (refused,) = native_calls([call])
    assert refused["status"] == 7
    for word in ("0.16", "OgaCreateTokenizerFromPath", other):
        assert word in refused["message"]


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


def test_the_name_of_an_added_token_is_text_as_in_python(
    native_calls: NativeCalls, codelet: Path, tmp_path: Path
) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai")
    library = Path(genai.__file__).parent / "libonnxruntime-genai.so"
    shutil.copytree(codelet, tmp_path / "bundle")
    path = tmp_path / "bundle" / "tokenizer.json"
    added = HubTokenizer.from_file(str(path))
    added.add_tokens(
        [AddedToken(name, special=False) for name in ("<|user|>", "<\uff5cuser\uff5c>")]
    )
    added.save(str(path))
    texts, used = ["a<|user|>b", "a<\uff5cuser\uff5c>b", "a<user>b"], Tokenizer(path)
    call = {"call": "encoded", "bundle": str(path.parent), "tokenizer": str(library)}
    (found,) = native_calls([{**call, "texts": texts, "parse_special": False}])
    for text, ids in zip(texts, found, strict=True):
        assert used.decode(ids) == text
        for spelled in (ids, used.encode(text, parse_special=False)):
            assert max(spelled) < Tokenizer(codelet / "tokenizer.json").size


@pytest.mark.parametrize("style", [None, *STYLES])
def test_words_are_spelled_as_the_middle_of_a_text(
    native_calls: NativeCalls, codelet: Path, tmp_path: Path, style: Style | None
) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai")
    library = Path(genai.__file__).parent / "libonnxruntime-genai.so"
    folder = codelet
    if style is not None:
        folder = written(tmp_path, style).parent
        config = {"tokenizer_class": "T5Tokenizer" if style == "t5" else "LlamaTokenizer"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    words = ["o", "hello", "the", "ow", " ol", "to he"]
    call = {"call": "encoded", "bundle": str(folder), "tokenizer": str(library), "texts": words}
    used = Tokenizer(folder / "tokenizer.json")
    spelled = [used.encode(f" {word}", special=False, behind=1) for word in words]
    native_calls.check([({**call, "middle": True}, spelled)])


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
