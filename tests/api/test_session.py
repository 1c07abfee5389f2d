"""A session answers as a fresh generator would, and reads only what is new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.completion import Stream
from specrt.errors import CapacityError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.session import Session
from specrt.speculation.pool import Models
from specrt.text.chat_template import ChatTemplate
from specrt.text.tokenizer import Tokenizer
from support.rows import packed
from support.toy import EOS, Style, TableEngine, generator, near, sentencepiece

TEMPLATE = ChatTemplate(
    "{% for m in messages %}<|tool|>{{ m.role }}:{{ m.content }}</s>{% endfor %}<|tool|>assistant:",
    {},
)
TRIMMED = ChatTemplate("{% for m in messages %}<|tool|>{{ m.content | trim }}</s>{% endfor %}", {})
LETTERS = tuple(b"the in")
PARAMS = SamplingParams(max_tokens=12, allowed_token_ids=LETTERS)


class Recorded(Generator):
    """A generator that keeps the prompts it is given."""

    def stream(self, prompt: Any, *args: Any, **options: Any) -> Stream:
        stream = super().stream(prompt, *args, **options)
        self.prompts: list[list[int]] = [*getattr(self, "prompts", []), list(prompt)]
        return stream


def made(tokenizer: Tokenizer, length: int = 600, rows: int = 1) -> Recorded:
    target = TableEngine(4, vocab=tokenizer.size, max_length=length)
    draft = near(target, 5, 0.7)
    engines = (target, draft) if rows == 1 else (packed(target, rows), packed(draft, rows))
    models = Models(engines[0], engines[1], tuple(range(9)), 4)
    return Recorded(models, tokenizer, tokenizer.encode(EOS, special=False))


def alone(tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    target = TableEngine(4, vocab=tokenizer.size, max_length=600)
    ends = tokenizer.encode(EOS, special=False)
    return generator(target, None, tokenizer, eos=ends).generate(prompt, params).token_ids


def test_a_conversation_that_does_not_fit_stays_as_it_was(tokenizer: Tokenizer) -> None:
    session = Session(made(tokenizer, length=60), params=PARAMS)
    session.generate("x" * 30)
    before = session.messages
    with pytest.raises(CapacityError, match=r"have 72 tokens, and the context .* is 60: undo"):
        session.stream("y" * 30)
    assert session.messages == before
    assert session.generate("y" * 18).finish_reason == "length"


MOVES = st.one_of(
    st.tuples(st.just("say"), st.text(min_size=1, max_size=9)),
    st.tuples(st.just("stop"), st.integers(0, 3)),
    st.tuples(st.just("undo"), st.none()),
)


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (TEMPLATE, None),
        (TRIMMED, None),
        (None, None),
        (None, "llama2"),
        (TEMPLATE, "llama2"),
        (None, "mistral"),
        (TRIMMED, "mistral"),
        (None, "gemma"),
    ],
)
@settings(max_examples=6, deadline=None)
@given(
    moves=st.lists(MOVES, max_size=6),
    stop=st.sampled_from([(), ("e",), ("\ufffd",)]),
    allowed=st.sampled_from([None, LETTERS, tuple("żó🐢".encode())]),
    rows=st.sampled_from([1, 2]),
)
def test_any_conversation_is_one_with_a_fresh_generator(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, template: ChatTemplate | None,
    style: Style | None, moves: list[tuple[str, Any]], stop: tuple[str, ...],
    allowed: tuple[int, ...] | None, rows: int,
) -> None:  # fmt: skip
    if style is not None:
        tokenizer = Tokenizer(sentencepiece(tmp_path_factory.mktemp("words"), style))
    params = SamplingParams(max_tokens=9, stop=stop, allowed_token_ids=allowed)
    opened = made(tokenizer, rows=rows)
    session = Session(opened, template, params=params)
    for move, value in moves:
        before = session.messages
        if move == "undo":
            if before:
                session.undo()
                assert session.messages == before[:-2]
            continue
        message = value if move == "say" else "more"
        stream = session.stream(message)
        read = stream if move == "say" else [c for _, c in zip(range(value), stream, strict=False)]
        ids = [i for chunk in read for i in chunk.token_ids]
        session.stop()
        written = [*before, {"role": "user", "content": message}]
        script = template.render(written) if template else "".join(m["content"] for m in written)
        prompt = opened.prompts[-1]
        whole = tokenizer.encode(script)
        assert tokenizer.decode(prompt) == tokenizer.decode(whole)
        assert ids == alone(tokenizer, prompt, params)[: len(ids)]
        assert len(session.messages) == len(before) + (2 if ids else 0)
