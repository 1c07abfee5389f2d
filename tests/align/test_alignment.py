"""Training: what is lost, what it says decoding will gain, and what is written when."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import specrt
from align.conftest import ANSWER, VOCABULARY, recipe_of
from shared import nightly_but
from specrt.cli import run
from specrt.errors import BuildError, CheckpointError, RequestError
from specrt.params import SamplingParams
from specrt.speculation.costs import Costs
from specrt.traces import read_index, read_texts
from specrt_export.align import trainer
from specrt_export.align.alignment import (
    DRAFTERS,
    KINDS,
    RECORD,
    Alignment,
    AlignmentOptions,
    Outcome,
)
from specrt_export.align.draft_sources import DraftSource
from specrt_export.align.prediction import MeasuredCosts, accepted, rounds_of, tokens_per_round
from specrt_export.align.sparse_loss import SparseTarget, overlap, sparse_loss
from specrt_export.align.trace_batches import TraceBatch, TraceWindow, cut, split
from specrt_export.align.trainer import TrainingOptions
from specrt_export.plan.build_plan import BuildPlan, resolve
from specrt_export.recipe.recipe import Recipe, read_recipe
from support.builds import build
from support.quantized_folders import Gptq, write_folder

QUICK = TrainingOptions(steps=60, rate=3e-3, batch=1024)

Aligned = Callable[..., tuple[Alignment, DraftSource, Outcome]]


def plan_of(recipe: Recipe) -> BuildPlan:
    return resolve(recipe, recipe.folder / "unbuilt")


@pytest.fixture
def align(pair: Path, traces: Path, tmp_path: Path) -> Aligned:
    """Align a draft of some kind."""

    def aligned(kind: str, **options: Any) -> tuple[Alignment, DraftSource, Outcome]:
        options = {"training": QUICK, **options}
        plan = plan_of(recipe_of(pair, pair / "draft"))
        made = Alignment(plan, traces, AlignmentOptions(kind, **options), None, tmp_path / "state")
        return made, *made.run(lambda share, stage: None)

    return aligned


def known(count: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, SparseTarget]:
    """Return logits, a target's distributions, and all that is known of them, in any order."""
    torch.manual_seed(0)
    logits, p = torch.randn(count, vocabulary) * 2, torch.randn(count, vocabulary).softmax(-1)
    ids = torch.stack([torch.randperm(vocabulary) for _ in range(count)])
    return logits, p, SparseTarget(ids, p.gather(-1, ids).log(), torch.zeros(count))


def test_losses_of_whole_distributions_are_those_of_torch() -> None:
    logits, p, target = known(7, 30)
    q = logits.softmax(-1)
    kl = torch.nn.functional.kl_div(q.log(), p, reduction="batchmean")
    least = torch.minimum(p, q).sum(-1)
    wanted = {"kl": kl, "tv": 1 - least.mean(), "nla": -least.log().mean()}
    for kind, value in wanted.items():
        torch.testing.assert_close(sparse_loss(logits, target, kind), value)
    assert wanted["tv"] < sparse_loss(logits, target, "lk_hybrid") < wanted["kl"]
    torch.testing.assert_close(overlap(logits, target), least)


