"""Image, service and KServe manifest: what can be told by reading them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from scheduler.support import rows
from serve.support import serving
from specrt.cli.options import API_KEY
from specrt.cli.serve import command
from specrt.text.tokenizer import Tokenizer
from support.fleets import ROOT
from support.rows import packed

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
MANIFEST: Any = yaml.safe_load((ROOT / "deploy" / "kserve.yaml").read_text())
FIELDS = {
    "predictor": {
        "minReplicas", "maxReplicas", "scaleMetric", "scaleTarget", "timeout", "containers",
        "volumes", "securityContext", "terminationGracePeriodSeconds",
    },
    "container": {
        "name", "image", "args", "ports", "env", "lifecycle", "readinessProbe", "livenessProbe",
        "resources", "securityContext", "volumeMounts",
    },
}  # fmt: skip


def entrypoint() -> list[str]:
    found = re.search(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found
    return [str(word) for word in json.loads(found[1])]


def options() -> set[str]:
    return {opt for param in command.params for opt in param.opts if opt.startswith("--")}


def test_the_image_starts_the_server_as_it_can_be_started() -> None:
    program, verb, bundle, *rest = entrypoint()
    assert (program, verb, bundle) == ("specrt", "serve", "/bundle")
    assert {word for word in rest if word.startswith("--")} <= options()
    parsed = command.make_context("serve", [bundle, *rest, *container()["args"]])
    assert (parsed.params["host"], parsed.params["port"]) == ("0.0.0.0", 8080)


def test_the_last_stage_runs_as_nobody_in_particular_and_carries_no_sources() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    assert len(stages) == 2
    assert "COPY . ." not in stages[-1]
    assert re.search(r"^USER [1-9]\d*$", stages[-1], re.MULTILINE)
    extras = re.search(r"pip install .*\[([\w,]+)\]", DOCKERFILE)
    assert extras
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{name} = \[", project, re.MULTILINE) for name in extras[1].split(","))


def test_what_is_copied_into_the_image_is_all_that_docker_is_given() -> None:
    nothing, *kept = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split()
    copied = re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, re.MULTILINE)
    assert (nothing, kept) == ("*", [f"!{name}" for name in copied])


def test_the_service_starts_the_server_and_systemd_reads_it(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "specrt.service").read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, verb, *words = shlex.split(start)
    assert (program, verb) == ("/opt/specrt/bin/specrt", "serve")
    command.make_context("serve", words)
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(stop) > command.make_context("serve", []).params["drain"]
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "specrt.service"
    unit.write_text(text.replace(program, "/bin/true"))
    made = ["systemd-analyze", "verify", str(unit)]
    done = subprocess.run(made, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def container() -> Any:
    (only,) = MANIFEST["spec"]["predictor"]["containers"]
    return only


def test_the_manifest_has_fields_that_kserve_knows_and_fits_the_image() -> None:
    assert (MANIFEST["apiVersion"], MANIFEST["kind"]) == (
        "serving.kserve.io/v1beta1", "InferenceService",
    )  # fmt: skip
    predictor, only = MANIFEST["spec"]["predictor"], container()
    assert predictor.keys() <= FIELDS["predictor"]
    assert only.keys() <= FIELDS["container"]
    assert only["name"] == "kserve-container"  # the name by which KServe knows the server
    assert predictor["minReplicas"] <= predictor["maxReplicas"]
    drain = int(only["args"][only["args"].index("--drain") + 1])
    program, seconds = only["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    assert predictor["terminationGracePeriodSeconds"] > int(seconds) + drain
    assert f"USER {predictor['securityContext']['runAsUser']}\n" in DOCKERFILE
    (port,) = only["ports"]
    assert str(port["containerPort"]) == entrypoint()[-1]
    (mount,) = only["volumeMounts"]
    assert mount["mountPath"] == entrypoint()[2]
    assert mount["name"] in [volume["name"] for volume in predictor["volumes"]]
    assert [one["name"] for one in only["env"]] == [API_KEY]


def test_the_probes_are_answered_without_a_key(tokenizer: Tokenizer) -> None:
    only = container()
    paths = [only[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")]
    paths += [MANIFEST["metadata"]["annotations"]["prometheus.io/path"]]
    paths += re.findall(r"127\.0\.0\.1:8080(/\w+)", DOCKERFILE)
    with serving(rows(packed, 1, tokenizer), api_keys=("k",)) as live:
        assert all(live.http.get(path).status_code == 200 for path in paths)
