"""What `--help` says of every verb: complete at 80 columns, and without any optional package."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import requires
from itertools import product
from math import isfinite

import click
import pytest

from cli.conftest import Run
from shared import nightly_but
from specrt.cli import COMMANDS, specrt

OPTIONAL = ("fastapi", "torch", "onnx", "llguidance", "matplotlib", "rich")

HIDDEN = """
import os, sys
import click, jinja2, numpy, tokenizers
from specrt.cli import COMMANDS, run

needed, optional = sys.argv[1].split(), sys.argv[2].split()
known = {*sys.stdlib_module_names, *needed, *sys.modules}

class Hiding:
    def __init__(self, finder, hides):
        self.finder, self.hides = finder, hides
    def find_spec(self, name, path=None, target=None):
        hidden = self.hides(name.partition(".")[0])
        return None if hidden else self.finder.find_spec(name, path, target)

ways = [lambda name: name not in known, *(name.__eq__ for name in optional)]
for hides in ways[:int(sys.argv[3])]:
    child = os.fork()
    if not child:
        sys.meta_path[:] = [Hiding(finder, hides) for finder in sys.meta_path]
        os._exit(max(run(words) for verb in COMMANDS for words in ([], ["-h"], [verb, "--help"])))
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("ways", nightly_but([1], [1, 1 + len(OPTIONAL)]))
def test_help_needs_no_optional_package(ways: int) -> None:
    """Without any of them, and nightly without each."""
    needed = [re.split(r"\W", name)[0] for name in requires("specrt") or () if "extra" not in name]
    given = " ".join(["specrt", *needed]), " ".join(OPTIONAL), str(ways)
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, *given], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_bare_command_lists_every_verb(cli: Run) -> None:
    ran = cli("--help")
    assert ran.status == 0
    assert cli() == ran
    listed = ran.out.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == [*COMMANDS]
    assert all(line.endswith(".") and not line.endswith("..") for line in listed)


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_fits_a_terminal(cli: Run, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ran = cli(verb, "--help")
    assert ran.status == 0
    assert max(map(len, ran.out.splitlines())) <= 80


@pytest.mark.parametrize("verb", COMMANDS)
def test_what_an_option_does_not_take_is_refused_in_plain_words(verb: str) -> None:
    context = click.Context(specrt)
    command = specrt.get_command(context, verb)
    assert command is not None
    values = "x", "inf", "nan", "-99", "1e9999"
    options = [one for one in command.params if isinstance(one, click.Option) and not one.is_flag]
    for option, value in product(options, values):
        try:
            taken = option.type.convert(value, option, context)
        except click.UsageError as error:
            said = error.format_message()
            assert option.opts[0] in said
            assert value[:9] in said
            assert re.search("expected|neither|not one of|does not exist", said), said
        else:
            assert not isinstance(taken, float) or isfinite(taken)