class SaidDraft:
    """A draft that says the same of every text."""

    trained = torch.nn.Module()

    def __init__(self, said: torch.Tensor) -> None:
        self._said = said

    def steps(
        self, batch: TraceBatch, begins: torch.Tensor, count: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield self._said, torch.arange(len(self._said))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return states


def test_sampled_texts_are_judged_as_rejection_does() -> None:
    """By the overlap of both distributions at the temperature of the traces."""
    count, temperature = 3000, 0.7
    logits, p, whole = known(count, 30)
    window = TraceWindow(
        np.zeros(count + 1, np.int64), 1, whole.ids.int().numpy(),
        whole.logprobs.half().numpy(), whole.rest.numpy(), "",
    )  # fmt: skip
    (found,) = accepted(SaidDraft(logits), [window], 1, None, temperature)
    colder = torch.softmax(p.log() / temperature, -1)
    wanted = torch.minimum(colder, torch.softmax(logits / temperature, -1)).sum(-1).mean()
    assert found.accepted.mean() == pytest.approx(float(wanted), abs=0.03)
    plain = torch.minimum(p, logits.softmax(-1)).sum(-1).mean()
    assert abs(float(plain - wanted)) > 0.05  # so the temperature shows


@pytest.mark.parametrize("kind", nightly_but(["layers"], KINDS))
def test_what_is_predicted_is_what_decoding_does(
    align: Aligned, pair: Path, traces: Path, tmp_path: Path, kind: str
) -> None:
    """Rounds of the built draft, counted, on texts that nothing was trained on."""
    alignment, source, outcome = align(kind, entries=0 if kind == "layers" else 64)
    alignment.write(source, outcome, tmp_path / kind)
    texts = split([*read_texts(traces, read_index(traces))])[1]
    build(recipe_of(pair, tmp_path / kind), tmp_path / "bundle")
    maps = source.maps(VOCABULARY)
    with specrt.load(tmp_path / "bundle", threads=1, text_memory_bytes=0) as generator:
        for drafter, gamma in product(("model", "cascade"), (1, 4)):
            lookup = gamma if drafter == "cascade" else 0
            windows = [cut(text, 512, lookup) for text in texts]
            found = accepted(source.draft, windows, 4, maps, 0.0)
            emitted = rounds = own = 0
            for text in texts:
                params = SamplingParams(max_tokens=ANSWER)
                done = generator.generate(
                    text.prompt.tolist(), params, gamma=gamma, drafter=drafter
                )
                assert done.token_ids == text.answer.tolist()
                emitted += len(done.token_ids) - 1
                rounds += len(done.speculation.log)
                own += sum(one.source == "model" for one in done.speculation.log)
            predicted = rounds_of(found, gamma)
            assert tokens_per_round(predicted) == pytest.approx(emitted / rounds, rel=0.01)
            asked = sum(one.asked > 0 for one in predicted)
            assert 0 <= asked - own <= len(texts)  # before a text's last token nothing is drafted
            assert (asked < len(predicted)) == (drafter == "cascade")


MEASURED = Costs((100.0, 104.0, 108.0), (0.0, 2.0, 3.0), 1.0)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_draft_that_stays_as_it_is_is_as_fast(
    align: Aligned, pair: Path, traces: Path, tmp_path: Path, drafter: str
) -> None:
    """By the costs of a bundle whose target is a hundred times as dear as the recipe's."""
    options = AlignmentOptions(
        "draft", drafter=drafter, training=replace(QUICK, steps=0, minutes=0)
    )
    costs, state = MeasuredCosts(MEASURED, 10_000_000), tmp_path / "state"
    recipe = recipe_of(pair, pair / "draft")
    made = Alignment(plan_of(recipe), traces, options, costs, state)
    _, outcome = made.run(lambda share, stage: None)
    assert outcome.after == outcome.before
    whole = outcome.before[0]
    assert whole.speeds[0] == pytest.approx(1e9 / MEASURED.plain_ns)
    if drafter == "model":
        rounds = whole.tokens_per_round[2]
        assert whole.speeds[2] == pytest.approx(rounds / MEASURED.round_ns(2) * 1e9)
    else:  # rounds of lookup have no step of the draft
        assert whole.speeds[2] > whole.tokens_per_round[2] / MEASURED.round_ns(2) * 1e9


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_that_begin_at_some_places_are_those_of_all(
    align: Aligned, traces: Path, kind: str
) -> None:
    """Training asks for few beginnings; what each position says there does not change."""
    _, source, _ = align(kind, training=replace(QUICK, steps=2))
    texts = split([*read_texts(traces, read_index(traces))])[0][:5]
    batch = TraceBatch.of([cut(text, 64) for text in texts], None)
    count = len(batch.chosen)
    some = torch.rand(count, generator=torch.Generator().manual_seed(0)) < 0.3
    every = torch.ones(count, dtype=torch.bool)
    with torch.no_grad():
        whole = [*source.draft.steps(batch, every, 3)]
        part = [*source.draft.steps(batch, some, 3)]
    assert len(whole) == len(part) > 0
    for (states, places), (fewer, chosen) in zip(whole, part, strict=True):
        assert 0 < len(chosen) < len(places)
        at = torch.searchsorted(places, chosen)
        assert (places[at] == chosen).all()
        torch.testing.assert_close(fewer, states[at], atol=1e-5, rtol=1e-4)


class KilledError(Exception):
    pass


def weights(source: DraftSource) -> dict[str, torch.Tensor]:
    return source.draft.trained.state_dict()


@pytest.mark.parametrize("kind", nightly_but(["draft"], ["draft", "head"]))
def test_a_run_that_was_killed_goes_on(
    align: Aligned, traces: Path, pair: Path, tmp_path: Path, kind: str
) -> None:
    often = replace(QUICK, steps=12, save_every=0.0)
    _, whole, _ = align(kind, training=often)
    shutil.rmtree(tmp_path / "state")
    steps = []

    def killed(share: float | None, stage: str) -> None:
        steps.append(share)
        if len(steps) == 8:
            raise KilledError

    options = AlignmentOptions(kind, training=often)
    recipe = recipe_of(pair, pair / "draft")
    with pytest.raises(KilledError):
        Alignment(plan_of(recipe), traces, options, None, tmp_path / "state").run(killed)
    alignment, resumed, _ = align(kind, training=often)
    assert alignment.state.step == 12
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], weight, atol=1e-4, rtol=1e-3)
    with pytest.raises(BuildError, match="other options"):
        align(kind, training=replace(often, rate=0.5))


