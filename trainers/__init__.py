"""Trainers on top of ckptcore's public API. Names are imported when they are first used, as
ckptcore's are."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import AccelTrainingArguments as AccelTrainingArguments
    from .arguments import BaseTrainingArguments as BaseTrainingArguments
    from .arguments import DataNotFound as DataNotFound
    from .arguments import DDPArguments as DDPArguments
    from .arguments import DDPTrainingArguments as DDPTrainingArguments
    from .arguments import FSDP2Arguments as FSDP2Arguments
    from .arguments import FSDP2TrainingArguments as FSDP2TrainingArguments
    from .arguments import GPTArguments as GPTArguments
    from .arguments import InvalidArgument as InvalidArgument
    from .arguments import MinimalTrainingArguments as MinimalTrainingArguments
    from .arguments import PipelineTrainingArguments as PipelineTrainingArguments
    from .arguments import PostLocalSGDArguments as PostLocalSGDArguments
    from .arguments import TrainingArguments as TrainingArguments
    from .arguments import resolve_arguments as resolve_arguments
    from .callbacks.protocol import CallbackHandler as CallbackHandler
    from .callbacks.protocol import TrainerCallback as TrainerCallback
    from .callbacks.protocol import TrainerControl as TrainerControl
    from .callbacks.protocol import TrainerState as TrainerState
    from .data.loader import ResumableLoader as ResumableLoader
    from .losses import causal_lm_loss as causal_lm_loss
    from .model import ByteGPT as ByteGPT
    from .parallel.accel import AccelTrainer as AccelTrainer
    from .parallel.ddp import DDPTrainer as DDPTrainer
    from .parallel.environment import DistributedEnvironment as DistributedEnvironment
    from .parallel.fsdp2 import FSDP2Trainer as FSDP2Trainer
    from .parallel.pipeline import PipelineTrainer as PipelineTrainer
    from .trainer import Trainer as Trainer
    from .trainer import TrainResult as TrainResult

_HOMES = {
    "parallel.accel": ["AccelTrainer"],
    "arguments": [
        "AccelTrainingArguments",
        "BaseTrainingArguments",
        "DDPArguments",
        "DDPTrainingArguments",
        "DataNotFound",
        "FSDP2Arguments",
        "FSDP2TrainingArguments",
        "GPTArguments",
        "InvalidArgument",
        "MinimalTrainingArguments",
        "PipelineTrainingArguments",
        "PostLocalSGDArguments",
        "TrainingArguments",
        "resolve_arguments",
    ],
    "callbacks.protocol": ["CallbackHandler", "TrainerCallback", "TrainerControl", "TrainerState"],
    "data.loader": ["ResumableLoader"],
    "parallel.ddp": ["DDPTrainer"],
    "parallel.environment": ["DistributedEnvironment"],
    "parallel.fsdp2": ["FSDP2Trainer"],
    "losses": ["causal_lm_loss"],
    "model": ["ByteGPT"],
    "parallel.pipeline": ["PipelineTrainer"],
    "trainer": ["TrainResult", "Trainer"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
