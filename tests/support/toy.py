"""Engines and tokenizers small enough to know everything about, for tests of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from specrt.engine.protocol import Candidates, EngineTraits, check_bounds
from specrt.generator import Generator
from specrt.geometry import Geometry
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.speculation.drafters import ModelDrafter, NoDrafter
from specrt.speculation.gamma import FixedGamma, GammaPolicy
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.pool import Models
from specrt.speculation.round import Drafter, Round, run_rounds, speculate
from specrt.speculation.target import EngineTarget
from specrt.text.tokenizer import Tokenizer as BundleTokenizer

_ROWS = 1021
_POWERS = np.array([pow(6364136223846793005, i + 1, 1 << 64) for i in range(1 << 14)], np.uint64)


class Call(NamedTuple):
    """What one forward pass was asked for."""

    start: int
    width: int
    rows: int


@dataclass(frozen=True)
class TableOutput:
    """Views of memory that the next pass of the same shape overwrites, as a real engine's are."""

    logits: NDArray[np.float32]
    argmax: NDArray[np.int64]
    confidence: NDArray[np.float32]
    candidates: Candidates | None = None


class TableEngine:
    """An engine whose logits are looked up by the tokens its own buffer holds.

    The buffer keeps what was written, stale tokens included, so a token fed to a wrong place, or
    read after it should have been overwritten, changes the answer. `memory` is how many of the
    latest tokens count (all of them when None). `wrong_at` are the positions for which the answer
    is turned upside down: the token there is the least likely one. `candidates` is how many of the
    best tokens an output names; it has none when 0.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        vocab: int = 29,
        scale: float = 3.0,
        memory: int | None = None,
        batch: int = 1,
        max_length: int = 256,
        max_width: int = 16,
        wrong_at: Collection[int] = (),
        candidates: int = 0,
        corrupt: Callable[[int, NDArray[np.float32]], None] | None = None,
    ) -> None:
        self.geometry = Geometry.uniform(1, 1, 1, 1, vocab, max_length, (0,))
        self.batch, self.max_length, self.max_width = batch, max_length, max_width
        self.max_rows, self.traits = max_width, EngineTraits()
        rng = np.random.default_rng(seed)
        self.table = (rng.standard_normal((_ROWS, vocab)) * scale).astype(np.float32)
        self.memory = memory
        self.wrong_at = wrong_at
        self.candidates = candidates
        self.corrupt = corrupt
        self.script: dict[int, int] = {}
        """Position -> the token that must be the most likely there."""
        self.no_numbers_from = 1 << 30
        """The position from which the scores are NaN."""
        self.buffer = np.full((batch, max_length), -1, np.int64)
        self.calls: list[Call] = []
        self.closed = False
        self._found: dict[bytes, int] = {}
        self._outputs: dict[tuple[int, int], TableOutput] = {}

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> TableOutput:
        """Write the tokens into the buffer, and look up each row asked for."""
        fed = np.asarray(tokens, np.int64)
        starts = np.broadcast_to(np.asarray(start, np.int64), (self.batch,))
        batch, width = fed.shape
        assert batch == self.batch
        check_bounds(self, width, int(starts.min()), int(starts.max()))
        wanted = width if rows is None else rows
        assert 0 < wanted <= width
        self.calls.append(Call(int(starts[0]), width, wanted))
        output = self._output(width, wanted)
        for b in range(batch):
            first = int(starts[b])
            self.buffer[b, first : first + width] = fed[b]
            for r in range(wanted):
                output.logits[b, r] = self.row(self.buffer[b, : first + width - wanted + r + 1])
        if self.corrupt is not None:
            self.corrupt(len(self.calls), output.logits)
        with np.errstate(invalid="ignore"):  # infinite logits are what some tests are about
            shifted = output.logits - output.logits.max(-1, keepdims=True)
        output.confidence[:] = 1 / np.exp(shifted).sum(-1)
        numbers = np.isfinite(output.logits.max(-1))  # a NaN anywhere is the maximum
        output.argmax[:] = np.where(numbers, output.logits.argmax(-1), -1)
        if output.candidates is not None:
            for made, found in zip(
                output.candidates, best(output.logits, self.candidates), strict=True
            ):
                made[:] = found
        return output

    def close(self) -> None:
        """Note that the engine was closed."""
        self.closed = True

    def row(self, seen: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the logits after the tokens seen."""
        known = seen[-self.memory :] if self.memory else seen
        name = known.tobytes()
        at = self._found.get(name)
        if at is None:
            key = int(((known + 1).astype(np.uint64) * _POWERS[: len(known)]).sum())
            assert (known >= 0).all(), "read a position that was never written"
            at = self._found[name] = (key >> 24) % _ROWS
        logits: NDArray[np.float32] = self.table[at]
        position = len(seen)
        if position >= self.no_numbers_from:
            return np.full_like(logits, np.nan)
        if position in self.wrong_at:
            logits = -logits
        if position in self.script:
            logits = logits.copy()
            logits[self.script[position]] = np.abs(logits).max() + 1
        return logits

    def _output(self, width: int, rows: int) -> TableOutput:
        if (width, rows) not in self._outputs:
            shape = (self.batch, rows)
            logits = np.empty((*shape, self.geometry.vocab_size), np.float32)
            candidates = None
            if k := self.candidates:
                candidates = np.empty((*shape, k), np.float32), np.empty((*shape, k), np.int64)
            self._outputs[width, rows] = TableOutput(
                logits, np.empty(shape, np.int64), np.empty(shape, np.float32), candidates
            )
        return self._outputs[width, rows]


