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
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator

from . import conflicts, exactness
from .building import Arguments
from .errors import InvalidArgument
from .kinds import (
    Below1,
    Count,
    DType,
    Flag,
    Level,
    Natural,
    Number,
    Options,
    Period,
    Positive,
    Real,
    Seed,
    SeedOrNone,
    Share,
    Strategy,
    Text,
    Whole,
    arg,
)
from .optimizer_options import Schedule, known_optimizer

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Backend = Literal["nccl", "gloo", "mpi", "ccl", "hccl"]
FP8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
QATRecipe = Literal[
    "int8-dynamic-act-int4-weight", "int4-weight-only", "float8-dynamic-act-float8-weight"
]
Kernel = Literal["math", "flash", "efficient", "cudnn"]


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


Optimizer = Annotated[Text, AfterValidator(known_optimizer)]
Reporters = Annotated[Text | list[Text], AfterValidator(_reporters)]
Kernels = Annotated[Text | list[Text], AfterValidator(_kernels)]


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
    output_dir: Text = arg("tmp_trainer", "folder of checkpoints, final model and logs")
    logging_dir: Text | None = arg(None, "folder of the logs; None: a new one in output_dir/runs")
    run_name: Text | None = arg(None, "shown by loggers; None: output_dir")
    device: Any = arg(None, "as torch names it; None: cuda where there is one, else cpu")
    use_cpu: Flag = arg(False, "train on the CPU; wins over device")
    seed: SeedOrNone = arg(
        -1,
        "of all random streams; -1 does not seed, and the checkpoint keeps the order of the data",
    )
    data_seed: Seed | None = arg(None, "of the order of the data only; None uses seed")
    full_determinism: Flag = arg(False, "deterministic algorithms only; needs a seed")

    # Length
    num_train_epochs: Real = arg(
        1.0, "epochs, or part of one; below 0: no limit, max_steps is the length"
    )
    max_steps: Whole = arg(
        -1, "above 0: exactly so many optimizer steps, whatever num_train_epochs says"
    )
    epoch_train_steps: Count = arg(100000, "steps of an epoch, for a dataset without a length")

    # Batches and data loading
    per_device_train_batch_size: Count = arg(16, "samples of a micro-batch on each device")
    per_device_eval_batch_size: Count = arg(16, "samples of an evaluation's batch")
    gradient_accumulation_steps: Count = arg(1, "micro-batches of an optimizer step")
    max_grad_norm: Positive | None = arg(None, "gradients are clipped to it; None does not clip")
    dataloader_num_workers: Natural = arg(0, "processes that load; 0: the main process")
    dataloader_pin_memory: Flag = arg(True, "pinned host memory, for CUDA")
    dataloader_persistent_workers: Flag = arg(False, "keep workers from epoch to epoch")
    dataloader_prefetch_factor: Count | None = arg(
        None, "batches that a worker loads ahead; None: 2, where there are workers"
    )
    dataloader_drop_last: Flag = arg(False, "drop the short last batch")
    ignore_data_skip: Flag = arg(False, "a resumed run starts its epoch's data over")

    # Evaluation and logging
    eval_strategy: Strategy = arg("no", "when to evaluate")
    eval_steps: Period = arg(100, "steps; below 1.0 it is a share of all steps")
    eval_delay: Natural | Number = arg(0, "steps or epochs before the first evaluation")
    eval_on_start: Flag = arg(False, "evaluate before the first step; never the best")
    logging_strategy: Strategy = arg("steps", "when to log")
    logging_steps: Period = arg(50, "steps; below 1.0 it is a share of all steps")
    logging_first_step: Flag = arg(False, "log step 1 too")
    logging_nan_inf_filter: Flag = arg(
        False, "log the mean of the window instead of a loss that is not finite"
    )
    include_num_input_tokens_seen: Flag | Literal["all", "non_padding", "no"] = arg(
        False, "count input tokens, and log them"
    )
    report_to: Reporters = arg("none", "loggers: tensorboard, json, none")
    disable_tqdm: Flag | None = arg(None, "plain lines; None: a bar on a terminal")
    log_level: Level = arg("passive", "of rank 0; passive leaves logging as it is")
    log_level_replica: Level = arg("warning", "of the other ranks")

    # torch.compile
    torch_compile: Flag = arg(False, "compile the model")
    torch_compile_backend: Text | None = arg("inductor", "one of torch's; does not turn it on")
    torch_compile_mode: CompileMode | None = arg("default", "what to optimise for")
    torch_compile_dynamic: Flag = arg(True, "dynamic shapes")
    torch_compile_full_graph: Flag = arg(False, "forbid breaks of the graph")

    # Checkpoints
    save_strategy: Literal["no", "steps", "epoch", "best"] = arg(
        "steps", "when to save; best: at each better evaluation"
    )
    save_steps: Period = arg(1000, "steps; below 1.0 it is a share of all steps")
    save_total_limit: Count | None = arg(
        2, "newest checkpoints that are kept, the best come on top; None keeps all"
    )
    save_safetensors: Flag = arg(True, "weights are safetensors always")
    save_on_each_node: Flag = arg(False, "each node writes all; not for shared storage")
    save_only_model: Flag = arg(False, "weights only: no run can go on from them")
    save_async: Flag = arg(True, "write in the background; the last save is waited for")
    overwrite_output_dir: Flag = arg(False, "start over where there are checkpoints")
    resume_from_checkpoint: Flag | Text = arg(
        True, "True: the newest usable one, else a fresh start; or a path, or best"
    )
    restore_callback_states_from_checkpoint: Flag = arg(True, "callbacks go on, too")
    enable_jit_checkpoint: Flag = arg(
        False, "SIGTERM to any rank: all save the same step, and train() returns"
    )
    on_world_size_change: Literal["error", "continue"] = arg(
        "error", "continue: same data position, random streams start anew"
    )
    load_best_model_at_end: Flag = arg(False, "end with the weights of the best evaluation")
    metric_for_best_model: Text = arg("loss", "metric that ranks; eval_ may be left out")
    greater_is_better: Flag | None = arg(None, "None: not for a name that ends in loss")

    # Optimizer and schedule, unless the trainer is given factories
    optim: Optimizer = arg("adamw_torch", "an optimizer's name; else an optimizer_factory")
    optim_args: Text | Options | None = arg(
        None, "more of it: key=value,key=value with Python literals"
    )
    learning_rate: Number = arg(5e-5, "its highest value")
    weight_decay: Number = arg(0.0, "of all parameters, unless optimizer_groups differ")
    adam_beta1: Below1 = arg(0.9, "of Adam's kind of optimizers")
    adam_beta2: Below1 = arg(0.999, "of Adam's kind of optimizers")
    adam_epsilon: Number = arg(1e-8, "of Adam's kind of optimizers")
    lr_scheduler_type: Schedule = arg("linear", "or give the trainer an lr_scheduler_factory")
    lr_scheduler_kwargs: Options | None = arg(
        dict, "cosine_with_restarts: num_cycles; polynomial: power"
    )
    warmup_steps: Natural = arg(0, "steps of a ramp from 0; above 0 it wins")
    warmup_ratio: Share = arg(0.0, "of all steps")
    label_smoothing_factor: Below1 = arg(0.0, "of the loss that the trainer computes")

    # Memory and processes
    gradient_checkpointing: Flag = arg(False, "recompute activations in the backward pass")
    gradient_checkpointing_kwargs: Options | None = arg(
        None, "of the model's gradient_checkpointing_enable"
    )
    torch_empty_cache_steps: Count | None = arg(None, "steps; None never empties the cache")
    ddp_backend: Backend | None = arg(None, "None: nccl on CUDA, gloo on the CPU")
    ddp_timeout: Count = arg(1800, "seconds, of the process group")

    _process = Process()

    def __post_init__(self) -> None:
        if self.lr_scheduler_kwargs is None:
            self.lr_scheduler_kwargs = {}
        counted = {"all": True, "no": False}
        if isinstance(said := self.include_num_input_tokens_seen, str) and said in counted:
            self.include_num_input_tokens_seen = counted[said]

    def check_trainer(self, kind: str, world_size: int) -> None:
        """For a trainer ("single", "ddp", "fsdp2", "pipeline", "accel") of so many ranks. Raises
        InvalidArgument."""
        conflicts.check_trainer(self, kind, world_size)
        data_parallel = 1 if kind == "pipeline" else world_size
        self._process = Process(world_size=world_size, data_parallel=data_parallel)

    def check_parts(self, kind: str, **given: Any) -> None:
        """With what the constructor was given, see conflicts.py. Raises InvalidArgument."""
        conflicts.check_parts(self, kind, **given)

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
        """Samples of an optimizer step over the trainer's ranks; of one rank before it is there."""
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
        """The direction of the metric for the best model, by its name where it was not given."""
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
        """`name old -> new` for each that changes what is computed and is not as it was stored."""
        return exactness.differences(stored, self.as_dict())


