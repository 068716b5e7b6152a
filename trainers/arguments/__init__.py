"""What a training run can be told. Torch-free, so that `ckpt-train --help` is quick.

Names, meanings and defaults are those of Hugging Face's TrainingArguments where it has the argument.
Every value is checked once, when the arguments are made, and never again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

from ckptcore import CheckpointError

__all__ = ["DataNotFound", "GPTArguments", "InvalidArgument", "TrainingArguments"]

# Where a run writes and how it reports: these never change what it computes.
_NOT_COMPUTED = {
    "output_dir",
    "logging_dir",
    "disable_tqdm",
    "report_to",
    "save_steps",
    "save_total_limit",
    "save_async",
    "enable_jit_checkpoint",
    "overwrite_output_dir",
    "resume_from_checkpoint",
    "on_world_size_change",
}


class InvalidArgument(ValueError):
    """An argument that cannot work: its name, the value given, why, and what to give instead."""

    def __init__(self, name: str, value: object, reason: str, instead: str) -> None:
        super().__init__(f"{name}={value!r}: {reason}; {instead}")
        self.name = name
        self.value = value


class DataNotFound(CheckpointError, FileNotFoundError):
    """A `data` entry that names no file."""

    facts = ("path",)
    path: str | None


@dataclass
class GPTArguments:
    """Size of the byte-level GPT."""

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 64
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "block_size"):
            _whole(name, getattr(self, name), at_least=1)
        _real("dropout", self.dropout, 0.0, 1.0, below_high=True)
        if self.n_embd % self.n_head:
            raise InvalidArgument("n_embd", self.n_embd, f"not a multiple of n_head={self.n_head}", "make it one")


@dataclass
class TrainingArguments:
    """Arguments of `Trainer`. `data` and `model` apply when the trainer is given no dataset or model."""

    # Output
    output_dir: str = "tmp_trainer"
    logging_dir: str | None = None  # None: <output_dir>/runs/<time>_<host>, kept when the run is resumed
    report_to: str = "none"  # "tensorboard" or "none"
    disable_tqdm: bool | None = None  # None: a bar on a terminal, plain lines elsewhere

    # Device and chance
    device: str | None = None  # None: cuda where there is one, else cpu
    use_cpu: bool = False
    seed: int = -1  # -1: do not seed; the data order then uses a random seed kept in the checkpoint

    # Length
    num_train_epochs: float = 1.0
    max_steps: int = -1  # above 0: exactly so many optimizer steps, whatever num_train_epochs says

    # Batches
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 16
    gradient_accumulation_steps: int = 1
    dataloader_drop_last: bool = False
    max_grad_norm: float | None = None

    # Optimizer and schedule
    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    warmup_steps: int = 0

    # Cadence
    logging_steps: int = 50
    eval_strategy: str = "no"  # "steps" or "no"
    eval_steps: int = 100
    max_eval_steps: int = -1  # batches per evaluation; -1: all

    # Checkpoints
    save_steps: int = 1000
    save_total_limit: int | None = 2
    save_async: bool = False  # written in the background; the last one of a run is waited for
    enable_jit_checkpoint: bool = False  # SIGTERM to any rank: all save the same step, and train() returns
    overwrite_output_dir: bool = False
    resume_from_checkpoint: bool | str = True  # True: the newest good one, else a fresh start
    on_world_size_change: str = "error"  # "continue": same data position, random streams start anew

    # What is trained on what, unless the trainer is given a model and datasets
    data: Sequence[str] = ()  # files, folders, globs; empty: the Python standard library's sources
    max_data_bytes: int | None = 4 * 2**20
    model: GPTArguments = field(default_factory=GPTArguments)

    def __post_init__(self) -> None:
        self.data = tuple(self.data)
        if isinstance(self.model, dict):
            self.model = GPTArguments(**self.model)
        for name in (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "logging_steps",
            "eval_steps",
            "save_steps",
        ):
            _whole(name, getattr(self, name), at_least=1)
        _whole("seed", self.seed, at_least=-1, at_most=2**32 - 1)  # numpy's generator takes 32 bits
        _whole("warmup_steps", self.warmup_steps, at_least=0)
        if self.save_total_limit is not None:
            _whole("save_total_limit", self.save_total_limit, at_least=1, instead="None keeps all")
        if self.max_data_bytes is not None:
            _whole("max_data_bytes", self.max_data_bytes, at_least=1, instead="None reads all")
        _real("learning_rate", self.learning_rate, 0.0)
        _real("weight_decay", self.weight_decay, 0.0)
        _real("adam_epsilon", self.adam_epsilon, 0.0)
        _real("adam_beta1", self.adam_beta1, 0.0, 1.0, below_high=True)
        _real("adam_beta2", self.adam_beta2, 0.0, 1.0, below_high=True)
        if self.max_grad_norm is not None:
            _real("max_grad_norm", self.max_grad_norm, 0.0, above_low=True, instead="None does not clip")
        if self.max_steps <= 0:
            _real("num_train_epochs", self.num_train_epochs, 0.0, above_low=True, instead="or set max_steps")
        _one_of("report_to", self.report_to, ("none", "tensorboard"))
        _one_of("eval_strategy", self.eval_strategy, ("no", "steps"))
        _one_of("on_world_size_change", self.on_world_size_change, ("error", "continue"))
        if self.on_world_size_change == "continue" and self.max_steps <= 0:
            # The steps of an epoch depend on the number of ranks, so those done would count for more, or for less.
            raise InvalidArgument(
                "on_world_size_change", "continue", "num_train_epochs is no fixed number of steps then", "set max_steps"
            )

    @property
    def train_batch_size(self) -> int:
        """Samples per optimizer step and rank."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def root(self) -> Path:
        return Path(self.output_dir)

    def as_dict(self) -> dict[str, Any]:
        """Plain values only, as they go into a checkpoint's metadata."""
        return {**asdict(self), "data": list(self.data)}

    def computed(self) -> dict[str, Any]:
        """Those arguments that change what a run computes."""
        return {name: value for name, value in self.as_dict().items() if name not in _NOT_COMPUTED}

    def digest(self) -> str:
        """Equal for two runs that compute the same from the same data."""
        return xxhash.xxh3_128_hexdigest(repr(sorted(self.computed().items())).encode())

    def differences(self, stored: dict[str, Any]) -> list[str]:
        """`name now (then)` for every argument that changes the computation and is not as it was stored."""
        now = self.computed()
        return [
            f"{name} {now[name]!r} (was {stored[name]!r})"
            for name in (f.name for f in fields(self))
            if name in now and name in stored and now[name] != stored[name]
        ]


def _whole(name: str, value: object, at_least: int, at_most: int | None = None, instead: str = "") -> None:
    span = f"give a whole number from {at_least}" + (f" to {at_most}" if at_most is not None else " up")
    if instead:
        span += f" ({instead})"
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(name, value, "not a whole number", span)
    if value < at_least or (at_most is not None and value > at_most):
        raise InvalidArgument(name, value, "out of range", span)


def _real(
    name: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    above_low: bool = False,
    below_high: bool = False,
    instead: str = "",
) -> None:
    span = f"give a number {'above' if above_low else 'from'} {low:g}"
    span += "" if high == math.inf else f" {'and below' if below_high else 'to'} {high:g}"
    if instead:
        span += f" ({instead})"
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidArgument(name, value, "not a finite number", span)
    if value < low or value > high or (above_low and value == low) or (below_high and value == high):
        raise InvalidArgument(name, value, "out of range", span)


def _one_of(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidArgument(name, value, "unknown", f"give one of {', '.join(choices)}")
