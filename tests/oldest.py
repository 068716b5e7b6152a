"""The oldest versions that the engine may be installed with, as pip wants them.

    python tests/oldest.py [--torch | --tests]

Of pyproject.toml's dependencies; torch, whose wheels have gigabytes, only with --torch. With --tests:
the tests that `make test-oldest` runs with them.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"

# What reads and writes by numpy, safetensors, msgpack, xxhash and fsspec.
TESTS = [
    "tests/golden",
    "tests/contract",
    *(f"tests/unit/test_{name}.py" for name in ("tensorfile", "manifest", "index", "files")),
    *(
        f"tests/unit/test_{name}.py"
        for name in ("values_roundtrip", "restore", "memory_root", "urls")
    ),
    "tests/retention/test_cases.py",
    "tests/remote/test_other_urls.py",
]


def oldest(torch: bool) -> list[str]:
    asked = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    pairs = [line.split(">=") for line in asked]
    return [f"{name}=={version}" for name, version in pairs if torch or name != "torch"]


if __name__ == "__main__":
    print(*(TESTS if "--tests" in sys.argv else oldest("--torch" in sys.argv)), sep="\n")
