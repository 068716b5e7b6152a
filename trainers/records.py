"""Where a run writes its logs, and how loudly."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .environment import DistributedEnvironment

if TYPE_CHECKING:
    from .trainer_parts import TrainerParts

__all__ = ["add_reporters", "choose_logging_dir", "set_log_level", "stored_logging_dir"]


def choose_logging_dir(args: Any, env: DistributedEnvironment, metadata: dict[str, Any]) -> str:
    """As given; else that of the run which is resumed, wherever its root is by now; else a new one. The same on all ranks."""
    if args.logging_dir is not None:
        return str(args.logging_dir)
    stored = metadata.get("logging_dir")
    if isinstance(stored, str):
        return os.path.join(args.output_dir, stored)
    name = env.broadcast_object(f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{env.host}")
    return os.path.join(args.output_dir, "runs", name)


def stored_logging_dir(args: Any, folder: str | None) -> str | None:
    """As a checkpoint's metadata holds it: relative where it lies in the root, which may be moved."""
    if folder is None:
        return None
    path = Path(folder)
    return str(path.relative_to(args.output_dir) if path.is_relative_to(args.output_dir) else path.absolute())


def add_reporters(trainer: TrainerParts) -> None:
    """The loggers that `report_to` names, unless there are some of the kind."""
    if not (names := trainer.args.reporters):
        return
    from .callbacks import JsonLogger, ResumableSummaryWriter, TBLogger

    present = trainer.callbacks.callbacks
    if "json" in names and not any(isinstance(callback, JsonLogger) for callback in present):
        trainer.callbacks.add(JsonLogger())
    if "tensorboard" in names and not any(isinstance(callback, TBLogger) for callback in present):
        writer = trainer.callbacks.add(ResumableSummaryWriter(None))
        trainer.callbacks.add(TBLogger(writer))


def set_log_level(args: Any, env: DistributedEnvironment) -> None:
    """Of the trainers and the engine; "passive" leaves logging as the program has it."""
    level = args.log_level if env.rank == 0 else args.log_level_replica
    if level != "passive" and (env.rank == 0 or args.log_level != "passive"):
        for name in ("ckpt_trainers", "ckptcore"):
            logging.getLogger(name).setLevel(level.upper())
