"""The comparison with other runtimes: protocol, turns, figures, table; no peer installed."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from peerbench.measure import Row, measure
from peerbench.process import Runner, RunnerError
from peerbench.protocol import Completed, Order, Outcome
from peerbench.schedule import Contender
from peerbench.summary import figures
from peerbench.table import HEADINGS, markdown, verdict
from plot import TO, plot

from specrt.text.prompt_file import read_prompts
from specrt.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"
PROMPTS = ROOT / "benchmarks" / "prompts"
CHECKPOINT = ROOT / "engines" / "codelet" / "checkpoint"
ORDER = Order([[1, 2], [3]], 4)

FAKE = """
import os, sys
sys.path.insert(0, {peers!r})
from contextlib import contextmanager
from peerbench.protocol import Completed, Hello, serve

class Fake:
    hello = Hello("fake", ["plain", "speculative"], {{"fake": "1"}}, ["speculative"])
    def complete(self, prompt, order):
        if order.gamma == 9:
            os._exit(3)
        if order.gamma == 8:
            raise KeyError("no such gamma")
        os.write(1, b"noise of a library\\n")
        return Completed([prompt[0]] * (order.max_tokens - (order.gamma == 7)), 1000, 2000)

@contextmanager
def opening():
    yield Fake()

serve(opening)
"""


def row(name: str, rates: list[float], tokens: list[int] | None = None, error: str = "") -> Row:
    """A row whose single prompt decoded at these rates."""
    made = tokens or [5, 6, 7, 8]
    outcomes = [
        Outcome.of([Completed(made, 2_000_000, round((len(made) - 1) / rate * 1e9))])
        for rate in rates
    ]
    return Row(Contender.parse(name), outcomes, error)


def test_a_runner_answers_and_one_that_dies_or_fails_loses_its_rows_only(tmp_path: Path) -> None:
    script, log = tmp_path / "fake.py", tmp_path / "log"
    script.write_text(FAKE.format(peers=str(PEERS)))
    names = ["fake:plain", "fake:speculative:8", "fake:speculative:7", "fake:speculative:9"]
    contenders = list(map(Contender.parse, names))
    with Runner([sys.executable, str(script)], log) as runner:
        assert runner.hello.peer == "fake"
        assert runner.ask(ORDER).tokens == [[1] * 4, [3] * 4]
        assert "noise of a library" in log.read_text()
        rows = measure({"fake": runner}, contenders[:3], ORDER, 2)
        rows += measure({"fake": runner}, contenders[3:], ORDER, 2)
    assert [len(row.outcomes) for row in rows] == [2, 0, 0, 0]
    said = ["", "no such gamma", "4 each were ordered", "the runner ended"]
    assert all(words in row.error for words, row in zip(said, rows, strict=True))
    command = [sys.executable, "-c", "raise SystemExit('the model is missing')"]
    with pytest.raises(RunnerError, match="the model is missing"):
        Runner(command, log)


def test_outputs_are_compared_with_both_plain_runs() -> None:
    rows = [
        row("specrt:plain", [10], [1, 2, 3, 4]),
        row("specrt:speculative:auto", [20], [1, 2, 3, 4]),
        row("peer:plain", [10], [1, 2, 9, 9]),
        row("peer:speculative:2", [10], [1, 2, 9, 8]),
    ]
    found = figures(rows[3], rows, rows[1])
    assert found["same_as_own_plain"] == {"equal": 0, "prompts": 1, "leading": 0.75}
    assert found["same_as_base_plain"] == {"equal": 0, "prompts": 1, "leading": 0.5}
    assert found["ratio"] == 0.5
    assert found["repeats"] == 0.0
    looping = row("peer:plain", [10], [1, 2] * 20)
    assert figures(looping, [looping], looping)["repeats"] == (40 - 16 - 1) / 40


def test_the_table_keeps_losing_rows_and_failures_and_ratios_within_a_repeat() -> None:
    rows = [
        row("specrt:plain", [100, 200]),
        row("peer:plain", [300, 1000]),
        row("other:speculative:3", [], error="no | memory\nleft"),
    ]
    lines = markdown([figures(r, rows, rows[0]) for r in rows]).splitlines()
    assert [line.count(" | ") for line in lines] == [len(HEADINGS) - 1] * 5
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| peer", "| specrt", "| other"]
    assert "no / memory left" in lines[4]
    assert "4.00 (3.00 to 5.00)" in lines[2]
    assert "150 tokens/s, 0.27 (0.20 to 0.33) times peer:plain" in verdict(rows, rows[0])


def test_prompts_that_nobody_tuned_on_are_in_no_other_file() -> None:
    width = 40
    unseen = PROMPTS / "unseen.jsonl"
    others = [*PROMPTS.glob("*.jsonl"), *(ROOT / "engines").rglob("calibration.jsonl")]
    texts = [prompt.text for path in others if path != unseen for prompt in read_prompts(path)]
    assert len(others) >= 7
    known = {text[at : at + width] for text in texts for at in range(len(text) - width + 1)}
    prompts = [prompt.text for prompt in read_prompts(unseen)]
    for text in prompts:
        assert not known & {text[at : at + width] for at in range(len(text) - width + 1)}
    assert len(set(prompts)) == 12


def test_long_prompts_have_the_tokens_that_the_tables_name() -> None:
    tokenizer = Tokenizer(CHECKPOINT / "target" / "tokenizer.json", None)
    prompts = read_prompts(PROMPTS / "long.jsonl")
    assert [len(tokenizer.encode(prompt.text)) for prompt in prompts] == [130, 512, 2000]


def test_the_plot_is_what_the_recorded_results_make() -> None:
    drawn = plot()
    assert TO.read_text(encoding="utf-8") == drawn, "run python benchmarks/peers/plot.py"
    assert len(drawn) < 10_000
    ElementTree.fromstring(drawn)
    for told in ("602, lookup and draft model; plain 285", "124, plain<", "ik_llama.cpp"):
        assert told in drawn
