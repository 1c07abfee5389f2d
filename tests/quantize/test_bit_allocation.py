"""Bits of parts: what each part does is measured as it is, and a bound that is asked for is met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from portable.zoo import Exported
from specrt.errors import BuildError
from specrt_export.check.quality import GraphScorer, measure, take_in
from specrt_export.portable.graph import GraphRun, Tokens, read_graph, runs_here
from specrt_export.precision import BitBound, Precision
from specrt_export.quantize import bit_allocation
from specrt_export.quantize.bit_allocation import BitSearch, BitTrial, Part, parts_of, sensitivities
from specrt_export.quantize.calibration import CalibrationText
from specrt_export.quantize.quantizer import find_codes, graft, quantize
from specrt_export.quantize.weight_choice import choose

needs_reference = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)
PIECES = np.random.default_rng(3).integers(0, 8192, (2, 24))
FREE = Precision.of("int4", auto=True)


def silent(part: str, done: float) -> None:
    pass


@pytest.mark.export
def test_what_recurrent_layers_and_attention_put_out_are_parts_of_their_own(
    exported: Callable[[str], Exported],
) -> None:
    names = {part.name for part in parts_of(read_graph(exported("qwen3_5").graph), FREE)}
    assert {"layer 0: out_proj", "layer 3: o_proj", "layer 3: q_proj, k_proj, v_proj"} <= names


@needs_reference
def test_a_part_is_measured_as_if_it_were_the_only_one_in_int4(
    draft: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, precision = read_graph(draft[0]), replace(FREE, calibrated=True)
    parts = parts_of(model, precision)
    fitted: list[Tokens] = list(np.random.default_rng(4).integers(0, 8192, (2, 128)))
    text = CalibrationText(fitted, tmp_path / "kept")
    choices = choose(model, precision)
    codes = find_codes(model, draft[1], precision, choices, text, silent)
    found = sensitivities(model, draft[1], parts, codes, PIECES, tmp_path, silent)
    quantized = quantize(*draft, tmp_path / "q", precision, codes=codes)
    reference = GraphScorer(GraphRun(*draft), 24)
    for at in (0, 3, len(parts) - 2):
        mixed = read_graph(draft[0])
        graft(mixed, [one for one in quantized.stored if one.choice in parts[at].choices])
        take_in(mixed, quantized.folder)
        alone = measure(reference, GraphScorer(GraphRun(mixed, draft[1]), 24), list(PIECES))
        assert found[at] == pytest.approx(alone.kl, rel=1e-2)
    sweeps: list[int] = []

    class Counted(bit_allocation._Sweep):
        def run(self, *args: object) -> list[float]:
            sweeps.append(len(set(self._part_of.values())))
            return super().run(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(bit_allocation, "_Sweep", Counted)
    assert sensitivities(model, draft[1], parts, codes, PIECES, tmp_path, silent) == found
    assert not sweeps, "what was measured is kept"
    monkeypatch.setattr(bit_allocation, "_BRANCH_BYTES", 1)
    other = PIECES[:, 1:]
    apart = sensitivities(model, draft[1], parts, codes, other, tmp_path, silent)
    assert sweeps == [1] * len(parts), "of another text nothing is taken over"
    monkeypatch.setattr(bit_allocation, "_BRANCH_BYTES", 1 << 30)
    together = sensitivities(model, draft[1], parts, codes, other, tmp_path / "new", silent)
    assert apart == pytest.approx(together, rel=1e-6)


def whole(kls: list[float], raised: frozenset[int], scale: float, rest: float) -> float:
    """What a model might come to: parts add up about as they do alone, and others lose, too."""
    low = sum(kl for at, kl in enumerate(kls) if at not in raised)
    return rest + scale * low**1.1


def searched(
    seed: int, bound: BitBound, scale: float, rest: float
) -> tuple[BitSearch, list[BitTrial]]:
    chance = np.random.default_rng(seed)
    kls = (10 ** chance.uniform(-5, -2.5, 40)).tolist()
    parts = [Part(f"part {at}", (), int(chance.integers(1, 9)) << 16) for at in range(40)]
    search, trials = BitSearch(parts, kls, bound, 1 << 22), list[BitTrial]()
    best: BitTrial | None = None
    while (raised := search.propose()) is not None:
        used = (1 << 22) + 5000 + sum(parts[at].added_bytes for at in raised)
        trial = BitTrial(raised, whole(kls, raised, scale, rest), used)
        trials.append(trial)
        best = trial if search.record(trial) else best
        assert len(trials) < 9
    assert best is not None
    return search, [best, *trials]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("scale", "rest"), [(1.3, 0.0), (0.5, 0.001), (3.0, 0.002)])
def test_a_bound_of_kl_is_met_and_nearly_used(seed: int, scale: float, rest: float) -> None:
    everything = searched(seed, BitBound(max_kl=10.0), scale, rest)[1][0]
    assert not everything.raised, "nothing needs more bits under a bound that is far"
    for share in (0.25, 0.6):
        bound = rest + share * (everything.kl - rest)
        best = searched(seed, BitBound(max_kl=bound), scale, rest)[1][0]
        assert 0.7 * bound < best.kl <= bound
    with pytest.raises(BuildError, match=r"in int8 the KL divergence is .* nats; ask for that"):
        searched(seed, BitBound(max_kl=rest / 2 + 1e-12), scale, rest + 1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_a_bound_of_bytes_is_met_and_nearly_used(seed: int) -> None:
    for room in (0, 1 << 18, 1 << 20, 1 << 22):
        bound = (1 << 22) + 5000 + room
        best, *trials = searched(seed, BitBound(max_bytes=bound), 1.0, 0.0)[1]
        assert best.bytes <= bound
        assert bound - best.bytes < 1 << 17 or len(best.raised) >= 39 or room == 0
        assert best.kl == min(trial.kl for trial in trials if trial.bytes <= bound)
    with pytest.raises(BuildError, match="in int4 the weights take 4199304 bytes; ask for that"):
        searched(seed, BitBound(max_bytes=(1 << 22) + 4000), 1.0, 0.0)
