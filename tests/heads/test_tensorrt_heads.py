"""Heads on TensorRT: real plans of them, and rounds over doubles that run what the plans mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import pytest

import specrt
from heads.conftest import RECIPE, VOCABULARY, save_head, save_mtp, tensors
from heads.test_head_drafting import PROMPTS, SETTINGS, Rounds
from lower.lowering import findings, spoil
from shared import locked, nightly_but, shared_folder
from specrt.bundle import Bundle
from specrt.engine.head_engine import TrimmedEngine
from specrt.engine.protocol import Feed
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.engine_record import FILE_NAME, PLAN, read_engine_record
from specrt.engine.tensorrt.feature_buffer import FeatureBuffer
from specrt.engine.tensorrt.head import HeadStates, TensorRtHead
from specrt.engine.tensorrt.library import NATIVE
from specrt.errors import BuildError, EngineError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.system.gpu import survey
from specrt.tuning.pass_timer import PassTimer
from specrt_export.compile.compiler import CompiledModel
from specrt_export.compile.tensorrt_compiler import TensorRtCompiler
from specrt_export.heads.eagle3_format import KIND
from specrt_export.heads.mtp_format import KIND as MTP
from specrt_export.lower.lazy_tensor import ENGINE
from specrt_export.recipe.recipe import read_recipe
from support.builds import build
from support.gpu_double import MADE, RTX, GraphMachine, kept_graphs

GAMMAS, PREFILL = (1, 2, 4), 12
STAGES = "stages.txt"
"""What a build said on its way, next to what it made."""
Built = Callable[..., Path]


@pytest.fixture(scope="session")
def built(target: Path, bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the pair, or the target with another draft; keep the lowered graphs next to it."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: nothing is built")
    root = shared_folder(tmp_path_factory) / "plans-of-heads"
    root.mkdir(exist_ok=True)

    def once(
        version: str = "", batch: int = 1, precision: str = "fp32", draft: Path | None = None,
        gammas: Sequence[int] = GAMMAS, backend: str = RTX, name: str = "",
    ) -> Path:  # fmt: skip
        draft = draft or bundle.parent / "head"
        folder = root / "-".join([backend, version, str(batch), precision, draft.name, name])
        with locked(root / f"{folder.name}.lock"):
            if not (folder / "bundle").exists():
                folder.mkdir()
                make(folder, version, batch, precision, draft, gammas, backend)
        return folder / "bundle"

    def make(
        folder: Path, version: str, batch: int, precision: str, draft: Path,
        gammas: Sequence[int], backend: str,
    ) -> None:  # fmt: skip
        text = RECIPE.format(target=target, head=draft)
        text = text.replace("[draft]", f'[draft]\nkind = "{MTP if draft.name == MTP else ""}"')
        text = text.replace("batch = 2", f'batch = {batch}\nbackend = "{backend}"')
        text = text.replace("[1, 2, 3, 4, 5, 6, 7, 8]", str(list(gammas)))
        text += f'precision = "{precision}"\n'
        text += f'[tensorrt]\nversion = "{version}"\n' if version else ""
        if precision.startswith("int"):
            text += '[quality]\ncalibration = "text.txt"\n'
            words = " ".join(f"t{7 * i * i % VOCABULARY}" for i in range(300))
            (folder / "text.txt").write_text(words, encoding="utf-8")
        (folder / "recipe.toml").write_text(text, encoding="utf-8")
        with kept_graphs(folder):
            stages: list[str] = []
            build(
                read_recipe(folder / "recipe.toml"), folder / "bundle",
                lambda stage, done: stages.append(stage),
            )  # fmt: skip
            (folder / STAGES).write_text("\n".join(stages), encoding="utf-8")

    return once


@pytest.fixture
def load(gpu: GraphMachine, built: Built) -> Callable[..., Generator]:
    """Open the pair on that machine."""

    def loaded(version: str = "", batch: int = 1, draft: Path | None = None) -> Generator:
        return gpu.load(built(version, batch, draft=draft))

    return loaded


def engines(generator: Generator) -> tuple[TensorRtEngine, TensorRtHead]:
    """Return the engines below a pair."""
    target, draft = generator.models.target, generator.models.draft
    assert isinstance(target, TensorRtEngine)
    assert isinstance(draft, TrimmedEngine)
    assert isinstance(draft.engine, TensorRtHead)
    return target, draft.engine


FORMS = pytest.mark.parametrize(
    ("version", "batch"),
    [
        pytest.param("", 1, id="native", marks=pytest.mark.nightly),
        pytest.param("", 2, id="rows"),
        pytest.param("10.3", 2, id="decomposed", marks=pytest.mark.nightly),
    ],
)


def drafts(generator: Generator) -> list[list[int]]:
    """Return what is drafted in random rounds: any number of drafted tokens is accepted."""
    found = []
    for seed in range(12):
        text = Rounds(generator, seed)
        text.step()  # reads the prompt
        for number in range(8):
            if number % 5 == 2:
                text.step()
            text.step(lambda tokens, gamma: [])
        found += text.drafts
    return found


@pytest.fixture(scope="module")
def cpu(bundle: Path) -> Iterator[Generator]:
    """The pair on a CPU."""
    with specrt.load(bundle, threads=1, text_memory_bytes=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def drafts_on_cpu(cpu: Generator) -> list[list[int]]:
    return drafts(cpu)


@FORMS
def test_drafts_are_those_of_a_cpu_after_any_rounds(
    load: Callable[..., Generator], drafts_on_cpu: list[list[int]], version: str, batch: int
) -> None:
    """Rolled back anywhere, after rounds without the head, prompts in several passes."""
    with load(version, batch) as generator:
        assert drafts(generator) == drafts_on_cpu
        captured = generator.models.cuda_graphs
        target, head = engines(generator)
        fixed = {width for width in range(1, PREFILL + 1) if head.captures(width, 1)}
    assert len(drafts_on_cpu) == 96
    assert {len(tokens) for tokens in drafts_on_cpu} == {*range(1, 9)}
    assert fixed == {1, 2, 3, 4, 5}
    assert captured is not None
    assert captured.captured >= len(fixed) + target.captures(1, 1)
    assert captured.refusals == ()


def off_by_one(patched: pytest.MonkeyPatch) -> None:
    read = FeatureBuffer.read

    def shifted(self: FeatureBuffer, to: int, starts: Sequence[int], width: int) -> None:
        read(self, to, [max(0, start - 1) for start in starts], width)

    patched.setattr(FeatureBuffer, "read", shifted)


def states_stay(patched: pytest.MonkeyPatch) -> None:
    """The target's features do not take the place of the states that a head went on from."""
    after, states = FeatureBuffer.after, HeadStates.go_on

    def kept(self: FeatureBuffer, bound: Any, starts: Sequence[int], shape: Any) -> None:
        if starts[0] not in written:
            after(self, bound, starts, shape)

    def noted(self: HeadStates, row: int, position: int) -> None:
        written.add(position)
        states(self, row, position)

    written: set[int] = set()
    patched.setattr(FeatureBuffer, "after", kept)
    patched.setattr(HeadStates, "go_on", noted)


