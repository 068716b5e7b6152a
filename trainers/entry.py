"""Where the command `ckpt-train` begins: before anything that a plain installation lacks."""

from __future__ import annotations

import sys
from importlib import import_module

USAGE = 2
# What the extra [trainers] brings.
EXTRA = ("click", "pydantic", "yaml", "tqdm", "tensorboard")


def main() -> int:
    """Run the command, or say which package it needs; the exit code."""
    try:
        program = import_module(".main", __package__)
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        sys.stderr.write(
            f"ckpt-train: the package {error.name} is missing: pip install 'ckptcore[trainers]'\n"
        )
        return USAGE
    code: int = program.main()
    return code
