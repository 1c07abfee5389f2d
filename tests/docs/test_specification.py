"""A runtime written from docs/embedding.md, not from the runtime: it must say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from specrt.engine.ort_packed import RowSlice, pack
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise, Purpose


class Reader:
    """A greedy or sampling runtime for one row, made from the page and not from the runtime."""

    def __init__(self, folder: Path) -> None:
        self.manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        said = self.manifest
        self.widest = max(said["prefill"], said["gammas"][-1] + 1)
        self.target = Held(folder, said["target"], said["max_length"], self.widest)
        self.draft = Held(folder, said["draft"], said["max_length"], self.widest)

    def complete(
        self, prompt: list[int], most: int, gamma: int, temperature: float, seed: int
    ) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Return what follows a prompt, and per round what was drafted, evaluated, accepted."""
        tokens, ends = list(prompt), set(self.manifest["eos_token_ids"])
        limit = min(len(prompt) + most, self.manifest["max_length"] + 1)
        target, draft, rounds = self.target, self.draft, list[tuple[int, int, int]]()

        def choose(row: Any, position: int) -> int:
            if not temperature:
                return int(row.argmax())
            weights = np.exp((row.astype(np.float64) - float(row.max())) / temperature)
            ids = np.flatnonzero(weights)
            waits = Noise(seed).exponential(Purpose.TOKEN, position, ids)
            return int(ids[(waits / (weights[ids] / weights.sum())).argmin()])

        def reached(row: Any) -> Any:
            least = np.float32(row.max() - 7.0 * temperature)
            return np.where(row >= least, row, -np.inf) if temperature else row

        target.held = draft.held = 0
        while len(tokens) < limit and ends.isdisjoint(tokens[len(prompt) :]):
            n = len(tokens)
            drafted = list[int]()
            for _ in range(min(gamma, limit - n - 1) if n > len(prompt) else 0):
                row = draft.feed([*tokens, *drafted][draft.held :], 1)[0]
                drafted.append(choose(reached(row), n + len(drafted)))
            rows = target.feed([*tokens[target.held :], *drafted], len(drafted) + 1)
            own = [choose(row, n + i) for i, row in enumerate(rows)]
            kept = next((i for i, t in enumerate(drafted) if own[i] != t), len(drafted))
            if n > len(prompt):
                rounds.append((len(drafted), kept + (kept < len(drafted)), kept))
            tokens += own[: kept + 1]
            target.held = n + kept
            draft.held = min(draft.held, len(tokens) - 1)
        end = next((i + 1 for i, t in enumerate(tokens) if i >= len(prompt) and t in ends), None)
        return tokens[len(prompt) : end], rounds


class Held:
    """An engine of one row, and how many tokens its buffers hold."""

    def __init__(self, folder: Path, record: dict[str, Any], positions: int, widest: int) -> None:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        self._session: Any = ort.InferenceSession(
            str(folder / record["engine"]), options, providers=["CPUExecutionProvider"]
        )
        shape = record["geometry"]
        self._vocabulary, self._widest, self.held = shape["vocab_size"], widest, 0
        sizes = (1, shape["kv_heads"], positions, shape["head_dim"])
        layers = range(shape["layers"])
        names = [f"{kind}.{i}" for i in layers for kind in ("key", "value")]
        self._buffers = {name: np.zeros(sizes, np.float32) for name in names}

    def feed(self, tokens: list[int], rows: int) -> Any:
        """Feed tokens in chunks, and return the last rows of scores."""
        while len(tokens) > self._widest:
            chunk = min(self._widest, len(tokens) - rows)
            self._run(tokens[:chunk], 1)
            tokens = tokens[chunk:]
        return self._run(tokens, rows)

    def _run(self, tokens: list[int], rows: int) -> Any:
        width, binding = len(tokens), self._session.io_binding()
        logits = np.zeros((1, rows, self._vocabulary), np.float32)
        read = {
            "input_ids": np.array([tokens]),
            "start": np.array([self.held]),
            "rows": np.arange(width - rows, width),
            **self._buffers,
        }
        written = {"logits": logits, **{f"present_{n}": a for n, a in self._buffers.items()}}
        for bind, arrays in ((binding.bind_input, read), (binding.bind_output, written)):
            for name, a in arrays.items():
                bind(name, "cpu", 0, a.dtype, a.shape, a.ctypes.data)
        self._session.run_with_iobinding(binding)
        self.held += width
        return logits[0]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_runtime_made_from_the_page_says_the_same(
    codelet: Path, generator: Generator, code_prompts: Path, temperature: float
) -> None:
    reader = Reader(codelet)
    text = code_prompts.read_text(encoding="utf-8")
    prompts = [json.loads(line)["prompt"] for line in text.splitlines()[:2]]
    asked = SamplingParams(max_tokens=32, temperature=temperature, seed=7)
    for prompt in [generator.tokenizer.encode(p) for p in (*prompts, "".join(prompts) * 3)]:
        for gamma in (0, 1, 4, 8):
            done = generator.generate(prompt, asked, gamma=gamma, drafter="model")
            counts = [(r.drafted, r.evaluated, r.accepted) for r in done.speculation.log]
            told = reader.complete(prompt, 32, gamma, temperature, seed=7)
            assert told == (done.token_ids, counts)


def _packed(batch: int, parts: list[RowSlice], places: int, even: bool) -> dict[str, list[int]]:
    """Lay out a pass as the page says."""
    total = max(places, sum(part.width for part in parts))
    total += even and total % 2
    begins, at = {}, 0
    for part in parts:
        begins[part.row], at = at, at + part.width
    widths, spread, kept = [1] * batch, list[int](), [0] * total
    for row in range(batch):
        own = [begins[p.row] + j for p in parts if p.row == row for j in range(p.width)]
        widths[row] = max(len(own), places)
        for j, token in enumerate(own):
            kept[token] = len(spread) + j
        spread += (own or [0]) + [(own or [0])[-1]] * (widths[row] - len(own or [0]))
    rows = [begins[p.row] + p.width - p.rows + j for p in parts for j in range(p.rows)]
    rows += [0] * (even and len(rows) % 2)
    return {"widths": widths, "spread": spread, "kept": kept, "rows": rows}


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("places", [1, 2])
def test_rows_are_packed_as_the_page_says(places: int, even: bool) -> None:
    for parts in (
        [RowSlice(0, 1, 1)],
        [RowSlice(2, 1, 1), RowSlice(0, 5, 2)],
        [RowSlice(1, 3, 3), RowSlice(0, 1, 1), RowSlice(2, 4, 1)],
    ):
        made = pack(3, tuple(parts), places, even)
        told = _packed(3, parts, places, even)
        assert told == {name: getattr(made, name).tolist() for name in told}
