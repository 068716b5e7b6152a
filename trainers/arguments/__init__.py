"""What a training run can be told: the arguments of the five trainers, and Hugging Face's names for
them.

Torch-free, so that `ckpt-train --help` is quick.
"""

from __future__ import annotations

from .configuration import load_configuration, print_configuration
from .errors import DataNotFound, InvalidArgument
from .gpt import GPTArguments
from .native import (
    AccelTrainingArguments,
    BaseTrainingArguments,
    DDPTrainingArguments,
    FSDP2TrainingArguments,
    MinimalTrainingArguments,
    PipelineTrainingArguments,
    TrainingArguments,
    dtype_of,
    steps_of,
)
from .nested import DDPArguments, FSDP2Arguments, PostLocalSGDArguments
from .resolve import known_names, native_name, resolve_arguments

__all__ = [
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
    "dtype_of",
    "known_names",
    "load_configuration",
    "native_name",
    "print_configuration",
    "resolve_arguments",
    "steps_of",
]
