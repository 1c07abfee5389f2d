"""What passes cost: between what was measured, beyond it, and for rows that share a pass."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specrt.errors import BundleError
from specrt.speculation.costs import Costs
from specrt.speculation.pool import as_one_launch


def test_a_round_is_draft_and_verify_and_what_lies_outside() -> None:
    costs = Costs((100.0, 110.0, 130.0), (0.0, 10.0, 20.0), 5.0)
    assert [costs.round_ns(g) for g in range(3)] == [105.0, 125.0, 155.0]
    assert costs.plain_ns == 105.0
    assert costs.scaled(2.0, 3.0) == Costs((200.0, 220.0, 260.0), (0.0, 30.0, 60.0), 5.0)
    assert [as_one_launch(costs).round_ns(g) for g in range(3)] == [105.0, 125.0, 155.0]
    assert as_one_launch(costs).draft(2) == 0.0
    # Beyond what was measured costs go on as before, and never fall.
    assert [costs.verify(g) for g in (2, 3, 4)] == [130.0, 145.0, 160.0]
    assert [costs.draft(g) for g in (2, 3, 4)] == [20.0, 30.0, 40.0]
    assert Costs((100.0, 90.0), (0.0,)).verify(9) == 90.0


@pytest.mark.parametrize(
    "costs",
    [
        ((), (0.0,)), ((1.0,), ()), ((0.0, 1.0), (0.0,)), ((1.0,), (0.0, -1.0)), ((1.0,), (1.0,)),
        ((math.nan,), (0.0,)), ((1.0,), (0.0, math.inf)), ((1.0,), (0.0,), -1.0),
    ],
)  # fmt: skip
def test_costs_that_no_machine_has_are_refused(costs: Any) -> None:
    with pytest.raises(BundleError, match="specrt tune"):
        Costs(*costs)
