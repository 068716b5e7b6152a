"""The arguments of the five trainers: what a run can be told, under the names that trainers read.

Names and meanings are those of Hugging Face's TrainingArguments where it has the argument; defaults
differ in places. The classes take native names only; `resolve_arguments` takes the wider
vocabulary. Values are checked when an instance is made, and by `check_trainer` and `check_parts`
once it is known who trains what. Torch-free, so that `ckpt-train --help` is quick.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import checks, exactness, trainer_checks
from .errors import InvalidArgument
from .nested import DDPArguments, FSDP2Arguments, PostLocalSGDArguments
from .typed import check_types

if TYPE_CHECKING:
    import torch

__all__ = [
    "AccelTrainingArguments",
    "BaseTrainingArguments",
    "DDPTrainingArguments",
    "FSDP2TrainingArguments",
    "MinimalTrainingArguments",
    "PipelineTrainingArguments",
    "TrainingArguments",
    "dtype_of",
    "steps_of",
]


@dataclass(kw_only=True)
class MinimalTrainingArguments:
    """What Hugging Face's arguments also have."""

    # Output and device
    output_dir: str = "tmp_trainer"
    logging_dir: str | None = None  # None: <output_dir>/runs/<time>_<host>
    run_name: str | None = None  # None: output_dir
    device: Any = None  # None: cuda where there is one, else cpu
    use_cpu: bool = False  # wins over device
    seed: int = (
        -1
    )  # -1: do not seed; the data order then has a random seed that is kept in the checkpoint
    data_seed: int | None = None  # of the data order only; None: seed
    full_determinism: bool = False

    # Length
    num_train_epochs: float = 1.0  # below 0: no limit, max_steps is the length
    max_steps: int = -1  # above 0: exactly so many optimizer steps, whatever num_train_epochs says
    epoch_train_steps: int = 100000  # length of an epoch, for a dataset without one

    # Batches and data loading
    per_device_train_batch_size: int = 16
    per_device_eval_batch_size: int = 16
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None  # None: 2 with workers
    dataloader_drop_last: bool = False
    ignore_data_skip: bool = False  # a resumed run starts its epoch's data over

    # Evaluation and logging
    eval_strategy: str = "no"
    eval_steps: int | float = 100  # as other steps too: below 1.0, a share of all steps
    eval_delay: int | float = 0
    eval_on_start: bool = False
    logging_strategy: str = "steps"
    logging_steps: int | float = 50
    logging_first_step: bool = False
    logging_nan_inf_filter: bool = False
    include_num_input_tokens_seen: bool | str = False  # True or "all", "non_padding"
    report_to: str | list[str] = "none"
    disable_tqdm: bool | None = None  # None: a bar on a terminal, plain lines elsewhere
    log_level: str = "passive"  # rank 0
    log_level_replica: str = "warning"  # other ranks

    # torch.compile
    torch_compile: bool = False
    torch_compile_backend: str | None = "inductor"
    torch_compile_mode: str | None = "default"
    torch_compile_dynamic: bool = True
    torch_compile_full_graph: bool = False

    # Checkpoints
    save_strategy: str = "steps"
    save_steps: int | float = 1000
    save_total_limit: int | None = 2  # newest ones; those preserved as best come on top
    save_safetensors: bool = True
    save_on_each_node: bool = False
    save_only_model: bool = False
    save_async: bool = True  # written in the background; the last one of a run is waited for
    overwrite_output_dir: bool = False
    resume_from_checkpoint: bool | str = (
        True  # True: the newest usable one, else a fresh start; or a path, or "best"
    )
    restore_callback_states_from_checkpoint: bool = True
    enable_jit_checkpoint: bool = (
        False  # SIGTERM to any rank: all save the same step, and train() returns
    )
    on_world_size_change: str = "error"  # "continue": same data position, random streams start anew
    load_best_model_at_end: bool = False
    metric_for_best_model: str = "loss"
    greater_is_better: bool | None = None  # None: False for a name that ends in "loss"

    # Optimizer and schedule, unless the trainer is given factories
    optim: str = "adamw_torch"
    optim_args: str | dict[str, Any] | None = None
    learning_rate: float = 5e-5
    weight_decay: float = 0.0  # of all parameters, unless optimizer_groups say otherwise
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict[str, Any] | None = field(default_factory=dict)
    warmup_steps: int = 0
    warmup_ratio: float = 0.0  # of all steps; warmup_steps above 0 win
    label_smoothing_factor: float = 0.0

    # Memory and processes
    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    torch_empty_cache_steps: int | None = None
    ddp_backend: str | None = None  # None: nccl on CUDA, gloo on CPU
    ddp_timeout: int = 1800  # seconds

    def __post_init__(self) -> None:
        self._data_parallel = 1
        check_types(self)
        self._normalise()
        self.check()

    def _normalise(self) -> None:
        if self.lr_scheduler_kwargs is None:
            self.lr_scheduler_kwargs = {}
        said = self.include_num_input_tokens_seen
        self.include_num_input_tokens_seen = (
            {"all": True, "no": False}.get(said, said) if isinstance(said, str) else said
        )

    def check(self) -> None:
        """What can be judged from the arguments alone. Raises InvalidArgument."""
        checks.check_minimal(self)

    def check_trainer(self, kind: str, world_size: int) -> None:
        """For a trainer ("single", "ddp", "fsdp2", "pipeline", "accel") of so many ranks. Raises
        InvalidArgument."""
        trainer_checks.check_trainer(self, kind, world_size)
        self._data_parallel = 1 if kind == "pipeline" else world_size

    def check_parts(self, kind: str, **given: Any) -> None:
        """With what the trainer's constructor was given, see `trainer_checks.check_parts`. Raises
        InvalidArgument."""
        trainer_checks.check_parts(self, kind, **given)

    def global_batch(self, data_parallel: int) -> int:
        """Samples of an optimizer step over all ranks."""
        return self.per_device_train_batch_size * data_parallel * self.gradient_accumulation_steps

    @property
    def train_batch_size(self) -> int:
        """Samples of an optimizer step over the ranks of the trainer that has these arguments; of
        one rank before."""
        return self.global_batch(self._data_parallel)

    @property
    def root(self) -> Path:
        return Path(self.output_dir)

    @property
    def reporters(self) -> tuple[str, ...]:
        """`report_to` as names, without "none"."""
        names = [self.report_to] if isinstance(self.report_to, str) else self.report_to
        return tuple(dict.fromkeys(name for name in names if name != "none"))

    @property
    def best_is_greater(self) -> bool:
        """The direction of the metric for the best model, found from its name where it was not
        given."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return not self.metric_for_best_model.endswith("loss")

    def warmup(self, total_steps: int) -> int:
        """Steps of warm-up in a run of so many steps."""
        return self.warmup_steps or math.ceil(exactness.rounded(self.warmup_ratio * total_steps))

    @staticmethod
    def dtype_of(name: str) -> torch.dtype:
        return dtype_of(name)

    def as_dict(self) -> dict[str, Any]:
        """Plain values only, as they go into a checkpoint's metadata."""
        return {f.name: exactness.plain(getattr(self, f.name)) for f in fields(self)}

    def changed(self) -> dict[str, Any]:
        """The arguments that are not at their default; nested ones as mappings of what differs
        inside."""
        return _changed(self)

    def digest(self) -> str:
        """Equal for two runs that compute the same from the same data."""
        return exactness.digest(self.as_dict())

    def differences(self, stored: dict[str, Any]) -> list[str]:
        """`name old -> new` for every argument that changes what is computed and is not as it was
        stored."""
        return exactness.differences(stored, self.as_dict())


