"""Hugging Face's names that are no native arguments, and what becomes of each: one table.

A name stands for a native argument, has no effect, or is refused with its replacement. With the
value that a dump of untouched arguments holds for it, it is never refused and never remarked on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import InvalidArgument

__all__ = ["NAMES", "UNSET_IN_HF", "Name", "Wish", "accelerator_faults", "wishes"]


@dataclass(frozen=True)
class Name:
    """A name of Hugging Face's.

    target: the native argument that an alias sets. values: what its values mean there, where they
    are not the same. reason: why it has no effect, or is refused. instead: what to use.
    untouched: values that say nothing; None is one of them always.
    """

    name: str
    kind: Literal["alias", "no effect", "refused"]
    untouched: tuple[Any, ...]
    target: str = ""
    values: tuple[tuple[Any, Any], ...] = ()
    reason: str = ""
    instead: str = ""

    def is_untouched(self, value: object) -> bool:
        return value is None or any(_same(value, default) for default in self.untouched)


def _same(value: object, default: object) -> bool:
    """Equal and of one type; a mapping also where it holds a part of the default."""
    if isinstance(value, Mapping) and isinstance(default, Mapping):
        return all(key in default and _same(value[key], default[key]) for key in value)
    return type(value) is type(default) and value == default


def _alias(
    target: str, values: tuple[tuple[Any, Any], ...] = (), reason: str = "", **names: Any
) -> Iterator[Name]:
    for name, untouched in names.items():
        yield Name(name, "alias", _tuple(untouched), target, values, reason)


def _silent(reason: str, **names: Any) -> Iterator[Name]:
    for name, untouched in names.items():
        yield Name(name, "no effect", _tuple(untouched), reason=reason)


def _refused(reason: str, instead: str, **names: Any) -> Iterator[Name]:
    for name, untouched in names.items():
        yield Name(name, "refused", _tuple(untouched), reason=reason, instead=instead)


def _tuple(untouched: Any) -> tuple[Any, ...]:
    return untouched if isinstance(untouched, tuple) else (untouched,)


# Keys of accelerator_config, and the values that hold in AccelTrainer. Its loaders are this
# project's: no sample comes twice, all processes take equally many steps, the order has a seed,
# copies do not block, and a run goes on in the middle of an epoch.
ACCELERATOR: dict[str, tuple[Any, ...]] = {
    "split_batches": (True, False),
    "dispatch_batches": (True, False),
    "even_batches": (True, False),
    "use_seedable_sampler": (True,),
    "non_blocking": (True, False),
    "use_stateful_dataloader": (True, False),
    "use_configured_state": (False,),
    "gradient_accumulation_kwargs": (),
}
_ACCELERATOR_UNTOUCHED = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
    "gradient_accumulation_kwargs": None,
    "use_configured_state": False,
}
_FSDP_UNTOUCHED = {
    "min_num_params": 0,
    "transformer_layer_cls_to_wrap": [],
    "xla": False,
    "xla_fsdp_v2": False,
    "xla_fsdp_grad_ckpt": False,
}
_CALLBACK = "use a callback (on_prediction_step, on_evaluate)"
_LAYERS = "set fsdp2.transformer_layers_path"

# In each row names are followed by the value that is untouched; a tuple holds several.
NAMES: dict[str, Name] = {
    row.name: row
    for rows in (
        _alias("learning_rate", lr=5e-5),
        _alias("eval_strategy", evaluation_strategy="no"),
        _alias("use_cpu", no_cuda=False),
        _alias("per_device_train_batch_size", per_gpu_train_batch_size=None),
        _alias("per_device_eval_batch_size", per_gpu_eval_batch_size=None),
        _alias("gradient_checkpointing", activation_checkpointing=False),
        _alias("gradient_checkpointing_kwargs", activation_checkpointing_kwargs=None),
        _alias("mixed_precision", ((True, "bf16"),), bf16=False),
        _alias("mixed_precision", ((True, "fp16"),), fp16=False),
        _alias("float32_matmul_precision", ((True, "high"), (False, "highest")), tf32=None),
        _alias("torch_compile_backend", reason="turns torch_compile on, too", torchdynamo=None),
        _alias("optim", ((True, "adafactor"),), adafactor=False),
        _alias("ddp.bucket_cap_mb", ddp_bucket_cap_mb=None),
        _alias("ddp.find_unused_parameters", ddp_find_unused_parameters=None),
        _alias("ddp.broadcast_buffers", ddp_broadcast_buffers=None),
        _alias("ddp.gradient_as_bucket_view", ddp_gradient_as_bucket_view=None),
        _alias("ddp.static_graph", ddp_static_graph=None),
        _alias("accelerator_config.split_batches", split_batches=False),
        _alias("accelerator_config.dispatch_batches", dispatch_batches=None),
        _alias("accelerator_config", accelerator_config=_ACCELERATOR_UNTOUCHED),
        _alias("fsdp2", fsdp=("", [], False)),
        _alias("fsdp2", fsdp_config=("", _FSDP_UNTOUCHED)),
        _silent("a flag of scripts; call train()", do_train=False),
        _silent("a flag of scripts; call evaluate()", do_eval=False, do_predict=False),
        _silent("the rank comes from the launcher's environment", local_rank=-1),
        _silent("use `device`", use_mps_device=False),
        _silent("memory is reported by the PeakMemory callback", skip_memory_metrics=True),
        _silent("DefaultMetrics always logs tok_per_sec", include_tokens_per_second=False),
        _silent(
            "a loss that the trainer computes is always normalised over all ranks",
            average_tokens_across_devices=(True, False),
        ),
        _silent("names a project of a tracker that is not used", project="huggingface"),
        _silent(
            "names a space of a tracker that is not used",
            trackio_space_id="trackio",
            trackio_bucket_id=None,
            trackio_static_space_id=None,
        ),
        _refused(
            "it is derived from the batch size of a device",
            "set per_device_train_batch_size",
            train_batch_size=None,
        ),
        _refused(
            "it is derived from the batch size of a device",
            "set per_device_eval_batch_size",
            eval_batch_size=None,
        ),
        _refused("DeepSpeed is not supported", "use FSDP2Trainer", deepspeed=""),
        _refused("removed upstream", "use FSDP2Trainer", sharded_ddp=("", [])),
        _refused("modules are not wrapped by size", _LAYERS, fsdp_min_num_params=0),
        _refused(
            "modules are not wrapped by class", _LAYERS, fsdp_transformer_layer_cls_to_wrap=None
        ),
        _refused("no external model parallelism", "use PipelineTrainer", mp_parameters=""),
        _refused("no TPU", "train on CUDA or CPU", tpu_num_cores=None, tpu_metrics_debug=False),
        _refused("no XPU", "set ddp_backend", xpu_backend=None),
        _refused("no IPEX", "set torch_compile", use_ipex=False),
        _refused("no jit trace", "set torch_compile", jit_mode_eval=False),
        _refused("no hyperparameter search", "use an external driver", ray_scope="last"),
        _refused(
            "no recurrent memory outputs",
            "use compute_loss_func, or do it in the model",
            past_index=-1,
        ),
        _refused(
            "only torch's own mixed precision",
            "set mixed_precision",
            fp16_backend="auto",
            half_precision_backend="auto",
        ),
        _refused(
            "a setting of Apex, which is not used", "set mixed_precision", fp16_opt_level="O1"
        ),
        _refused(
            "evaluation uses the precision of training",
            "set mixed_precision or default_dtype",
            bf16_full_eval=False,
            fp16_full_eval=False,
        ),
        _refused(
            "nothing is uploaded",
            "upload output_dir afterwards",
            push_to_hub=False,
            hub_model_id=None,
            hub_strategy="every_save",
            hub_token="<HUB_TOKEN>",
            hub_private_repo=None,
            hub_always_push=False,
            hub_revision=None,
            push_to_hub_model_id=None,
            push_to_hub_organization=None,
            push_to_hub_token="<PUSH_TO_HUB_TOKEN>",
        ),
        _refused("batches go to the model as collated", "use data_collator", label_names=None),
        _refused(
            "batches are not grouped by length",
            "give your own sampler or DataLoader, or pack the sequences",
            group_by_length=False,
            length_column_name="length",
            sortish_sampler=False,
            train_sampling_strategy="random",
        ),
        _refused(
            "the loaders have no such setting",
            "give a DataLoader of your own as train_dataset",
            dataloader_in_order=True,
            dataloader_multiprocessing_context=None,
        ),
        # Theirs is True, which is refused all the same: columns are not removed.
        _refused(
            "columns are never removed",
            "set False, and drop columns in the dataset or collator",
            remove_unused_columns=False,
        ),
        _refused(
            "evaluation already returns the loss only", "leave it out", prediction_loss_only=False
        ),
        _refused(
            "there is no compute_metrics",
            _CALLBACK,
            include_inputs_for_metrics=False,
            include_for_metrics=[],
            batch_eval_metrics=False,
        ),
        _refused(
            "predictions are not accumulated",
            _CALLBACK,
            eval_accumulation_steps=None,
            eval_do_concat_batches=True,
            eval_use_gather_object=False,
        ),
        _refused(
            "evaluation does not generate",
            "generate in the on_evaluate of a callback of your own",
            predict_with_generate=False,
            generation_config=None,
            generation_max_length=None,
            generation_num_beams=None,
        ),
        _refused(
            "would break exact resumption",
            "set per_device_train_batch_size, gradient_accumulation_steps",
            auto_find_batch_size=False,
        ),
        _refused(
            "no noise is added to embeddings",
            "put a hook on the embedding in model_init",
            neftune_noise_alpha=None,
        ),
        _refused(
            "models are not patched",
            "patch in model_init, or give a fused_loss_factory",
            use_liger_kernel=False,
            liger_kernel_config=None,
        ),
        _refused("a model decides so itself", "set it in the model's config", use_cache=False),
        _refused(
            "for low-rank optimizers only",
            "use optimizer_groups or optimizer_factory",
            optim_target_modules=None,
        ),
        _refused(
            "torch's AdamW has no such switch", "use optimizer_factory", adam_bias_correction=True
        ),
        _refused(
            "no such debugging modes",
            "set detect_anomaly, or add a DivergenceDetector",
            debug=("", []),
        ),
        _refused(
            "levels are set by rank", "set log_level and log_level_replica", log_on_each_node=True
        ),
        _refused(
            "where a model is built has another name",
            "set construct_model_on",
            low_cpu_mem_usage=True,
        ),
        _refused(
            "no such low-precision optimizers",
            "set fp8_recipe or mixed_precision",
            optim_target_precision=None,
        ),
        _refused(
            "no built-in profiler", "use torch.profiler in a callback of your own", profile=False
        ),
        _refused(
            "the order of the data has another argument", "set data_seed", dataloader_seed=None
        ),
        _refused(
            "stopping early is a callback's",
            "add an EarlyStopping callback",
            early_stopping_patience=None,
        ),
        _refused(
            "no other parallelism than that of the trainer",
            "use FSDP2Trainer or PipelineTrainer",
            parallelism_config=None,
        ),
    )
    for row in rows
}

# Native names that Hugging Face leaves open: None is no value there, and leaves our default.
_UNSET = (
    "eval_steps metric_for_best_model resume_from_checkpoint lr_scheduler_kwargs report_to "
    "include_num_input_tokens_seen logging_steps save_steps warmup_ratio dispatch_batches ddp "
    "post_local_sgd fsdp2 output_dir"
)
UNSET_IN_HF = frozenset(_UNSET.split())


@dataclass(frozen=True)
class Wish:
    """What a name of Hugging Face's sets.

    source: as a message names it. given: its value. target: a native argument, or one inside a
    group. firm: also against a value that is the default of the target, if it was given.
    """

    source: str
    given: Any
    target: str
    value: Any
    firm: bool = False


def wishes(row: Name, value: Any) -> Iterator[Wish | InvalidArgument]:
    """What an alias asks for, or what is wrong with it."""
    name = row.name
    if name == "fsdp":
        yield from _wishes_of_fsdp(value)
    elif name == "fsdp_config":
        yield from _wishes_of_fsdp_config(value)
    elif name == "accelerator_config":
        read = _read_mapping(name, value)
        yield read if isinstance(read, InvalidArgument) else Wish(name, value, name, read)
    elif row.values:
        meaning = next((to for given, to in row.values if _same(value, given)), None)
        if meaning is not None:
            yield Wish(name, value, row.target, meaning)
        elif not isinstance(value, bool):
            reason = f"is of type {type(value).__name__}"
            yield InvalidArgument(name, value, reason, "give True or False")
    else:
        yield Wish(name, value, row.target, value)
        if name == "torchdynamo":
            yield Wish(name, value, "torch_compile", True)


def _wishes_of_fsdp(value: Any) -> Iterator[Wish | InvalidArgument]:
    words = ["full_shard"] if value is True else value.split() if isinstance(value, str) else value
    instead = "give full_shard, shard_grad_op, hybrid_shard, offload, auto_wrap, or set fsdp2"
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        yield InvalidArgument("fsdp", value, f"is of type {type(value).__name__}", instead)
        return
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    meanings: dict[str, tuple[str, Any]] = {
        "full_shard": ("reshard_after_forward", True),
        "shard_grad_op": ("reshard_after_forward", False),
        "hybrid_shard": ("reshard_after_forward", int(local) if local.isdigit() else None),
        "offload": ("cpu_offload", True),
        "auto_wrap": ("shard_transformer_layers", True),
    }
    for word in words:
        target, meaning = meanings.get(word, ("", None))
        if word == "no_shard":
            yield InvalidArgument("fsdp", word, "nothing would be sharded", "use DDPTrainer")
        elif not target:
            yield InvalidArgument("fsdp", word, "unknown", instead)
        elif meaning is None:
            reason = "the launcher does not say the ranks per node (LOCAL_WORLD_SIZE)"
            number = "set fsdp2.reshard_after_forward to their number"
            yield InvalidArgument("fsdp", word, reason, number)
        else:
            yield Wish(f"fsdp={word}", meaning, f"fsdp2.{target}", meaning, firm=True)


def _wishes_of_fsdp_config(value: Any) -> Iterator[Wish | InvalidArgument]:
    config = _read_mapping("fsdp_config", value)
    if isinstance(config, InvalidArgument):
        yield config
        return
    for key, inner in config.items():
        name, shown = key.removeprefix("fsdp_"), f"fsdp_config.{key}"
        if inner is None or inner == "" or _same(inner, _FSDP_UNTOUCHED.get(name)):
            continue
        if name in ("reshard_after_forward", "cpu_offload"):
            yield Wish(shown, inner, f"fsdp2.{name}", inner, firm=True)
        elif name == "activation_checkpointing" and isinstance(inner, bool):
            if inner:
                yield Wish(shown, inner, "gradient_checkpointing", True)
        elif name == "version":
            if inner != 2 or isinstance(inner, bool):
                instead = "set version 2, or leave it out"
                yield InvalidArgument(shown, inner, "only FSDP2 is supported", instead)
        elif name in ("min_num_params", "transformer_layer_cls_to_wrap"):
            yield InvalidArgument(shown, inner, "modules are not wrapped by size or class", _LAYERS)
        elif name == "activation_checkpointing":
            reason = f"is of type {type(inner).__name__}"
            yield InvalidArgument(shown, inner, reason, "give True or False")
        else:
            reason, instead = "FSDP2Trainer has no such setting", "leave it out, or set fsdp2"
            yield InvalidArgument(shown, inner, reason, instead)


def accelerator_faults(settings: Mapping[str, Any]) -> Iterator[InvalidArgument]:
    """Settings of the Accelerator's loaders that AccelTrainer cannot follow."""
    for name, value in settings.items():
        shown = f"accelerator_config.{name}"
        if name not in ACCELERATOR:
            instead = f"there are {', '.join(ACCELERATOR)}"
            yield InvalidArgument(
                shown, value, "AccelTrainer's loaders have no such setting", instead
            )
        elif not any(_same(value, allowed) for allowed in ACCELERATOR[name]):
            if isinstance(value, bool):
                reason = "AccelTrainer's loaders always do it" if not value else "not supported"
            else:
                reason = f"is of type {type(value).__name__}"
            choices = " or ".join(map(str, ACCELERATOR[name]))
            yield InvalidArgument(
                shown, value, reason, f"give {choices}" if choices else "leave it out"
            )


def _read_mapping(name: str, value: Any) -> dict[str, Any] | InvalidArgument:
    """A mapping given as such, as JSON or the path of it, or as an object with fields."""
    instead = "give a mapping or the path of a JSON file"
    if isinstance(value, str):
        try:
            inline = value.lstrip().startswith("{")
            value = json.loads(value if inline else Path(value).read_text(encoding="utf-8"))
        except OSError as error:
            return InvalidArgument(name, value, f"cannot be read: {error.strerror}", instead)
        except ValueError as error:
            return InvalidArgument(name, value, f"is not JSON: {error}", instead)
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    elif not isinstance(value, Mapping) and hasattr(value, "__dict__") and not callable(value):
        value = vars(value)
    if not isinstance(value, Mapping):
        return InvalidArgument(name, value, f"is of type {type(value).__name__}", instead)
    return {str(key): inner for key, inner in value.items()}
