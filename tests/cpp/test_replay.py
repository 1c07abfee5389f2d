"""One truth: what the Python runtime generates, the library generates, hosted and native."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

import specrt
from cpp.conftest import Library, onnxruntime_library
from portable.zoo import MEMORIES, SIZES
from shared import nightly_but
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import AUTO, Callback, Row
from specrt.speculation.drafters import DRAFTERS
from specrt.text.prompt_file import read_prompts
from specrt_export.recipe.recipe import read_recipe
from support.builds import build

Options = Mapping[str, Any]
Requests = list[dict[str, Any]]

SMALL = """
name = "small"

[target]
checkpoint = "{codelet}/checkpoint/draft"
graph = "{codelet}/portable/draft.onnx"

[draft]
checkpoint = "{codelet}/checkpoint/draft"
graph = "{codelet}/portable/draft.onnx"
precision = "{draft}"

[engine]
max_length = {length}
prefill = 5
gammas = [1, 2, 4]
snapshot_bytes = 0
precision = "{target}"
batch = {batch}

[quality]
calibration = "{codelet}/calibration.jsonl"
"""


# ---- requests, and what the Python runtime makes of them ----

WAYS: tuple[Options, ...] = (
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.3, "top_k": 40, "seed": 2, "verifier": "rejection"},
    {"repetition_penalty": 1.2, "stop": ["\n\n"]},
    {"temperature": 0.9, "top_p": 0.9, "seed": -3, "presence_penalty": 0.6,
     "verifier": "rejection"},
    {"temperature": 0.7, "top_p": 0.95, "min_p": 0.02, "top_k": 100, "seed": 2**62},
    {"temperature": 1.0, "typical_p": 0.8, "seed": 5, "max_tokens": 1},
    {"frequency_penalty": 0.3, "temperature": 0.8, "seed": 6, "stop": [":\n", "self"]},
    {"no_repeat_ngram_size": 3, "logprobs": 3, "prompt_logprobs": 2},
    {"logit_bias": {"12": 4.0, "300": -100.0}, "temperature": 0.6, "seed": 7, "logprobs": 0},
    {"min_tokens": 20, "stop_token_ids": [10, 13, 200, 201, 202, 203]},
    {"allowed_token_ids": [*range(1, 8192, 3)], "temperature": 0.7, "seed": 8},
    {"repetition_penalty": 0.9, "no_repeat_ngram_size": 4, "top_k": 50, "temperature": 1.1,
     "min_p": 0.01, "seed": 9, "presence_penalty": -0.5, "logprobs": 2, "stop": ["="]},
)  # fmt: skip
WORDS: tuple[Options, ...] = (
    {"gamma": 3, "bad_words": ["self", "return", "(x", " 1"], "temperature": 0.9, "seed": 13},
    {"gamma": 2, "bad_words": ["def", "\n    "], "drafter": "ngram"},
)
"""What takes a tokenizer."""
TIMES = ("queue_ms", "ttft_ms", "itl_ms", "tokens_per_second")


def requests(gammas: Sequence[int]) -> Iterator[Options]:
    """Yield what is asked, gamma and drafter included."""
    for gamma in (AUTO, *gammas):
        yield {"gamma": gamma, "temperature": 0.8, "seed": 1}
    for number, (way, drafter) in enumerate(product(WAYS, DRAFTERS)):
        yield {"gamma": gammas[(number + number // 4) % len(gammas)], "drafter": drafter, **way}


def cases(generator: Generator, prompts: Sequence[str], *, texts: bool, every: int = 1) -> Requests:
    """Return requests, one after another on one row that held nothing, and what came of each.

    `texts` gives prompts as they are, where not as token ids; `every` leaves requests out.
    """
    generator.forget()
    made = []
    wanted = [*[*requests(generator.models.gammas)][::every], *(WORDS if texts else ())]
    for number, options in enumerate(wanted):
        prompt = prompts[number // 2 % len(prompts)]
        one = case(generator, generator.tokenizer.encode(prompt), {"max_tokens": 32, **options})
        made.append({**one, "prompt": prompt} if texts else one)
    return made


def refusals(generator: Generator, prompt: list[int]) -> Requests:
    """Return requests that are refused, and the statuses."""
    full = (prompt * generator.models.target.max_length)[: generator.models.target.max_length]
    return [
        {"prompt": ids, "params": params, "expected": {"refused": f"SPECRT_{status}"}}
        for ids, params, status in (
            ([*full, 1], {}, "CAPACITY"),
            ([-1], {}, "INVALID_ARGUMENT"),
            (prompt, {"gamma": 77}, "INVALID_ARGUMENT"),
            (prompt, {"max_tokens": 4, "min_tokens": 5}, "INVALID_ARGUMENT"),
            (prompt, {"regex": "a+", "ignore_eos": True}, "INVALID_ARGUMENT"),
            (prompt, {"regex": "a+", "choice": ["a"]}, "INVALID_ARGUMENT"),
        )
    ]


def edges(generator: Generator, prompt: list[int]) -> Requests:
    """Return requests at limits: of the context, of lists, and such as end before their time.

    They follow those of `cases`. `prompt` is to be a third of the context or less.
    """
    context = generator.models.target.max_length
    full = (prompt * context)[:context]
    short, gammas = prompt[:-3], generator.models.gammas
    made = [case(generator, full, {"max_tokens": 5, "gamma": gamma}) for gamma in (gammas[-1], 0)]
    made += [
        case(generator, full[: context - left], {"max_tokens": most, "gamma": gammas[-1], **more})
        for left in (1, 2, 5)
        for most, more in ((2**62, {}), (2**63 - 1, {"temperature": 0.8, "seed": 4}))
    ]
    known: Options = {"gamma": gammas[-1], "prompt_logprobs": 1, "logprobs": 2, "max_tokens": 7}
    made += [case(generator, ids, known) for ids in (prompt[:1], prompt[:2], prompt, prompt)]
    options: Options = {"gamma": gammas[-1], "max_tokens": 30, "drafter": "ngram"}
    plain = case(generator, prompt, options)
    made.append(plain)
    ids = plain["expected"]["ids"]
    end = ids[len(ids) // 2]
    made += [
        case(generator, prompt, {**options, **more})
        for more in (
            {"stop_token_ids": [end], "min_tokens": 25},
            {"stop_token_ids": [end], "logprobs": 1, "repetition_penalty": 1.1},
            {"stop_token_ids": [end], "ignore_eos": True, "stop": ["\ufffd", "zq"]},
        )
    ]
    for after in (0, 1, 3):
        made.append(case(generator, prompt, options, cancel_after=after))
        made.append(case(generator, short, {**options, "drafter": "cascade"}))
        made.append(case(generator, prompt, options, fail_at=len(prompt) + 2 * after))
        made.append(case(generator, [*prompt, end], options))
    return made


def case(generator: Generator, prompt: list[int], params: Options, **broken: int) -> dict[str, Any]:
    """Return a request and what came of it; `broken` ends it before its time."""
    outcome = _outcome(generator, prompt, params, **broken)
    return {"prompt": prompt, "params": params, **broken, "expected": outcome}


def _outcome(
    generator: Generator,
    prompt: list[int],
    params: Options,
    cancel_after: int | None = None,
    fail_at: int | None = None,
) -> dict[str, Any]:
    options = {k: v for k, v in params.items() if k not in ("gamma", "drafter")}
    if fail_at is not None:
        options["logits_processors"] = [_failing(fail_at)]
    stream = generator.stream(
        prompt,
        specrt.SamplingParams.of(**options),
        gamma=params["gamma"],
        drafter=params.get("drafter"),
        memory_key=None,  # native code drafts from the text at hand alone
    )
    done, lines, ended = stream.completion, "", ""
    try:
        for number in count():
            if number == cancel_after:
                stream.cancel()
                ended = "SPECRT_CANCELLED"
            chunk = next(stream, None)
            if chunk is None:
                break
            counts = done.speculation
            lines += (
                f"{chunk.token_ids} {chunk.accepted} {counts.rounds} {counts.drafted} "
                f"{counts.evaluated} {counts.accepted}\n"
            )
    except RequestError:
        ended = "SPECRT_CALLBACK"
    completion: Any = near(done.to_json())
    completion |= dict.fromkeys(TIMES, ANY)
    if "seed" not in params:  # drawn
        completion["seed"] = ANY
    auto = params["gamma"] == AUTO  # how far it drafts depends on what passes take
    if auto:
        completion["speculation"] = ANY
    return {
        "ids": done.token_ids,
        "text": done.text,
        "finish_reason": done.finish_reason or "error",
        "cached_tokens": done.cached_tokens,
        "rounds": ANY if auto else lines + ended,
        "completion": completion,
    }


def near(value: Any) -> Any:
    """Return what equals a value but for what exp and log of two libraries differ by."""
    if isinstance(value, dict):
        return {name: near(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [near(item) for item in value]
    return pytest.approx(value, rel=0, abs=1e-9) if isinstance(value, float) else value


def _failing(most: int) -> Callback:
    """Return a processor that refuses to go on once a text has so many tokens."""

    def fail(tokens: Sequence[int], scores: Row) -> Row:
        if len(tokens) >= most:
            raise ValueError("enough")
        return scores

    return fail


# ---- the same by the library ----


@pytest.fixture(scope="module")
def prompts(code_prompts: Path) -> list[str]:
    return [prompt.text for prompt in read_prompts(code_prompts)][:6]


@pytest.fixture
def small(request: pytest.FixtureRequest, engines: Path, tmp_path: Path) -> Path:
    """A small bundle of codelet's draft, as both models."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(SMALL.format(codelet=engines / "codelet", **request.param))
    build(read_recipe(recipe), tmp_path / "small")
    return tmp_path / "small"


