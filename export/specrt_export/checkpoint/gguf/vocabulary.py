"""The vocabulary of a GGUF file, as the tokenizer files that a checkpoint folder holds.

Ids are llama.cpp's: it is what people who made the file have looked at. Three kinds are known by
`tokenizer.ggml.model`: `gpt2`, merges over bytes of text that a regular expression has cut,
`llama`, where the pair whose union has the best score is joined first (SentencePiece's BPE), and
`gemma4`, merges over the letters of a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from specrt.errors import CheckpointError, did_you_mean, first_line
from specrt_export.checkpoint.gguf.reader import GgufFile, shown

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Types of tokens that stand for more than their text."""

_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_RAISED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)  # fmt: skip
LLAMA3 = (rf"{_ENDING}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",)
QWEN2 = (rf"{_ENDING}|{_WORD}|\p{{N}}|{_REST}",)
TEKKEN = (rf"{_CASED}|{_RAISED}|\p{{N}}|{_SLASH}",)
GPT4O = (rf"{_CASED}{_ENDING}?|{_RAISED}{_ENDING}?|\p{{N}}{{1,3}}|{_SLASH}",)
DIGITS = (r"\p{N}", *GPT2)
LINES = r"[^\n]+|\n+"
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class Cut:
    """How text is cut before pairs are merged."""

    expressions: Sequence[str]
    """Applied in turn, to what the ones before have left whole."""
    whole: bool = False
    """Whether a piece that is a token stays one, whatever merges say."""
    begins: bool = False
    """Whether a text begins with the BOS token where the file does not say."""


_CUTS = {
    Cut(DEFAULT): ("default",),
    Cut(GPT2): ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
    Cut(LLAMA3, whole=True, begins=True): (
        "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    ),
    Cut(LLAMA3): ("dbrx", "smaug-bpe"),
    Cut(QWEN2): (
        "qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "kormo", "solar-open",
    ),
    Cut(TEKKEN, whole=True, begins=True): ("tekken",),
    Cut(GPT4O): ("gpt-4o", "llama4", "kanana2"),
    Cut(DIGITS): (
        "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b",
    ),
}  # fmt: skip

CUTS = {name: cut for cut, names in _CUTS.items() for name in names}
"""By `tokenizer.ggml.pre`."""

# fmt: off
ENDS = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>",
    "<|end_of_text|>", "<eos>", "</s>", "<turn|>", "<|tool_response>",
))
# fmt: on
"""Control tokens that end an answer in some family, whatever else the file says."""

_METASPACE = "▁"