@dataclass(kw_only=True)
class BaseTrainingArguments(MinimalTrainingArguments):
    """Retention of checkpoints, precision, attention, debugging."""

    default_dtype: DType | None = arg(None, "torch's default dtype while the model is built")
    max_eval_steps: Literal[-1] | Count = arg(-1, "batches of an evaluation; -1 evaluates on all")
    preserve_best_model: Flag = arg(False, "the best checkpoints are not removed")
    best_model_metric: Text = arg("loss", "the same as metric_for_best_model")
    best_model_greater_is_better: Flag | None = arg(None, "the same as greater_is_better")
    preserve_n_best: Count = arg(1, "how many best checkpoints are not removed")
    eval_on_save: Flag = arg(False, "evaluate right before each save")
    enable_activation_offloading: Flag = arg(False, "activations wait on the CPU")
    detect_anomaly: Flag = arg(False, "autograd's anomaly mode; slow")
    sdpa_backend: Kernels | None = arg(None, "kernels of attention: math, flash, efficient, cudnn")
    sdpa_set_priority: Flag = arg(False, "the order of sdpa_backend is one of preference")
    float32_matmul_precision: Literal["highest", "high", "medium"] | None = arg(
        None, "high: TF32; None leaves torch's"
    )
    dynamo_recompile_limit: Count | None = arg(None, "of the compiler; None leaves torch's")
    mixed_precision: Literal["no", "bf16", "fp16"] | None = arg(
        None, "autocast; fp16 scales the loss"
    )
    fp8_recipe: FP8Recipe | None = arg(
        None, "linear layers in float8; needs torchao and compute capability 8.9"
    )
    fp8_dim_alignment: Natural = arg(
        16, "layers whose dimensions are no multiples of it stay as they are; 0: none does"
    )
    fp8_emulate: Flag = arg(
        False, "compute in float32 what fp8_recipe computes in float8: on any device, to try it"
    )
    qat_recipe: QATRecipe | None = arg(None, "linear layers train as if quantised; needs torchao")

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