def best(logits: NDArray[np.float32], k: int) -> Candidates:
    """Return the k best tokens of each row, falling, as a TopK operator does."""
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(logits, ids, -1), ids


def near(target: TableEngine, seed: int, closeness: float, **options: object) -> TableEngine:
    """Return an engine whose table is a mix of another's and of one of its own."""
    made = TableEngine(
        seed,
        vocab=target.geometry.vocab_size,
        memory=target.memory,
        max_length=target.max_length,
        max_width=target.max_width,
        **options,  # type: ignore[arg-type]
    )
    made.table = (closeness * target.table + (1 - closeness) * made.table).astype(np.float32)
    return made


class Run(NamedTuple):
    """The tokens a loop added, and its rounds, the prefill first."""

    tokens: list[int]
    rounds: list[Round]


def run(
    target: TableEngine,
    draft: TableEngine | None,
    prompt: Sequence[int],
    *,
    gamma: int | GammaPolicy = 0,
    new: int = 40,
    params: SamplingParams | None = None,
    seed: int = 0,
) -> Run:
    """Run the loop itself, without generator or text."""
    params = params or SamplingParams()
    noise = Noise(seed)
    policy = FixedGamma(gamma) if isinstance(gamma, int) else gamma
    drafter: Drafter = ModelDrafter(KVCache(draft), params, noise, policy) if draft else NoDrafter()
    tokens = list(prompt)
    limit = min(len(prompt) + new, target.max_length + 1)
    rounds = list(
        run_rounds(speculate(EngineTarget(KVCache(target), params, noise), drafter, tokens, limit))
    )
    return Run(tokens[len(prompt) :], rounds)


def plain(target: TableEngine, prompt: Sequence[int], new: int = 40) -> list[int]:
    """Return the greedy continuation, looked up without any engine or loop."""
    tokens = list(prompt)
    for _ in range(min(new, target.max_length + 1 - len(prompt))):
        tokens.append(int(target.row(np.array(tokens)).argmax()))
    return tokens[len(prompt) :]


def generator(
    target: TableEngine,
    draft: TableEngine | None,
    tokenizer: BundleTokenizer,
    *,
    gammas: Iterable[int] = range(9),
    gamma: int = 4,
    eos: Sequence[int] = (),
) -> Generator:
    """Return a generator over toy engines."""
    return Generator(Models(target, draft, tuple(gammas), gamma), tokenizer, eos)


def byte_symbols() -> list[str]:
    """Return the printable character that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in plain}
    rest = [byte for byte in range(256) if byte not in symbols]
    return [symbols.get(byte) or chr(256 + rest.index(byte)) for byte in range(256)]


BOS, EOS, SPECIAL = "<s>", "</s>", "<|tool|>"


def byte_level(folder: Path) -> Path:
    """Write a byte-level BPE tokenizer: 256 bytes (id = byte), a few merges, special tokens.

    One merge joins the first half of most emoji, so that a token may be half a character.
    """
    byte = byte_symbols()
    space, first, second = byte[32], byte[0xF0], byte[0x9F]
    merges = [("t", "h"), ("th", "e"), (space, "the"), ("i", "n"), ("in", "g"), (first, second)]
    vocab = {symbol: i for i, symbol in enumerate(byte)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in (BOS, EOS, SPECIAL)])
    return _saved(made, folder)


Style = Literal["llama2", "mistral", "gemma", "t5"]
STYLES: tuple[Style, ...] = get_args(Style)


def sentencepiece(folder: Path, style: Style = "llama2") -> Path:
    """Write a tokenizer of words with a metaspace, as checkpoints of a style have it.

    Bytes stand for all other characters; t5 has no bytes, and <unk> for them.
    """
    words = ["\u2581", *"abcdehlorstw", "\u2581h", "\u2581w", "he", "lo"]
    marks = [BOS, EOS, SPECIAL]
    if style == "t5":
        made = Tokenizer(models.Unigram([(w, -2.0) for w in ["<unk>", *marks, *"<>/|", *words]], 0))
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        )
        made.decoder = decoders.Metaspace()
        made.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", *marks)])
        return _saved(made, folder)
    pieces = ["<unk>", *marks, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("\u2581", "h"), ("\u2581", "w"), ("h", "e"), ("l", "o")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    first = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    strip = [decoders.Strip(content=" ", left=1, right=0)]
    if style == "llama2":
        made.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])]
        )
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    elif style == "mistral":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence(first if style == "gemma" else first + strip)
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", *marks)])
    return _saved(made, folder)


def _saved(tokenizer: Tokenizer, folder: Path) -> Path:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path
