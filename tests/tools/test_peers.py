"""The comparison with other runtimes: protocol, turns, figures, table; no peer installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from compare import main
from peerbench.catalog import PEERS as KINDS
from peerbench.catalog import MissingError, Models
from peerbench.measure import WARM_TOKENS, Row, measure
from peerbench.process import Runner, RunnerError
from peerbench.protocol import Completed, Order, Outcome
from peerbench.schedule import Contender
from peerbench.server import completed
from peerbench.summary import figures, first_tokens
from peerbench.table import HEADINGS, first_token_table, markdown, verdict
from plot import TO, plot
from run_llamacpp import read_example

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


@pytest.mark.parametrize(
    ("compiler", "tiles", "native"),
    [("12.2.0", 0, "OFF"), ("13.1.0", 0, "ON"), ("12.2.0", 1, "ON")],
)
def test_llamacpp_has_no_amx_where_gcc_12_compiles_it(
    tmp_path: Path, compiler: str, tiles: int, native: str
) -> None:
    shutil.copy(PEERS / "setup_llamacpp.sh", tmp_path)
    venv = tmp_path / ".venvs" / "llamacpp"
    (venv / "llama_cpp_python-0.3.36").mkdir(parents=True)
    scripts = {
        venv / "bin" / "python": ":",
        tmp_path / "c++": f"echo {compiler}",
        tmp_path / "grep": f"exit {tiles}",
        tmp_path / "cmake": f"echo $* >> {tmp_path}/told",
    }
    for path, script in scripts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    done = subprocess.run(
        ["bash", str(tmp_path / "setup_llamacpp.sh"), "1"], capture_output=True, text=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    told = (tmp_path / "told").read_text()
    assert f"-DGGML_NATIVE={native} " in told
    assert "AMX" not in told


def test_rates_leave_out_what_the_prefill_brought() -> None:
    outcome = Outcome.of(
        [Completed([1] * 11, 10**9, 10**9), Completed([1] * 11, 10**9, 10**9, first=6)]
    )
    assert outcome.decoded == 15
    assert outcome.decode_rate == pytest.approx(7.5)
    assert outcome.whole_rate == pytest.approx(22 / 4)


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


def test_only_turns_count_and_each_begins_warm() -> None:
    rates = {"plain": iter([1.0, 10.0, 20.0]), "ngram": iter([1.0, 30.0, 40.0])}
    turns: list[str] = []

    def ask(order: Order) -> Outcome:
        warm = order.max_tokens == WARM_TOKENS
        turns.extend([] if warm else [order.mode])
        assert (order.prompts == [[4, 1]]) == warm, "what warms is not a prompt that is measured"
        ns = round((order.max_tokens - 1) / (999.0 if warm else next(rates[order.mode])) * 1e9)
        return Outcome.of([Completed([7] * order.max_tokens, 1, ns) for _ in order.prompts])

    runner: Any = SimpleNamespace(ask=ask)
    contenders = [Contender.parse("a:plain"), Contender.parse("a:ngram:2")]
    found = measure({"a": runner}, contenders, Order([[1, 4], [2], [3]], 64), 2)
    assert [[round(o.decode_rate) for o in row.outcomes] for row in found] == [[10, 20], [30, 40]]
    assert set(turns[2:4]) == set(turns[4:]) == {"plain", "ngram"}, "one turn each a repeat"


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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--peers", "nobody"], "no peer is called nobody"),
        (["--contender", "specrt:plain"], "the runner ended"),
    ],
)
def test_what_goes_wrong_ends_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    flags: list[str], said: str,
) -> None:  # fmt: skip
    needed = ["--bundle", tmp_path, "--target", CHECKPOINT / "target"]
    needed += ["--draft", CHECKPOINT / "draft", "--precision", "int8", "--work", tmp_path]
    monkeypatch.setattr(sys, "argv", list(map(str, ["compare.py", *needed, *flags])))
    with pytest.raises(SystemExit, match="1"):
        main()
    shown = capsys.readouterr().err
    assert (shown.startswith("compare: "), shown.count("\n"), said in shown) == (True, 1, True)


def test_first_tokens_are_compared_prompt_by_prompt_within_a_repeat() -> None:
    def timed(name: str, repeats: list[list[int]]) -> Row:
        turns = [[Completed([1, 2], ms * 10**6, 10) for ms in times] for times in repeats]
        return Row(Contender.parse(name), list(map(Outcome.of, turns)))

    base = timed("specrt:plain", [[10, 100], [20, 200], [40, 100]])
    rows = [
        timed("peer:plain", [[20, 50], [20, 100], [20, 50]]),
        base,
        row("a:plain", [], error="?"),
    ]
    shown = [{**figures(r, rows, base), "first_tokens": first_tokens(r, base)} for r in rows]
    assert shown[0]["first_tokens"] == [{"ms": 20, "ratio": 1.0}, {"ms": 50, "ratio": 0.5}]
    lines = first_token_table(shown, [130, 512]).splitlines()
    assert "| 130 tokens: ms (ratio) | 512 tokens: ms (ratio) |" in lines[0]
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| peer", "| specrt", "| a"]
    assert "| 20.0 (1.00) | 50.0 (0.50) |" in lines[2]
    assert len({line.count("|") for line in lines}) == 1


def test_a_server_is_believed_about_its_times() -> None:
    times = {"prompt_ms": 2.5, "predicted_ms": 30.0, "draft_n": 8, "draft_n_accepted": 5}
    found = completed({"timings": times}, [1, 2, 3, 4])
    assert (found.ttft_ns, found.drafted, found.accepted) == (2_500_000, 8, 5)
    assert Outcome.of([found]).decode_rate == pytest.approx(100)


def test_whoever_reads_another_peers_models_says_which_peer_is_to_be_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / ".venvs" / "ikllamacpp" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr("peerbench.catalog.HERE", tmp_path)
    models = Models(CHECKPOINT / "target", CHECKPOINT / "draft", "int8", 2, tmp_path / "work")
    with pytest.raises(MissingError, match=r"setup_llamacpp\.sh"):
        KINDS["ikllamacpp"].command(models)


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


SAID = """
0.05 I encoded    8 tokens in    0.060 seconds, speed:  134.089 t/s
0.05 I decoded   17 tokens in    3.400 seconds, speed:    5.000 t/s
0.05 I n_drafted = 25
0.05 I n_accept  = 7
"""


def test_the_example_is_believed_about_its_rate() -> None:
    found = read_example(SAID, 8, [1] * 40, 16)
    assert (len(found.tokens), found.drafted, found.accepted) == (16, 25, 7)
    assert Outcome.of([found]).decode_rate == pytest.approx(5.0)
    assert found.ttft_ns == 60_000_000
    with pytest.raises(ValueError, match="8 tokens of a prompt of 9"):
        read_example(SAID, 9, [], 16)


def test_the_plot_is_what_the_recorded_results_make() -> None:
    drawn = plot()
    assert TO.read_text(encoding="utf-8") == drawn, "run python benchmarks/peers/plot.py"
    assert len(drawn) < 10_000
    ElementTree.fromstring(drawn)
    for told in ("602, lookup and draft model; plain 285", "124, plain<", "ik_llama.cpp"):
        assert told in drawn
