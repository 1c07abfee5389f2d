"""A bundle of plans from `specrt.load` to text: all but the lowest layer is the runtime's own."""

from __future__ import annotations

import json
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
from specrt.errors import EngineError, RequestError, SpecrtError
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


def rounds_of(generator: Generator) -> CapturedRounds:
    found = generator.models.rounds
    assert isinstance(found, CapturedRounds)
    return found


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


@pytest.mark.parametrize("gammas", [(0, 4), (0, 2, 5), (0, 1, 8), (0,)])
def test_gammas_with_gaps(site: Site, gammas: tuple[int, ...]) -> None:
    target, draft = pair()
    with specrt.load(site.bundle(target, draft, gammas=gammas)) as generator:
        wanted = plain(target, PROMPT, NEW)
        for gamma in (*gammas, "auto"):
            found = generator.generate(PROMPT, PARAMS, gamma=gamma)  # type: ignore[arg-type]
            assert found.token_ids == wanted
        with pytest.raises(RequestError, match=r"gamma 3 is not among those .* 0"):
            generator.generate(PROMPT, PARAMS, gamma=3)
        assert (generator.models.rounds is None) is (gammas == (0,))


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


def test_threads_of_two_generators(site: Site) -> None:
    target, draft = pair()
    folder = site.bundle(target, draft)
    wanted = plain(target, PROMPT, NEW)
    found: list[bool] = []

    def work() -> None:
        with specrt.load(folder) as generator:
            for gamma in (4, 0, 8, 1):
                done = generator.generate(PROMPT, PARAMS, gamma=gamma)
                found.append(done.token_ids == wanted)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


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


def test_too_little_memory_for_the_pair_names_what_is_missing(site: Site) -> None:
    folder = site.bundle(*pair())
    site.options = {"size": 20_000}
    with pytest.raises(EngineError, match=r"needs \d+ bytes of the device, which has \d+ free"):
        specrt.load(folder)


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


def edited(folder: Path, role: str, change: dict[str, Any]) -> None:
    """Change a record, and the manifest's hash of it."""
    from specrt.bundle import hash_file

    path = folder / role / "engine.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    manifest = json.loads((folder / "manifest.json").read_text())
    new = hash_file(path)
    manifest["files"][f"{role}/engine.json"] = {"bytes": new.bytes, "sha256": new.sha256}
    (folder / "manifest.json").write_text(json.dumps(manifest))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another version": (
        {"version": "10.13.3.9"},
        r"built by TensorRT 10\.13\.3\.9, and here is 10\.15.*specrt build RECIPE --backend tens",
    ),
    "another GPU": (
        {"gpu": "NVIDIA H200", "gpu_capability": "9.0"},
        r"built on NVIDIA H200 of compute capability 9\.0, and A GPU has 8\.9.*--backend tensorrt",
    ),
    "another library": (
        {"backend": "tensorrt-rtx", "version": "1.7.1.116"},
        r"a plan of TensorRT for RTX 1\.7\.1\.116, and TensorRT 10\.15.* was asked to run it",
    ),
    "another compute": ({"compute": "bf16"}, "build the bundle again"),
    "no compute": ({"compute": "fp3"}, "computes in fp3, form native, .*expect|say fp16"),
    "newer": ({"format": 2}, "has format 2, and this specrt reads up to 1; upgrade specrt"),
    "no profiles": ({"profiles": []}, "profiles is empty"),
    "no record": ({"profiles": 3}, r"profiles is 3; expected a list.*build the bundle again"),
}


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", sorted(BAD))
def test_a_record_that_does_not_fit_is_one_line(site: Site, role: str, name: str) -> None:
    folder = site.bundle(*pair())
    change, said = BAD[name]
    edited(folder, role, change)
    with pytest.raises(SpecrtError, match=said) as told:
        specrt.load(folder)
    assert "\n" not in str(told.value)
    assert folder.name in str(told.value) or name in ("another compute", "no compute")
