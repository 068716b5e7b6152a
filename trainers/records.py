"""Where a run writes its logs, and how loudly."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from .callbacks.log_paths import path_in_root, relative_to_root
from .parallel.environment import DistributedEnvironment

if TYPE_CHECKING:
    from .trainer_parts import TrainerParts

__all__ = ["add_reporters", "choose_logging_dir", "set_log_level", "stored_logging_dir"]


def choose_logging_dir(args: Any, env: DistributedEnvironment, metadata: dict[str, Any]) -> str:
    """As given; else that of the run which is resumed, where it lies in this root; else a new one.
    The same on all ranks."""
    if args.logging_dir is not None:
        return str(args.logging_dir)
    chosen = os.path.join("runs", f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{env.host}")
    stored = metadata.get("logging_dir")
    if env.rank == 0 and stored is not None and path_in_root(stored, args.output_dir) is not None:
        chosen = stored
    return os.path.join(args.output_dir, str(env.broadcast_object(chosen)))


def stored_logging_dir(args: Any, folder: str | None) -> str | None:
    """As a checkpoint's metadata holds it: relative to the root. One that lies elsewhere is the
    user's to name again."""
    return None if folder is None else relative_to_root(folder, args.output_dir)


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
