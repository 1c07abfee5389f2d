"""Bad input to every verb: one line with the value and a remedy, status 2, and no work."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import Run

# {codelet} is a bundle, {prompts} a file of prompts, {latin} one that is not UTF-8, {none} a place
# where nothing is.
GENERATE = [
    ("--prompt-ids 1,x", "--prompt-ids is '1,x'; expected numbers, as 1,2,3"),
    ("--prompt-file {none}", "{none} cannot be read: No such file or directory; name a file"),
    ("--prompt a --prompts f", "--prompt-ids and --prompts, not several"),
    ("--prompt-ids 1,2 --chat", "need a text prompt"),
    ("--prompt x --chat --no-parse-special", "--chat"),
    ("--prompt hello --chat", "{codelet} has no chat template: its model was not trained"),
    ("--prompt a --n 1000000", "--n is 1000000; expected a whole number from 1 to 1024"),
    ("--prompt-ids 99999 --n 2", "token id 99999 is not in the vocabulary"),
    ("--promt a", "'--promt'. (Did you mean one of: '--prompt'"),
    ("--prompt a --logit-bias 5=much", "'5=much' is not a bias; expected a token id and a number"),
    ("--prompt a --logprobs 2", "--logprobs needs --json"),
    ("--prompt a --json-schema=", "--json-schema is empty; expected a file, a schema, or true"),
    ("--prompt a --json-schema {none}", "--json-schema {none} cannot be read: No such file"),
    ("--prompt a --json-schema {prompts}", "--json-schema {prompts} has 'prompt' at #"),
    ("--prompt a --json-schema {{", "--json-schema is not a JSON: "),
    ("--prompt a --grammar {none}", "--grammar {none} cannot be read: No such file"),
    ("--prompt", "see `specrt generate --help`"),
    ("text", "'text' is one argument too many; give a text as --prompt TEXT"),
]
BENCH = [
    ("--gammas 2;3", "--gammas is '2;3'; expected numbers and auto"),
    ("--gammas 9", "gamma 9 is not among those"),
    ("--max-tokens 2048", "prompts.jsonl:1: a prompt of 9 tokens and 2048 more do not fit"),
    ("--prompts {all}", "all.jsonl:1 is of category 'all'"),
    ("--rows 1,3", "3 rows at once: this bundle was built for 1 to 1; name fewer"),
    ("--rows 1 --regex a+", "--rows and a constraint are measured apart"),
    ("--regex () --gammas 2 --max-tokens 4 --repeats 1", "nothing to time"),
]
OTHERS = [
    ("verify {codelet}", "Missing option '--prompts'"),
    ("verify {codelet} --prompts {prompts} --gammas 0", "nothing to compare"),
    ("tune {codelet} --prompts {few}", "prompts to tune on: 3, with room for 288 tokens"),
    ("tune {codelet} --prompts {long}", "shorten the prompt"),
    ("build {none}", "{none} does not exist; a recipe is a TOML file, such as engines/"),
    ("build itm", "itm does not exist; did you mean 'itn'?"),
    ("build {prompts}", "a recipe is a TOML file"),
    ("inspect {codelet}/manifest.json", "did you mean '{codelet}'?"),
    ("build --dry-run {nowhere}", "{nowhere}: target.checkpoint is 'nowhere/at/all'; expected"),
    ("build {none} {none} --out b", "--out is the place of one bundle, and 2 are named"),
    ("lint {none} --tensorrt 99.9", "--tensorrt is '99.9'; expected 10.3 to 11.x, as 11.0"),
    ("lint {none}", "{none} cannot be read (No such file or directory); name an ONNX file"),
    ("config", "no option; expected --cflags"),
    ("config --cflags --to {none}", "build it with `specrt config --build --to {none}`"),
    ("genrate", "unknown command 'genrate'; did you mean 'generate'?"),
]
TABLE = [
    *((f"generate {{codelet}} {options}", told) for options, told in GENERATE),
    *((f"bench {{codelet}} --prompts {{prompts}} {options}", told) for options, told in BENCH),
    *OTHERS,
]


@pytest.fixture(scope="module")
def places(codelet: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("refusals")
    texts = {
        "prompts": b'{"prompt": "def area(width, height):\\n"}\n',
        "all": b'{"prompt": "Once"}\n',
        "few": b'{"prompt": "x"}\n' * 3,
        "long": json.dumps({"prompt": "x = 1\n" * 3000}).encode(),
        "latin": b"# caf\xe9",
        "nowhere": b"[target]\ncheckpoint = 'nowhere/at/all'\n",
        "grammar": b"start: missing",
    }
    for name, text in texts.items():
        (folder / f"{name}.jsonl").write_bytes(text)
    places = {name: folder / f"{name}.jsonl" for name in texts}
    return {"codelet": codelet, "none": folder / "none", **places}


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize(("line", "told"), TABLE, ids=[line[:60] for line, _ in TABLE])
def test_bad_input_is_one_line_before_any_work(
    cli: Run, places: dict[str, Path], line: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("bench.measure", "tune.measure_costs", "config.compile_library"):
        monkeypatch.setattr(f"specrt.cli.{place}", None)
    words = [word.format(**places) for word in line.split()]
    assert told.format(**places) in cli(*words).refusal
    assert not (places["codelet"] / "tuning.json").exists()


ALONE = """
import sys
from specrt.cli import run
print([run(line.split()) for line in sys.argv[1:]])
print(sorted({"onnx", "onnxruntime", "torch", "transformers"} & set(sys.modules)))
"""


def test_what_can_be_refused_at_once_loads_no_library(places: dict[str, Path]) -> None:
    lines = ("build {few}", "build {few} --dry-run", "export {none} --out {none}/a.onnx",
             "lint {none} --tensorrt 99.9")  # fmt: skip
    words = [sys.executable, "-c", ALONE, *(line.format(**places) for line in lines)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr.count("\n")) == ("[2, 2, 2, 2]\n[]\n", 4)


def test_a_backend_of_a_later_version(cli: Run, codelet: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(codelet, tmp_path / "copy"))
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"ort-cpu"', '"x"'))
    for words in (("inspect",), ("generate", "--prompt", "a"), ("chat",), ("tune",)):
        said = cli(words[0], copy, *words[1:]).refusal
        assert "bundle 'codelet': backend 'x' is unknown" in said
        assert "upgrade specrt, or build the bundle again" in said


@pytest.mark.parametrize("line", ["hello", "[1]", '{"text": "a"}', ""])
def test_a_prompt_file_of_anything_else_is_told_what_a_line_holds(
    cli: Run, codelet: Path, tmp_path: Path, line: str
) -> None:
    path = tmp_path / "prompts"
    path.write_text(line)
    for verb in ("generate", "verify", "bench", "tune"):
        assert '{"prompt": "TEXT"}' in cli(verb, codelet, "--prompts", path).refusal


def test_a_bundle_that_was_likely_meant_is_named(
    cli: Run, codelet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "engines/build/codelet"
    place.mkdir(parents=True)
    shutil.copy(codelet / "manifest.json", place)
    (tmp_path / "engines/codelet").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("engines/build/codlet", "engines/codelet", "engines/build"):
        for words in (("inspect", name), ("generate", name), ("chat", name), ("tune", name)):
            assert "did you mean 'engines/build/codelet'?" in cli(*words).refusal
    assert "did you mean" not in cli("inspect", "zebra").refusal
    for recipe, told in (("codelet", "its bundle is"), ("other", "`specrt build engines/other/")):
        (tmp_path / "engines" / recipe).mkdir(exist_ok=True)
        (tmp_path / "engines" / recipe / "recipe.toml").touch()
        assert told in cli("inspect", f"engines/{recipe}/recipe.toml").refusal
    assert "such as engines/codelet/recipe.toml" in cli("build", "engines").refusal


def test_standard_input_is_held(cli: Run, codelet: Path) -> None:
    assert "put --prompt before it" in cli("generate", "import os").refusal
    said = cli("generate", codelet, stdin=b"ab\xff").refusal
    assert "standard input is not UTF-8: byte 0xff at offset 2" in said
    assert "no prompt; give --prompt TEXT" in cli("generate", codelet, terminal=True).refusal