@dataclass(kw_only=True)
class TrainingArguments(BaseTrainingArguments):
    """Arguments of `Trainer`: memory and compilation."""

    gc_threshold: Share = arg(0.5, "of GPU memory: above it the cache is emptied")
    construct_model_on: Literal["default", "device", "meta"] = arg(
        "default", "meta: empty, and filled from the checkpoint"
    )
    activation_memory_budget: Share | None = arg(None, "of the compiler's partitioner")
    fuse_optim_with_backward: Flag = arg(
        False, "step each parameter once its gradient is there, and free the gradient"
    )
    speed_metrics_start_step: Natural = arg(1, "speed is measured from this step on")
    set_dataset_epoch: Flag = arg(True, "call set_epoch of the dataset, if it has it")
    debug_optimizer_groups: Flag = arg(False, "log the group of each parameter")


@dataclass(kw_only=True)
class DDPArguments(Arguments):
    """Handed to `DistributedDataParallel`."""

    broadcast_buffers: Flag = arg(True, "synchronise buffers in each forward pass")
    init_sync: Flag = arg(True, "synchronise parameters and buffers at the start")
    bucket_cap_mb: Count | None = arg(None, "None leaves torch's size")
    find_unused_parameters: Flag = arg(False, "walks the graph once more")
    gradient_as_bucket_view: Flag = arg(True, "saves memory")
    static_graph: Flag = arg(False, "the graph is the same in every step")
    skip_all_reduce_unused_params: Flag = arg(False, "newer torch only")


