"""Windows over the latest positions of a text: what states and convolutions read without rings."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from specrt.geometry import BASE, NEXT_BASE, TAKEN_BACK
from specrt_export.lower.attention import positions
from specrt_export.lower.view import GraphView

_NEVER = 1 << 40
"""A position that no pass reaches."""


class Windows:
    """The windows of a graph of one row.

    ```
    window.i [1, 1, W, C] ─┐
    x [1, 1, S, C] ─────── Concat [1, 1, W + S, C] ─┬─ (what the layer reads)
                                                    └─ Gather places ─ present_window.i
    ```
    A window holds the `TAKEN_BACK` positions from `base` on, and `before` ones in front of them; a
    pass leaves it as of `next_base`.
    """

    def __init__(self, view: GraphView) -> None:
        self._view = view
        view.graph.input.append(helper.make_tensor_value_info(NEXT_BASE, TensorProto.INT64, [1]))
        self.positions = positions(view)
        """Of the tokens of a pass, [1, S]."""
        last = view.add("Slice", [self.positions, *map(self.number, (-1, 2**31 - 1, 1))])
        self._last = view.add("Reshape", [last, self.number(1)])
        self._places: dict[int, str] = {}

    def number(self, *numbers: int) -> str:
        """Return a constant [N]."""
        return self._view.add_constant("number", np.array(numbers, np.int64))

    def since_base(self) -> tuple[str, str]:
        """Return the positions of a window without `before`, and of the tokens after it.

        Also whether the former lie before the pass; those that do not are far away.
        Shapes: positions [W + S], whether they are there [W].
        """
        view = self._view
        held = view.add("Add", [BASE, self.number(*range(TAKEN_BACK))])
        there = view.add("Less", [held, "start"])
        known = view.add("Where", [there, held, self.number(_NEVER)])
        fed = view.add("Reshape", [self.positions, self.number(-1)])
        return view.add("Concat", [known, fed], axis=0), there

    def move(self, name: str, held: str, new: str, before: int = 0) -> str:
        """Let a window move on, given what it holds and what a pass adds; return both joined.

        Shapes: held [1, 1, W, C], new [1, 1, S, C], both [1, 1, W + S, C].
        """
        view = self._view
        joined = view.add("Concat", [held, new], axis=2)
        places = self._places.get(before) or self._places.setdefault(before, self._moved(before))
        view.add("Gather", [joined, places], outputs=[f"present_{name}"], axis=2)
        return joined

    def _moved(self, before: int) -> str:
        """Return where in a window and the tokens after it the next window lies, [W].

        Of what follows the last token there is none yet: it is that token once more.
        """
        view, length = self._view, TAKEN_BACK + before
        wanted = view.add("Add", [NEXT_BASE, self.number(*range(-before, TAKEN_BACK))])
        there = view.add("Min", [wanted, self._last])
        held = view.add("Sub", [self.number(before), BASE])
        fed = view.add("Sub", [self.number(length), "start"])
        shift = view.add("Where", [view.add("Less", [there, "start"]), held, fed])
        return view.add("Add", [there, shift])

    def ahead(self, before: int) -> tuple[str, str]:
        """Return where the `before` positions ahead of a pass lie, and whether there are such.

        Shapes: places in a window [1, before], whether they are there [1, before, 1].
        """
        view = self._view
        steps = self.number(*range(-before, 0))
        at = view.add("Add", [view.add("Unsqueeze", ["start", self.number(1)]), steps])
        there = view.add("GreaterOrEqual", [at, self.number(0)])
        places = view.add("Add", [at, view.add("Sub", [self.number(before), BASE])])
        return places, view.add("Unsqueeze", [there, self.number(2)])
