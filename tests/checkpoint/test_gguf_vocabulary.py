"""Vocabularies of GGUF files: ids as llama.cpp gives them, and files that specrt reads.

`gguf_ids.json` holds what llama.cpp (llama-cpp-python 0.3.36; of "gemma4" xllamacpp 2026.10.11549)
made of `TEXTS` with the vocabularies here; where the first is installed, it is asked again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HubTokenizer

from specrt.errors import CheckpointError
from specrt_export.checkpoint.gguf.reader import read_gguf
from specrt_export.checkpoint.gguf.vocabulary import CUTS, Vocabulary
from support.gguf_files import (
    ALPHABET,
    BYTES_VOCABULARY,
    PIECES,
    SCORED_VOCABULARY,
    container,
    plain,
)

RECORDED = Path(__file__).with_name("gguf_ids.json")

TEXTS = [
    "", " ", "  ", "\n", "hello world", " hello  world", "hello\n\n world\t!", "the hello in world",
    "<|begin|>hello<|eot_id|>", "<s>the</s> hello", "  \n hello", "<|end|>  hello <|end|>\n\nthe",
    "a<tool>b", "it's 'LL I'Ve", "3 33 333 3333 33333 3.3", "HTTPServer fooBar ÀÉ ßX ǅa",
    "नमस्ते 世界 Привет", "🦙🦙 e\u0301 é", "\u3000\u00a0 x", "--- !!! ??? ... //", "x = [1,\n\n  2]",
    "$5 <=> 10^2 ~| a+b", "\r\n\r\n a\r\n", "١٢٣ ½ ²", "<0x41>", "▁the_world", "hellohellohello",
    "\0", "          the", "wor ld", "hell", "ªb ʰ \u0300", "zz zzz",
]  # fmt: skip


def learned() -> dict[str, Any]:
    """Return a vocabulary with some merges of each kind: letters, digits, blanks and signs."""
    pairs = ["1 2", "3 3", "33 3", "33 33", "Ġ 3", ". .", "- -", "-- -", "' s", "Ġ '", "Ċ Ċ", "Ġ a"]
    pairs += [
        "! !",
        "/ /",
        "Ġ Ġ",
        "ĠĠ ĠĠ",
        "Ċ Ġ",
        "A B",
        "H T",
        "HT T",
        "HTT P",
        "S e",
        "< =",
        "a +",
    ]
    merges = list(dict.fromkeys([*BYTES_VOCABULARY["tokenizer.ggml.merges"], *pairs]))
    # No merge makes the last: it is a token where a whole piece of text is one.
    tokens = list(dict.fromkeys([*ALPHABET, *(m.replace(" ", "", 1) for m in merges), "zz"]))
    controls = ["<|begin|>", "<|eot_id|>", "<|end_of_text|>", "<tool>", ""]
    return {
        **BYTES_VOCABULARY,
        "tokenizer.ggml.tokens": [*tokens, *controls],
        "tokenizer.ggml.token_type": [*[1] * len(tokens), 3, 3, 3, 4, 5],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 2,
    }


def scored(**changes: Any) -> dict[str, Any]:
    return {**SCORED_VOCABULARY, **{f"tokenizer.ggml.{k}": v for k, v in changes.items()}}


def by_line() -> dict[str, Any]:
    """Return a vocabulary with merges of letters; scores, which it has too, say nothing."""
    runs = ["\n", "\n\n", "\n\n\n"]
    merges = ["\n \n", "\n \n\n", "\n\n \n", "▁ t", "h e", "▁t he", "l o", "he l", "hel lo", "o r"]
    merges += ["w or", "l d", "▁ hello", "▁ wor", "▁ ▁", "▁▁ ▁▁", "e r", "\n ▁"]
    # The last merge is of two lines, and never happens.
    more = [*runs, "\n▁", "</s>", "<turn|>", "<|tool_response>"]
    tokens = ["<unk>", "<s>", "<eos>", *SCORED_VOCABULARY["tokenizer.ggml.tokens"][3:], *more]
    return scored(
        model="gemma4", add_space_prefix=False, merges=merges,
        tokens=tokens,
        token_type=[*SCORED_VOCABULARY["tokenizer.ggml.token_type"], 1, 1, 1, 1, 1, 3, 4],
        scores=[*SCORED_VOCABULARY["tokenizer.ggml.scores"], *[0.0] * len(more)],
    )  # fmt: skip


NAMED = ("default", "gpt-2", "llama-bpe", "smaug-bpe", "qwen2", "tekken", "gpt-4o", "smollm")
VOCABULARIES: dict[str, dict[str, Any]] = {
    **{name: {**learned(), "tokenizer.ggml.pre": name} for name in NAMED},
    "bos and eos": {
        **learned(), "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True,
    },
    "scores": scored(),
    "no prefix": scored(add_space_prefix=False, add_bos_token=False),
    "scores with eos": scored(add_eos_token=True),
    "gemma4": by_line(),
    "phi-3": {**scored(), "general.architecture": "phi3", "general.name": "phi-3 tiny"},
}  # fmt: skip


def write_vocabulary(path: Path, values: dict[str, Any]) -> Path:
    said = {"general.architecture": "llama", **values}
    path.write_bytes(container([plain(key, held) for key, held in said.items()]))
    return path


def opened(path: Path, values: dict[str, Any]) -> Vocabulary:
    return Vocabulary(read_gguf(write_vocabulary(path / "vocabulary.gguf", values)))


def hub(vocabulary: Vocabulary) -> Any:
    return HubTokenizer.from_str(json.dumps(vocabulary.tokenizer()))


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_are_llama_cpps(name: str, tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))[name]
    assert len(recorded) == len(TEXTS)
    tokenizer = hub(opened(tmp_path, VOCABULARIES[name]))
    for text, ids in zip(TEXTS, recorded, strict=True):
        assert tokenizer.encode(text).ids == ids, text


def test_control_tokens_and_ends_are_told(tmp_path: Path) -> None:
    vocabulary = opened(tmp_path, BYTES_VOCABULARY)
    size = len(vocabulary.tokens)
    assert vocabulary.begin == size - 4
    assert vocabulary.ends == [size - 2, size - 3]
    added = {one["content"]: one["special"] for one in vocabulary.tokenizer()["added_tokens"]}
    assert added == {
        "<|begin|>": True,
        "<|eot_id|>": True,
        "<|end_of_text|>": True,
        "<tool>": False,
    }
    config = vocabulary.tokenizer_config()
    assert config["bos_token"] == "<|begin|>"
    assert config["eos_token"] == "<|end_of_text|>"
    plain = BYTES_VOCABULARY["tokenizer.chat_template"]
    assert config["chat_template"] == plain
    named = {**BYTES_VOCABULARY, "tokenizer.chat_template.tool_use": "{{ tools }}"}
    assert opened(tmp_path, named).tokenizer_config()["chat_template"] == [
        {"name": "default", "template": plain}, {"name": "tool_use", "template": "{{ tools }}"},
    ]  # fmt: skip
    assert vocabulary.generation_config() == {
        "bos_token_id": size - 4, "eos_token_id": [size - 2, size - 3],
    }  # fmt: skip


def test_tokens_of_roles_end_an_answer(tmp_path: Path) -> None:
    values = scored(eot_token_id=260, eom_token_id=261)
    vocabulary = opened(tmp_path, values)
    named = [vocabulary.tokens.index(text) for text in ("<|end|>", "<|endoftext|>")]
    assert vocabulary.ends == [2, 260, 261, *named]


def test_what_ends_an_answer_of_gemma_4_may_be_a_token_of_tools(tmp_path: Path) -> None:
    vocabulary = opened(tmp_path, by_line())
    ends = [vocabulary.tokens[index] for index in vocabulary.ends]
    assert ends == ["<eos>", "<|end|>", "<|endoftext|>", "<turn|>", "<|tool_response>"]


def test_a_file_with_merges_and_one_score_goes_by_its_merges(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "c", "bc", "ab", "abc"]
    values = scored(tokens=tokens, scores=[-1000.0] * 9, token_type=[2, 3, 3, *[1] * 6])
    values |= {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.merges": ["b c", "a bc"]}
    tokenizer = hub(opened(tmp_path, values))
    assert tokenizer.encode("abc", add_special_tokens=False).ids == [8]
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [3, 4]


SIZE = len(BYTES_VOCABULARY["tokenizer.ggml.tokens"])
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"model": "t5"}, "'t5'; specrt reads 'gpt2', 'llama' and"),
    "another cut": ({"pre": "qwen3"}, "'qwen3', a way to cut text.*did you mean 'qwen2'"),
    "a number for the cut": ({"pre": 3}, "tokenizer.ggml.pre is 3; expected a text"),
    "no tokens": ({"tokens": None}, "has no tokenizer.ggml.tokens"),
    "a token twice": ({"tokens": [*ALPHABET, "a"]}, "holds 'a' twice, as 64 and as 256"),
    "an endless token": ({"tokens": ["a", "b" * 10**6]}, "token 1 is 1000000 characters long"),
    "few types": ({"token_type": [1, 1]}, f"finite number for each of {SIZE} tokens"),
    "a far begin": ({"bos_token_id": 10**6}, f"is 1000000; expected an id below {SIZE}"),
    "a merge of none": ({"merges": ["h e", "q q"]}, "item 1 of tokenizer.ggml.merges is 'q q'"),
    "a worded flag": ({"add_bos_token": "yes"}, "add_bos_token is 'yes'; expected true or false"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_what_makes_no_tokenizer_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values = {**BYTES_VOCABULARY, **{f"tokenizer.ggml.{k}": v for k, v in changes.items()}}
    values = {key: held for key, held in values.items() if held is not None}
    vocabulary = opened(tmp_path, values)

    def read() -> None:
        vocabulary.tokenizer()
        vocabulary.generation_config()

    with pytest.raises(CheckpointError, match=message) as caught:
        read()
    assert "\n" not in str(caught.value)


def test_scores_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    scores = [*SCORED_VOCABULARY["tokenizer.ggml.scores"]]
    scores[-1] = float("nan")
    with pytest.raises(
        CheckpointError, match=rf"finite number for each of {259 + len(PIECES) + 3}"
    ):
        opened(tmp_path, scored(scores=scores)).tokenizer()


def test_every_cut_is_an_expression(tmp_path: Path) -> None:
    for name in CUTS:
        tokenizer = hub(opened(tmp_path, {**BYTES_VOCABULARY, "tokenizer.ggml.pre": name}))
        assert tokenizer.decode(tokenizer.encode("it's 12\n x").ids) == "it's 12\n x"
