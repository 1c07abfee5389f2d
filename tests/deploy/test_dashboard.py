"""grafana.json and prometheus.yml: every name is one that a server tells."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from scheduler.support import rows
from serve.support import serving
from shared import REPOSITORY
from specrt.text.tokenizer import Tokenizer
from support.rows import packed

DEPLOY = REPOSITORY / "deploy"
DASHBOARD: Any = json.loads((DEPLOY / "grafana.json").read_text())
VARIABLES = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
EXPRESSIONS = [t["expr"] for panel in DASHBOARD["panels"] for t in panel["targets"]]
ADDED = {"instance", "job"}
"""Labels that Prometheus adds to what it scrapes."""


def told(prefix: str, tokenizer: Tokenizer) -> dict[str, set[str]]:
    """Return the labels of each sample that a server tells after a few requests."""
    toys = rows(packed, 2, tokenizer)
    with serving(toys, metrics_prefix=prefix, api_keys=("k name=someone",)) as live:
        live.http.headers["X-Api-Key"] = "k"
        live.post("/v1/completions", prompt="ab", max_tokens=40, ignore_eos=True, gamma=4)
        live.refusal("/v1/completions", 400, prompt="x", temperature=-1)
        text = live.http.get("/metrics").text
    labels: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels[sample.name] |= {*sample.labels}
    return labels


@pytest.mark.parametrize("choice", VARIABLES["prefix"]["query"].split(","))
def test_every_expression_uses_names_that_there_are(choice: str, tokenizer: Tokenizer) -> None:
    prefix, begin = (part.strip() for part in choice.split(" : "))
    labels = told(prefix, tokenizer)
    queries = [v["query"] for v in VARIABLES.values() if v["type"] == "query"]
    for expression in [*EXPRESSIONS, *queries]:
        names = re.findall(r"\$\{prefix\}(\w+)", expression)
        assert names
        known = set.union(*(labels.get(begin + name, set()) for name in names)) | ADDED
        for name in names:
            assert begin + name in labels, expression
        grouped = {g.strip() for by in re.findall(r"by \(([^)]*)\)", expression)
                   for g in by.split(",")}  # fmt: skip
        matched = {*re.findall(r"(\w+)=~", expression)}
        assert grouped | matched <= known, expression
