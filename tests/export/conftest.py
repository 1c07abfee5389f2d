from __future__ import annotations

from collections.abc import Callable

import pytest

from export.zoo import Exported, exporter


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Exports an architecture of the zoo the first time it is asked for."""
    pytest.importorskip("torch", reason="needs the export extra")
    return exporter(tmp_path_factory.mktemp("zoo"))