def replay(
    library: Library, bundle: Path, made: Requests, folder: Path, caches: bool = True, **given: Any
) -> list[Any]:
    """Replay requests in one session that held nothing; return what came of each."""
    vectors = folder / "requests.json"
    sent = [{k: v for k, v in one.items() if k != "expected"} for one in made]
    vectors.write_text(json.dumps({"requests": sent, "prompt_cache": caches}))
    first, *lines = library.run("replay", bundle=bundle, vectors=vectors, **given)
    found = [json.loads(line) for line in lines]
    again = json.loads(first)  # of a generator that was opened before
    assert again.get("ids") == found[0].get("ids")
    return found


def check(found: list[Any], made: Requests) -> None:
    """Fail with the first request of which something else came."""
    assert len(found) == len(made)
    for outcome, one in zip(found, made, strict=True):
        assert outcome == one["expected"], one["params"]


@pytest.mark.parametrize(
    ("implementation", "every"),
    [
        ("hosted", 5),
        ("native", 5),
        pytest.param("hosted", 1, marks=pytest.mark.nightly),
        pytest.param("native", 1, marks=pytest.mark.nightly),
    ],
)
def test_what_python_generates_is_generated(
    request: pytest.FixtureRequest,
    implementation: str,
    every: int,
    codelet: Path,
    generator: Generator,
    prompts: list[str],
    tmp_path: Path,
) -> None:
    made = cases(generator, prompts, texts=implementation == "hosted", every=every)
    ids = generator.tokenizer.encode(prompts[0])
    if implementation == "native" and every == 1:  # else those of small bundles, below, will do
        made += edges(generator, ids)
    made += refusals(generator, ids)
    found = replay(request.getfixturevalue(implementation), codelet, made, tmp_path)
    check(found, made)
    found[0]["ids"][-1] ^= 1
    with pytest.raises(AssertionError):  # the comparison can fail
        check(found, made)


