"""Hub names: what is fetched, resumed, compared and refused, against a hub on this machine."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import huggingface_hub
import pytest

from specrt.errors import CheckpointError
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.hub import WANTED_FILES, download, gguf_files, gguf_snapshot, look_up
from specrt_export.checkpoint.hub_cache import cache, cached_snapshot, repository
from support.loopback_hub import COMMIT, LoopbackHub, listed, served

TENSOR = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
WEIGHTS = len(TENSOR).to_bytes(8, "little") + TENSOR + bytes(4)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickled",
    "README.md": b"# hello",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "onnx/model.safetensors": b"of something else",
    "model-/onnx.safetensors": b"of something else",
    "model-/../../../../escaped.safetensors": b"no",
}
WANTED = ["config.json", "model.safetensors", "additional_chat_templates/tool_use.jinja"]
SMALL = bytes(range(1, 21))
NEEDED = sum(len(FILES[name]) for name in WANTED)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    huggingface_hub.close_session()
    monkeypatch.setattr("specrt_export.checkpoint.hub.time.sleep", lambda _: None)
    models = {"owner/tiny": FILES, "owner/shut": FILES}
    models["owner/small"] = {"model.safetensors": SMALL}
    with served(LoopbackHub(models, gated=("owner/shut",), token="hf_right")) as hub:
        for key, value in {"HF_ENDPOINT": hub.address, "NO_PROXY": "127.0.0.1"}.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_TOKEN", "")
        yield hub
    huggingface_hub.close_session()


def fetch(show: Any = lambda done, total: None) -> Path:
    return download("owner/tiny", None, WANTED_FILES, show)


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_hub_name_is_fetched_once_and_only_what_is_needed(hub: LoopbackHub) -> None:
    alone = Checkpoint.open("owner/tiny", "v1", config_only=True)
    assert list(contents(alone.folder)) == ["config.json"]
    for revision in (None, "v1", COMMIT):
        whole = Checkpoint.open("owner/tiny", revision)
        assert whole.folder.name == COMMIT
        assert sorted(whole.weights) == ["w"]
        assert cached_snapshot("owner/tiny", revision or "") == whole.folder
    assert contents(whole.folder) == {name: FILES[name] for name in WANTED}
    assert sorted(name for name, _ in hub.sent) == sorted(WANTED)


def test_what_is_here_is_what_huggingface_hub_has(hub: LoopbackHub) -> None:
    """It finds what was fetched here, and what it fetched is found."""
    folder = fetch()
    for name in WANTED:
        found = huggingface_hub.try_to_load_from_cache("owner/tiny", name, cache_dir=cache())
        assert found == str(folder / name)
    (repo,) = huggingface_hub.scan_cache_dir(cache()).repos
    assert (repo.repo_id, repo.size_on_disk) == ("owner/tiny", NEEDED)
    assert [name for one in repo.revisions for name in one.refs] == ["main"]


@pytest.mark.parametrize("again", [True, False], ids=["another connection", "another process"])
def test_a_cut_at_every_byte_goes_on_there(hub: LoopbackHub, again: bool) -> None:
    small = look_up("owner/small", None, WANTED_FILES)
    (file,) = small.files
    blob = repository("owner/small") / "blobs" / file.blob
    for cut in range(file.bytes):
        hub.sent.clear()
        blob.unlink(missing_ok=True)
        if again:
            hub.cuts = [cut]
        else:
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.with_name(f"{blob.name}.incomplete").write_bytes(SMALL[:cut])
            assert small.missing_bytes == file.bytes - cut
        shown: list[int] = []
        small.fetch(lambda done, total, shown=shown: shown.extend((done, total)))
        assert (small.folder / file.name).read_bytes() == SMALL
        assert hub.sent == [(file.name, begin) for begin in ([0, cut] if again else [cut])]
        assert shown[-2:] == [file.bytes] * 2
        assert shown[0] > cut * (not again)
        assert not list(blob.parent.glob("*.incomplete"))


@pytest.mark.parametrize("left", [b"x" * 9, b"x" * 10_000, WEIGHTS[:-1] + b"!"])
def test_what_was_left_of_something_else_does_not_stay(hub: LoopbackHub, left: bytes) -> None:
    blob = listed("model.safetensors", WEIGHTS)["lfs"]["sha256"]
    part = repository("owner/tiny") / "blobs" / f"{blob}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(left)
    assert (fetch() / "model.safetensors").read_bytes() == WEIGHTS


def test_a_hub_without_ranges_sends_the_file_again(hub: LoopbackHub) -> None:
    hub.whole, hub.cuts = True, [9, 9, 9]
    assert contents(fetch()) == {name: FILES[name] for name in WANTED}
    hub.cuts = [5, 2, 9, 4] * 9  # and never sends it whole
    with pytest.raises(CheckpointError, match="check the network"):
        download("owner/small", None, WANTED_FILES)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_with_another_hash_is_refused_and_removed(hub: LoopbackHub, name: str) -> None:
    hub.spoiled = {name}
    with pytest.raises(CheckpointError, match=f"{name} of owner/tiny did not arrive as .*HF_ENDP"):
        fetch()
    assert name not in contents(cache() / "models--owner--tiny" / "snapshots")
    hub.spoiled = set()
    assert contents(fetch()) == {name: FILES[name] for name in WANTED}


class Refusal(NamedTuple):
    said: str
    model: str = "owner/tiny"
    revision: str | None = None
    answers: tuple[tuple[int, dict[str, str]], ...] = ()
    token: str = ""


REFUSALS = {
    "revision": Refusal("from the hub at revision 'v2' failed: the model has no", revision="v2"),
    "typo": Refusal("did you mean 'Qwen/Qwen3-0.6B'?", "Qwen/Qwen3-06B"),
    "not granted": Refusal("then wait until access is granted", "owner/shut", token="hf_wrong"),
    "401": Refusal(
        "`hf auth login` again, or correct HF_TOKEN",
        answers=((401, {"X-Error-Message": "Invalid credentials in Authorization header"}),),
    ),
    "403": Refusal("correct HF_TOKEN", answers=((403, {}),)),
    "429, for ever": Refusal("asks to wait 7 s", answers=((429, {"Retry-After": "7"}),) * 9),
    "500": Refusal("check the network and HF_ENDPOINT", answers=((500, {}),) * 9),
    "no hash": Refusal("the hub says None of", "owner/hashless"),
}  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_what_the_hub_refuses_is_one_line(
    hub: LoopbackHub, refusal: Refusal, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("HF_TOKEN", refusal.token)
    hub.answers = [*refusal.answers]
    if refusal.model == "owner/hashless":
        hub.answers = []
        monkeypatch.setattr("support.loopback_hub.COMMIT", None)
        hub.models["owner/hashless"] = FILES
    with pytest.raises(CheckpointError, match=refusal.said) as caught:
        Checkpoint.open(refusal.model, refusal.revision)
    assert str(caught.value).startswith(f"there is no folder {refusal.model}, and ")
    assert "\n" not in str(caught.value)


def test_a_disk_without_room_is_told_before_and_while(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5))
        with pytest.raises(CheckpointError, match=r"MB more, and 0\.0 MB are free at .*HF_HOME"):
            fetch()
    assert hub.sent == []

    def fill(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"free room at .*HF_HOME .*No space left"):
        fetch(fill)


def test_one_gguf_file_of_a_repository(hub: LoopbackHub) -> None:
    forms = ("Q8_0", "q4_k_m", "IQ4_XS", "IQ3_M", "IQ2_XS", "UD-Q8_K_XL")
    split = [f"m-BF16-0000{n}-of-00002.gguf" for n in (1, 2)]
    hub.models["owner/gguf"] = {
        name: name.encode() for name in (*(f"m-{form}.gguf" for form in forms), *split)
    }
    for form in ("Q4_K_M", "Q8_0", "IQ4_XS"):
        folder = gguf_snapshot("owner/gguf", form).fetch()
        assert [path.name.upper() for path in gguf_files(folder, form)] == [f"M-{form}.GGUF"]
    folder = gguf_snapshot("owner/gguf", "bf16").fetch()
    assert [path.name for path in gguf_files(folder, "BF16")] == split
    for form in ("ud-q8_k_xl", "Q8_K_XL"):
        folder = gguf_snapshot("owner/gguf", form).fetch()
        assert [path.name for path in gguf_files(folder, form)] == ["m-UD-Q8_K_XL.gguf"]
    assert len(hub.sent) == 6
    names = ("BF16", "IQ4_XS", "Q4_K_M", "Q8_0", "Q8_K_XL")
    there = f"there is {', '.join(f'owner/gguf:{name}' for name in names)}$"
    for form in ("IQ3_M", "Q4_0", "IQ2_XS", "../x"):
        with pytest.raises(CheckpointError, match=f"no file in {form} that is read; {there}"):
            gguf_snapshot("owner/gguf", form)
    with pytest.raises(CheckpointError, match=f"holds GGUF files; name one, {there}"):
        Checkpoint.open("owner/gguf")
    with pytest.raises(CheckpointError, match="there is none that is"):
        gguf_snapshot("owner/tiny", "Q8_0")
