"""Memory across requests: what is found, kept apart and let go, and that no text changes."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.speculation.costs import Costs
from specrt.speculation.gamma import DraftDecision
from specrt.speculation.ngram import NgramDrafter
from specrt.speculation.pool import Models
from specrt.speculation.round import NOTHING, Round, run_alone
from specrt.speculation.text_memory import GRAMS, KeyMemory, MemoryDrafter, TextMemory
from specrt.text.tokenizer import Tokenizer
from speculation.support import PROMPT, Script
from support.toy import TableEngine, near

GAMMAS = tuple(range(9))
COSTS = Costs(tuple(100.0 + 5 * g for g in GAMMAS), tuple(4.0 * g for g in GAMMAS))


def generator(tokenizer: Tokenizer, memory: TextMemory | None) -> Generator:
    target = TableEngine(3)
    models = Models(target, near(target, 4, 0.9), GAMMAS, costs=COSTS)
    return Generator(models, tokenizer, text_memory=memory)


def text(seed: int, length: int = 40, vocab: int = 500) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


# What is found


@pytest.mark.parametrize("vocab", [3, 50])
def test_what_is_found_agrees_and_is_found_wherever_it_is(vocab: int) -> None:
    memory = TextMemory()
    texts = [text(seed, 60, vocab) for seed in range(40)]
    for one in texts:
        memory.add("", one)
    rng, found_some = random.Random(5), 0
    for _ in range(300):
        one, end = rng.choice(texts), rng.randrange(20, 60)
        asked = [*text(rng.randrange(10**6), 5, vocab), *one[end - rng.randrange(4, 20) : end]]
        found = memory.recall("", asked)
        if found is None:
            continue  # a run whose place in the table went to another
        found_some += 1
        assert found.length >= GRAMS[0]
        assert found.text[found.end - found.length : found.end].tolist() == asked[-found.length :]  # type: ignore[attr-defined]
    assert found_some > 250


# Bounds and keys


def test_each_policy_learns_from_its_rounds_and_those_that_neither_drafted() -> None:
    memory, mine, other = TextMemory(), Script(2), Script(2)
    memory.add("", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    drafter = MemoryDrafter(NgramDrafter(other), KeyMemory(memory, ""), mine)
    recalled, copied, plain = (Round([1], n, 0, 1, 1) for n in (2, 1, 0))
    for tokens, round_ in (([1, 2, 3, 4], recalled), ([9, 8, 9, 8], copied), ([70, 71], plain)):
        run_alone(drafter.propose(tokens, 9))
        drafter.observe(tokens, round_)
    assert mine.seen == [recalled, plain]
    assert other.seen == [copied, plain]
    drafter = MemoryDrafter(
        NgramDrafter(Script(0)), KeyMemory(memory, ""), Script(2, DraftDecision.DISCARD)
    )
    assert run_alone(drafter.propose([1, 2, 3, 4], 9)) is NOTHING


def test_the_text_that_was_of_no_use_for_longest_goes_first() -> None:
    most = 60_000
    memory = TextMemory(most)
    texts = [text(seed, 500, 9000) for seed in range(40)]
    for one in texts:
        memory.add("", one)
        found = [memory.recall("", texts[0][:end]) for end in range(100, 140)]
        number = next(one.number for one in found if one is not None)
        memory.use(number)
        assert memory.bytes <= most
    assert 1 < len(memory) < 40
    assert memory.recall("", texts[1][:100]) is None
    assert memory.recall("", texts[-1][:100]) is not None
    assert 0 < sum(memory.recall("", one[:100]) is not None for one in texts) <= len(memory)
    memory.add("", text(50, 50_000))
    assert memory.bytes <= most
    memory.forget()
    memory.use(number)  # of a text that is gone
    assert (len(memory), memory.bytes) == (0, 0)
    with pytest.raises(RequestError, match="text_memory_bytes is -1"):
        TextMemory(-1)


# Texts stay as they are


SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 3}


@pytest.mark.parametrize(
    ("drafter", "options", "gamma", "recalls"),
    [
        ("ngram", {}, 4, True), ("cascade", {}, "auto", None), ("cascade", SAMPLED, 4, True),
        # Whose text depends on what is drafted.
        ("ngram", {"verifier": "rejection", **SAMPLED}, 4, False),
    ],
)  # fmt: skip
def test_no_text_changes_and_memory_is_counted_by_its_name(
    tokenizer: Tokenizer, drafter: str, options: dict[str, Any], gamma: Any, recalls: bool | None
) -> None:
    """A given seed repeats its text; with `auto` drafts depend on the clock."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=5, **options)
    without, memory = generator(tokenizer, None), TextMemory()
    given = generator(tokenizer, memory)
    for turn in range(3):
        alone = without.generate(PROMPT, params, gamma=gamma, drafter=drafter)
        done = given.generate(PROMPT, params, gamma=gamma, drafter=drafter)
        assert done.token_ids == alone.token_ids
        drafted, accepted = done.speculation.sources.get("memory", (0, 0))
        if recalls is not None:
            assert (accepted > 10) is (drafted > 0) is (recalls and turn > 0)
    assert len(memory) == 1


