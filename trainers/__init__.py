"""Trainers on top of ckptcore's public API; names are imported when they are first used."""

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

# Module: what it gives to users.
_HOMES = """
arguments: AccelTrainingArguments BaseTrainingArguments DDPArguments DDPTrainingArguments
arguments: DataNotFound FSDP2Arguments FSDP2TrainingArguments GPTArguments InvalidArgument
arguments: MinimalTrainingArguments PipelineTrainingArguments PostLocalSGDArguments
arguments: TrainingArguments resolve_arguments
callbacks.protocol: CallbackHandler TrainerCallback TrainerControl TrainerState
data.loader: ResumableLoader
losses: causal_lm_loss
model: ByteGPT
parallel.accel: AccelTrainer
parallel.ddp: DDPTrainer
parallel.environment: DistributedEnvironment
parallel.fsdp2: FSDP2Trainer
parallel.pipeline: PipelineTrainer
trainer: TrainResult Trainer
"""
_LINES = (line.partition(":") for line in _HOMES.strip().splitlines())
_HOME_OF = {name: home for home, _, names in _LINES for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