def feature_for_state(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(HeadStates, "go_on", lambda self, row, position: None)


def states_of_another_place(patched: pytest.MonkeyPatch) -> None:
    after = HeadStates.after

    def first(self: HeadStates, bound: Any, starts: Sequence[int], shape: Any) -> None:
        self.last = {row: position - 1 for row, position in self.last.items()}
        after(self, bound, starts, shape)

    patched.setattr(HeadStates, "after", first)


@pytest.mark.parametrize(
    "broken", [off_by_one, states_stay, feature_for_state, states_of_another_place]
)
def test_a_head_that_reads_something_else_drafts_otherwise(
    load: Callable[..., Generator], drafts_on_cpu: list[list[int]],
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None],
) -> None:  # fmt: skip
    with load() as generator:
        broken(monkeypatch)
        found = drafts(generator)
    same = [one == other for one, other in zip(found, drafts_on_cpu, strict=True)]
    assert sum(same) < len(same) / 2


@pytest.fixture(scope="module")
def on_cpu(cpu: Generator) -> list[Any]:
    """What the bundle for a CPU answers: texts, and how each round of them went."""
    return answers(cpu)


def answers(generator: Generator) -> list[Any]:
    """Return texts and rounds of requests, one after the other and on all rows."""
    found = []
    for settings in SETTINGS:
        for verifier in ("match", "rejection"):
            params = SamplingParams(max_tokens=24, ignore_eos=True, verifier=verifier, **settings)
            for gamma in (0, 2, 4):
                for prompt in PROMPTS[: 4 if gamma == 4 else 1]:
                    done = generator.generate(prompt, params, gamma=gamma, drafter="model")
                    rounds = [(one.drafted, one.accepted) for one in done.speculation.log]
                    found.append((done.token_ids, rounds))
            texts = generator.generate_many(PROMPTS, params, gamma=4, drafter="cascade")
            found.append([text[0].token_ids for text in texts])
    return found


