"""`specrt lint`: finds what TensorRT refuses in a graph, without its parser."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrt.errors import BuildError, how_to_install
from specrt.held_file import open_file
from specrt.system.memory import size

if TYPE_CHECKING:
    import onnx

    from specrt_export.lint.rules import Finding


LARGEST_BYTES = (1 << 31) - 1
"""The longest message that protobuf reads."""

GEOMETRY = "specrt.geometry"
"""Metadata key of the graphs of `specrt export`."""

SHOWN = 3
"""Nodes named in one line."""


@click.command("lint")
@click.argument("graph", type=click.Path(path_type=Path))
@click.option("--tensorrt", default="11.0", show_default=True, help="TensorRT's version.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def command(graph: Path, tensorrt: str, as_json: bool) -> int:
    """List what TensorRT refuses, drops or runs slowly in the ONNX file GRAPH.

    The exit status is 1 when anything is refused or dropped.
    """
    version = _version(tensorrt)
    try:
        from specrt_export.lint import lint
    except ImportError as error:
        raise BuildError(
            f"linting needs {error.name}; install it with `{how_to_install('build')}`"
        ) from None
    model = _read(graph)
    portable = any(p.key == GEOMETRY for p in model.metadata_props)
    folder = None if portable else graph.parent  # those of a portable graph lie in the checkpoint
    findings = lint(model, version, folder)
    print(json.dumps([asdict(f) for f in findings]) if as_json else _text(graph, findings))
    if findings and portable and not as_json:
        print("note: this is a portable graph; `specrt build` lowers it before TensorRT sees it")
    return int(any(f.severity != "slow" for f in findings))


def _version(text: str) -> tuple[int, int]:
    """Read a version such as 10.3 or 10.13.3.9."""
    from specrt.engine.tensorrt.library import LAST_MAJOR, OLDEST

    match = re.fullmatch(r"(\d{1,4})(?:\.(\d{1,4})(\.\d{1,9}){0,3})?", text, re.ASCII)
    version = (int(match[1]), int(match[2] or 0)) if match else (0, 0)
    if not OLDEST <= version < (LAST_MAJOR + 1,):
        oldest = ".".join(map(str, OLDEST))
        raise BuildError(f"--tensorrt is {text!r}; expected {oldest} to {LAST_MAJOR}.x, as 11.0")
    return version


def _read(path: Path) -> onnx.ModelProto:
    import onnx

    try:
        with open_file(path) as file:
            length = os.fstat(file.fileno()).st_size
            if length > LARGEST_BYTES:
                raise BuildError(
                    f"{path} has {size(length)}, and protobuf reads {size(LARGEST_BYTES)} at most; "
                    "keep its weights in external data"
                )
            model = onnx.load_model_from_string(file.read())
    except OSError as error:
        raise BuildError(f"{path} cannot be read ({error.strerror}); name an ONNX file") from error
    except BuildError:
        raise
    except Exception as error:  # the library passes on whatever its parser raises
        raise BuildError(
            f"{path} is not an ONNX graph ({type(error).__name__}); make it with `specrt export`"
        ) from error
    if not model.graph.output:
        raise BuildError(f"{path} is not an ONNX graph (it has no outputs); name an ONNX file")
    return model


def _text(graph: Path, findings: list[Finding]) -> str:
    if not findings:
        return f"{graph}: TensorRT takes all of it"
    alike = groupby(findings, key=lambda f: (f.severity, f.rule, f.reason, f.remedy))
    lines = []
    for (severity, rule, reason, remedy), group in alike:
        lines.append(f"{severity}: {_nodes([f.node for f in group])}: {_plain(reason)} [{rule}]")
        lines.append(f"  {remedy}")
    return "\n".join(lines)


def _nodes(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(_plain_all(names[:SHOWN])) + more


def _plain_all(texts: Iterable[str]) -> Iterable[str]:
    return (_plain(text) for text in texts)


def _plain(text: str) -> str:
    """Return a name from a file without escape sequences for a terminal."""
    return text if text.isprintable() else ascii(text)
