"""One example of docs/patterns.md on one rank."""

from __future__ import annotations

from typing import Any

import torch.distributed.tensor.parallel  # noqa: F401


def run(rank: int, world_size: int, name: str, text: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), names)
    names["dist"].destroy_process_group()
