"""What a recipe may say, and how a wrong one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrt.errors import RecipeError
from specrt_export.recipe import read_recipe

PAIR = '[target]\ncheckpoint = "t"\n[draft]\ncheckpoint = "d"\n'


def recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> str:
    path = recipe(folder, text)
    with pytest.raises(RecipeError) as refused:
        read_recipe(path)
    said = str(refused.value)
    assert str(path) in said
    assert "\n" not in said
    return said


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    found = read_recipe(recipe(tmp_path, PAIR))
    assert found.name == tmp_path.name
    assert (found.engine.backend, found.engine.precision) == ("ort-cpu", "fp32")
    assert found.engine.gammas == (1, 2, 3, 4, 5, 6, 7, 8)
    assert (found.engine.max_length, found.engine.prefill, found.engine.gamma) == (
        2048,
        256,
        "auto",
    )
    assert found.target.revision == found.target.graph == ""


def test_a_recipe_is_named_by_its_file_unless_it_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(PAIR, encoding="utf-8")
    assert read_recipe(path).name == "mine"
    path.write_text(f'name = "other"\n{PAIR}', encoding="utf-8")
    assert read_recipe(path).name == "other"


def test_a_recipe_in_the_working_folder_is_named_by_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe(tmp_path, PAIR)
    monkeypatch.chdir(tmp_path)
    assert read_recipe(Path("recipe.toml")).name == tmp_path.name


def test_the_backend_may_be_replaced(tmp_path: Path) -> None:
    path = recipe(tmp_path, PAIR)
    assert read_recipe(path, backend="ort-cpu").engine.backend == "ort-cpu"
    with pytest.raises(RecipeError, match=r"engine\.backend is 'cuda'; this version builds"):
        read_recipe(path, backend="cuda")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('nmae = "x"\n' + PAIR, "unknown key 'nmae'; did you mean 'name'?"),
        (PAIR + "[engin]\n", "unknown key 'engin'; did you mean 'engine'?"),
        (PAIR + "[engine]\ngama = 3\n", "unknown key engine.gama; did you mean 'gamma"),
        (PAIR + '[engine]\n"a\\nb" = 3\n', "unknown key engine.'a\\nb'; known: backend"),
        (PAIR + "[engine]\nzzz = 3\n", "unknown key engine.zzz; known: backend, batch, gamma, "),
        ('[target]\ncheckpont = "t"\n', "unknown key target.checkpont; did you mean 'checkpoint'"),
        ('[target]\nrevision = "main"\n', "target.checkpoint is missing"),
        ("", "[target] is missing"),
        ('target = "t"\n', "target is 't'; expected a table [target]"),
        ("[target]\ncheckpoint = 3\n", "target.checkpoint is 3; expected a string"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_named(tmp_path: Path, text: str, told: str) -> None:
    assert told in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("max_length = '9'", "engine.max_length is '9'; expected a whole number"),
        ("max_length = 9.5", "engine.max_length is 9.5; expected a whole number"),
        ("max_length = true", "engine.max_length is True; expected a whole number"),
        ("gammas = 3", "engine.gammas is 3; expected a list of whole numbers"),
        ("gammas = [1, '2']", "engine.gammas is [1, '2']; expected a list of whole numbers"),
        ("gammas = [true]", "engine.gammas is [True]; expected a list of whole numbers"),
        ("backend = 1", "engine.backend is 1; expected a string"),
        ("backend = 'tpu'", "engine.backend is 'tpu'; this version builds ort-cpu"),
        ("precision = 'fp8'", "engine.precision is 'fp8'; ort-cpu builds fp32"),
        ("max_length = 1\nprefill = 1", "engine.max_length is 1; expected 2 or more"),
        ("gammas = [-1, 4]", "engine.gammas is [-1, 4]; expected 0 or more each"),
        ("gamma = 9", "engine.gamma is 9; expected 'auto', 0 or one of engine.gammas"),
        (
            "gammas = [1, 2]\ngamma = 4",
            "engine.gamma is 4; expected 'auto', 0 or one of engine.gammas [1, 2]",
        ),
        ("gamma = 'fast'", "engine.gamma is 'fast'; expected a whole number or 'auto'"),
        ("gamma = true", "engine.gamma is True; expected a whole number or 'auto'"),
        ("batch = 0", "engine.batch is 0; expected 1 to 64"),
        ("batch = 65", "engine.batch is 65; expected 1 to 64"),
        ("prefill = 0", "engine.prefill is 0; expected 1 to max_length (2048)"),
        ("prefill = 4096", "engine.prefill is 4096; expected 1 to max_length (2048)"),
        ("max_length = 4\nprefill = 4", "engine.gammas reaches 8; a pass of 9 does not fit 4"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, line: str, told: str) -> None:
    assert told in refusal(tmp_path, f"{PAIR}[engine]\n{line}\n")


def test_a_target_alone_may_be_drafted_for(tmp_path: Path) -> None:
    found = read_recipe(recipe(tmp_path, '[target]\ncheckpoint = "t"\n[engine]\ngamma = 4\n'))
    assert (found.draft, found.engine.gamma) == (None, 4)


@pytest.mark.parametrize(
    ("best", "precision", "expected"),
    [
        ("ort-cuda", "fp16", "ort-cuda"),
        ("ort-cuda", "fp32", "ort-cpu"),
        ("ort-cpu", "fp16", "ort-cpu"),
    ],
)
def test_auto_is_the_fastest_backend_that_works_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: str, precision: str, expected: str
) -> None:
    monkeypatch.setattr("specrt_export.recipe.best_backend", lambda: best)
    path = recipe(tmp_path, models(engine=f'backend = "auto"\nprecision = "{precision}"'))
    assert read_recipe(path).engine.backend == expected
    monkeypatch.setattr("specrt_export.recipe.best_backend", lambda: "ort-cuda")
    wrong = recipe(tmp_path, models(engine='backend = "auto"\nprecision = "fp8"'))
    with pytest.raises(RecipeError, match=r"engine\.precision is 'fp8'"):
        read_recipe(wrong)


def test_models_may_have_backends_of_their_own(tmp_path: Path) -> None:
    text = models(target='backend = "ort-cuda"\nprecision = "bf16"')
    found = read_recipe(recipe(tmp_path, text))
    assert [found.backend_of(role) for role in ("target", "draft")] == ["ort-cuda", "ort-cpu"]
    with pytest.raises(RecipeError, match=r"engine\.precision is 'fp32'; ort-cuda builds fp16"):
        read_recipe(recipe(tmp_path, models(target='backend = "ort-cuda"')))


@pytest.mark.parametrize("backend", ["ort-cpu", "ort-cuda", "auto"])
def test_a_backend_given_replaces_those_of_the_models_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr("specrt_export.recipe.best_backend", lambda: "ort-cuda")
    own = [f'backend = "{name}"\nprecision = "fp16"' for name in ("ort-cuda", "ort-cpu")]
    found = read_recipe(recipe(tmp_path, models(*own)), backend=backend)
    wanted = "ort-cuda" if backend == "auto" else backend
    assert [found.backend_of(role) for role in ("target", "draft")] == [wanted, wanted]


@pytest.mark.parametrize(
    ("target", "engine"),
    [('head = "fp32"', ""), ('embedding = "fp32"', ""), ('head = "fp16"', "batch = 2")],
)
def test_auto_is_never_a_backend_that_is_then_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, engine: str
) -> None:
    monkeypatch.setattr("specrt_export.recipe.best_backend", lambda: "ort-cuda")
    halved = 'backend = "auto"\nprecision = "fp16"\n'
    found = read_recipe(recipe(tmp_path, models(target, engine=halved + engine)))
    assert found.engine.backend == "ort-cpu"


@pytest.mark.parametrize("table", ["engine", "target", "draft"])
def test_several_rows_are_for_the_cpu(tmp_path: Path, table: str) -> None:
    tables = {"target": "", "draft": "", "engine": 'precision = "fp16"\nbatch = 2'}
    tables[table] += '\nbackend = "ort-cuda"'
    said = refusal(tmp_path, models(**tables))
    assert "engine.batch is 2, and ort-cuda builds batch 1" in said


CALIBRATED = '[quality]\ncalibration = "text.txt"\n'


def models(target: str = "", draft: str = "", engine: str = "") -> str:
    """A recipe with lines of its own in each table."""
    return (
        f'[target]\ncheckpoint = "t"\n{target}\n[draft]\ncheckpoint = "d"\n{draft}\n'
        f"[engine]\n{engine}\n"
    )


@pytest.mark.parametrize(
    ("target", "draft", "engine", "expected"),
    [
        ("", "", "", ("fp32 fp32 fp32 0", "fp32 fp32 fp32 0")),
        ("", "", 'precision = "int8"', ("int8 int8 int8 32", "int8 int8 int8 32")),
        ("", "", 'precision = "int4"', ("int4 int8 int8 32", "int4 int8 int8 32")),
        ("", "", 'precision = "bf16"', ("bf16 bf16 bf16 0", "bf16 bf16 bf16 0")),
        ('precision = "int4"\nblock = 128', 'precision = "fp16"', 'precision = "int8"',
         ("int4 int8 int8 128", "fp16 fp16 fp16 0")),
        ('precision = "int4"\nhead = "fp32"\nembedding = "int4"', 'head = "int8"\nblock = 64', "",
         ("int4 int4 fp32 32", "fp32 fp32 int8 64")),
    ],
)  # fmt: skip
def test_each_model_has_its_own_precision(
    tmp_path: Path, target: str, draft: str, engine: str, expected: tuple[str, str]
) -> None:
    found = read_recipe(recipe(tmp_path, models(target, draft, engine) + CALIBRATED)).precisions
    told = {role: " ".join([*p.names, str(p.block)]) for role, p in found.items()}
    assert told == dict(zip(("target", "draft"), expected, strict=True))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (models(target='precision = "fp8"'),
         "target.precision is 'fp8'; ort-cpu builds fp32, fp16, bf16, int8, int4"),
        (models(draft='head = "int2"'), "draft.head is 'int2'; ort-cpu builds fp32"),
        (models(draft='embedding = "INT8"'), "draft.embedding is 'INT8'; ort-cpu builds fp32"),
        (models(target="precision = 8"), "target.precision is 8; expected a string"),
        (models(target='precison = "int8"'), "unknown key target.precison; did you mean 'precis"),
        (models(engine='precision = ""'), "engine.precision is ''; ort-cpu builds fp32"),
        (models('precision = "fp16"', 'precision = "fp32"', 'precision = "garbage"'),
         "engine.precision is 'garbage'; expected one of fp32, fp16, bf16, int8, int4"),
        (models('precision = "bf16"') + "[quality]\nmax_kl = 0.1\nmin_top1 = 1\n",
         "quality.max_kl and min_top1 cannot be held to without quality.calibration, and the "
         "target would not be stored as fp32"),
        (models(draft='head = "fp16"') + "[quality]\nmin_top1 = 0\n",
         "quality.min_top1 cannot be held to without quality.calibration, and the draft would"),
        (models(target='precision = "int4"\nblock = 48'),
         "target.block is 48; expected one of 32, 64, 128"),
        (models(target='precision = "int4"\nblock = 16'), "target.block is 16; expected one of 32"),
        (models(target='precision = "int4"\nblock = -32'), "target.block is -32; expected one of"),
        (models(draft="block = 64"),
         "draft.block is 64, and nothing of the draft is int8 or int4; remove it"),
        (models(engine="[quality]\nmax_kl = -0.1"), "quality.max_kl is -0.1; expected 0 or more"),
        (models(engine="[quality]\nmax_kl = nan"), "quality.max_kl is nan; expected 0 or more"),
        (models(engine="[quality]\nmax_kl = '1'"), "quality.max_kl is '1'; expected a number"),
        (models(engine="[quality]\nmax_kl = true"), "quality.max_kl is True; expected a number"),
        (models(engine="[quality]\nmin_top1 = 99"), "quality.min_top1 is 99; expected a share"),
        (models(engine="[quality]\nmin_top1 = nan"), "quality.min_top1 is nan; expected a share"),
        (models(engine="[quality]\nmaxkl = 1"), "unknown key quality.maxkl; did you mean 'max_kl'"),
        (models(engine="[quality]\ncalibration = 3"), "quality.calibration is 3; expected"),
        (models() + "[qualty]\n", "unknown key 'qualty'; did you mean 'quality'"),
        ('[target]\ncheckpoint = "t"\n[draft]\nprecision = "int8"\n', "draft.checkpoint is miss"),
    ],
)  # fmt: skip
def test_a_wrong_precision_or_limit_is_named(tmp_path: Path, text: str, told: str) -> None:
    assert told in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "who"),
    [
        (models(engine='precision = "int8"'), "target and draft"),
        (models(draft='precision = "int4"'), "draft"),
        (models(target='head = "int8"'), "target"),
        (models(target='head = "int8"') + "[quality]\nmax_kl = 1\n", "target"),
    ],
)
def test_whole_numbers_need_a_text_to_be_measured_on(tmp_path: Path, text: str, who: str) -> None:
    said = refusal(tmp_path, text)
    assert f"quality.calibration is missing, and the {who} would be quantized" in said
    assert '`calibration = "calibration.jsonl"`' in said


def test_storage_needs_none(tmp_path: Path) -> None:
    assert read_recipe(recipe(tmp_path, models(engine='precision = "fp16"'))).quality.max_kl is None


def test_limits_may_be_whole_numbers(tmp_path: Path) -> None:
    text = models(engine='precision = "int8"') + CALIBRATED + "max_kl = 1\nmin_top1 = 0\n"
    found = read_recipe(recipe(tmp_path, text)).quality
    assert (found.calibration, found.max_kl, found.min_top1) == ("text.txt", 1, 0)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_codelets_own_recipes_read(engines: Path, name: str) -> None:
    found = read_recipe(engines / "codelet" / f"{name}.toml")
    assert found.name == f"codelet-{name}"
    assert found.precisions["target"].layers == name
    assert found.precisions["draft"].layers == "int8"
    assert (found.folder / found.quality.calibration).is_file()


@pytest.mark.parametrize("name", ["a/b", ".hidden", ".."])
def test_a_name_must_be_that_of_a_folder(tmp_path: Path, name: str) -> None:
    assert f"name is {name!r}; expected a plain folder name" in refusal(
        tmp_path, f'name = "{name}"\n{PAIR}'
    )


@pytest.mark.parametrize("name", ["5", "0", "false", "[]", "{}"])
def test_a_name_must_be_text(tmp_path: Path, name: str) -> None:
    assert "expected a string" in refusal(tmp_path, f"name = {name}\n{PAIR}")


@pytest.mark.parametrize("name", ["", "a\\u0000b", "a\\nb", "\\u001b[31m", "a\\u2028b", "a" * 256])
def test_a_name_is_never_replaced_nor_holds_control_characters(tmp_path: Path, name: str) -> None:
    assert "expected a plain folder name" in refusal(tmp_path, f'name = "{name}"\n{PAIR}')


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    assert read_recipe(recipe(tmp_path, f"\ufeff{PAIR}")).target.checkpoint == "t"


@pytest.mark.parametrize(
    "value", ["[" * 20_000, "{a=" * 20_000, "9" * 5000], ids=["lists", "tables", "digits"]
)
def test_what_the_parser_cannot_hold_is_refused(tmp_path: Path, value: str) -> None:
    assert "cannot be read as TOML" in refusal(tmp_path, f"x = {value}")


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path) -> None:
    assert "cannot be read as TOML" in refusal(tmp_path, "[target\n")
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(RecipeError, match="is not UTF-8 text"):
        read_recipe(path)
    with pytest.raises(RecipeError, match=r"is a folder; name the recipe in it, .*/recipe\.toml"):
        read_recipe(tmp_path)
    with pytest.raises(RecipeError, match="does not exist; a recipe is a TOML file"):
        read_recipe(tmp_path / "none.toml")
