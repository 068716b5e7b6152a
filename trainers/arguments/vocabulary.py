"""Names of Hugging Face's arguments that are not native here, and what becomes of each.

Every table is one line a name. HF_DEFAULTS says with which values a name stands in a dump of
arguments that nobody
touched: with these it is never refused and never remarked on. None counts as untouched everywhere.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ALIASES",
    "DDP_ALIASES",
    "HF_DEFAULTS",
    "NO_EFFECT",
    "OF_ONE_TRAINER",
    "OPTIMIZERS",
    "REJECTED",
    "REJECTED_OPTIMIZERS",
    "SCHEDULES",
    "UNSET_IN_HF",
    "at_default",
]

# Another name for a native argument of the same meaning.
ALIASES = {
    "lr": "learning_rate",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
}

# Names whose value is translated (resolve.py): which native argument they set, for contradictions
# and close matches.
TRANSLATED = {
    "bf16": "mixed_precision",
    "fp16": "mixed_precision",
    "tf32": "float32_matmul_precision",
    "torchdynamo": "torch_compile_backend",
    "adafactor": "optim",
}

# Only DDPTrainer has these.
DDP_ALIASES = {
    "ddp_bucket_cap_mb": "bucket_cap_mb",
    "ddp_find_unused_parameters": "find_unused_parameters",
    "ddp_broadcast_buffers": "broadcast_buffers",
    "ddp_gradient_as_bucket_view": "gradient_as_bucket_view",
}

# Names that one trainer understands: reason and replacement for the others.
OF_ONE_TRAINER = {
    **dict.fromkeys(
        DDP_ALIASES,
        ("only DDPTrainer has DistributedDataParallel", "use DDPTrainer, or leave it out"),
    ),
    "fsdp": ("only FSDP2Trainer shards a model", "use FSDP2Trainer"),
    "fsdp_config": ("only FSDP2Trainer shards a model", "use FSDP2Trainer"),
    "accelerator_config": (
        "only AccelTrainer has an Accelerator",
        "use AccelTrainer, or leave it out",
    ),
    "split_batches": ("only AccelTrainer has an Accelerator", "use AccelTrainer, or leave it out"),
    "dispatch_batches": (
        "no other ranks to hand batches to",
        "use DDPTrainer, FSDP2Trainer or AccelTrainer",
    ),
}

# Accepted, and without effect: why.
NO_EFFECT = {
    "do_train": "a flag of scripts; call train()",
    "do_eval": "a flag of scripts; call evaluate()",
    "do_predict": "a flag of scripts; call evaluate()",
    "local_rank": "the rank comes from the launcher's environment",
    "use_mps_device": "use `device`",
    "skip_memory_metrics": "memory is reported by the PeakMemory callback",
    "include_tokens_per_second": "DefaultMetrics always logs tok_per_sec",
    "average_tokens_across_devices": "losses are always normalised over the tokens of all ranks",
    "project": "names a project of a tracker that is not used",
    "trackio_space_id": "names a space of a tracker that is not used",
}

_HUB = ("nothing is uploaded", "upload output_dir afterwards")
_EVALUATION = (
    "predictions are not accumulated",
    "use a callback (on_prediction_step, on_evaluate)",
)
_METRICS = ("there is no compute_metrics", "use a callback (on_prediction_step, on_evaluate)")
_LENGTHS = (
    "batches are not grouped by length",
    "give your own sampler or DataLoader, or pack the sequences",
)
_AMP = ("only torch's own mixed precision", "set mixed_precision")
_TEXT = ("evaluation does not generate", "generate in the on_evaluate of a callback of your own")

# Refused, unless the value is Hugging Face's default: reason and replacement.
REJECTED = {
    "train_batch_size": (
        "it is derived from the batch size of a device",
        "set per_device_train_batch_size",
    ),
    "eval_batch_size": (
        "it is derived from the batch size of a device",
        "set per_device_eval_batch_size",
    ),
    "deepspeed": ("DeepSpeed is not supported", "use FSDP2Trainer"),
    "sharded_ddp": ("removed upstream", "use FSDP2Trainer"),
    "fsdp_min_num_params": ("modules are not wrapped by size", "set fsdp2.transformer_layers_path"),
    "fsdp_transformer_layer_cls_to_wrap": (
        "modules are not wrapped by class",
        "set fsdp2.transformer_layers_path",
    ),
    "mp_parameters": ("no external model parallelism", "use PipelineTrainer"),
    "tpu_num_cores": ("no TPU", "train on CUDA or CPU"),
    "tpu_metrics_debug": ("no TPU", "train on CUDA or CPU"),
    "xpu_backend": ("no XPU", "set ddp_backend"),
    "use_ipex": ("no IPEX", "set torch_compile"),
    "jit_mode_eval": ("no jit trace", "set torch_compile"),
    "ray_scope": ("no hyperparameter search", "use an external driver"),
    "past_index": ("no recurrent memory outputs", "use compute_loss_func, or do it in the model"),
    "fp16_backend": _AMP,
    "half_precision_backend": _AMP,
    "fp16_opt_level": (
        "a setting of Apex, and only torch's own mixed precision is used",
        "set mixed_precision",
    ),
    "bf16_full_eval": (
        "evaluation uses the precision of training",
        "set mixed_precision or default_dtype",
    ),
    "fp16_full_eval": (
        "evaluation uses the precision of training",
        "set mixed_precision or default_dtype",
    ),
    "push_to_hub": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "push_to_hub_model_id": _HUB,
    "push_to_hub_organization": _HUB,
    "push_to_hub_token": _HUB,
    "label_names": ("batches go to the model as collated", "use data_collator"),
    "group_by_length": _LENGTHS,
    "length_column_name": _LENGTHS,
    "sortish_sampler": _LENGTHS,
    "remove_unused_columns": (
        "columns are never removed",
        "set False, and drop columns in the dataset or collator",
    ),
    "prediction_loss_only": ("evaluation already returns the loss only", "leave it out"),
    "include_inputs_for_metrics": _METRICS,
    "include_for_metrics": _METRICS,
    "batch_eval_metrics": _METRICS,
    "eval_accumulation_steps": _EVALUATION,
    "eval_do_concat_batches": _EVALUATION,
    "eval_use_gather_object": _EVALUATION,
    "predict_with_generate": _TEXT,
    "generation_config": _TEXT,
    "generation_max_length": _TEXT,
    "generation_num_beams": _TEXT,
    "auto_find_batch_size": (
        "would break exact resumption",
        "set per_device_train_batch_size, gradient_accumulation_steps",
    ),
    "neftune_noise_alpha": (
        "no noise is added to embeddings",
        "put a hook on the embedding in model_init",
    ),
    "use_liger_kernel": (
        "models are not patched",
        "patch in model_init, or give a fused_loss_factory",
    ),
    "liger_kernel_config": (
        "models are not patched",
        "patch in model_init, or give a fused_loss_factory",
    ),
    "optim_target_modules": (
        "for low-rank optimizers only",
        "use optimizer_groups or optimizer_factory",
    ),
    "adam_bias_correction": ("torch's AdamW has no such switch", "use optimizer_factory"),
    "debug": ("no such debugging modes", "set detect_anomaly, or add a DivergenceDetector"),
    "log_on_each_node": ("levels are set by rank", "set log_level and log_level_replica"),
    "low_cpu_mem_usage": ("the place of construction is said otherwise", "set construct_model_on"),
    "optim_target_precision": (
        "no such low-precision optimizers",
        "set fp8_recipe or mixed_precision",
    ),
    "profile": ("no built-in profiler", "use torch.profiler in a callback of your own"),
    "dataloader_seed": ("the order of the data has another argument", "set data_seed"),
    "early_stopping_patience": ("stopping early is a callback's", "add an EarlyStopping callback"),
    "parallelism_config": (
        "no other parallelism than that of the trainer",
        "use FSDP2Trainer or PipelineTrainer",
    ),
}

# Values that Hugging Face's own dumps hold for a name nobody set. None is one of them everywhere.
HF_DEFAULTS: dict[str, tuple[Any, ...]] = {
    # aliases and names of one trainer
    "bf16": (False,),
    "fp16": (False,),
    "warmup_ratio": (0.0,),
    "lr": (5e-5,),
    "evaluation_strategy": ("no",),
    "no_cuda": (False,),
    "adafactor": (False,),
    "fsdp": ("", [], False),
    "split_batches": (False,),
    "fsdp_config": (
        {},
        "",
        {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False},
    ),
    # no effect
    "do_train": (False,),
    "do_eval": (False,),
    "do_predict": (False,),
    "local_rank": (-1,),
    "use_mps_device": (False,),
    "skip_memory_metrics": (True,),
    "include_tokens_per_second": (False,),
    "average_tokens_across_devices": (True, False),
    "project": ("huggingface",),
    "trackio_space_id": ("trackio",),
    # rejected
    "deepspeed": ("",),
    "sharded_ddp": ("", []),
    "fsdp_min_num_params": (0,),
    "mp_parameters": ("",),
    "tpu_metrics_debug": (False,),
    "use_ipex": (False,),
    "jit_mode_eval": (False,),
    "ray_scope": ("last",),
    "past_index": (-1,),
    "fp16_backend": ("auto",),
    "half_precision_backend": ("auto",),
    "fp16_opt_level": ("O1",),
    "bf16_full_eval": (False,),
    "fp16_full_eval": (False,),
    "push_to_hub": (False,),
    "hub_strategy": ("every_save",),
    "hub_token": ("<HUB_TOKEN>",),
    "push_to_hub_token": ("<PUSH_TO_HUB_TOKEN>",),
    "hub_always_push": (False,),
    "group_by_length": (False,),
    "length_column_name": ("length",),
    "sortish_sampler": (False,),
    "remove_unused_columns": (
        False,
    ),  # theirs is True, which is refused all the same: columns are not removed
    "prediction_loss_only": (False,),
    "include_inputs_for_metrics": (False,),
    "include_for_metrics": ([],),
    "batch_eval_metrics": (False,),
    "eval_do_concat_batches": (True,),
    "eval_use_gather_object": (False,),
    "predict_with_generate": (False,),
    "auto_find_batch_size": (False,),
    "use_liger_kernel": (False,),
    "adam_bias_correction": (True,),
    "debug": ("", []),
    "log_on_each_node": (True,),
    "low_cpu_mem_usage": (True,),
    "profile": (False,),
}

# Native names that Hugging Face leaves unset: None there is no value, and leaves the default of
# this project.
UNSET_IN_HF = frozenset(
    {
        "eval_steps",
        "metric_for_best_model",
        "resume_from_checkpoint",
        "lr_scheduler_kwargs",
        "include_num_input_tokens_seen",
        "report_to",
        "logging_steps",
        "save_steps",
        "warmup_ratio",
        "dispatch_batches",
        "ddp",
        "post_local_sgd",
        "fsdp2",
    }
)

# Keys that the Accelerator's loader configuration is known to have, and the default of each.
ACCELERATOR_KEYS = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
}
# Keys of Hugging Face's accelerator_config that are no setting of a loader: accepted where they say
# nothing.
ACCELERATOR_ELSEWHERE = {"gradient_accumulation_kwargs": None, "use_configured_state": False}

# lr_scheduler_type -> its own lr_scheduler_kwargs with their defaults.
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {"num_cycles": 1},
    "constant": {},
    "constant_with_warmup": {},
    "polynomial": {"power": 1.0},
}

OPTIMIZERS = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
    "adafactor",
    "sgd",
    "adagrad",
    "rmsprop",
)

# Package that an optimizer needs, and what could be used instead: names.
_OPTIMIZERS_OF = {
    ("torch_xla", "adamw_torch"): "adamw_torch_xla",
    ("torch_npu", "adamw_torch_fused"): "adamw_torch_npu_fused",
    ("apex", "adamw_torch_fused"): "adamw_apex_fused",
    ("torchdistx", "adamw_torch"): "adamw_anyprecision",
    (
        "bitsandbytes",
        "adamw_torch_8bit",
    ): "adamw_bnb_8bit adamw_8bit paged_adamw_32bit paged_adamw_8bit",
    ("bitsandbytes", ""): "lion_32bit lion_8bit paged_lion_32bit paged_lion_8bit "
    "rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit",
    ("bitsandbytes >= 0.44", ""): "ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit",
    ("schedulefree", ""): "schedule_free_adamw schedule_free_radam schedule_free_sgd",
    ("galore_torch", ""): "galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise "
    "galore_adamw_8bit_layerwise galore_adafactor_layerwise",
    ("apollo_torch", ""): "apollo_adamw apollo_adamw_layerwise",
    ("lomo-optim", ""): "lomo adalomo",
    ("grokadamw", ""): "grokadamw",
    ("torch-optimi and torchdistx", ""): "stable_adamw",
}

# Name -> (reason, what to use besides optimizer_factory).
REJECTED_OPTIMIZERS = {
    name: (f"needs the package {package}, which is not used here", instead)
    for (package, instead), names in _OPTIMIZERS_OF.items()
    for name in names.split()
} | {"adamw_hf": ("removed upstream", "adamw_torch")}


def at_default(name: str, value: object) -> bool:
    """Is this what a dump of Hugging Face's arguments holds for a name that nobody set?"""
    if value is None:
        return True
    return any(
        type(value) is type(default) and value == default for default in HF_DEFAULTS.get(name, ())
    )