@dataclass(kw_only=True)
class BaseTrainingArguments(MinimalTrainingArguments):
    """Retention of checkpoints, precision, attention, debugging."""

    default_dtype: str | None = None  # torch's default dtype while the model is built
    max_eval_steps: int = -1  # batches per evaluation; -1: all
    preserve_best_model: bool = False
    best_model_metric: str = "loss"  # one with metric_for_best_model
    best_model_greater_is_better: bool | None = None  # one with greater_is_better
    preserve_n_best: int = 1
    eval_on_save: bool = False
    enable_activation_offloading: bool = False
    detect_anomaly: bool = False
    sdpa_backend: str | list[str] | None = None
    sdpa_set_priority: bool = False
    float32_matmul_precision: str | None = None
    dynamo_recompile_limit: int | None = None
    mixed_precision: str | None = None
    fp8_recipe: str | None = None
    fp8_dim_alignment: int = 16
    qat_recipe: str | None = None

    def _normalise(self) -> None:
        super()._normalise()
        self._pair("metric_for_best_model", "best_model_metric", "loss")
        self._pair("greater_is_better", "best_model_greater_is_better", None)

    def _pair(self, one: str, other: str, default: object) -> None:
        """Two names for the same thing: what either was given holds for both."""
        first, second = getattr(self, one), getattr(self, other)
        if default not in (first, second) and first != second:
            raise InvalidArgument(
                other, second, f"contradicts {one}={first!r}", f"give one of {other} and {one}"
            )
        value = second if first == default else first
        setattr(self, one, value)
        setattr(self, other, value)

    def check(self) -> None:
        super().check()
        checks.check_base(self)


