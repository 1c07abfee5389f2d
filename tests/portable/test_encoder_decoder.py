"""Encoder-decoders: the contract of their graphs, their weights, and parity with transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import helper, numpy_helper

from portable.zoo import BARE, ENCODER_DECODERS, Exported
from shared import nightly_but
from specrt.cli.export import command
from specrt.errors import CheckpointError, ExportError
from specrt_export.check.equivalence import check_parity
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.task import (
    SPEECH,
    TEXT_GENERATION,
    TEXT_TO_TEXT,
    ModelTask,
    task_of,
)
from specrt_export.plan.generation_settings import decoder_start
from specrt_export.portable.attachment import attach_graph
from specrt_export.portable.exporter import check_support
from specrt_export.portable.graph import PARTS, part_path

pytestmark = pytest.mark.export

Zoo = Callable[[str], Exported]

OFTEN = ("t5_untied", "bart_biased", "m2m_100", "whisper")
"""Relative bias and weights held twice; positions from a table, also a computed one; speech."""


def families() -> list[Any]:
    """Return all families, those not of `OFTEN` nightly."""
    nightly = pytest.mark.nightly
    return [n if n in OFTEN else pytest.param(n, marks=nightly) for n in ENCODER_DECODERS]


def load(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)


def graphs(one: Exported) -> dict[str, onnx.ModelProto]:
    paths = {"": one.graph, **{part: part_path(one.graph, part) for part in PARTS}}
    return {part: load(path) for part, path in paths.items() if path.is_file()}


@pytest.mark.parametrize("name", families())
def test_graphs_agree_with_their_model(name: str, exported: Zoo) -> None:
    one = exported(name)
    report = check_parity(one.checkpoint, one.graph)
    assert [case.name for case in report.cases] == ["prefill", "offset", "rollback", "far"]
    assert report.error < 1e-5, report
    assert all(case.argmax_equal == case.rows for case in report.cases)


def test_graphs_that_are_not_whole_get_no_weights(exported: Zoo, tmp_path: Path) -> None:
    one, bare = exported("t5_untied"), exported("t5_untied" + BARE).graph
    decoder = tmp_path / "decoder.onnx"
    shutil.copyfile(bare, decoder)
    with pytest.raises(ExportError, match=r"there is no cross\.onnx next to it"):
        attach_graph(decoder, one.checkpoint)
    shutil.copyfile(part_path(bare, "cross"), tmp_path / "cross.onnx")
    with pytest.raises(CheckpointError, match=r"model of type t5, and .* is of type bart"):
        attach_graph(decoder, exported("bart_biased").checkpoint)
    assert decoder.read_bytes() == bare.read_bytes()


def share_first_row(model: onnx.ModelProto) -> None:
    """Give every row the bias of the first one's positions."""
    (node,) = (n for n in model.graph.node if n.op_type == "Clip")
    at = list(model.graph.node).index(node)
    first = helper.make_node("Gather", [node.output[0], "zeros"], ["first"], axis=0)
    for user in model.graph.node:
        user.input[:] = ["first" if name == node.output[0] else name for name in user.input]
    model.graph.node.insert(at + 1, first)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(2, np.int64), "zeros"))


def halve_reach(model: onnx.ModelProto) -> None:
    """Take distances from half the greatest on for one."""
    (node,) = (n for n in model.graph.node if n.op_type == "Clip")
    node.input[2] = "near"
    model.graph.initializer.append(numpy_helper.from_array(np.array(64), "near"))


def swap_lengths(model: onnx.ModelProto) -> None:
    """Hide what the other row's source has not."""
    lengths = {"length", "source_length"}
    (node,) = (n for n in model.graph.node if n.op_type == "Unsqueeze" and lengths & {*n.input})
    swap = helper.make_node("Gather", [node.input[0], "other"], ["swapped"], axis=0)
    node.input[0] = "swapped"
    model.graph.node.insert(0, swap)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 0]), "other"))


def swap_positions(model: onnx.ModelProto) -> None:
    """Look positions up in the table for the other row."""
    (node,) = (n for n in model.graph.node if "embed_positions.weight" in "".join(n.input))
    at = list(model.graph.node).index(node)
    swap = helper.make_node("Gather", [node.input[1], "other"], ["swapped"], axis=0)
    node.input[1] = "swapped"
    model.graph.node.insert(at, swap)
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 0]), "other"))


@pytest.mark.parametrize(
    ("name", "part", "fault", "case"),
    [
        ("t5_untied", "", share_first_row, "rollback"),
        ("t5_untied", "", halve_reach, "far"),
        ("t5_untied", "", swap_lengths, "prefill"),
        ("bart_biased", "", swap_positions, "rollback"),
        ("whisper", "", swap_positions, "rollback"),
    ],
)
def test_parity_finds_a_row_that_is_taken_for_another(
    name: str, part: str, fault: Callable[[onnx.ModelProto], None], case: str, exported: Zoo,
    tmp_path: Path,
) -> None:  # fmt: skip
    one = exported(name)
    for made, model in graphs(one).items():
        if made == part:
            fault(model)
        onnx.save(model, tmp_path / (part_path(one.graph, made) if made else one.graph).name)
    with pytest.raises(ExportError, match=f"disagrees with the model at '{case}'"):
        check_parity(one.checkpoint, tmp_path / one.graph.name)


