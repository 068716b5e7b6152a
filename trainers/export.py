"""Weights for use outside of training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn


def write_model(
    path: str, state: Mapping[str, Tensor], model: nn.Module, processing_class: Any
) -> None:
    """model.safetensors, and what model and processing class save of themselves, such as the
    config that `from_pretrained` needs. The file is whole or not there."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "model.safetensors"
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    first: dict[Any, str] = {}  # memory -> its first name: safetensors does not take it twice
    firsts = {
        name: first.setdefault(
            (value.data_ptr(), tuple(value.shape)) if value.numel() else name, name
        )
        for name, value in state.items()
    }
    weights = {
        name: state[name].detach().cpu().contiguous() for name in firsts if firsts[name] == name
    }
    aliases = {name: of for name, of in firsts.items() if of != name}
    save_file(weights, partial, metadata={"format": "pt", **aliases})
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    partial.replace(target)
    for part in (getattr(model, "config", None), processing_class):
        save = getattr(part, "save_pretrained", None)
        if save is not None:
            save(path)
