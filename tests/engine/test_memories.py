"""Rows over every kind of memory have the bits of plain decoding, whatever was rolled back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from time import perf_counter_ns
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from lower.lowering import Lowering, lowered
from portable.zoo import EXPERTS, RECURRENT, Exported
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.head_engine import TrimmedEngine
from specrt.engine.ort.kernels import missing_kernels
from specrt.engine.protocol import Feed, PackedEngine, rows_of
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.engine_record import PLAN
from specrt.engine.tensorrt.plan import TrtPlan
from specrt.errors import EngineError
from specrt.generator import Generator
from specrt.geometry import BASE, TAKEN_BACK
from specrt.params import SamplingParams
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.pool import Models
from specrt.text.tokenizer import Tokenizer
from specrt.tuning.pass_timer import PassTimer
from specrt_export.lower.lazy_tensor import ENGINE
from support.gpu_double import (
    DoubleDevice,
    GraphDouble,
    library_double,
    record_of,
    target_profiles,
)
from support.kernels import without_kernels

pytestmark = [
    pytest.mark.export,
    pytest.mark.skipif(bool(missing_kernels()), reason="rings are of the CPU kernels"),
]

Zoo = Callable[[str], Exported]
WIDEST, LENGTH, ROWS = 8, 96, 3
WIDE = 48
"""Tokens of a pass that no window holds."""
CASES = [
    ("gemma3", "fp32"), ("gemma4", "int8"), ("lfm2", "int4"), ("qwen3_5", "fp32"),
    ("gemma4", "int8 contrib"), ("qwen3_5", "fp32 contrib"), ("granitemoe", "int8"),
    *(
        pytest.param(name, precision, marks=pytest.mark.nightly)
        for name in (
            "gemma3", "gemma4", "gemma4_unified", "minicpm3", "lfm2", "lfm3", *RECURRENT, *EXPERTS,
        )
        for precision in ("fp32", "int8", "int4")
    ),
    *(
        pytest.param(name, f"{precision} contrib", marks=pytest.mark.nightly)
        for name in (
            "gemma3", "gemma4", "gemma4_unified", "minicpm3", "lfm2", "lfm3", *RECURRENT,
        )
        for precision in ("fp32", "int8", "int4")
    ),
]  # fmt: skip


@contextmanager
def opened(
    one: Exported, folder: Path, precision: str, widest: int = WIDEST, length: int = LENGTH
) -> Iterator[PackedEngine]:
    """Build an engine whose passes are narrow, so that its rings are short, and open it."""
    how = Lowering("ort-cpu", precision, batch=ROWS)
    sizes: dict[str, Any] = {"max_length": length, "gammas": (WIDEST - 1,), "prefill": widest}
    role = "target" if missing_kernels() else "draft"  # which has other bits without kernels
    case = lowered(*one.source, folder, how, role, **sizes)
    with case.compiler.score(case.lowered, widest) as engine:
        assert isinstance(engine, PackedEngine)
        yield engine


class Rounds:
    """Random rounds on the rows of an engine, of texts that share beginnings.

    Up to `error` scores may differ from those of plain decoding.
    """

    def __init__(self, engine: Any, seed: int, widest: int = WIDEST, error: float = 0.0) -> None:
        self.engine, self.widest, self.error = engine, widest, error
        self.rows = rows_of(engine)
        self.rng = np.random.default_rng(seed)
        vocabulary = engine.geometry.vocab_size
        first = self.rng.integers(0, vocabulary, LENGTH)
        self.texts = [first]
        for at in (7, 20, 41):
            self.texts.append(
                np.concatenate([first[:at], self.rng.integers(0, vocabulary, LENGTH - at)])
            )
        self.plain = [self._plain(text) for text in self.texts]
        self.held = [(0, 0)] * engine.batch
        """Of each row the text, and how many of its tokens the row holds."""

    def _plain(self, text: NDArray[np.int64]) -> NDArray[np.float32]:
        rows = [self.rows.forward_rows([Feed(0, [int(t)], i, 1)])[0].logits[0, 0].copy()
                for i, t in enumerate(text)]  # fmt: skip
        return np.stack(rows)

    def move(self, row: int) -> None:
        """Let a row go back, begin another text, or hold what another row does."""
        text, length = self.held[row]
        kind = self.rng.random()
        if kind < 0.1:
            other = int(self.rng.integers(0, len(self.texts)))
            same = np.flatnonzero(self.texts[other] != self.texts[text])
            common = int(same[0]) if len(same) else LENGTH
            self.held[row] = other, self._kept(row, min(length, common))
        elif kind < 0.2 and len(self.held) > 1:
            source = int(self.rng.integers(0, ROWS))
            kept = self._kept(source, self.held[source][1])
            self.engine.copy_row(source, row, kept)
            self.held[row] = self.held[source][0], kept
        elif kind < 0.3:
            self.held[row] = text, self._kept(row, int(self.rng.integers(0, length + 1)))

    def _kept(self, row: int, length: int) -> int:
        return length if length >= self.engine.traits.rewind(row) else 0

    def round(self) -> None:
        """Verify drafts of some rows in one pass; hold what was accepted to plain decoding."""
        rows = [row for row in range(len(self.held)) if self.rng.random() < 0.7] or [0]
        feeds, right = [], []
        for row in rows:
            self.move(row)
            text, length = self.held[row]
            if length >= LENGTH:
                length = 0
                self.held[row] = text, length
            width = int(min(self.rng.integers(1, self.widest + 1), LENGTH - length))
            tokens = self.texts[text][length : length + width].copy()
            least = max(1, width - TAKEN_BACK)
            good = int(self.rng.integers(least, width + 1))  # the others were drafted wrongly
            tokens[good:] = self.rng.integers(0, self.engine.geometry.vocab_size, width - good)
            feeds.append(Feed(row, tokens.tolist(), length, min(width, self.engine.max_rows)))
            right.append(good)
        for feed, good, output in zip(feeds, right, self.rows.forward_rows(feeds), strict=True):
            text, length = self.held[feed.row]
            first = len(feed.tokens) - feed.rows
            expected = self.plain[text][length + first : length + good]
            found = output.logits[0, : len(expected)]
            assert np.allclose(found, expected, rtol=0, atol=self.error), (feed, self.held)
            self.held[feed.row] = text, length + good


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_rows_that_go_back_have_the_bits_of_plain_decoding(
    exported: Zoo, tmp_path: Path, name: str, precision: str
) -> None:
    precision, _, contrib = precision.partition(" ")
    with (
        without_kernels() if contrib else nullcontext(),
        opened(exported(name), tmp_path, precision) as engine,
    ):
        rounds = Rounds(engine, seed=0)
        for _ in range(1000):
            rounds.round()


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_a_row_does_not_go_back_to_what_its_layers_forgot(
    exported: Zoo, tmp_path: Path, name: str
) -> None:
    with opened(exported(name), tmp_path, "fp32") as engine:
        rounds = Rounds(engine, seed=0)
        least = engine.traits.rewind(0)
        assert 0 < least < LENGTH - WIDEST, "of a text that was read to its end"
        token = [int(rounds.texts[-1][least])]
        (found,) = engine.forward_rows([Feed(0, token, least, 1)])
        assert np.array_equal(found.logits[0, 0], rounds.plain[-1][least])
        assert TrimmedEngine(engine, np.zeros(1, np.int32)).traits.rewind(0) == least
        assert engine.traits.rewind(1) == 0
        with pytest.raises(EngineError, match=f"from position {least} on"):
            engine.forward_rows([Feed(1, token, least, 1), Feed(0, token, least - 1, 1)])
        assert engine.traits.rewind(1) == 0, "a pass that is refused writes no row"
        engine.forward_rows([Feed(0, token, 0, 1)])  # a text that begins anew may
        assert engine.traits.rewind(0) == 0


def test_a_row_whose_pass_ended_half_done_begins_anew(exported: Zoo, tmp_path: Path) -> None:
    with opened(exported("qwen3_5"), tmp_path, "fp32") as engine:
        rounds = Rounds(engine, seed=0)
        for name, memory in engine.traits.buffers.items():
            if name.startswith(BASE):
                memory[0] = -1  # as the kernel leaves it
        token, text = [int(rounds.texts[0][-1])], rounds.texts[0].tolist()
        with pytest.raises(EngineError, match="from 0 with its text read again"):
            engine.forward_rows([Feed(1, text[:1], 0, 1), Feed(0, token, LENGTH - 1, 1)])
        (output,) = engine.forward_rows([Feed(0, text[:WIDEST], 0, WIDEST)])
        assert np.array_equal(output.logits[0], rounds.plain[0][:WIDEST])
        (output,) = engine.forward_rows([Feed(0, text[3:5], 3, 2)])
        assert np.array_equal(output.logits[0], rounds.plain[0][3:5])


def test_prompts_are_scored_and_passes_timed_where_states_go_back_by_less_than_a_pass(
    exported: Zoo, tmp_path: Path
) -> None:
    with opened(exported("qwen3_5"), tmp_path, "fp32", 64, 128) as engine:
        rounds = Rounds(engine, seed=0)
        found: list[NDArray[np.float32]] = []
        passes = KVCache(engine).read(
            rounds.texts[0][:70].tolist(),
            lambda output, _, known: found.extend(output.logits[0, known:].copy()),
        )
        wanted = next(passes)
        with suppress(StopIteration):
            while True:
                wanted = passes.send(engine.forward_rows([wanted.feed(0)])[0])
        assert np.array_equal(found, rounds.plain[0][:70])
        text = rounds.texts[0].tolist()
        for start, end in ((0, 61), (29, 70)):  # wider than rings; back by as much as states do
            assert engine.traits.rewind(1) == start
            (output,) = engine.forward_rows([Feed(1, text[start:end], start, end - start)])
            assert np.array_equal(output.logits[0], rounds.plain[0][start:end])
        timer = PassTimer(Models(engine, None, (0, 3), 3), None, perf_counter_ns)
        timer.fill(perf_counter_ns())
        assert [len(timer.burst(gamma, 4)) for gamma in (0, 3, 40)] == [4, 4, 1]


@pytest.mark.parametrize(("most", "kept"), [(1 << 28, 2500), (200_000, 1500)])
def test_texts_that_go_on_from_snapshots_are_those_of_fresh_rows(
    exported: Zoo, tmp_path: Path, tokenizer: Tokenizer, most: int, kept: int
) -> None:
    """Prompts begin as earlier prompts and answers do, cut anywhere, several at once.

    Without snapshots 1,402 of their tokens are not read again.
    """
    rng, texts, cached, one = np.random.default_rng(5), [[7]], 0, exported("qwen3_5")
    with (
        opened(one, tmp_path / "a", "fp32", 8, 128) as engine,
        opened(one, tmp_path / "b", "fp32", 8, 128) as other,
        Generator(Models(engine, None, (0, 3), snapshot_bytes=most), tokenizer) as reusing,
        Generator(Models(other, None, (0, 3)), tokenizer, prompt_cache=False) as fresh,
    ):
        for _ in range(60):
            prompts = []
            for _ in range(int(rng.integers(1, ROWS + 1))):
                text = texts[int(rng.integers(0, len(texts)))]
                cut = int(rng.integers(1, len(text) + 1)) if rng.random() < 0.7 else len(text)
                more = rng.integers(3, 160, int(rng.integers(1, 30))).tolist()
                prompts.append([*text[:cut], *more][:90])
            params = SamplingParams(max_tokens=int(rng.integers(1, 30)), ignore_eos=True)
            gamma = int(rng.choice([0, 3]))
            made = reusing.generate_many(prompts, params, gamma=gamma, drafter="ngram")
            wanted = fresh.generate_many(prompts, params, gamma=0, drafter="ngram")
            for prompt, (found,), (right,) in zip(prompts, made, wanted, strict=True):
                assert found.token_ids == right.token_ids
                texts.append([*prompt, *found.token_ids])
                cached += found.cached_tokens
            texts = texts[-6:]
    assert cached > kept


@contextmanager
def on_a_gpu(one: Exported, folder: Path) -> Iterator[TensorRtEngine]:
    """Lower a model as for TensorRT, and open an engine over doubles that run that graph."""
    sizes: dict[str, Any] = {"max_length": LENGTH, "gammas": (WIDEST - 1,), "prefill": WIDE}
    case = lowered(*one.source, folder, Lowering("tensorrt"), role="target", **sizes)
    record = record_of(target_profiles((WIDEST - 1,), WIDE), compute="fp32", candidates=16)
    device, path, geometry = DoubleDevice(1 << 24), folder / PLAN, case.lowered.geometry
    library = library_double(record.backend, cuda=device.cuda)
    graph, log = case.lowered.folder / ENGINE, library.logger.log
    double = GraphDouble(device.cuda, log, record, graph, geometry, 1, LENGTH)
    plan = TrtPlan(path, library, device, None, double)
    spec = EngineSpec(record.backend, path, geometry, 1, LENGTH, WIDE)
    engine = TensorRtEngine(plan, device, record, spec)
    yield engine
    engine.close()
    assert device.live == []


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.nightly)])
def test_plans_go_back_by_what_their_windows_hold(
    exported: Zoo, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes are wider than windows now and then; a state that is read is not written."""
    with on_a_gpu(exported(name), tmp_path) as engine:
        rounds = Rounds(engine, 0, WIDE, 2e-4)
        for _ in range(300):
            rounds.round()
        least = engine.traits.rewind(0)
        with pytest.raises(EngineError, match=f"from position {least} on"):
            engine.forward([[1]], least - 1)
        text = rounds.texts[0].tolist()
        engine.forward([text[:WIDE]], 0, 1)
        rest = [text[WIDE:][:WIDEST]]
        with monkeypatch.context() as patched:
            patched.setattr(GraphDouble, "run", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.forward(rest, WIDE)
        found = engine.forward(rest, WIDE).logits[0]  # runs again, of states as they were
        assert np.allclose(found, rounds.plain[0][WIDE:][:WIDEST], rtol=0, atol=2e-4)