@dataclass(kw_only=True)
class TrainingArguments(BaseTrainingArguments):
    """Arguments of `Trainer`: memory and compilation."""

    gc_threshold: float = 0.5  # share of allocated GPU memory above which the cache is emptied
    construct_model_on: str = "default"  # "default", "device", "meta"
    activation_memory_budget: float | None = None
    fuse_optim_with_backward: bool = False
    speed_metrics_start_step: int = 1
    set_dataset_epoch: bool = True
    debug_optimizer_groups: bool = False

    def check(self) -> None:
        super().check()
        checks.check_memory(self)


@dataclass(kw_only=True)
class AccelTrainingArguments(TrainingArguments):
    """Arguments of `AccelTrainer`, whose Accelerator has its own precision and accumulation, which
    win."""

    accelerator_config: dict[str, Any] = field(
        default_factory=dict
    )  # of the Accelerator's loaders; only what was given


@dataclass(kw_only=True)
class DDPTrainingArguments(TrainingArguments):
    """Arguments of `DDPTrainer`."""

    dispatch_batches: bool = True  # rank 0 reads all data; False: each rank reads its shard
    ddp: DDPArguments = field(default_factory=DDPArguments)
    post_local_sgd: PostLocalSGDArguments = field(default_factory=PostLocalSGDArguments)


@dataclass(kw_only=True)
class FSDP2TrainingArguments(TrainingArguments):
    """Arguments of `FSDP2Trainer`."""

    dispatch_batches: bool = True
    fsdp2: FSDP2Arguments = field(default_factory=FSDP2Arguments)


@dataclass(kw_only=True)
class PipelineTrainingArguments(TrainingArguments):
    """Arguments of `PipelineTrainer`. Batches have one shape, so the last short one is always
    dropped."""

    n_microbatches: int = 4
    stages_per_rank: int = 1
    pp_stage_type: str = "loop"  # "v": for ScheduleZBVZeroBubble
    is_multistage: bool = False  # True for schedules derived from PipelineScheduleMulti
    debug_pipeline: bool = False
    debug_split_model: bool = False
    debug_model_params: bool = False
    debug_model_init: bool = False

    def _normalise(self) -> None:
        super()._normalise()
        self.dataloader_drop_last = True

    def check(self) -> None:
        super().check()
        checks.check_pipeline(self)


def _changed(instance: Any) -> dict[str, Any]:
    plain = type(instance)()
    found: dict[str, Any] = {}
    for f in fields(instance):
        value, default = getattr(instance, f.name), getattr(plain, f.name)
        if is_dataclass(value) and not isinstance(value, type):
            if inside := _changed(value):
                found[f.name] = inside
        elif type(value) is not type(default) or value != default:
            found[f.name] = copy.copy(value)
    return found


def steps_of(value: int | float, total_steps: int) -> int:
    """A period in steps: a float below 1.0 is a share of all steps, and at least one step."""
    if isinstance(value, float) and value < 1.0:
        return max(1, math.ceil(exactness.rounded(value * total_steps)))
    return int(value)


def dtype_of(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(
            "dtype", name, "torch has no dtype of this name", "give one such as float32 or bfloat16"
        )
    return dtype