@dataclass(kw_only=True)
class PostLocalSGDArguments(Arguments):
    """Ranks step on their own gradients and average their parameters now and then."""

    enabled: Flag = arg(False, "do so")
    start_step: Natural = arg(500, "ordinary all-reduce before this step")
    period: Count = arg(4, "optimizer steps from one average to the next")
    post_local_gradient_allreduce: Flag = arg(False, "gradients stay all-reduced")


@dataclass(kw_only=True)
class FSDP2Arguments(Arguments):
    """Policies for `fully_shard`."""

    reshard_after_forward: Flag | Count = arg(
        True, "True: least memory; False: parameters stay whole; N: groups of N ranks"
    )
    param_dtype: DType | None = arg(None, "that is computed in; None: no policy")
    reduce_dtype: DType | None = arg(None, "of the reduction of gradients")
    buffer_dtype: DType | None = arg(None, "of floating-point buffers")
    cpu_offload: Flag = arg(False, "parameters and gradients wait on the CPU")
    shard_transformer_layers: Flag = arg(True, "shard each block before the root")
    transformer_layers_path: Text = arg(
        "causal_lm.layer_stack.layers",
        "of the list of blocks; empty, or not there: only the root is sharded",
    )


@dataclass(kw_only=True)
class AccelTrainingArguments(TrainingArguments):
    """Arguments of `AccelTrainer`, whose Accelerator has its own precision and accumulation, which
    win."""

    accelerator_config: dict[str, Any] = arg(
        dict, "of the Accelerator's loaders: split_batches, dispatch_batches"
    )


@dataclass(kw_only=True)
class DDPTrainingArguments(TrainingArguments):
    """Arguments of `DDPTrainer`."""

    dispatch_batches: Flag | None = arg(
        None, "rank 0 reads all data; False: each rank its shard; None: False for map-style data"
    )
    ddp: DDPArguments = arg(DDPArguments, "of DistributedDataParallel")
    post_local_sgd: PostLocalSGDArguments = arg(
        PostLocalSGDArguments, "average parameters now and then"
    )


@dataclass(kw_only=True)
class FSDP2TrainingArguments(TrainingArguments):
    """Arguments of `FSDP2Trainer`."""

    dispatch_batches: Flag | None = arg(
        None, "rank 0 reads all data; False: each rank its shard; None: False for map-style data"
    )
    fsdp2: FSDP2Arguments = arg(FSDP2Arguments, "of fully_shard")


@dataclass(kw_only=True)
class PipelineTrainingArguments(TrainingArguments):
    """Arguments of `PipelineTrainer`. Batches have one shape, so the last short one is always
    dropped."""

    n_microbatches: Count = arg(4, "parts of a batch that follow each other")
    stages_per_rank: Count = arg(1, "above 1 with is_multistage only")
    pp_stage_type: Literal["loop", "v"] = arg("loop", "v: for ScheduleZBVZeroBubble")
    is_multistage: Flag = arg(False, "for schedules of the kind PipelineScheduleMulti")
    debug_pipeline: Flag = arg(False, "log the schedule")
    debug_split_model: Flag = arg(False, "log the stages")
    debug_model_params: Flag = arg(False, "log each parameter's shape, dtype, device")
    debug_model_init: Flag = arg(False, "log where the stages get their values")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.dataloader_drop_last = True


@dataclass(kw_only=True)
class GPTArguments(Arguments):
    """Size of the byte-level GPT that the demonstrations and tests train."""

    n_layer: Count = arg(4, "blocks")
    n_head: Count = arg(4, "heads of attention")
    n_embd: Count = arg(128, "width; a multiple of n_head")
    block_size: Count = arg(64, "bytes of a sample")
    dropout: Below1 = arg(0.1, "share of activations")


def steps_of(value: int | float, total_steps: int) -> int:
    """A period in steps: a float below 1.0 is a share of all steps, and at least one step."""
    if isinstance(value, float) and value < 1.0:
        return max(1, math.ceil(exactness.rounded(value * total_steps)))
    return int(value)