def test_the_command_writes_and_checks_all_graphs(exported: Zoo, tmp_path: Path) -> None:
    """From those that `--config-only` left."""
    one, bare = exported("t5_untied"), exported("t5_untied" + BARE).graph
    decoder = tmp_path / "graphs" / "decoder.onnx"
    decoder.parent.mkdir()
    shutil.copyfile(bare, decoder)
    for part in PARTS:
        shutil.copyfile(part_path(bare, part), part_path(decoder, part))
    line = [str(one.checkpoint.folder), "--out", str(tmp_path / "graphs"), "--json"]
    done = CliRunner().invoke(command, [*line, "--attach", "--check"], catch_exceptions=False)
    facts = json.loads(done.stdout)
    names = ["cross.onnx", "decoder.onnx", "encoder.onnx"]
    assert sorted(path.name for path in (tmp_path / "graphs").iterdir()) == names
    assert [Path(part["path"]).name for part in facts["parts"]] == ["cross.onnx", "encoder.onnx"]
    assert facts["parity"]["error"] < 1e-5
    for name, made in (("decoder", ""), ("encoder", "encoder"), ("cross", "cross")):
        path = part_path(one.graph, made) if made else one.graph
        assert (tmp_path / "graphs" / f"{name}.onnx").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"model_type": "t5"}, ModelTask(TEXT_TO_TEXT, encodes=True)),
        ({"model_type": "bart", "architectures": ["BartForCausalLM"]}, ModelTask(TEXT_GENERATION)),
        ({"model_type": "whisper"}, ModelTask(SPEECH, encodes=True)),
        ({"model_type": "vit"}, None),
    ],
)  # fmt: skip
def test_what_a_checkpoint_is_for(config: dict[str, Any], task: ModelTask | None) -> None:
    assert task_of(config) == task


@pytest.mark.parametrize(
    "kind",
    nightly_but(["led"], ["led", "longt5", "pop2piano", "seamless_m4t", "speech_to_text"]),
)
def test_what_does_not_keep_the_contract_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    from specrt_export.portable.exporter import export_graph

    sizes = dict.fromkeys(("num_layers", "encoder_layers", "decoder_layers"), 1)
    config = AutoConfig.for_model(kind, vocab_size=60, d_model=32, hidden_size=32, **sizes)
    config.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path, config_only=True)
    with pytest.raises(ExportError) as refused:
        export_graph(checkpoint, tmp_path / "decoder.onnx")
    assert "does not trace" not in str(refused.value), refused.value


def configured(folder: Path, config: dict[str, Any], **generation: Any) -> Checkpoint:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return Checkpoint(folder, {"vocab_size": 90, **config}, {})


LANGUAGES = {"<|en|>": 50, "<|de|>": 51}
TASKS = {"transcribe": 60, "translate": 61}


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"lang_to_id": LANGUAGES, "task_to_id": TASKS, "no_timestamps_token_id": 70},
         (3, 50, 60, 70)),
        ({"lang_to_id": LANGUAGES, "task_to_id": TASKS, "language": "de", "task": "translate"},
         (3, 51, 61)),
        ({"forced_decoder_ids": [[2, 60], [1, 50], [3, 70]], "no_timestamps_token_id": 70},
         (3, 50, 60, 70)),
    ],
)  # fmt: skip
def test_how_a_text_of_speech_begins(
    settings: dict[str, Any], start: tuple[int, ...], tmp_path: Path
) -> None:
    assert (
        decoder_start(configured(tmp_path, {"decoder_start_token_id": 3}, **settings), SPEECH)
        == start
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"language": "xx", "lang_to_id": LANGUAGES}, "language 'xx'.*correct generation_config"),
        (
            {"lang_to_id": LANGUAGES, "task": "sing", "task_to_id": TASKS},
            r"task_to_id\[sing\] None",
        ),
        ({"forced_decoder_ids": 7}, "forced_decoder_ids 7; expected pairs"),
        ({"no_timestamps_token_id": 95}, "no_timestamps_token_id 95; expected token ids from 0"),
    ],
)
def test_what_no_text_of_speech_begins_with_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        decoder_start(configured(tmp_path, {"decoder_start_token_id": 3}, **settings), SPEECH)


def test_how_a_text_of_a_text_begins(tmp_path: Path) -> None:
    assert decoder_start(configured(tmp_path, {}, bos_token_id=4), TEXT_TO_TEXT) == (4,)
    assert decoder_start(configured(tmp_path, {"vocab_size": 3}), TEXT_GENERATION) == ()
    marian = {"vocab_size": 3, "decoder_vocab_size": 9, "decoder_start_token_id": 8}
    assert decoder_start(configured(tmp_path, marian), TEXT_TO_TEXT) == (8,)
    with pytest.raises(CheckpointError, match="no decoder_start_token_id; expected the token"):
        decoder_start(configured(tmp_path, {}), TEXT_TO_TEXT)


@pytest.mark.parametrize("kind", ["vit", "wav2vec2"])
def test_support_is_asked_of_the_task(kind: str) -> None:
    """The second hears speech, and writes no text by steps."""
    with pytest.raises(ExportError, match=f"{kind} cannot be exported: transformers has no model"):
        check_support({"model_type": kind})


@pytest.mark.parametrize("kind", ["t5gemma", "encoder-decoder"])
def test_configs_of_parts_are_refused(kind: str) -> None:
    with pytest.raises(ExportError, match=f"{kind} .*have a config each.*such as T5"):
        check_support({"model_type": kind, "encoder": {}, "decoder": {}})


def test_an_encoder_that_attends_to_blocks_is_refused() -> None:
    """It exports as one that sees all, which on short sources is the same."""
    config = {"model_type": "bigbird_pegasus", "is_encoder_decoder": True}
    for refused in (config, {**config, "attention_type": "block_sparse"}):
        with pytest.raises(ExportError, match=r"to blocks of a long source.*original_full"):
            check_support(refused)
    check_support({**config, "attention_type": "original_full"})