def test_keys_forgetting_and_turning_it_off(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    memory = TextMemory()
    given = generator(tokenizer, memory)

    def recalled(made: Generator, **options: Any) -> bool:
        done = made.generate(PROMPT, params, gamma=4, drafter="ngram", **options)
        return "memory" in done.speculation.sources

    assert not recalled(given, memory_key=None)
    assert len(memory) == 0
    assert not recalled(given, memory_key="a")
    assert not recalled(given, memory_key="b")
    assert not recalled(given, memory_key=None)
    assert recalled(given, memory_key="a")
    given.forget()
    assert not recalled(given, memory_key="a")
    off = generator(tokenizer, None)
    assert [recalled(off) for _ in range(2)] == [False, False]
    with pytest.raises(RequestError, match="memory_key is 3"):
        given.generate(PROMPT, params, memory_key=3)  # type: ignore[arg-type]


# The file


def test_a_file_holds_what_the_memory_held(tmp_path: Path) -> None:
    memory, path = TextMemory(), tmp_path / "texts"
    memory.read(path, "v", 500)
    memory.add("a", text(1))
    memory.add("b", text(2))
    memory.save(path, "v")
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["texts"]
    again = TextMemory()
    again.read(path, "v", 500)
    assert again.recall("a", text(1)[:20]) == memory.recall("a", text(1)[:20])
    assert again.recall("b", text(2)[:20]) == memory.recall("b", text(2)[:20])
    assert again.recall("b", text(1)[:20]) is None


def test_a_file_that_is_damaged_or_not_ours_is_refused(tmp_path: Path) -> None:
    memory, path = TextMemory(), tmp_path / "texts"
    memory.add("a", text(1))
    memory.save(path, "v")
    whole = path.read_bytes()

    def refused(why: str, data: bytes = whole, vocabulary: str = "v", most: int = 1 << 20) -> None:
        path.write_bytes(data)
        with pytest.raises(RequestError, match=why) as error:
            TextMemory(most).read(path, vocabulary, 500)
        assert "\n" not in str(error.value)

    refused("another tokenizer", vocabulary="w")
    refused("bounded to 10", most=10)
    for cut in (0, 1, 20, whole.index(b"\n")):
        refused("no file|damaged", whole[:cut])
    refused("damaged", whole[:-1])
    refused("damaged", whole[:-4])
    for place in range(whole.index(b"\n") + 1, len(whole), 7):
        refused("damaged", whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    refused("damaged", whole.replace(b'["a", 40]', b'["a", 4000000000000]'))
    refused("damaged", whole.replace(b'["a", 40]', b"7"))
    refused("not a file", b"[" * 100_000)
    path.write_bytes(whole)
    with pytest.raises(RequestError, match="damaged"):
        TextMemory().read(path, "v", 10)


def test_a_file_that_could_not_be_saved_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    memory, pipe, none = TextMemory(), tmp_path / "pipe", tmp_path / "none" / "texts"
    os.mkfifo(pipe)
    for path, why in ((tmp_path, "a folder"), (pipe, "a pipe"), (none, "there is no folder")):
        for use in (lambda at: memory.read(at, "v", 10), lambda at: memory.save(at, "v")):
            with pytest.raises(RequestError, match=f"cannot be written: .*{why}.*; give another"):
                use(path)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
