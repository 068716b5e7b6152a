"""The arguments of the five trainers, under the names that trainers read.

Names and meanings are those of Hugging Face's TrainingArguments where it has the argument; defaults
differ in places. Each class takes Hugging Face's other names too, see hugging_face.py. What can be
judged from the arguments alone is checked when an instance is made, and all that is wrong is raised
at once; `check_trainer` and `check_parts` judge once it is known who trains what. Torch-free, so
that `ckpt-train --help` is quick.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from annotated_types import Ge, Le
from pydantic import AfterValidator

from . import exactness, trainer_checks
from .building import Arguments
from .errors import InvalidArgument, raise_any
from .kinds import (
    Below1,
    Count,
    DType,
    Flag,
    Level,
    Natural,
    Number,
    Period,
    Positive,
    Real,
    Seed,
    Share,
    Text,
    Whole,
)
from .optimizer_options import known_optimizer, option_conflicts

if TYPE_CHECKING:
    pass

# lr_scheduler_type -> its own lr_scheduler_kwargs with their defaults.
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 1},
    "constant": {},
    "constant_with_warmup": {},
    "polynomial": {"power": 1.0},
}
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "constant", "constant_with_warmup", "polynomial"
]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
QATRecipe = Literal[
    "int8-dynamic-act-int4-weight", "int4-weight-only", "float8-dynamic-act-float8-weight"
]
Kernel = Literal["math", "flash", "efficient", "cudnn"]
_NO_CUDAGRAPHS = "use 'max-autotune-no-cudagraphs'"


def _reporters(given: str | list[str]) -> str | list[str]:
    names = given.split(",") if isinstance(given, str) else given
    for name in names:
        if name not in ("tensorboard", "json", "none"):
            instead = "give tensorboard, json or none, or a list of them"
            raise InvalidArgument("report_to", given, f"there is no reporter {name!r}", instead)
    return names if len(names) > 1 else given


def _kernels(given: str | list[str]) -> str | list[str]:
    names = [given] if isinstance(given, str) else given
    if not names or any(name not in get_args(Kernel) for name in names):
        instead = f"give one of {', '.join(get_args(Kernel))}, or a list of them"
        raise InvalidArgument("sdpa_backend", given, "unknown", instead)
    return given


@dataclass(frozen=True)
class Process:
    """Where arguments are in use: what callbacks written for Hugging Face look up in them.

    data_parallel: ranks that take different data. device: a torch.device.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    data_parallel: int = 1
    device: Any = None
    logging_dir: str | None = None


