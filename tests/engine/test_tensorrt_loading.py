"""A bundle of plans from `specrt.load` to text: all but the lowest layer is the runtime's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specrt
from engine.tensorrt_site import GAMMAS, LENGTH, Site, make_site, pair
from runtime.toy import TableEngine, plain
from specrt.engine.tensorrt.engine import OpenedEngine
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.errors import EngineError, RequestError
from specrt.generator import Generator
from specrt.params import Gamma, SamplingParams

PROMPT = list(range(40, 75))  # more than two chunks of a prompt
NEW = 60
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True)
DRAFTERS = ("model", "ngram", "cascade", "none")
EVERY: list[Gamma] = [*GAMMAS, "auto"]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = make_site(tmp_path, monkeypatch)
    yield made
    made.hold_closed()


def count_rounds(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the gamma of every whole round."""
    ran: list[int] = []
    run = CapturedRounds.run

    def noted(self: CapturedRounds, *given: Any) -> Any:
        ran.append(given[-1])
        return run(self, *given)

    monkeypatch.setattr(CapturedRounds, "run", noted)
    return ran


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_plain_decoding(
    site: Site, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair(memory=1)  # texts repeat, for lookup to find something
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    with specrt.load(site.bundle(target, draft)) as generator:
        ran = count_rounds(generator, monkeypatch)
        wanted = plain(target, PROMPT, LENGTH)
        for gamma in EVERY:
            ran.clear()
            found = generator.generate(PROMPT, params, gamma=gamma, drafter=drafter)
            assert found.token_ids == wanted
            counts = found.speculation
            if gamma == "auto":
                continue
            assert max(ran, default=0) <= gamma
            assert bool(ran) is (drafter in ("model", "cascade") and gamma > 0)
            if drafter in ("ngram", "cascade") and gamma:
                assert counts.sources["ngram"][0] > 0


@pytest.mark.parametrize("form", ["native", "decomposed"])
@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_sampled_text_uses_no_whole_round(
    site: Site, form: str, verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair()
    params = SamplingParams(
        max_tokens=NEW, ignore_eos=True, temperature=0.8, seed=5, verifier=verifier
    )
    with specrt.load(site.bundle(target, draft, form=form, candidates=8)) as generator:
        generator.generate(PROMPT, params, gamma="auto")  # measures costs, whole rounds too
        ran = count_rounds(generator, monkeypatch)
        alone = generator.generate(PROMPT, params, gamma=0)
        for drafter in DRAFTERS:
            for gamma in (1, 3, 8, "auto"):
                found = generator.generate(PROMPT, params, gamma=gamma, drafter=drafter)
                assert len(found.token_ids) == NEW
                if verifier == "match":
                    assert found.token_ids == alone.token_ids
        assert ran == []


def test_without_whole_rounds_the_text_is_the_same(site: Site) -> None:
    target, draft = pair()
    wanted = plain(target, PROMPT, LENGTH)
    assert len(wanted) == LENGTH + 1 - len(PROMPT)
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    for name, form in (("whole", "native"), ("single", "decomposed")):
        with specrt.load(site.bundle(target, draft, name=name, form=form)) as generator:
            assert (generator.models.rounds is None) is (form == "decomposed")
            for gamma in EVERY:  # up to the end of the KV buffers
                assert generator.generate(PROMPT, params, gamma=gamma).token_ids == wanted


@pytest.mark.parametrize("role", ["target", "draft"])
def test_one_model_may_run_on_another_backend(site: Site, role: str) -> None:
    backends = ("ort-cpu", "tensorrt") if role == "target" else ("tensorrt", "ort-cpu")
    target, draft = pair()
    with specrt.load(site.bundle(target, draft, backends=backends)) as generator:
        assert generator.models.rounds is None
        assert isinstance(getattr(generator.models, role), TableEngine)
        for gamma in EVERY:
            wanted = plain(target, PROMPT, NEW)
            assert generator.generate(PROMPT, PARAMS, gamma=gamma).token_ids == wanted
    assert len(site.devices) == 1


def test_a_target_alone_looks_up(site: Site) -> None:
    target, _ = pair(memory=2)
    with specrt.load(site.bundle(target, None)) as generator:
        for gamma in EVERY:
            found = generator.generate(PROMPT, PARAMS, gamma=gamma)
            assert found.token_ids == plain(target, PROMPT, NEW)


def test_two_libraries_share_one_device(site: Site) -> None:
    target, draft = pair()
    backends = ("tensorrt", "tensorrt-rtx")
    with specrt.load(site.bundle(target, draft, backends=backends)) as generator:
        assert generator.generate(PROMPT, PARAMS, gamma=4).token_ids == plain(target, PROMPT, NEW)
    assert len(site.devices) == 1


def test_nothing_is_left_of_many_openings(site: Site) -> None:
    folder = site.bundle(*pair())
    for number in range(20):
        generator = specrt.load(folder)
        generator.generate(PROMPT, PARAMS, gamma=number % 9)
        device = site.devices[-1]
        models = generator.models
        assert isinstance(models.target, OpenedEngine)
        assert isinstance(models.draft, OpenedEngine)
        first, last = models.target, models.draft
        if number % 2:  # in either order
            first, last = last, first
        first.close()
        assert device.closed == 0
        last.close()
        assert device.closed == 1
        generator.close()
        site.hold_closed()
    assert len(site.devices) == 20


def test_streams_of_two_generators_do_not_meet(site: Site) -> None:
    target, draft = pair()
    folder = site.bundle(target, draft)
    wanted = plain(target, PROMPT, NEW)
    with specrt.load(folder) as one, specrt.load(folder) as other:
        streams = [g.stream(PROMPT, PARAMS, gamma=3) for g in (one, other)]
        found: list[list[int]] = [[], []]
        while min(map(len, found)) < NEW:
            for number, stream in enumerate(streams):
                chunk = next(stream, None)
                found[number] += chunk.token_ids if chunk else []
        assert found == [wanted, wanted]
    assert len(site.devices) == 2


def test_closing_in_mid_stream_ends_it_with_a_word(site: Site) -> None:
    target, draft = pair()
    generator = specrt.load(site.bundle(target, draft))
    stream = generator.stream(PROMPT, PARAMS, gamma=4)
    emitted = [token for _ in range(5) for token in next(stream).token_ids]
    closing = threading.Thread(target=generator.close)
    closing.start()
    closing.join()
    with pytest.raises(RequestError, match="was closed"):
        next(stream)
    assert emitted == plain(target, PROMPT, len(emitted))
    assert stream.completion.token_ids == emitted


@pytest.mark.parametrize("call", ["launch", "wait", "enqueue", "fetch", "copy", "capture"])
@pytest.mark.parametrize("gamma", [0, 4])
def test_a_lost_device_keeps_what_was_emitted(site: Site, call: str, gamma: int) -> None:
    target, draft = pair()
    site.options = {"loses": True}
    with specrt.load(site.bundle(target, draft)) as generator:
        stream = generator.stream(PROMPT, PARAMS, gamma=gamma)
        emitted = list(next(stream).token_ids)
        device = site.devices[0]
        later = 5 if call in ("launch", "wait") else 1
        if call == "copy" and not gamma:
            return
        device.fails = {call: device.calls[call] + later}
        with pytest.raises(EngineError, match=f"^{call} failed") as told:
            emitted.extend(token for chunk in stream for token in chunk.token_ids)
        assert "\n" not in str(told.value)
        assert stream.completion.token_ids == emitted
        assert emitted == plain(target, PROMPT, len(emitted))
        for again in (gamma, 0, 8):
            with pytest.raises(EngineError, match="lost"):
                generator.generate(PROMPT, PARAMS, gamma=again)


def test_memory_that_is_missing_in_mid_stream_is_told(site: Site) -> None:
    target, draft = pair()
    with specrt.load(site.bundle(target, draft)) as generator:
        stream = generator.stream(PROMPT, PARAMS, gamma=4)
        next(stream)
        device = site.devices[0]
        device.fails = {"allocate": device.calls["allocate"] + 1}
        with pytest.raises(EngineError, match="allocate failed"):
            stream.finish()
        found = generator.generate(PROMPT, PARAMS, gamma=4)  # there is enough of it again
        assert found.token_ids == plain(target, PROMPT, NEW)


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("call", ["plan", "allocate"])
def test_what_does_not_open_closes_what_did(site: Site, role: str, call: str) -> None:
    folder = site.bundle(*pair())
    if call == "plan":
        site.refuse = {role: EngineError("TensorRT cannot open it")}
        said = "cannot open it"
    else:  # KV buffers, then working memory, of each model
        site.options = {"fails": {"allocate": 2 if role == "target" else 4}}
        said = "allocate failed"
    with pytest.raises(EngineError, match=said):
        specrt.load(folder)
    assert len(site.devices) == 1
    site.refuse, site.options = {}, {}
    with specrt.load(folder) as generator:
        generator.generate(PROMPT, PARAMS, gamma=4)


def test_scores_that_are_no_numbers_end_a_text_and_not_the_engine(site: Site) -> None:
    target, draft = pair()
    site.broken_at = {"target": (len(PROMPT) + 20,)}
    with specrt.load(site.bundle(target, draft)) as generator:
        for gamma in GAMMAS:
            stream = generator.stream(PROMPT, PARAMS, gamma=gamma)
            with pytest.raises(EngineError, match="NaN"):
                list(stream)
            found = stream.completion.token_ids
            assert 20 - gamma <= len(found) <= 20
            assert found == plain(target, PROMPT, len(found))