def test_a_state_that_was_cut_off_is_refused(align: Aligned, tmp_path: Path) -> None:
    align("draft", training=replace(QUICK, steps=2))
    state = tmp_path / "state" / "state.pt"
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(BuildError, match="damaged"):
        align("draft", training=replace(QUICK, steps=2))


def test_what_is_no_number_ends_training(align: Aligned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        trainer, "sparse_loss", lambda *_: torch.tensor(torch.nan, requires_grad=True)
    )
    with pytest.raises(BuildError, match="learning-rate"):
        align("draft")


def command(pair: Path, traces: Path, out: Path, *more: str) -> int:
    named = ["--traces", str(traces), "--out", str(out)]
    return run(["align", str(pair / "recipe.toml"), *named, "--learning-rate", "0.03", *more])


def test_a_better_draft_is_written_with_its_record(
    pair: Path, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    recipe_of(pair, pair / "draft")
    monkeypatch.chdir(tmp_path)
    out = Path("aligned")
    assert command(pair, traces, out, "--steps", "60") == 0
    (said,) = re.findall(f"wrote {out}; .*`checkpoint = (.*)`", capsys.readouterr().out)
    assert (pair / json.loads(said)).samefile(out)
    record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    assert max(record["after"][0]["speeds"]) > max(record["before"][0]["speeds"])
    assert (out / "alignment.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert [path.name for path in tmp_path.iterdir()] == ["aligned"]
    assert command(pair, traces, out, "--steps", "60", "--trim-vocab", "48") == 0  # replaced
    assert load_file(out / "model.safetensors")["lm_head.weight"].shape[0] == 48


def test_a_draft_that_is_no_faster_is_not_written(
    pair: Path, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_of(pair, pair / "draft")
    assert command(pair, traces, tmp_path / "aligned", "--minutes", "0") == 1
    assert "not written" in capsys.readouterr().out
    assert not (tmp_path / "aligned").exists()


def test_traces_of_another_tokenizer_are_refused(
    pair: Path, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(pair, tmp_path / "pair", ignore=shutil.ignore_patterns("bundle", "traces"))
    for role in ("target", "draft"):
        path = tmp_path / "pair" / role / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.add_tokens(["<new>"])
        path.write_text(path.read_text(encoding="utf-8").replace("t95", "T95"), encoding="utf-8")
    recipe_of(tmp_path / "pair", tmp_path / "pair" / "draft")
    assert command(tmp_path / "pair", traces, tmp_path / "out") == 2
    assert "tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [
        ["--trim-vocab", "few"],
        ["--trim-vocab", "0"],
        ["--kind", "layers", "--depth", "4"],
        ["--kind", "draft", "--depth", "2"],
        ["--kind", "head", "--reads", "3,2"],
        ["--kind", "head", "--reads", "x"],
        ["--kind", "draft", "--reads", "1,2"],
        ["--bundle", "nowhere"],
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    pair: Path, traces: Path, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_of(pair, pair / "draft")
    assert command(pair, traces, tmp_path / "out", *more) == 2
    told = capsys.readouterr().err
    assert told.count("specrt:") == 1
    assert "Traceback" not in told
    assert not list(tmp_path.iterdir())


def test_a_trimmed_model_says_which_entries_it_has(
    align: Aligned, pair: Path, tmp_path: Path
) -> None:
    alignment, source, outcome = align(
        "draft", entries=48, training=replace(QUICK, steps=0, minutes=0.0)
    )
    alignment.write(source, outcome, tmp_path / "trimmed")
    stored = load_file(tmp_path / "trimmed" / "model.safetensors")
    ids = (stored["d2t"] + torch.arange(48)).tolist()
    assert ids == sorted(set(ids))
    assert 2 in ids  # what ends a text
    whole = load_file(pair / "draft" / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(stored["lm_head.weight"], whole[ids])
    config = json.loads((tmp_path / "trimmed" / "config.json").read_text(encoding="utf-8"))
    for wrong in (
        {"draft_vocab_size": 47},
        {"draft_vocab_size": "x"},
        {"tie_word_embeddings": True},
    ):
        (tmp_path / "trimmed" / "config.json").write_text(
            json.dumps(config | wrong), encoding="utf-8"
        )
        with pytest.raises(CheckpointError, match=r"d2t|whole numbers"):
            build(recipe_of(pair, tmp_path / "trimmed"), tmp_path / "bundle")


def test_a_trimmed_draft_changes_no_text(align: Aligned, pair: Path, tmp_path: Path) -> None:
    """In rows that share passes, with int8 weights, with seeds and without."""
    untrained = replace(QUICK, steps=0, minutes=0.0)
    alignment, source, outcome = align("draft", entries=48, training=untrained)
    alignment.write(source, outcome, tmp_path / "trimmed")
    recipe = recipe_of(pair, tmp_path / "trimmed")
    options = replace(recipe.engine, batch=2, precision="int8")
    build(replace(recipe, engine=options), tmp_path / "bundle")
    prompts = [[5, 9, 17], [40, 41, 5, 5, 7]]
    with specrt.load(tmp_path / "bundle", threads=1, text_memory_bytes=0) as generator:
        assert generator.models.target.batch == 2
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
            plain = generator.generate_each(prompts, params, drafter="none")
            drafted = generator.generate_each(prompts, params, gamma=4, drafter="model")
            assert [d.token_ids for [d] in drafted] == [p.token_ids for [p] in plain]
            assert all(done.speculation.drafted for [done] in drafted)


def test_places_and_recipes_that_will_not_do_are_refused(
    pair: Path, traces: Path, tmp_path: Path
) -> None:
    """A folder that holds something else, and a recipe without a draft model to train."""
    (tmp_path / "letter").write_text("dear", encoding="utf-8")
    assert command(pair, traces, tmp_path) == 2
    (pair / "alone.toml").write_text('[target]\ncheckpoint = "target"\n', encoding="utf-8")
    alone = read_recipe(pair / "alone.toml")
    with pytest.raises(BuildError, match="--kind head"):
        Alignment(plan_of(alone), traces, AlignmentOptions("draft"), None, tmp_path / "state")


def test_texts_of_one_token_are_on_neither_side(traces: Path) -> None:
    texts = [*read_texts(traces, read_index(traces))]
    short = [replace(text, answer=text.answer[:1]) for text in texts]
    with pytest.raises(RequestError, match="--max-tokens"):
        split(short)
    kept, held = split(texts)
    assert {t.prompt.tobytes() for t in kept}.isdisjoint(t.prompt.tobytes() for t in held)
    assert len(kept) + len(held) == sum(len(text.answer) > 1 for text in texts)
    assert np.isclose(len(held) / len(texts), 0.1, atol=0.08)


def test_the_target_of_a_draft_model_may_be_quantized(
    pair: Path, traces: Path, tmp_path: Path
) -> None:
    write_folder(tmp_path / "target", Gptq(), vocab_size=VOCABULARY)
    shutil.copyfile(pair / "draft" / "tokenizer.json", tmp_path / "target" / "tokenizer.json")
    shutil.copytree(pair / "draft", tmp_path / "draft")
    recipe = recipe_of(tmp_path, tmp_path / "draft")
    options = AlignmentOptions("draft", training=replace(QUICK, steps=2))
    made = Alignment(plan_of(recipe), traces, options, None, tmp_path / "state")
    assert made.run(lambda share, stage: None)[1].after[0].texts
    with pytest.raises(CheckpointError, match="quantized"):
        Alignment(plan_of(recipe), traces, AlignmentOptions("layers"), None, tmp_path / "state")