@FORMS
def test_texts_and_rounds_are_those_of_a_cpu(
    on_cpu: list[Any], load: Callable[..., Generator], version: str, batch: int
) -> None:
    with load(version, batch) as generator:
        found = answers(generator)
    for number, (one, other) in enumerate(zip(found, on_cpu, strict=True)):
        assert one == other, number


def test_rounds_of_a_head_are_timed(load: Callable[..., Generator]) -> None:
    """From a position that no text led to."""
    with load() as generator:
        timer = PassTimer(generator.models, None, perf_counter_ns)
        timer.fill(perf_counter_ns() + 10**12)
        for gamma in (0, *GAMMAS):
            timed = timer.burst(gamma, 3)
            assert [one.drafted for one in timed] == [gamma] * 3


def test_a_head_ends_with_its_target(gpu: GraphMachine, load: Callable[..., Generator]) -> None:
    """Also where a copy fails, and where the head is closed first."""
    generator = load()
    target, head = engines(generator)
    head.forward([[1, 2, 3]], 0, 1)
    for feed in (Feed(0, [1], 160, 1, recursive=True), Feed(0, [1, 2], 5, 1, recursive=True)):
        with pytest.raises(EngineError, match=r"would write positions|has 2 tokens"):
            head.forward_rows([feed._replace(start=feed.start + 1)])
    gpu.cuda.fail("cudaMemcpyAsync", after=1)
    with pytest.raises(EngineError, match="cannot copy on the device"):
        head.forward_rows([Feed(0, [1], 5, 1, recursive=True)])
    with pytest.raises(EngineError, match="an earlier pass failed"):
        head.forward([[1]], 0)
    target.close()
    with pytest.raises(EngineError, match=r"an earlier pass failed|closed"):
        head.forward([[1]], 0)
    generator.close()
    gpu.hold_closed()
    generator = load()
    target, head = engines(generator)
    head.close()
    with pytest.raises(EngineError, match="closed"):
        head.forward([[1]], 0)
    target.forward([[1, 2]], 0)
    target.end(EngineError("a pass of the target"))
    generator.close()


def test_a_failed_copy_of_features_ends_the_target(
    gpu: GraphMachine, load: Callable[..., Generator]
) -> None:
    with load() as generator:
        target, head = engines(generator)
        target.forward([[1, 2]], 0)
        gpu.cuda.fail("cudaMemcpyAsync")  # what is fed and fetched is in the captured graph
        with pytest.raises(EngineError, match="cannot copy on the device"):
            target.forward([[1, 2]], 0)
        gpu.cuda.fails = {}
        with pytest.raises(EngineError, match="what the KV buffers hold is not known"):
            target.forward([[1, 2]], 0)
        with pytest.raises(EngineError, match="what the KV buffers hold is not known"):
            head.forward([[1]], 2)


