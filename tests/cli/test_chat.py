"""`specrt chat`: answers on stdout, all else on stderr, and a session that bad input leaves be."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.conftest import Run
from specrt.cli.message_reader import History, Typed, next_typed
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.session import Session
from specrt.text.chat_template import ChatTemplate

pytestmark = pytest.mark.usefixtures("opened")
PARAMS = SamplingParams(max_tokens=12)
FEW = ("--max-tokens", 12, "--gamma", 2, "--temperature", 0)


def answers(generator: Generator, *messages: str) -> str:
    session = Session(generator, params=PARAMS)
    return "".join(session.generate(message).text + "\n" for message in messages)


def test_each_line_is_a_message(cli: Run, codelet: Path, generator: Generator) -> None:
    typed = b'import os\r\n\ndef area(w):\nimport os\\\nimport sys\\\n\n"""/tmp is\n a folder"""\n'
    ran = cli("chat", codelet, *FEW, stdin=typed)
    messages = ("import os", "", "def area(w):", "import os\nimport sys\n", "/tmp is\n a folder")
    assert (ran.status, ran.out) == (0, answers(generator, *messages))
    assert "it continues your text" in ran.err


def test_a_template_makes_messages_of_lines_and_stats_are_told(
    cli: Run, codelet: Path, generator: Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(
        "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}", {}
    )
    monkeypatch.setattr("specrt.cli.chat.read_template", lambda _: template)
    saved = tmp_path / "saved.jsonl"
    typed = f"/save {saved}\n\nimport os\n   \nimport sys\n/stats\n/save {saved}\n".encode()
    ran = cli("chat", codelet, *FEW, "--system", "Code.", stdin=typed)
    session = Session(generator, template, system="Code.", params=PARAMS)
    assert ran.out == "".join(session.generate(m).text + "\n" for m in ("import os", "import sys"))
    assert re.findall("wrote .* to", ran.err) == ["wrote 1 message to", "wrote 5 messages to"]
    lines = saved.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == session.messages
    figures = (
        r": (\d+) tokens, \d+ tokens/s, (?:estimated .*, )?TTFT \d+\.\d ms, "
        r"\d+ of \d+ prompt tokens cached \| "
        r"cascade, gamma (?:auto|\d+).*: \d+ rounds, \d\.\d\d tokens per round, "
        r"acceptance rate [01]\.\d\d\n"
    )
    assert re.findall(f"(this answer|the session){figures}", ran.err) == [
        ("this answer", "12"), ("the session", "24"),
    ]  # fmt: skip
    assert f"the conversation: {session.tokens} of 2048 tokens" in ran.err


def test_commands_change_what_follows(cli: Run, codelet: Path, generator: Generator) -> None:
    typed = b"/gamma 3\n/drafter ngram\nimport os\n/undo\n/system # x\\n\nimport os\n/reset\na\n"
    typed += b'/system\n/system ""\n/temperature\n/temperature 0.5\n'
    ran = cli("chat", codelet, *FEW[:2], *FEW[4:], stdin=typed + b"/gamma\n/quit\nimport sys\n")
    assert ran.status == 0
    told = r"^gamma: 3|^drafter: ngram|removed: .*|.*system.*|^temp.*"
    assert re.findall(told, ran.err, re.M) == [
        "gamma: 3", "drafter: ngram", "removed: 'import os'", "system: # x\\n", "system: # x\\n",
        "there is no system message", "temperature: 0, greedy", "temperature: 0.5", "gamma: 3",
    ]  # fmt: skip
    session = Session(generator, system="# x\\n", params=PARAMS)
    expected = answers(generator, "import os") + session.generate("import os").text + "\n"
    session.reset()
    assert ran.out == expected + session.generate("a").text + "\n"


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (b"/stat", "there is no command '/stat'; did you mean '/stats'?"),
        (b"/gamma 99", "gamma 99 is not among those"),
        (b"/undo", "there is nothing to undo"),
        (b"/temperature hot", "'hot' is not a number; expected a temperature"),
        (b"/temperature -1", "temperature is -1"),
        (b"/save /nowhere/f", "/nowhere/f cannot be written: there is no folder /nowhere"),
        (b"/show-draft", "standard output is not a terminal"),
        (b"\xff", "line 1 of standard input is not UTF-8: byte 0xff at offset 0"),
        (b"x = y\t" * 2000, "tokens, and the context of this bundle is 2048: undo some of it"),
    ],
)
def test_bad_input_is_one_error_and_the_session_goes_on(
    cli: Run, codelet: Path, generator: Generator, typed: bytes, told: str
) -> None:
    ran = cli("chat", codelet, *FEW, stdin=typed + b"\nimport os\n")
    assert (ran.status, ran.out) == (1, answers(generator, "import os"))
    (error,) = [line for line in ran.err.splitlines() if line.startswith("specrt: ")]
    assert told in error


def test_a_message_that_never_ends_is_an_error(cli: Run, codelet: Path) -> None:
    ran = cli("chat", codelet, stdin=b'"""a\nb')
    assert (ran.status, ran.out) == (1, "")
    assert 'the input ended in a message that """ keeps open' in ran.err


def test_ctrl_c_at_the_prompt_drops_the_line(
    cli: Run, codelet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", Mock(side_effect=[KeyboardInterrupt, "/gamma", EOFError]))
    ran = cli("chat", codelet, "--no-history", terminal=True)
    assert (ran.status, ran.out) == (0, "")
    assert re.search(r"Ctrl-D or /quit leaves.*\ngamma: auto, the bundle's default\n", ran.err)


def test_history_is_bounded_private_and_shared(tmp_path: Path) -> None:
    path = tmp_path / "state" / "specrt" / "history"
    first, second = History(path), History(path)
    assert [first.add(text) for text in ("a\nb", "a\nb", " ", "x" * 5000)] == [True, *[False] * 3]
    assert second.add("é")
    assert first.texts == second.texts == ["a\nb", "é"]
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    path.write_text("\n".join(['"old"', *['"x"'] * History.MOST]))
    assert first.add("new")
    assert (len(first.texts), first.texts[-1], first.texts[0]) == (History.MOST, "new", "x")
    for damaged in ("{", "[" * 100_000, "1\n"):
        path.write_text(damaged)
        assert History(path).texts == []
    nowhere = History(Path(os.devnull) / "history")
    assert nowhere.add("a")
    assert nowhere.texts == []


@settings(max_examples=30)
@given(st.text(st.characters(codec="utf-8", exclude_characters='"') | st.just("\n")))
def test_any_text_can_be_typed_in_quotes(text: str) -> None:
    typed = iter(f'"""{text}"""'.split("\n"))
    assert next_typed(lambda _: next(typed)) == Typed(text)
