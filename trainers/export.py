"""Weights for use outside of training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["write_model"]


def write_model(trainer: Trainer, path: str) -> None:
    """model.safetensors, and what the processing class saves of itself. The file is whole or not
    there.

    Of the ranks rank 0 writes.
    """
    state = trainer.export_state()
    if trainer.rank == 0:
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / "model.safetensors"
        partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
        host = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        save_file(_untied(host, state), partial, metadata={"format": "pt", **_aliases(state)})
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(target)
        save = getattr(trainer.processing_class, "save_pretrained", None)
        if save is not None:
            save(path)
    trainer.env.max_flags([0])  # nobody goes on before it is there


def _first_names(state: dict[str, Tensor]) -> dict[str, str]:
    """Name -> the first name of the same memory."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    return {
        name: name
        if not value.numel()
        else first.setdefault((value.data_ptr(), tuple(value.shape)), name)
        for name, value in state.items()
    }


def _untied(host: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights once: safetensors does not take memory twice."""
    return {name: host[name] for name, first in _first_names(state).items() if name == first}


def _aliases(state: dict[str, Tensor]) -> dict[str, str]:
    return {name: first for name, first in _first_names(state).items() if name != first}
