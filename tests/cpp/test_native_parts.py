"""Parts of the native library, held to vectors that the Python runtime makes."""

from __future__ import annotations

import codecs
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpp import drafting, sampling
from cpp.conftest import Library, onnxruntime_library, run_program
from specrt.bundle import Bundle
from specrt.engine.backends import open_engine
from specrt.engine.protocol import Feed, PackedEngine
from specrt.generator import Generator
from specrt.text import StopStrings

Check = Callable[[str, dict[str, Any]], None]
MAKERS: dict[str, Callable[[], dict[str, Any]]] = {
    "noise": sampling.noise,
    "sampling": sampling.sampling,
    "rules": sampling.rules,
    "verify": sampling.verify,
    "logprobs": sampling.logprobs,
    "costs": drafting.between,
    "gamma": drafting.gamma,
    "ngram": drafting.ngram,
    "draft": drafting.draft,
}


@pytest.mark.parametrize("name", MAKERS)
def test_numbers_and_drafters_are_those_of_python(native_check: Check, name: str) -> None:
    made = MAKERS[name]()
    # Where rounding decides nothing can be compared; almost everywhere it does not.
    assert made.pop("left_out", 0) < 0.05 * len(made.get("cases", [1]))
    if name == "draft":  # drafts that caught up, and drafts by rejection
        steps = [s for case in made["cases"] for g in case["generations"] for s in g["steps"]]
        assert sum(bool(step.get("caught_up")) for step in steps) > 100
        assert sum(bool(step.get("drawn_from")) for step in steps) > 100
    native_check(name, made)


def test_a_difference_is_found(native: Library, tmp_path: Path) -> None:
    made = drafting.between()
    made["cases"][7]["costs"] = [ns + 1.0 for ns in made["cases"][7]["costs"]]
    (tmp_path / "costs.json").write_text(json.dumps(made))
    with pytest.raises(AssertionError, match="costs: 1 differ"):
        run_program([native.program("native_check"), "costs", tmp_path / "costs.json"])


# ---- text ----

BYTES = (0x41, 0x7F, 0x80, 0xBF, 0xC0, 0xC2, 0xC3, 0xA9, 0xE0, 0xA0, 0x9F, 0xED, 0xEF, 0xBB, 0xF0,
         0x90, 0x8F, 0xF4, 0xF5, 0xFF, 0x00)  # fmt: skip
"""Beginnings, middles and limits of characters, and what begins none."""
WORDS = ("a", "b", "é", "日", "ab", "\n", "😀", "aa")
ODD = (
    "a", "b", " ", "  ", "\n", "\t", "\r\n", "é", "e\u0301", "日", "😀", "👩\u200d👧", "def ",
    "x=", "_", "1", "23", "'s", "'LL", "\u00a0", "\u3000", "\u200b", "\ufb01", "ß", "\ufeff",
    "\x7f", "\x02", "\u0627", "ह", "…", "<", ">", "</", "\u2028", "Ⅷ", "²", "<|endoftext|>",
)  # fmt: skip


def _decoded(chance: random.Random) -> dict[str, Any]:
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
    valid = "\ufffd" not in every.decode(errors="replace")
    return {"pieces": pieces, "texts": texts, "valid": valid}


def _stopped(chance: random.Random) -> dict[str, Any]:
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


def test_text_is_decoded_and_stopped_as_in_python(native_check: Check) -> None:
    chance = random.Random(7)
    made = {
        "utf8": [_decoded(chance) for _ in range(4000)],
        "stops": [_stopped(chance) for _ in range(4000)],
    }
    native_check("text", made)


def test_texts_are_encoded_as_in_python(
    native_check: Check, codelet: Path, generator: Generator
) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai")
    chance = random.Random(3)
    texts = ["".join(chance.choices(ODD, k=chance.randrange(1, 14))) for _ in range(2000)]
    made = {
        "bundle": str(codelet),
        "tokenizer": str(Path(genai.__file__).parent / "libonnxruntime-genai.so"),
        "texts": [{"text": t, "ids": generator.tokenizer.encode(t)} for t in texts],
    }
    native_check("encode", made)


# ---- passes ----


def _passes(bundle: Bundle, role: str) -> list[dict[str, Any]]:
    """Run widths up to nine, going back, and wide ones; return what each left behind."""
    manifest = bundle.manifest
    model = getattr(manifest, role)
    pads = role == "target" and model.quantized
    engine = open_engine(
        manifest.backend_of(model), bundle.file(model.engine), model.geometry,
        batch=manifest.batch, max_length=manifest.max_length, max_width=manifest.max_width,
        threads=1, pad_single_token=pads, pad_to_even=pads, upcast_weights=model.half_stored,
    )  # fmt: skip
    rng, left = np.random.default_rng(6), []
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
        sure = output.confidence
        left.append({
            "tokens": tokens, "start": start, "rows": rows,
            "argmax": output.argmax.ravel().tolist(),
            "logits": hashlib.sha256(output.logits.tobytes()).hexdigest(),
            "confidence": "" if sure is None else hashlib.sha256(sure.tobytes()).hexdigest(),
        })  # fmt: skip
    engine.close()
    return left


@pytest.mark.parametrize("owns_process", [False, True])
def test_passes_leave_the_same_bits_as_in_python(
    native_check: Check, codelet: Path, owns_process: bool
) -> None:
    bundle = Bundle.open(codelet)
    vectors = {
        "bundle": str(codelet), "library": str(onnxruntime_library()), "threads": 1,
        "owns_process": owns_process, "target": _passes(bundle, "target"),
        "draft": _passes(bundle, "draft"),
    }  # fmt: skip
    native_check("engine", vectors)


def test_a_cancelled_prompt_counts_as_far_as_it_was_read(native_check: Check) -> None:
    native_check("cancel", {})
