"""The table of backends: what a manifest names is what opens, and a new backend is one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from specrt.bundle import HEADS, KINDS, TASKS, Bundle
from specrt.engine.backends import BACKENDS, check_versions, notices
from specrt.engine.ort.kernels import CONTRIB, LAYOUT
from specrt.errors import BundleError
from specrt.speculation.drafters import DRAFT_KINDS
from specrt_export.heads.head_formats import HEAD_FORMATS
from specrt_export.recipe.compiler_spec import COMPILERS
from support.gpu_double import Site, table_pair
from support.kernels import without_kernels


def test_every_kind_of_model_is_a_row_of_each_table() -> None:
    assert set(HEAD_FORMATS) == set(HEADS)
    assert set(DRAFT_KINDS) == set(KINDS)
    assert set(TASKS.values()) <= set(KINDS) == set(BACKENDS["ort-cpu"].runs)
    assert all(set(one.runs) <= set(KINDS) for one in BACKENDS.values())
    assert set(BACKENDS) == set(COMPILERS)


def packages(monkeypatch: pytest.MonkeyPatch, there: Mapping[str, str], loaded: str | None) -> None:
    """Let packages have these versions, and the module that is loaded one of them, if any."""

    def version(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    module = None if loaded is None else SimpleNamespace(__version__=loaded)
    monkeypatch.setitem(sys.modules, "onnxruntime", module)


@pytest.mark.parametrize("loaded", ["1.31.1", "1.25.1"])
def test_of_two_packages_the_one_that_is_loaded_counts(
    site: Site, monkeypatch: pytest.MonkeyPatch, loaded: str
) -> None:
    there = {"onnxruntime": "1.25.1", "onnxruntime-gpu": "1.31.1"}
    packages(monkeypatch, there, loaded)
    bundle = Bundle.open(site.bundle(*table_pair(), backends=("ort-cuda", "ort-cuda")))
    manifest = replace(bundle.manifest, versions={"onnxruntime": "1.31.0"})
    if loaded == "1.31.1":
        check_versions(bundle.path, manifest)
        return
    with pytest.raises(BundleError, match=r"pip install 'onnxruntime>=1\.31'"):
        check_versions(bundle.path, manifest)
    monkeypatch.setattr(sys, "version_info", (3, 10, 14))
    with pytest.raises(BundleError, match=r"Python 3\.10 has none that new: run .* 3\.11"):
        check_versions(bundle.path, manifest)


@pytest.mark.parametrize(
    ("built", "has_kernels", "refused", "noticed"),
    [
        (LAYOUT, True, "", ""),
        (LAYOUT, False, "apt install g.*specrt build RECIPE", ""),
        ("strips of 4 tiles of 16, norms in products", True, "", ""),
        (CONTRIB, True, "", "build the bundle again with `specrt build RECIPE`"),
        (CONTRIB, False, "", "apt install g.*dnf install.*xcode-select.*specrt build RECIPE"),
        ("tiles of 7", True, "'tiles of 7'.*build it again with `specrt build RECIPE`", ""),
        (None, True, "build it again with `specrt build RECIPE`", ""),
    ],
)
def test_a_bundle_is_for_the_kernels_that_are_here(
    site: Site, built: str | None, has_kernels: bool, refused: str, noticed: str
) -> None:
    folder = site.bundle(*table_pair(), backends=("ort-cpu", "ort-cpu"))
    versions = {} if built is None else {"kernels": built}
    manifest = replace(Bundle.open(folder).manifest, versions=versions)
    with nullcontext() if has_kernels else without_kernels():
        if refused:
            with pytest.raises(BundleError, match=refused):
                check_versions(folder, manifest)
        else:
            check_versions(folder, manifest)
            told = notices(manifest)
            assert len(told) == bool(noticed), "one for both models"
            assert all(re.search(noticed, one) for one in told)
    check_versions(folder, replace(manifest, backend="ort-cuda", **{
        role: replace(getattr(manifest, role), backend="ort-cuda") for role in ("target", "draft")
    }))  # fmt: skip


def test_a_library_that_was_compiled_for_another_layout_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrt.engine.ort.kernels.LAYOUT", "tiles of 7")
    folder = site.bundle(*table_pair(), backends=("ort-cpu", "ort-cpu"))
    manifest = replace(Bundle.open(folder).manifest, versions={"kernels": "tiles of 7"})
    with pytest.raises(BundleError, match=f"compiled for '{LAYOUT}'.*'tiles of 7'; run `"):
        check_versions(folder, manifest)