LONGEST = 512
"""Characters of a token: ways to cut one in two are tried all, in time of its length squared."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file."""

    file: GgufFile

    @cached_property
    def kind(self) -> str:
        """`gpt2`, `llama` or `gemma4`.

        Raises: CheckpointError for a vocabulary of another kind.
        """
        kind = self.file.text("tokenizer.ggml.model", "")
        if kind not in ("gpt2", "llama", "gemma4"):
            raise CheckpointError(
                f"{self.file.path}: tokenizer.ggml.model is {shown(kind)}; specrt reads 'gpt2', "
                "'llama' and 'gemma4'. Build from the model's safetensors folder, which has a "
                "tokenizer.json"
            )
        return kind

    @cached_property
    def cut(self) -> Cut:
        """How a `gpt2` vocabulary cuts text; a file that does not say is taken for 'default'."""
        name = self.file.text("tokenizer.ggml.pre", "default")
        if name not in CUTS:
            raise CheckpointError(
                f"{self.file.path}: tokenizer.ggml.pre is {shown(name)}, a way to cut text that "
                f"specrt does not have{did_you_mean(name[:60], CUTS)}. Build from the model's "
                "safetensors folder, which has a tokenizer.json"
            )
        return CUTS[name]

    @cached_property
    def tokens(self) -> list[str]:
        """The text of each id.

        Raises: CheckpointError for two of one text.
        """
        key = "tokenizer.ggml.tokens"
        stored = self.file.texts(key)
        # What llama.cpp calls those that are empty.
        tokens = [text or f"[EMPTY_{index}]" for index, text in enumerate(stored)]
        if not tokens:
            raise CheckpointError(
                f"{self.file.path} has no {key}, so text cannot be told from its ids; fetch a file "
                "with a vocabulary"
            )
        longest = max(range(len(tokens)), key=lambda index: len(tokens[index]))
        if len(tokens[longest]) > LONGEST:
            raise CheckpointError(
                f"{self.file.path}: token {longest} is {len(tokens[longest])} characters long; "
                f"expected up to {LONGEST}. Fetch the file again, or convert the model again"
            )
        last = self.ids_of(tokens)
        if len(last) < len(tokens):
            twice = next(text for index, text in enumerate(tokens) if last[text] != index)
            raise CheckpointError(
                f"{self.file.path}: {key} holds {shown(twice)} twice, as {tokens.index(twice)} and "
                f"as {last[twice]}; convert the model again"
            )
        return tokens

    @staticmethod
    def ids_of(tokens: Sequence[str]) -> dict[str, int]:
        """Return the id of each text."""
        return {text: index for index, text in enumerate(tokens)}

    @cached_property
    def types(self) -> list[int]:
        """The type of each token; 1 is plain text."""
        return [int(number) for number in self._of_each("token_type", 1)]

    @cached_property
    def scores(self) -> list[float]:
        """The score of each token."""
        return [float(number) for number in self._of_each("scores", 0)]

    def _of_each(self, name: str, default: int) -> Any:
        key = f"tokenizer.ggml.{name}"
        numbers = self.file.numbers(key)
        if not len(numbers):
            return np.full(len(self.tokens), default)
        if len(numbers) < len(self.tokens) or not np.isfinite(numbers).all():
            raise self.file.wrong(key, f"a finite number for each of {len(self.tokens)} tokens")
        return numbers[: len(self.tokens)]

    def token(self, name: str, default: int | None = None) -> int | None:
        """Return the id of a token by its role, such as `eos`; None where there is none."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.file.metadata:
            return default if default is not None and default < len(self.tokens) else None
        index = self.file.whole(key)
        if index >= len(self.tokens):
            raise self.file.wrong(key, f"an id below {len(self.tokens)}, which the vocabulary has")
        return index

    @property
    def begin(self) -> int | None:
        """The BOS token."""
        return self.token("bos", 1 if self.kind == "llama" else None)

    @property
    def end(self) -> int | None:
        """The EOS token."""
        return self.token("eos", 2 if self.kind == "llama" else None)

    @cached_property
    def ends(self) -> list[int]:
        """All tokens that end an answer: EOS first, of a turn, of a message, and known ones."""
        roles = (self.end, self.token("eot"), self.token("eom"))
        named = (i for i, text in enumerate(self.tokens) if text in ENDS and self._ends(i))
        return list(dict.fromkeys(i for i in (*roles, *named) if i is not None))

    def _ends(self, index: int) -> bool:
        # Gemma 4's of tools are not control tokens, so that they are shown, and its </s> is HTML.
        shown_ends = self.kind == "gemma4" and self.types[index] == USER_DEFINED
        return self._special(index) or shown_ends

    def _special(self, index: int) -> bool:
        return self.types[index] in (UNKNOWN, CONTROL)

    def tokenizer(self) -> dict[str, Any]:
        """Return what `tokenizer.json` holds.

        Raises: CheckpointError for a vocabulary that does not make one.
        """
        parts = self._bytes() if self.kind == "gpt2" else self._scored()
        state = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": list(self._added()),
            **parts,
            "post_processor": self._framed(),
        }
        try:
            Tokenizer.from_str(json.dumps(state))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"{self.file.path}: its vocabulary makes no tokenizer ({first_line(error)}); "
                "convert the model again"
            ) from error
        return state

    def _added(self) -> Iterator[dict[str, Any]]:
        """Yield tokens that are found in a text before it is cut or merged."""
        # Phi-3's take in the blanks after them; a GGUF file does not say so.
        strips = self.kind == "llama" and self.file.architecture == "phi3"
        for index, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind in (UNKNOWN, CONTROL, USER_DEFINED):
                yield {
                    "id": index,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": strips and text not in ("<unk>", "<s>", "<|endoftext|>"),
                    "normalized": False,
                    "special": self._special(index),
                }

    def _bytes(self) -> dict[str, Any]:
        """Return the parts that encode and decode text as bytes."""
        splits = [_split(expression) for expression in self.cut.expressions]
        spell = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        return {
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [*splits, {**spell, "use_regex": False}],
            },
            "decoder": {**spell, "use_regex": True},
            "model": self._model(list(self._given_merges()), whole=self.cut.whole),
        }

    def _given_merges(self) -> Iterator[tuple[str, str]]:
        key = "tokenizer.ggml.merges"
        known = self.ids_of(self.tokens)
        for index, merge in enumerate(self.file.texts(key)):
            blank = merge.find(" ", 1)  # a token may begin with one
            left, right = merge[:blank], merge[blank + 1 :]
            if not (left in known and right in known and left + right in known):
                raise CheckpointError(
                    f"{self.file.path}: item {index} of {key} is {shown(merge)}; expected two "
                    "tokens, which join to a third, and a blank between them. Convert the model "
                    "again"
                )
            yield left, right

    def _scored(self) -> dict[str, Any]:
        """Return the parts that encode and decode text with blanks spelled as a letter."""
        by_line = self.kind == "gemma4"
        prefixed = self.file.flag("tokenizer.ggml.add_space_prefix", default=not by_line)
        prepend = [{"type": "Prepend", "prepend": _METASPACE}] if prefixed else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
        spelled = {"type": "Replace", "pattern": {"String": " "}, "content": _METASPACE}
        blanks = {"type": "Replace", "pattern": {"String": _METASPACE}, "content": " "}
        decoders = [blanks, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
        unknown = self.token("unknown", 0)
        # Written from a tokenizer.json, a file has merges, and one score for all.
        given = len(set(self.scores)) == 1 and len(self.file.texts("tokenizer.ggml.merges"))
        merges = self._given_merges() if given or by_line else self._scored_merges()
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prepend, spelled]},
            "pre_tokenizer": _split(LINES) if by_line else None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._model(
                list(merges),
                unk_token=None if unknown is None else self.tokens[unknown],
                byte_fallback=True,
            ),
        }

    def _scored_merges(self) -> Iterator[tuple[str, str]]:
        """Yield each way to make a token of two others, the tokens of best score first."""
        tokens, scores = self.tokens, self.scores
        known = set(tokens)
        for index in sorted(range(len(tokens)), key=lambda i: (-scores[i], i)):
            text = tokens[index]
            for at in range(1, len(text)):
                if text[:at] in known and text[at:] in known:
                    yield text[:at], text[at:]

    def _model(
        self,
        merges: list[tuple[str, str]],
        *,
        unk_token: str | None = None,
        byte_fallback: bool = False,
        whole: bool = False,
    ) -> dict[str, Any]:
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": unk_token,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": byte_fallback,
            "ignore_merges": whole,
            "vocab": self.ids_of(self.tokens),
            "merges": merges,
        }

    @cached_property
    def frames(self) -> tuple[bool, bool]:
        """Whether a text begins with the BOS token, and whether it ends with the EOS token."""
        default = self.kind != "gpt2" or self.cut.begins
        return (
            self.file.flag("tokenizer.ggml.add_bos_token", default) and self.begin is not None,
            self.file.flag("tokenizer.ggml.add_eos_token", default=False) and self.end is not None,
        )

    def _framed(self) -> dict[str, Any] | None:
        """Return what puts BOS before a text and EOS after it."""
        chosen = [
            index if wanted else None
            for index, wanted in zip((self.begin, self.end), self.frames, strict=True)
        ]
        if chosen == [None, None]:
            return None

        def sequence(name: str, place: int) -> list[dict[str, Any]]:
            spans = [
                []
                if index is None
                else [{"SpecialToken": {"id": self.tokens[index], "type_id": place}}]
                for index in chosen
            ]
            return [*spans[0], {"Sequence": {"id": name, "type_id": place}}, *spans[1]]

        return {
            "type": "TemplateProcessing",
            "single": sequence("A", 0),
            "pair": [*sequence("A", 0), *sequence("B", 1)],
            "special_tokens": {
                self.tokens[i]: {"id": self.tokens[i], "ids": [i], "tokens": [self.tokens[i]]}
                for i in chosen
                if i is not None
            },
        }

    def tokenizer_config(self) -> dict[str, Any]:
        """Return what `tokenizer_config.json` holds, the chat template with it."""
        roles = {"bos": self.begin, "eos": self.end, "unk": self.token("unknown")}
        roles["pad"] = self.token("padding")
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self.frames[0],
            "add_eos_token": self.frames[1],
        }
        config |= {f"{n}_token": self.tokens[i] for n, i in roles.items() if i is not None}
        key = "tokenizer.chat_template"
        named = [name for name in self.file.metadata if name.startswith(f"{key}.")]
        templates = {"default": self.file.text(key, "")}
        templates |= {name.removeprefix(f"{key}."): self.file.text(name) for name in named}
        given = [{"name": name, "template": text} for name, text in templates.items() if text]
        alone = [template["template"] for template in given if not named]
        return config | ({"chat_template": alone[0] if alone else given} if given else {})

    def generation_config(self) -> dict[str, Any]:
        """Return what `generation_config.json` holds: the tokens that begin and end."""
        named = {"bos_token_id": self.begin, "eos_token_id": self.ends or None}
        named["pad_token_id"] = self.token("padding")
        return {key: value for key, value in named.items() if value is not None}


def _split(expression: str) -> dict[str, Any]:
    """Return what cuts text into the matches of an expression, and what lies between them."""
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
