"""Real processes for the libraries: forked from one that has imported all of them already."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def processes() -> Iterator[Any]:
    home = HERE.parent / "distributed" / "conftest.py"
    spec = importlib.util.spec_from_file_location("distributed_conftest", home)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = ("accelerate_ranks.py", "lightning_ranks.py", "transformers_ranks.py")
    started = module.Processes(*(HERE / name for name in names))
    yield started
    started.close()
