"""What TensorRT refuses, silently drops or does badly, found before its parser is called.

Tried, and no fault: any IR version (the parser takes all), nodes out of order, unused inputs,
initializers among the inputs, local functions, and a constant scale that is a graph input.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from specrt_export.lint.attention_rules import ATTENTION_RULES, CACHE_RULES
from specrt_export.lint.rules import (
    OPERATOR_RULES,
    SEVERITIES,
    Facts,
    Finding,
    Rule,
    Severity,
    Version,
)
from specrt_export.lint.weight_rules import LAYOUT_RULES, QUANTIZED_RULES, TYPE_RULES

__all__ = ["RULES", "Finding", "Rule", "Severity", "Version", "lint"]

NEWEST: Version = (11, 0)

RULES: tuple[Rule, ...] = (
    *OPERATOR_RULES,
    *ATTENTION_RULES,
    *CACHE_RULES,
    *QUANTIZED_RULES,
    *TYPE_RULES,
    *LAYOUT_RULES,
)


def lint(
    model: onnx.ModelProto, version: Version = NEWEST, folder: Path | None = None
) -> list[Finding]:
    """Return what the given TensorRT will not take as the graph has it, the worst first.

    External data is looked for below `folder`; without one only its paths and lengths are judged.
    """
    facts = Facts(model, version, folder)
    findings = [
        Finding(rule.name, node, rule.severity, reason, rule.remedy)
        for rule in RULES
        for node, reason in rule.faults(facts)
    ]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
