"""The comparison with other runtimes: protocol, turns, figures, table; no peer installed."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from plot import TO, plot

from specrt.text.prompt_file import read_prompts
from specrt.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "benchmarks" / "prompts"
CHECKPOINT = ROOT / "engines" / "codelet" / "checkpoint"


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
