"""Graphs exported from a config alone, and their weights attached later."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from specrt.errors import CheckpointError, ExportError
from specrt_export.checkpoint import Checkpoint, WeightBytes

pytest.importorskip("onnx_ir", reason="exporting needs more: make setup-export")

from export.zoo import Exported

pytestmark = pytest.mark.export

Zoo = Callable[[str], Exported]


@pytest.fixture(scope="module")
def bare(exported: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph made where there is only a config.json."""
    from specrt_export.portable.exporter import export_graph

    folder = tmp_path_factory.mktemp("bare")
    # Of all architectures this one stores a weight under another name than it gives it.
    shutil.copy(exported("gpt_neox").checkpoint.folder / "config.json", folder)
    checkpoint = Checkpoint.open(folder, config_only=True)
    return export_graph(checkpoint, folder / "graph.onnx").path


def test_attaching_later_gives_the_same_bytes(bare: Path, exported: Zoo, tmp_path: Path) -> None:
    from specrt_export.portable.exporter import attach_graph

    one = exported("gpt_neox")
    whole = attach_graph(bare, one.checkpoint, tmp_path / "whole.onnx")
    assert whole.path.read_bytes() == one.graph.path.read_bytes()
    assert (whole.geometry, whole.nodes) == (one.graph.geometry, one.graph.nodes)


def test_a_bare_graph_says_so(bare: Path, exported: Zoo) -> None:
    from specrt_export.check.equivalence import check_parity

    model = onnx.load(bare, load_external_data=False)
    meta = {entry.key: entry.value for entry in model.metadata_props}
    assert meta["specrt.attached"] == "false"
    assert json.loads(meta["specrt.geometry"])["layers"] == 2
    places = {entry.value for t in model.graph.initializer for entry in t.external_data}
    assert places == {"unattached.safetensors"}
    with pytest.raises(ExportError, match=r"has no weights yet.*--attach"):
        check_parity(exported("gpt_neox").checkpoint, bare)


def test_a_whole_graph_is_not_attached_again(exported: Zoo) -> None:
    from specrt_export.portable.exporter import attach_graph

    one = exported("gpt_neox")
    with pytest.raises(ExportError, match="is not a graph without weights"):
        attach_graph(one.graph.path, one.checkpoint)


NAME = "gpt_neox.layers.0.attention.dense.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, f"holds no weight {NAME}"),
        ({"shape": (1, 2)}, rf"{NAME} has shape \[1, 2\], config.json calls for \[32, 32\]"),
        ({"dtype": "I8"}, f"{NAME} is stored as I8; expected one of F32, F16, BF16"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    change: dict[str, object] | None, message: str, bare: Path, exported: Zoo, tmp_path: Path
) -> None:
    from specrt_export.portable.exporter import attach_graph

    one = exported("gpt_neox").checkpoint
    weights = dict(one.weights)
    stored = weights.pop(NAME)
    if change is not None:
        weights[NAME] = WeightBytes(**{**vars(stored), **change})
    out = tmp_path / "out.onnx"
    with pytest.raises(CheckpointError, match=message):
        attach_graph(bare, Checkpoint(one.folder, one.config, weights), out)
    assert not out.exists()


def test_names_without_their_first_part_are_found(
    bare: Path, exported: Zoo, tmp_path: Path
) -> None:
    """Checkpoints saved from a model without its head, GPT-2's for one, lack it."""
    from specrt_export.portable.exporter import attach_graph

    one = exported("gpt_neox")
    shorter = {name.removeprefix("gpt_neox."): w for name, w in one.checkpoint.weights.items()}
    checkpoint = Checkpoint(one.checkpoint.folder, one.checkpoint.config, shorter)
    whole = attach_graph(bare, checkpoint, tmp_path / "whole.onnx")
    assert whole.path.read_bytes() == one.graph.path.read_bytes()
