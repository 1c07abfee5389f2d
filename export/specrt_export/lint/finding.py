"""What a lint says, and the form of a rule that says it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import onnx

from specrt_export.lint.facts import Facts

Severity = Literal["refused", "dropped", "slow"]
SEVERITIES: tuple[Severity, ...] = ("refused", "dropped", "slow")

Fault = tuple[str, str]
"""The node (or tensor) at fault, and why."""

NodeFault = Callable[[Facts, onnx.NodeProto], "str | None"]
"""What says why a node is at fault, or that it is not."""

TESTED = "parser and builder of TensorRT for RTX 1.7.1"


@dataclass(frozen=True)
class Finding:
    """One fault of one node: `refused` by TensorRT, silently `dropped` or changed, or `slow`."""

    rule: str
    node: str
    severity: Severity
    reason: str
    remedy: str


@dataclass(frozen=True)
class Rule:
    """One thing TensorRT does not take as written; `source` says how that is known."""

    name: str
    severity: Severity
    faults: Callable[[Facts], Iterable[Fault]]
    remedy: str
    source: str = TESTED


def each(*op_types: str, fault: NodeFault) -> Callable[[Facts], Iterator[Fault]]:
    """Ask every node of some operators that the version knows."""

    def faults(facts: Facts) -> Iterator[Fault]:
        for node in facts.nodes(*op_types):
            whole = bool(node.output) and (bool(node.input) or node.op_type == "Constant")
            known = whole and not facts.too_old_for(node.op_type)
            reason = fault(facts, node) if known else None
            if reason is not None:
                yield label(node), reason

    return faults


def label(node: onnx.NodeProto) -> str:
    """Name a node, also one without a name."""
    return node.name or f"{node.op_type} of {next(filter(None, node.output), 'nothing')}"
