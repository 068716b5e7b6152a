"""Lean trainers on top of ckptcore's public API. Names are imported when they are first used, as ckptcore's are."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import GPTArguments as GPTArguments
    from .arguments import TrainingArguments as TrainingArguments
    from .ddp import DDPTrainer as DDPTrainer
    from .model import ByteGPT as ByteGPT
    from .trainer import Trainer as Trainer
    from .trainer import TrainResult as TrainResult

_HOMES = {
    "ByteGPT": "model",
    "DDPTrainer": "ddp",
    "GPTArguments": "arguments",
    "TrainResult": "trainer",
    "Trainer": "trainer",
    "TrainingArguments": "arguments",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
