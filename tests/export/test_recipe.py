"""Recipes: what they default to, and that whatever is wrong is named with its remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrt.errors import RecipeError
from specrt_export.recipe.recipe import read_recipe

PAIR = '[target]\ncheckpoint = "t"\n[draft]\ncheckpoint = "d"\n'


def recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def models(target: str = "", draft: str = "", engine: str = "") -> str:
    """A recipe with lines of its own in each table."""
    return (
        f'[target]\ncheckpoint = "t"\n{target}\n[draft]\ncheckpoint = "d"\n{draft}\n'
        f"[engine]\n{engine}\n"
    )


def refusal(folder: Path, text: str) -> str:
    path = recipe(folder, text)
    with pytest.raises(RecipeError) as refused:
        read_recipe(path)
    assert str(refused.value).startswith(str(path))
    return str(refused.value)


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    found = read_recipe(recipe(tmp_path, PAIR))
    assert found.name == tmp_path.name
    assert (found.target.checkpoint, found.draft and found.draft.checkpoint) == ("t", "d")
    assert (found.engine.backend, found.engine.precision, found.engine.batch) == (
        "ort-cpu", "", 1,
    )  # fmt: skip
    assert {model.precision.names for model in found.models.values()} == {("fp32",) * 3}
    assert (found.engine.gammas, found.engine.gamma) == (tuple(range(1, 9)), "auto")
    other = recipe(tmp_path, PAIR).rename(tmp_path / "pair.toml")
    assert read_recipe(other).name == "pair"
    alone = '[target]\ncheckpoint = "t"\n[engine]\ngamma = 4\n'
    assert read_recipe(recipe(tmp_path, f"\ufeff{alone}")).draft is None


PLANS = 'backend = "tensorrt-rtx"\nprecision = "fp16"\n'
CUDA, ROWS = 'backend = "ort-cuda"\n', 'precision = "fp16"\nbatch = 2'


def plans(line: str) -> str:
    return models(engine=f"{PLANS}[tensorrt]\n{line}")


WRONG = [
    (models(target='head = "int8"'),
     "quality.calibration is missing, and the target would be quantized"),
    ('nmae = "x"\n' + PAIR, "unknown key 'nmae'; did you mean 'name'?"),
    ('[target]\nrevision = "main"\n', "target.checkpoint is missing"),
    (f'name = "a\\u2028b"\n{PAIR}', "printable characters"),
    ("x = " + "[" * 20_000, "cannot be read as TOML"),
    (models(engine="gammas = 3"), "engine.gammas is 3; expected a list"),
    (models(engine="backend = 'tpu'"), "engine.backend is 'tpu'; this version builds ort-cpu"),
    (models(engine="precision = 'fp8'"), "engine.precision is 'fp8'; ort-cpu builds fp32"),
    (models('precision = "fp8"'), "It keeps the fp8 of a checkpoint that holds it; of floats take"),
    (models(engine="gamma = 9"), "engine.gamma is 9; expected 'auto', 0 or one of engine.gammas"),
    (models(engine="drafter = 'none'"), "engine.drafter is 'none'; expected one of model, ngram"),
    ('[target]\ncheckpoint = "t"\n[engine]\ndrafter = "cascade"\n',
     "engine.drafter is 'cascade'; expected one of ngram, without [draft]"),
    (models(engine="batch = 65"), "engine.batch is 65, and ort-cpu builds 1 to 64"),
    (models(engine="prefill = 4096"), "engine.prefill is 4096; expected 1 to max_length (2048)"),
    (models(engine="max_length = 4\nprefill = 4"), "gammas reaches 8; a pass of 9 does not fit 4"),
    (models('precision = "fp16"', 'precision = "fp32"', 'precision = "garbage"'),
     "engine.precision is 'garbage'; expected one of fp32, fp16, bf16, int8, int4"),
    (models('precision = "bf16"') + "[quality]\nmax_kl = 0.1\nmin_top1 = 1\n",
     "quality.max_kl and min_top1 cannot be held to without quality.calibration, and the "
     "target would not be stored as fp32"),
    (models(target='precision = "int4"\nblock = 48'), "target.block is 48; expected one of 32, 64"),
    (models(draft="block = 64"),
     "draft.block is 64, and nothing of the draft is int8 or int4; remove it"),
    (models(engine='quantizer = "awq"'), "engine.quantizer is 'awq'; expected search or gptq"),
    (models('precision = "int4"', 'precision = "int8"\nquantizer = "gptq"'),
     "draft.quantizer is 'gptq', and no layers or head of the draft are int4; remove it, or set"),
    (models('precision = "int4"\nquantizer = "gptq"'), "quality.calibration is missing, and the"),
    (models("bits = 4"), "target.bits is 4; expected 'auto', or set `precision`, such as \"int4\""),
    (models("symmetric = false"), "target.symmetric is false, and nothing of the target is int4"),
    (models('symmetric = false\nprecision = "int4"\nbackend = "ort-cuda"'),
     "target.symmetric is false, and the int4 of ort-cuda has no zeros; remove it"),
    (models('bits = "auto"'), "target.bits is 'auto', and no bound is set; expected one of"),
    (models("max_kl = 0.1"), "target.max_kl is a bound for bits that are chosen; add target.bits"),
    (models('bits = "auto"\nmax_kl = 0.0'), "target.max_kl is 0.0; expected more than 0 nats"),
    (models('bits = "auto"\nmax_kl = 0.1\nprecision = "int8"'),
     "target.precision is 'int8', and target.bits 'auto' chooses between int4 and int8"),
    (models('bits = "auto"\nmax_kl = 0.1'), "quality.calibration is missing, and the target"),
    (models(target='backend = "ort-cuda"'), "engine.precision is 'fp32'; ort-cuda builds fp16"),
    (plans("candidatez = 5"), "unknown key 'candidatez'; did you mean 'candidates'"),
    (plans('version = "9.9"'), "version is '9.9'; graphs are written for TensorRT 10.3 to 11"),
    (models(engine="max_length = -1"), "max_length is -1; expected a whole number from 2 to 1"),
    (models(engine=f"{CUDA}{ROWS}"), "engine.batch is 2, and ort-cuda builds batch 1"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "told"), WRONG, ids=[told[:40] for _, told in WRONG])
def test_what_is_wrong_is_named(tmp_path: Path, text: str, told: str) -> None:
    assert told in refusal(tmp_path, text)


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(RecipeError, match="is not UTF-8 text"):
        read_recipe(path)
    with pytest.raises(
        RecipeError, match=r"is a folder, not a file; name a recipe in it, .*recipe\.toml"
    ):
        read_recipe(tmp_path)


@pytest.mark.parametrize(
    ("best", "engine", "target", "expected"),
    [
        ("ort-cuda", 'precision = "fp16"', "", "ort-cuda"),
        ("ort-cuda", 'precision = "fp16"', 'head = "fp32"', "ort-cpu"),
        ("ort-cuda", 'precision = "fp16"\nbatch = 2', "", "ort-cpu"),
    ],
)
def test_auto_is_the_fastest_backend_that_builds_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: str, engine: str, target: str,
    expected: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("specrt_export.recipe.recipe.best_backend", lambda: best)
    path = recipe(tmp_path, models(target, engine=f'backend = "auto"\n{engine}'))
    assert read_recipe(path).engine.backend == expected