SEVERAL = {
    "int8": {"target": "int8", "draft": "fp16", "batch": 1, "length": 96},
    "int4, 4 rows": {"target": "int4", "draft": "int8", "batch": 4, "length": 96},
}


@pytest.mark.parametrize(
    "small", nightly_but([SEVERAL["int4, 4 rows"]], SEVERAL.values()), ids=SEVERAL, indirect=True
)
def test_quantized_bundles_and_bundles_of_several_rows_are_replayed(
    native: Library, small: Path, prompts: list[str], tmp_path: Path
) -> None:
    batch = json.loads((small / "manifest.json").read_text("utf-8"))["batch"]
    caches = batch == 1  # the rows of a generator, and sessions, keep texts in ways of their own
    with specrt.open(small, threads=1, prompt_cache=caches) as opened:
        short = [opened.tokenizer.decode(opened.tokenizer.encode(one)[:25]) for one in prompts]
        made = cases(opened, short, texts=False, every=3)
        made += edges(opened, opened.tokenizer.encode(short[0]))
    check(replay(native, small, made, tmp_path, caches=caches), made)


RANDOM = """
name = "random"

[target]
checkpoint = "checkpoint"

[engine]
max_length = 96
prefill = 5
gammas = [1, 2, 4]
snapshot_bytes = 0
"""


@pytest.mark.nightly
@pytest.mark.export
@pytest.mark.parametrize("kind", ["gemma4", "lfm2", "qwen3_5", "falcon_h1"])
def test_layers_that_remember_in_other_ways_are_replayed(
    native: Library, engines: Path, prompts: list[str], tmp_path: Path, kind: str
) -> None:
    import transformers

    config, changes, _ = MEMORIES[kind]
    sizes = {**SIZES, **changes, "vocab_size": 8192, "vocab_size_per_layer_input": 8192}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes))
    model.save_pretrained(tmp_path / "checkpoint")
    for path in (engines / "codelet" / "checkpoint" / "draft").glob("*tokenizer*"):
        shutil.copy(path, tmp_path / "checkpoint")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RANDOM)
    build(read_recipe(recipe), tmp_path / "made")
    with specrt.open(tmp_path / "made", threads=1) as opened:
        short = [opened.tokenizer.decode(opened.tokenizer.encode(one)[:25]) for one in prompts]
        lookups = [o for o in requests(opened.models.gammas) if o.get("drafter") == "ngram"]
        opened.forget()
        made = [
            case(opened, opened.tokenizer.encode(short[n // 2 % 6]), {"max_tokens": 32, **options})
            for n, options in enumerate(lookups)
        ]
    check(replay(native, tmp_path / "made", made, tmp_path), made)


def test_prompts_may_be_text_where_a_library_reads_tokenizers(
    native: Library, codelet: Path, generator: Generator, prompts: list[str], tmp_path: Path
) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai")
    texts = [*prompts, "x = '日本'  \n\té 😀", "a\r\n"]
    made = cases(generator, texts, texts=True, every=17)
    library = Path(genai.__file__).parent / "libonnxruntime-genai.so"
    found = replay(
        native, codelet, made, tmp_path, onnxruntime=onnxruntime_library(), tokenizer=library
    )
    check(found, made)