def test_a_head_beside_another_target_is_refused(
    gpu: GraphMachine, load: Callable[..., Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FeatureBuffer, "width", 7, raising=False)
    made = FeatureBuffer.__init__

    def wider(self: FeatureBuffer, memory: Any, batch: int, length: int, width: int) -> None:
        made(self, memory, batch, length, width + 1)

    monkeypatch.setattr(FeatureBuffer, "__init__", wider)
    with pytest.raises(EngineError, match="reads features of width 32, and its target leaves"):
        load()


def no_gpu() -> bool:
    return bool(survey().problem)


@pytest.fixture(scope="session")
def mild(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that does not make more of what fp16 rounds than trained ones do."""
    weights = {
        name: tensor / 2 if tensor.is_floating_point() and tensor.ndim > 1 else tensor
        for name, tensor in tensors().items()
    }
    return save_head(tmp_path_factory.mktemp("mild") / "mild", weights=weights)


@pytest.mark.parametrize("precision", nightly_but(["int8"], ["fp16", "int8", "int4"]))
@pytest.mark.parametrize("kind", nightly_but([KIND], [KIND, MTP, ""]))
def test_plans_are_built_in_every_precision(
    built: Built, target: Path, trimmed: Path, mild: Path, kind: str, precision: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """And TensorRT, of the version that parses them, has nothing against the graphs."""
    draft = save_mtp(tmp_path / MTP, target) if kind == MTP else mild if kind else trimmed
    folder = built(precision=precision, draft=draft, gammas=(2,))
    manifest = Bundle.open(folder).manifest
    assert manifest.draft is not None
    assert manifest.draft.precision == manifest.target.precision == precision
    assert manifest.draft.kind == kind
    assert bool(manifest.draft.vocab_map) == (kind != MTP)
    if kind and precision != "fp16":
        said = (folder.parent / STAGES).read_text("utf-8")
        assert ("of what the head drafts is accepted is not measured" in said) is no_gpu()
    for role in ("target", "draft"):
        record = read_engine_record(folder / role / FILE_NAME)
        assert (record.form, record.compute) == (NATIVE, "fp16")
        assert record.plan_bytes == (folder / role / PLAN).stat().st_size
        places = [(p.width.most, p.rows.most) for p in record.profiles]
        drafts = [(12, 1), (1, 1), (2, 1), *([(3, 1)] if kind else [])]
        assert places == (drafts if role == "draft" else [(12, 3), (1, 1), (3, 3)])
        assert findings(folder.parent / MADE / role) == []


@pytest.mark.parametrize(
    ("role", "name", "said"),
    [
        ("target", "feature", "leaves features that differ from the portable graph"),
        ("draft", "state", "the head's engine differs from its portable graph"),
        ("draft", "confidence", "has a wrong confidence"),
    ],
)
def test_what_a_lowered_graph_leaves_wrongly_is_found_by_the_build(
    built: Built, monkeypatch: pytest.MonkeyPatch, role: str, name: str, said: str
) -> None:
    lowers = TensorRtCompiler.lower

    def spoiled(self: Any, source: Any, folder: Path) -> Any:
        made = lowers(self, source, folder)
        if made.role == role:
            spoil(folder / ENGINE, name)
        return made

    monkeypatch.setattr(TensorRtCompiler, "lower", spoiled)
    plan = CompiledModel(PLAN, 0)  # none is built: the graphs are compared before
    monkeypatch.setattr(TensorRtCompiler, "compile", lambda *_: plan)
    with pytest.raises(BuildError, match=said):
        built(name=name)
