"""The arguments of the five trainers, and Hugging Face's names for them.

Torch-free, so that `ckpt-train --help` is quick.
"""

from __future__ import annotations

from .building import Arguments, known_names, native_name, resolve_arguments
from .configuration import load_configuration, print_configuration
from .errors import DataNotFound, InvalidArgument, raise_any
from .native import (
    AccelTrainingArguments,
    BaseTrainingArguments,
    DDPArguments,
    DDPTrainingArguments,
    FSDP2Arguments,
    FSDP2TrainingArguments,
    GPTArguments,
    MinimalTrainingArguments,
    PipelineTrainingArguments,
    PostLocalSGDArguments,
    Process,
    TrainingArguments,
    steps_of,
)

__all__ = [
    "AccelTrainingArguments",
    "Arguments",
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
    "Process",
    "TrainingArguments",
    "known_names",
    "load_configuration",
    "native_name",
    "print_configuration",
    "raise_any",
    "resolve_arguments",
    "steps_of",
]