@dataclass(kw_only=True)
class MinimalTrainingArguments(Arguments):
    """What Hugging Face's arguments also have."""

    takes_hugging_face = True

    # Output and device
    output_dir: Annotated[Text, "folder of checkpoints, final model and logs"] = "tmp_trainer"
    logging_dir: Annotated[
        Text | None, "folder of the logs; None: a new one in output_dir/runs"
    ] = None
    run_name: Annotated[Text | None, "shown by loggers; None: output_dir"] = None
    device: Annotated[Any, "as torch names it; None: cuda where there is one, else cpu"] = None
    use_cpu: Annotated[Flag, "train on the CPU; wins over device"] = False
    seed: Annotated[
        Whole,
        Ge(-1),
        Le(2**32 - 1),
        "of all random streams; -1 does not seed, and the checkpoint keeps the order of the data",
    ] = -1
    data_seed: Annotated[Seed | None, "of the order of the data only; None uses seed"] = None
    full_determinism: Annotated[Flag, "deterministic algorithms only; needs a seed"] = False

    # Length
    num_train_epochs: Annotated[
        Real, "epochs, or part of one; below 0: no limit, max_steps is the length"
    ] = 1.0
    max_steps: Annotated[
        Whole, "above 0: exactly so many optimizer steps, whatever num_train_epochs says"
    ] = -1
    epoch_train_steps: Annotated[Count, "steps of an epoch, for a dataset without a length"] = (
        100000
    )

    # Batches and data loading
    per_device_train_batch_size: Annotated[Count, "samples of a micro-batch on each device"] = 16
    per_device_eval_batch_size: Annotated[Count, "samples of an evaluation's batch"] = 16
    gradient_accumulation_steps: Annotated[Count, "micro-batches of an optimizer step"] = 1
    max_grad_norm: Annotated[Positive | None, "gradients are clipped to it; None does not clip"] = (
        None
    )
    dataloader_num_workers: Annotated[Natural, "processes that load; 0: the main process"] = 0
    dataloader_pin_memory: Annotated[Flag, "pinned host memory, for CUDA"] = True
    dataloader_persistent_workers: Annotated[Flag, "keep workers from epoch to epoch"] = False
    dataloader_prefetch_factor: Annotated[
        Count | None, "batches that a worker loads ahead; None: 2, where there are workers"
    ] = None
    dataloader_drop_last: Annotated[Flag, "drop the short last batch"] = False
    ignore_data_skip: Annotated[Flag, "a resumed run starts its epoch's data over"] = False

    # Evaluation and logging
    eval_strategy: Annotated[Literal["no", "steps", "epoch"], "when to evaluate"] = "no"
    eval_steps: Annotated[Period, "steps; below 1.0 it is a share of all steps"] = 100
    eval_delay: Annotated[
        Annotated[Whole, Ge(0)] | Number, "steps or epochs before the first evaluation"
    ] = 0
    eval_on_start: Annotated[Flag, "evaluate before the first step; never the best"] = False
    logging_strategy: Annotated[Literal["no", "steps", "epoch"], "when to log"] = "steps"
    logging_steps: Annotated[Period, "steps; below 1.0 it is a share of all steps"] = 50
    logging_first_step: Annotated[Flag, "log step 1 too"] = False
    logging_nan_inf_filter: Annotated[
        Flag, "log the mean of the window instead of a loss that is not finite"
    ] = False
    include_num_input_tokens_seen: Annotated[
        Flag | Literal["all", "non_padding", "no"], "count input tokens, and log them"
    ] = False
    report_to: Annotated[
        Text | list[Text], AfterValidator(_reporters), "loggers: tensorboard, json, none"
    ] = "none"
    disable_tqdm: Annotated[Flag | None, "plain lines; None: a bar on a terminal"] = None
    log_level: Annotated[Level, "of rank 0; passive leaves logging as it is"] = "passive"
    log_level_replica: Annotated[Level, "of the other ranks"] = "warning"

    # torch.compile
    torch_compile: Annotated[Flag, "compile the model"] = False
    torch_compile_backend: Annotated[Text | None, "one of torch's; does not turn it on"] = (
        "inductor"
    )
    torch_compile_mode: Annotated[CompileMode | None, "what to optimise for"] = "default"
    torch_compile_dynamic: Annotated[Flag, "dynamic shapes"] = True
    torch_compile_full_graph: Annotated[Flag, "forbid breaks of the graph"] = False

    # Checkpoints
    save_strategy: Annotated[
        Literal["no", "steps", "epoch", "best"], "when to save; best: at each better evaluation"
    ] = "steps"
    save_steps: Annotated[Period, "steps; below 1.0 it is a share of all steps"] = 1000
    save_total_limit: Annotated[
        Count | None, "newest checkpoints that are kept, the best come on top; None keeps all"
    ] = 2
    save_safetensors: Annotated[Flag, "weights are safetensors always"] = True
    save_on_each_node: Annotated[Flag, "each node writes all; not for shared storage"] = False
    save_only_model: Annotated[Flag, "weights only: no run can go on from them"] = False
    save_async: Annotated[Flag, "write in the background; the last save is waited for"] = True
    overwrite_output_dir: Annotated[Flag, "start over where there are checkpoints"] = False
    resume_from_checkpoint: Annotated[
        Flag | Text, "True: the newest usable one, else a fresh start; or a path, or best"
    ] = True
    restore_callback_states_from_checkpoint: Annotated[Flag, "callbacks go on, too"] = True
    enable_jit_checkpoint: Annotated[
        Flag, "SIGTERM to any rank: all save the same step, and train() returns"
    ] = False
    on_world_size_change: Annotated[
        Literal["error", "continue"], "continue: same data position, random streams start anew"
    ] = "error"
    load_best_model_at_end: Annotated[Flag, "end with the weights of the best evaluation"] = False
    metric_for_best_model: Annotated[Text, "metric that ranks; eval_ may be left out"] = "loss"
    greater_is_better: Annotated[Flag | None, "None: not for a name that ends in loss"] = None

    # Optimizer and schedule, unless the trainer is given factories
    optim: Annotated[
        Text, AfterValidator(known_optimizer), "an optimizer's name; else an optimizer_factory"
    ] = "adamw_torch"
    optim_args: Annotated[
        Text | dict[str, Any] | None, "more of it: key=value,key=value with Python literals"
    ] = None
    learning_rate: Annotated[Number, "its highest value"] = 5e-5
    weight_decay: Annotated[Number, "of all parameters, unless optimizer_groups differ"] = 0.0
    adam_beta1: Annotated[Below1, "of Adam's kind of optimizers"] = 0.9
    adam_beta2: Annotated[Below1, "of Adam's kind of optimizers"] = 0.999
    adam_epsilon: Annotated[Number, "of Adam's kind of optimizers"] = 1e-8
    lr_scheduler_type: Annotated[Schedule, "or give the trainer an lr_scheduler_factory"] = "linear"
    lr_scheduler_kwargs: Annotated[
        dict[str, Any] | None, "cosine_with_restarts: num_cycles; polynomial: power"
    ] = field(default_factory=dict)
    warmup_steps: Annotated[Natural, "steps of a ramp from 0; above 0 it wins"] = 0
    warmup_ratio: Annotated[Share, "of all steps"] = 0.0
    label_smoothing_factor: Annotated[Below1, "of the loss that the trainer computes"] = 0.0

    # Memory and processes
    gradient_checkpointing: Annotated[Flag, "recompute activations in the backward pass"] = False
    gradient_checkpointing_kwargs: Annotated[
        dict[str, Any] | None, "of the model's gradient_checkpointing_enable"
    ] = None
    torch_empty_cache_steps: Annotated[Count | None, "steps; None never empties the cache"] = None
    ddp_backend: Annotated[
        Literal["nccl", "gloo", "mpi", "ccl", "hccl"] | None, "None: nccl on CUDA, gloo on the CPU"
    ] = None
    ddp_timeout: Annotated[Count, "seconds, of the process group"] = 1800

    _process = Process()

    def __post_init__(self) -> None:
        if self.lr_scheduler_kwargs is None:
            self.lr_scheduler_kwargs = {}
        counted = {"all": True, "no": False}
        if isinstance(said := self.include_num_input_tokens_seen, str) and said in counted:
            self.include_num_input_tokens_seen = counted[said]

    def conflicts(self) -> Iterator[InvalidArgument]:
        """What does not go together, judged from the arguments alone."""
        if self.full_determinism and self.seed < 0:
            reason = "nothing is determined without a seed"
            yield self.fault("full_determinism", reason, "set seed, from 0 up")
        if self.torch_compile_mode == "max-autotune" and self.gradient_accumulation_steps > 1:
            reason = "its CUDA graphs do not go with gradient_accumulation_steps > 1"
            yield self.fault("torch_compile_mode", reason, _NO_CUDAGRAPHS)
        if self.save_strategy == "best" and self.eval_strategy == "no":
            reason = "without evaluations no checkpoint is the best"
            yield self.fault("save_strategy", reason, "set eval_strategy")
        yield from self._conflicts_of_length()
        for name, unset in (
            ("dataloader_persistent_workers", False),
            ("dataloader_prefetch_factor", None),
        ):
            if self.dataloader_num_workers == 0 and getattr(self, name) != unset:
                instead = f"set dataloader_num_workers above 0, or {name} to {unset}"
                yield self.fault(name, "there are no workers", instead)
        known = SCHEDULES[self.lr_scheduler_type]
        for name, value in (self.lr_scheduler_kwargs or {}).items():
            shown = f"lr_scheduler_kwargs.{name}"
            if name not in known:
                takes = f"takes {', '.join(known)} only" if known else "takes none"
                reason = f"unknown: the schedule {self.lr_scheduler_type} {takes}"
                instead = "leave it out, or give the trainer an lr_scheduler_factory"
                yield InvalidArgument(shown, value, reason, instead)
            elif type(value) not in (int, float) or not 0 < value < math.inf:
                yield InvalidArgument(shown, value, "out of range", "give a number above 0")
        yield from option_conflicts(self.optim, self.optim_args)
        yield from self._conflicts_of_best()

    def _conflicts_of_length(self) -> Iterator[InvalidArgument]:
        if self.max_steps > 0:
            return
        if self.num_train_epochs < 0:
            reason = "no limit of epochs, and max_steps is not set"
            instead = "set max_steps above 0, or num_train_epochs above 0"
            yield self.fault("num_train_epochs", reason, instead)
        elif self.num_train_epochs == 0:
            instead = "give a number above 0, or set max_steps"
            yield self.fault("num_train_epochs", "out of range", instead)
        if self.on_world_size_change == "continue":
            # The steps of an epoch depend on the number of ranks, so those done would count for
            # more, or for less.
            reason = "num_train_epochs is no fixed number of steps then"
            yield self.fault("on_world_size_change", reason, "set max_steps")

    def _conflicts_of_best(self) -> Iterator[InvalidArgument]:
        """Hugging Face's rules: the best model must be among those saved."""
        name, save, evaluate = "load_best_model_at_end", self.save_strategy, self.eval_strategy
        if not self.load_best_model_at_end or save == "best":
            return
        if save != evaluate or save == "no":
            reason = f"save_strategy={save!r} and eval_strategy={evaluate!r} do not match"
            instead = "make both 'steps' or both 'epoch', or set save_strategy='best'"
            yield self.fault(name, reason, instead)
        elif save == "steps" and not getattr(self, "eval_on_save", False):
            times = self.save_steps / self.eval_steps
            same_kind = (self.save_steps < 1) == (self.eval_steps < 1)
            if not same_kind or abs(times - max(1, round(times))) > 1e-9:
                reason = (
                    f"save_steps={self.save_steps} is no multiple of eval_steps={self.eval_steps}"
                )
                instead = "make it one, or set eval_on_save or save_strategy='best'"
                yield self.fault(name, reason, instead)

    def check_trainer(self, kind: str, world_size: int) -> None:
        """For a trainer ("single", "ddp", "fsdp2", "pipeline", "accel") of so many ranks. Raises
        InvalidArgument."""
        raise_any(trainer_checks.trainer_conflicts(self, kind, world_size))
        data_parallel = 1 if kind == "pipeline" else world_size
        self._process = Process(world_size=world_size, data_parallel=data_parallel)

    def check_parts(self, kind: str, **given: Any) -> None:
        """With what the trainer's constructor was given, see `trainer_checks.part_conflicts`.
        Raises InvalidArgument."""
        raise_any(trainer_checks.part_conflicts(self, kind, **given))

    def as_seen_by_callbacks(self, process: Process) -> Self:
        """A copy with the device, the logging_dir and the run_name that are in use."""
        seen = copy.copy(self)
        seen._process, seen.device = process, process.device
        seen.logging_dir = process.logging_dir or self.logging_dir
        seen.run_name = self.run_name or self.output_dir
        return seen

    def global_batch(self, data_parallel: int) -> int:
        """Samples of an optimizer step over all ranks."""
        return self.per_device_train_batch_size * data_parallel * self.gradient_accumulation_steps

    @property
    def train_batch_size(self) -> int:
        """Samples of an optimizer step over the ranks of the trainer that has these arguments; of
        one rank before."""
        return self.global_batch(self._process.data_parallel)

    @property
    def world_size(self) -> int:
        return self._process.world_size

    @property
    def process_index(self) -> int:
        return self._process.rank

    @property
    def local_rank(self) -> int:
        return self._process.local_rank

    local_process_index = local_rank

    @property
    def n_gpu(self) -> int:
        """Devices of this process, as Hugging Face counts them."""
        return int(str(self.device or "cpu").startswith("cuda"))

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

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, as they go into a checkpoint's metadata."""
        return self.as_dict()

    to_sanitized_dict = to_dict

    def to_json_string(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

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

    default_dtype: Annotated[DType | None, "torch's default dtype while the model is built"] = None
    max_eval_steps: Annotated[
        Literal[-1] | Count, "batches of an evaluation; -1 evaluates on all"
    ] = -1
    preserve_best_model: Annotated[Flag, "the best checkpoints are not removed"] = False
    best_model_metric: Annotated[Text, "the same as metric_for_best_model"] = "loss"
    best_model_greater_is_better: Annotated[Flag | None, "the same as greater_is_better"] = None
    preserve_n_best: Annotated[Count, "how many best checkpoints are not removed"] = 1
    eval_on_save: Annotated[Flag, "evaluate right before each save"] = False
    enable_activation_offloading: Annotated[Flag, "activations wait on the CPU"] = False
    detect_anomaly: Annotated[Flag, "autograd's anomaly mode; slow"] = False
    sdpa_backend: Annotated[
        Annotated[Text | list[Text], AfterValidator(_kernels)] | None,
        "kernels of attention: math, flash, efficient, cudnn",
    ] = None
    sdpa_set_priority: Annotated[Flag, "the order of sdpa_backend is one of preference"] = False
    float32_matmul_precision: Annotated[
        Literal["highest", "high", "medium"] | None, "high: TF32; None leaves torch's"
    ] = None
    dynamo_recompile_limit: Annotated[Count | None, "of the compiler; None leaves torch's"] = None
    mixed_precision: Annotated[
        Literal["no", "bf16", "fp16"] | None, "autocast; fp16 scales the loss"
    ] = None
    fp8_recipe: Annotated[
        Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None,
        "linear layers in float8; needs torchao and compute capability 8.9",
    ] = None
    fp8_dim_alignment: Annotated[
        Natural, "layers whose dimensions are no multiples of it stay as they are; 0: none does"
    ] = 16
    fp8_emulate: Annotated[
        Flag, "compute in float32 what fp8_recipe computes in float8: on any device, to try it"
    ] = False
    qat_recipe: Annotated[
        QATRecipe | None, "linear layers train as if quantised; needs torchao"
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # What either of two names was given holds for both.
        if self.metric_for_best_model == "loss":
            self.metric_for_best_model = self.best_model_metric
        elif self.best_model_metric == "loss":
            self.best_model_metric = self.metric_for_best_model
        if self.greater_is_better is None:
            self.greater_is_better = self.best_model_greater_is_better
        elif self.best_model_greater_is_better is None:
            self.best_model_greater_is_better = self.greater_is_better

    def conflicts(self) -> Iterator[InvalidArgument]:
        yield from super().conflicts()
        for one, other in (
            ("metric_for_best_model", "best_model_metric"),
            ("greater_is_better", "best_model_greater_is_better"),
        ):
            if getattr(self, one) != getattr(self, other):
                reason = f"contradicts {one}={getattr(self, one)!r}"
                yield self.fault(other, reason, f"give one of {other} and {one}")
        if self.fp8_recipe is not None and self.qat_recipe is not None:
            reason = f"excludes qat_recipe={self.qat_recipe!r}"
            yield self.fault("fp8_recipe", reason, "give one of the two")
        if self.sdpa_set_priority and not isinstance(self.sdpa_backend, list):
            reason = f"sdpa_backend={self.sdpa_backend!r} is no list to take an order from"
            yield self.fault("sdpa_set_priority", reason, "give sdpa_backend a list")


@dataclass(kw_only=True)
class TrainingArguments(BaseTrainingArguments):
    """Arguments of `Trainer`: memory and compilation."""

    gc_threshold: Annotated[Share, "of GPU memory: above it the cache is emptied"] = 0.5
    construct_model_on: Annotated[
        Literal["default", "device", "meta"], "meta: empty, and filled from the checkpoint"
    ] = "default"
    activation_memory_budget: Annotated[Share | None, "of the compiler's partitioner"] = None
    fuse_optim_with_backward: Annotated[
        Flag, "step each parameter once its gradient is there, and free the gradient"
    ] = False
    speed_metrics_start_step: Annotated[Natural, "speed is measured from this step on"] = 1
    set_dataset_epoch: Annotated[Flag, "call set_epoch of the dataset, if it has it"] = True
    debug_optimizer_groups: Annotated[Flag, "log the group of each parameter"] = False

    def conflicts(self) -> Iterator[InvalidArgument]:
        yield from super().conflicts()
        if self.activation_memory_budget is not None and not self.torch_compile:
            reason = "a setting of the compiler, and the model is not compiled"
            yield self.fault("activation_memory_budget", reason, "set torch_compile")
        for name, given, instead in (
            ("max_grad_norm", self.max_grad_norm is not None, "set max_grad_norm to None"),
            (
                "gradient_accumulation_steps > 1",
                self.gradient_accumulation_steps > 1,
                "set it to 1",
            ),
            ("mixed_precision='fp16'", self.mixed_precision == "fp16", "use bf16"),
        ):
            if self.fuse_optim_with_backward and given:
                reason = f"excludes {name}, since no gradient outlives its step"
                yield self.fault("fuse_optim_with_backward", reason, f"{instead}, or do not fuse")


@dataclass(kw_only=True)
class DDPArguments(Arguments):
    """Handed to `DistributedDataParallel`."""

    broadcast_buffers: Annotated[Flag, "synchronise buffers in each forward pass"] = True
    init_sync: Annotated[Flag, "synchronise parameters and buffers at the start"] = True
    bucket_cap_mb: Annotated[Count | None, "None leaves torch's size"] = None
    find_unused_parameters: Annotated[Flag, "walks the graph once more"] = False
    gradient_as_bucket_view: Annotated[Flag, "saves memory"] = True
    static_graph: Annotated[Flag, "the graph is the same in every step"] = False
    skip_all_reduce_unused_params: Annotated[Flag, "newer torch only"] = False


@dataclass(kw_only=True)
class PostLocalSGDArguments(Arguments):
    """Ranks step on their own gradients and average their parameters now and then."""

    enabled: Annotated[Flag, "do so"] = False
    start_step: Annotated[Natural, "ordinary all-reduce before this step"] = 500
    period: Annotated[Count, "optimizer steps from one average to the next"] = 4
    post_local_gradient_allreduce: Annotated[Flag, "gradients stay all-reduced"] = False


@dataclass(kw_only=True)
class FSDP2Arguments(Arguments):
    """Policies for `fully_shard`."""

    reshard_after_forward: Annotated[
        Flag | Count, "True: least memory; False: parameters stay whole; N: groups of N ranks"
    ] = True
    param_dtype: Annotated[DType | None, "that is computed in; None: no policy"] = None
    reduce_dtype: Annotated[DType | None, "of the reduction of gradients"] = None
    buffer_dtype: Annotated[DType | None, "of floating-point buffers"] = None
    cpu_offload: Annotated[Flag, "parameters and gradients wait on the CPU"] = False
    shard_transformer_layers: Annotated[Flag, "shard each block before the root"] = True
    transformer_layers_path: Annotated[
        Text, "of the list of blocks; empty, or not there: only the root is sharded"
    ] = "causal_lm.layer_stack.layers"


@dataclass(kw_only=True)
class AccelTrainingArguments(TrainingArguments):
    """Arguments of `AccelTrainer`, whose Accelerator has its own precision and accumulation, which
    win."""

    accelerator_config: Annotated[
        dict[str, Any], "of the Accelerator's loaders: split_batches, dispatch_batches"
    ] = field(default_factory=dict)


@dataclass(kw_only=True)
class DDPTrainingArguments(TrainingArguments):
    """Arguments of `DDPTrainer`."""

    dispatch_batches: Annotated[
        Flag | None,
        "rank 0 reads all data; False: each rank its shard; None: False for map-style data",
    ] = None
    ddp: Annotated[DDPArguments, "of DistributedDataParallel"] = field(default_factory=DDPArguments)
    post_local_sgd: Annotated[PostLocalSGDArguments, "average parameters now and then"] = field(
        default_factory=PostLocalSGDArguments
    )


@dataclass(kw_only=True)
class FSDP2TrainingArguments(TrainingArguments):
    """Arguments of `FSDP2Trainer`."""

    dispatch_batches: Annotated[
        Flag | None,
        "rank 0 reads all data; False: each rank its shard; None: False for map-style data",
    ] = None
    fsdp2: Annotated[FSDP2Arguments, "of fully_shard"] = field(default_factory=FSDP2Arguments)


@dataclass(kw_only=True)
class PipelineTrainingArguments(TrainingArguments):
    """Arguments of `PipelineTrainer`. Batches have one shape, so the last short one is always
    dropped."""

    n_microbatches: Annotated[Count, "parts of a batch that follow each other"] = 4
    stages_per_rank: Annotated[Count, "above 1 with is_multistage only"] = 1
    pp_stage_type: Annotated[Literal["loop", "v"], "v: for ScheduleZBVZeroBubble"] = "loop"
    is_multistage: Annotated[Flag, "for schedules of the kind PipelineScheduleMulti"] = False
    debug_pipeline: Annotated[Flag, "log the schedule"] = False
    debug_split_model: Annotated[Flag, "log the stages"] = False
    debug_model_params: Annotated[Flag, "log each parameter's shape, dtype, device"] = False
    debug_model_init: Annotated[Flag, "log where the stages get their values"] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.dataloader_drop_last = True

    def conflicts(self) -> Iterator[InvalidArgument]:
        yield from super().conflicts()
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            if getattr(self, name) % self.n_microbatches:
                reason = f"does not divide {name}={getattr(self, name)}"
                yield self.fault("n_microbatches", reason, "give one that does")
        if self.stages_per_rank > 1 and not self.is_multistage:
            reason = "a rank has one stage unless is_multistage=True"
            instead = "set is_multistage, with a schedule derived from PipelineScheduleMulti"
            yield self.fault("stages_per_rank", reason, instead)
        yield from trainer_checks.pipeline_conflicts(self)


@dataclass(kw_only=True)
class GPTArguments(Arguments):
    """Size of the byte-level GPT that the demonstrations and tests train."""

    n_layer: Annotated[Count, "blocks"] = 4
    n_head: Annotated[Count, "heads of attention"] = 4
    n_embd: Annotated[Count, "width; a multiple of n_head"] = 128
    block_size: Annotated[Count, "bytes of a sample"] = 64
    dropout: Annotated[Below1, "share of activations"] = 0.1

    def conflicts(self) -> Iterator[InvalidArgument]:
        if self.n_embd % self.n_head:
            reason = f"not a multiple of n_head={self.n_head}"
            yield self.fault("n_embd", reason, "make it one")


def steps_of(value: int | float, total_steps: int) -> int:
    """A period in steps: a float below 1.0 is a share of all steps, and at least one step."""
    if isinstance(value, float) and value < 1.0:
        return max(1, math.ceil(exactness.rounded(value * total_steps)))
    return int(value)
