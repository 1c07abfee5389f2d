"""What a run says: tables, sentences, JSON, the picture, and the memory behind it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.samples import DRAFTING, drafting, plain, rounds, sample
from specrt.bench.lossless import Comparison
from specrt.bench.measure import Environment, Footprint, Samples, peak_bytes, resident_bytes
from specrt.bench.report import (
    ALL,
    BenchReport,
    Summary,
    Table,
    check_plot,
    curves,
    draw,
    levels,
    report,
    verdicts,
)
from specrt.bench.samples import PLAIN, Configuration
from specrt.errors import RequestError
from specrt.params import SamplingParams
from specrt.system import Bandwidth, Machine, last_cache_bytes, measure_bandwidth

AUTO = Configuration("auto", "model")
LOSING = Configuration(4, "model")
MIB = 1 << 20


def reported(samples: Samples, categories: list[str]) -> BenchReport:
    return report(samples, categories, Comparison(12), 10**6)


@pytest.fixture
def two_classes() -> BenchReport:
    """Drafting gains on the first prompt, gamma 4 loses on both, auto is plain on the second."""
    pairs = [(p, r) for p in range(2) for r in range(3)]
    samples = {
        PLAIN: [plain(p) for p in pairs],
        DRAFTING: [drafting(p, slow=1 + p[0]) for p in pairs],
        LOSING: [drafting(p, slow=2, configuration=LOSING) for p in pairs],
        AUTO: [drafting(p, configuration=AUTO) if p[0] == 0 else
               sample(rounds(4, 0, 0, 0, 1000), decode_us=4400, inside_us=3600, pair=p,
                      configuration=AUTO) for p in pairs],
    }  # fmt: skip
    return reported(samples, ["code", "prose"])


@pytest.fixture
def summary(two_classes: BenchReport) -> Summary:
    machine = Machine("Some CPU", "avx2", 2, "", "onnxruntime 1.0")
    params = SamplingParams(max_tokens=5, seed=0)
    setting = Environment("a/b", "pair", "ort-cpu", "fp32", machine, 2, 3, params)
    taken = Footprint(40 * MIB, 190 * MIB, 100 * MIB, 20 * MIB)
    return Summary(setting, two_classes, taken, Bandwidth(2.5e9, 256 * MIB, 2, 12))


def test_classes_are_apart_and_all_together(two_classes: BenchReport) -> None:
    assert [(t.category, t.prompts) for t in two_classes.tasks] == [
        ("code", 1), ("prose", 1), (ALL, 2),
    ]  # fmt: skip
    code, prose, total = ([row.speedup.median for row in t.rows] for t in two_classes.tasks)
    assert code == pytest.approx([1, 4.4 / 3, 2.2 / 3, 4.4 / 3])
    assert prose == pytest.approx([1, 2.2 / 3, 2.2 / 3, 1])
    assert total == pytest.approx([1, (4.4 + 2.2) / 6, 2.2 / 3, (1 + 4.4 / 3) / 2])
    assert len(reported({PLAIN: [plain()]}, ["code"]).tasks) == 1


def test_the_verdict_is_in_words(two_classes: BenchReport) -> None:
    code, prose, _, outputs = verdicts(two_classes)
    assert code == (
        "code: gamma 2 (model) is 1.47x (quartiles 1.47 to 1.47) plain decoding; a drafted token "
        "costs 10.0% of a target step and verifying 3 tokens 1.20 steps; over the whole run auto "
        "(model) is 1.47x and the best fixed, gamma 2 (model), 1.47x; 0% of the plain output "
        "repeats an earlier run of 16 tokens"
    )
    assert prose.startswith(
        "prose: speculation does not pay here: the best, auto (model), is 1.00x (quartiles 1.00 "
        "to 1.00) plain decoding; over the whole run auto (model) is 1.00x and the best fixed, "
        "gamma 2 (model), 0.73x; "
    )
    assert outputs == "outputs identical: 12 compared with plain decoding"
    assert verdicts(reported({PLAIN: [plain()]}, ["code"]))[0] == (
        "0% of the plain output repeats an earlier run of 16 tokens"
    )


def test_a_limit_that_was_crossed_is_said() -> None:
    done = [drafting((0, r), configuration=AUTO) for r in range(3)]
    done[1].counts.fallback = "too few accepted"
    found = reported({PLAIN: [plain((0, r)) for r in range(3)], AUTO: done}, ["code"])
    assert (
        "; auto (model) fell back in 1 of 3 completions: too few accepted; " in verdicts(found)[0]
    )
    assert found.total.rows[1].to_json()["fallback"] == "too few accepted"


def test_losing_rows_stay_and_are_marked(summary: Summary) -> None:
    text = summary.to_text()
    lines = [line.split() for line in text.splitlines() if line.lstrip().startswith("4 ")]
    assert [line[2:7] for line in lines[:3]] == [
        ["667", "0.73", "0.73-0.73", "0.73", "slower"]
    ] * 3  # fmt: skip
    assert text.count("slower") == 4  # and gamma 2 on prose
    assert max(map(len, text.splitlines()[2:8])) <= 120


def test_the_round_table_adds_up(summary: Summary) -> None:
    table = summary.to_text().split("a round, 2 prompts: where its time goes\n")[1]
    header, plain_row, drafting_row = (line.split() for line in table.splitlines()[:3])
    assert header[:4] == ["gamma", "drafter", "draft", "us"]
    assert plain_row == ["0", "0", "900", "100", "100", "200", "1.1"]
    assert drafting_row[2:6] == ["300", "1650", "150", "150"]
    assert drafting_row[-2:] == ["1.00", "0.00"]


def test_the_setting_says_what_the_figures_hold_for(summary: Summary) -> None:
    assert str(summary.setting) == (
        "pair, ort-cpu fp32, 2 threads of Some CPU, onnxruntime 1.0; 5 tokens a prompt, greedy, "
        "3 repeats in turn"
    )
    drawn = SamplingParams(max_tokens=5, temperature=0.8, top_p=0.9, verifier="rejection")
    sampled = replace(summary.setting, params=drawn, threads=1, repeats=1)
    assert "1 thread of Some CPU" in str(sampled)
    assert str(sampled).endswith(
        "5 tokens a prompt, temperature 0.8, top-p 0.9 (rejection), 1 repeat in turn"
    )


def test_reading_weights_is_held_to_the_memory(summary: Summary) -> None:
    reading, memory = summary.sentences[-2:]
    assert reading == (
        "plain decoding reads 1.1 GB/s of weights in the target's passes, 44% of 2.5 GB/s of "
        "memory read, at least: the fastest of 12 reads of 256 MiB in NumPy by 2 threads"
    )
    assert memory == (
        "peak memory 190 MiB, 40 of them there before the bundle was opened; weights 100 and "
        "caches 20: 1.58 times them, 1.25 without what was there"
    )
    cached = replace(summary, bandwidth=Bandwidth(1e9, MIB, 1, 2))
    assert cached.sentences[-2].endswith(
        "by 1 thread; more than memory gives, so weights stay in the cache"
    )


def test_markdown_is_tables_of_equal_rows(summary: Summary) -> None:
    blocks = summary.to_markdown().split("\n\n")
    tables = [block.splitlines() for block in blocks if block.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len({line.count("|") for line in table}) == 1
        assert set(table[1]) == set("|-: ")
        assert len(table) == 2 + 4
    assert "**code**, 1 prompt" in blocks
    assert blocks[-1].count("\n- ") == len(summary.sentences) - 1


def test_json_has_everything(summary: Summary) -> None:
    told = json.loads(json.dumps(summary.to_json()))
    assert set(told) == {
        "bundle", "name", "backend", "precision", "machine", "threads", "repeats", "sampling",
        "outputs", "tasks", "memory", "bandwidth", "verdict",
    }  # fmt: skip
    assert told["sampling"]["max_tokens"] == 5
    assert [len(task["results"]) for task in told["tasks"]] == [4, 4, 4]
    assert told["tasks"][0]["results"][3]["gamma"] == "auto"
    assert told["memory"]["ratio"] == 1.5833
    assert told["verdict"] == summary.sentences


def test_text_is_aligned() -> None:
    table = Table("title", ("a", "bbb"), (("1", "2"), ("333", "")))
    assert table.to_text() == "title\n  a  bbb\n  1    2\n333"
    assert table.to_markdown() == "title\n\n| a | bbb |\n| ---: | ---: |\n| 1 | 2 |\n| 333 |  |"


def test_the_picture_has_a_curve_a_drafter(two_classes: BenchReport) -> None:
    code = two_classes.tasks[0]
    (drafter, points), *others = curves(code).items()
    assert (drafter, others) == ("model", [])
    assert [p.gamma for p in points] == [0, 2, 4]
    speeds = [p.tokens_per_second.median for p in points]
    assert speeds == pytest.approx([4 / 4400e-6, 4 / 3000e-6, 4 / 6000e-6])
    assert levels(code) == {
        "plain": pytest.approx(4 / 4400e-6), "auto (model)": pytest.approx(4 / 3000e-6),
    }  # fmt: skip


def test_a_picture_is_drawn_whole(two_classes: BenchReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    path = tmp_path / "out.png"
    check_plot(path)
    draw(two_classes, path, "a title")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["out.png"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("out.bmp", "expected a name ending in .png, .svg or .pdf"),
        ("none/out.png", "none/out.png cannot be written: No such file or directory"),
        ("folder.png", "cannot be written: it is a folder"),
        ("/proc/out.png", "/proc/out.png cannot be written: "),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(RequestError, match=told):
        check_plot(tmp_path / name)


def test_drawing_without_matplotlib_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrt.bench.report.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r'pip install "specrt\[plot\]"'):
        check_plot(tmp_path / "out.png")


def test_memory_is_read_from_the_kernel(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n", encoding="ascii")
    assert (resident_bytes(status), peak_bytes(status)) == (MIB, 2 * MIB)
    silent = tmp_path / "none"
    assert resident_bytes(silent) == peak_bytes(silent) > MIB
    assert 0 < resident_bytes() <= peak_bytes()


def test_bandwidth_is_of_the_fastest_read(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0, 500, 1000, 1250, 2000, 3000])
    monkeypatch.setattr("specrt.system.perf_counter_ns", lambda: next(times))
    found = measure_bandwidth(2, MIB, reads=3)
    assert found == Bandwidth(MIB / 250e-9, MIB, 2, 3)
    assert found.to_json()["bytes_per_second"] == round(MIB / 250e-9)


def test_the_last_cache_is_the_largest(tmp_path: Path) -> None:
    for number, size in enumerate(("64K", "2048K", "32M", "?")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n", encoding="ascii")
    assert last_cache_bytes(tmp_path) == 32 * MIB
    assert last_cache_bytes(tmp_path / "none") == 0
