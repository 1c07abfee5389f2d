"""What follows from measured times: numbers worked out by hand, and properties."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.samples import DRAFTING, drafting, plain, rounds, sample
from specrt.bench.lossless import Comparison
from specrt.bench.measure import PLAIN, Configuration, Stages
from specrt.bench.report import (
    BenchReport,
    BenchRow,
    Environment,
    Footprint,
    Summary,
    peak_bytes,
    repeated_tokens,
    report,
    resident_bytes,
    verdict,
)
from specrt.params import SamplingParams
from specrt.system.machine import Machine
from specrt.system.memory import Bandwidth, last_cache_bytes, measure_bandwidth

AUTO = Configuration("auto", "model")
LOSING = Configuration(4, "model")
MIB = 1 << 20


def test_a_row_of_known_numbers() -> None:
    result = BenchRow(DRAFTING, [drafting()], {(0, 0): plain()}, 10**6)
    assert result.tokens_per_second.median == pytest.approx(4 / 3000e-6)
    assert result.speedup.median == result.overall == pytest.approx(4400 / 3000)
    assert result.draft_steps == pytest.approx(0.1)
    assert result.verify_steps == pytest.approx(1.2)
    assert result.weights_per_second.median == pytest.approx(2 * 10**6 / 2200e-6)
    assert (result.ttft_ms.median, result.itl_ms) == (9, (0.75, 0.75))
    assert drafting().stages == Stages(draft=200, verify=1100, accept=100, other=100)
    assert {name: s.median for name, s in result.stages.items()} == drafting().stages._asdict()
    assert result.outside_us.median == 250
    assert result.acceptance_by_position == [1.0, 0.0]
    facts = result.to_json()
    counts = [facts[name] for name in ("rounds", "drafted", "evaluated", "accepted")]
    assert counts == [2, 4, 4, 2]
    assert facts["speedup"] == {"median": 1.4667, "low": 1.4667, "high": 1.4667}


def test_a_speedup_is_the_median_of_the_ratios_of_pairs() -> None:
    slowness = [(1, 1), (1, 2), (3, 1), (2, 2), (1, 5)]  # drafting, plain
    pairs = [(number, 0) for number in range(len(slowness))]
    own = [drafting(p, slow) for p, (slow, _) in zip(pairs, slowness, strict=True)]
    beside = {p: plain(p, slow) for p, (_, slow) in zip(pairs, slowness, strict=True)}
    result = BenchRow(DRAFTING, own, beside, 10**6)
    assert result.speedup.median == pytest.approx(4400 / 3000)
    assert result.overall == pytest.approx(4400 * 11 / (3000 * 8))
    assert result.standing == "faster"  # on at least three of four


def test_repeated_tokens_are_those_whose_run_came_before() -> None:
    assert repeated_tokens([1, 2, 3, 1, 2, 4, 1, 2, 4], 2) == 3


@pytest.fixture
def two_classes() -> BenchReport:
    """Drafting gains on the first prompt, gamma 4 loses on both, auto is plain on the second."""
    pairs = [(p, r) for p in range(2) for r in range(3)]
    idle: Any = {"decode_us": 4400, "inside_us": 3600, "configuration": AUTO}
    samples = {
        PLAIN: [plain(p) for p in pairs],
        DRAFTING: [drafting(p, slow=1 + p[0]) for p in pairs],
        LOSING: [drafting(p, slow=2, configuration=LOSING) for p in pairs],
        AUTO: [
            *(drafting(p, configuration=AUTO) for p in pairs[:3]),
            *(sample(rounds(4, 0, 0, 0, 1000), pair=p, **idle) for p in pairs[3:]),
        ],
    }
    return report(samples, ["code", "prose"], Comparison(12), 10**6)


def test_the_verdict_names_the_best_and_what_auto_makes_of_it(two_classes: BenchReport) -> None:
    code, prose, _ = map(verdict, two_classes.tasks)
    assert code[0].startswith("gamma 2 (model) is 1.47 times plain decoding")
    assert "auto (model) is 1.47 times as fast" in code[1]
    assert "the best fixed one, gamma 2 (model), 1.47 times" in code[1]
    assert prose[0].startswith("speculation does not pay here: the best, auto (model), is 1.00")


def test_json_has_everything_and_the_setting_names_its_options(two_classes: BenchReport) -> None:
    machine = Machine("Some CPU", "avx2", 2, "", "onnxruntime 1.0")
    params = SamplingParams(max_tokens=5, temperature=0.8, top_p=0.9, verifier="rejection")
    setting = Environment("a/b", "pair", "ort-cpu", "fp32", machine, 1, 1, params)
    memory = Footprint(40 * MIB, 190 * MIB, 100 * MIB, 20 * MIB)
    summary = Summary(setting, two_classes, memory, Bandwidth(2.5e9, 256 * MIB, 2, 12))
    facts = json.loads(json.dumps(summary.to_json()))
    assert " ".join(sorted(facts)) == (
        "backend bandwidth bundle machine memory name outputs precision repeats sampling tasks "
        "threads verdict"
    )
    assert [len(task["results"]) for task in facts["tasks"]] == [4, 4, 4]
    assert facts["memory"]["ratio"] == 1.5833
    assert any("44% of 2.5 GB/s" in sentence for sentence in facts["verdict"])
    cached = replace(summary, bandwidth=Bandwidth(1e9, MIB, 1, 2))
    assert any("stay in the cache" in sentence for sentence in cached.sentences)
    for part in ("1 thread of Some CPU", "temperature 0.8, top-p 0.9 (rejection)", "1 repeat "):
        assert part in str(setting)


def test_memory_is_read_from_the_kernel(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n", encoding="ascii")
    assert (resident_bytes(status), peak_bytes(status)) == (MIB, 2 * MIB)
    assert 0 < resident_bytes() <= peak_bytes()


def test_bandwidth_is_of_the_fastest_read(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0, 500, 1000, 1250, 2000, 3000])
    monkeypatch.setattr("specrt.system.memory.perf_counter_ns", lambda: next(times))
    assert measure_bandwidth(2, MIB, reads=3) == Bandwidth(MIB / 250e-9, MIB, 2, 3)


def test_the_last_cache_is_the_largest(tmp_path: Path) -> None:
    for size in ("64K", "2048K", "32M", "?"):
        (tmp_path / f"index{size}").mkdir()
        (tmp_path / f"index{size}/size").write_text(f"{size}\n")
    assert last_cache_bytes(tmp_path) == 32 * MIB
