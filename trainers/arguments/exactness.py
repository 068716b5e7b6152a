"""Which arguments change what a run computes. A run resumed with others of these is not the run
that was stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import xxhash

from .errors import InvalidArgument
from .optimizer_options import options_in

# Where a run writes, when it reports and saves, how its memory and its processes are arranged.
_NOT_COMPUTED = """
    output_dir logging_dir run_name overwrite_output_dir resume_from_checkpoint
    on_world_size_change report_to disable_tqdm log_level log_level_replica logging_strategy
    logging_steps logging_first_step logging_nan_inf_filter include_num_input_tokens_seen
    eval_strategy eval_steps eval_delay eval_on_start eval_on_save max_eval_steps
    per_device_eval_batch_size save_strategy save_steps save_total_limit save_safetensors
    save_on_each_node save_only_model save_async enable_jit_checkpoint load_best_model_at_end
    metric_for_best_model greater_is_better preserve_best_model best_model_metric
    best_model_greater_is_better preserve_n_best ignore_data_skip
    restore_callback_states_from_checkpoint dataloader_num_workers dataloader_pin_memory
    dataloader_persistent_workers dataloader_prefetch_factor gradient_checkpointing
    gradient_checkpointing_kwargs enable_activation_offloading torch_empty_cache_steps
    gc_threshold construct_model_on activation_memory_budget dynamo_recompile_limit
    speed_metrics_start_step debug_optimizer_groups detect_anomaly ddp_timeout debug_pipeline
    debug_split_model debug_model_params debug_model_init
"""
NOT_COMPUTED = frozenset(_NOT_COMPUTED.split())


AS_TEXT = object()


def plain(value: Any, not_finite: Any = AS_TEXT) -> Any:
    """As JSON and YAML can hold it: tensors and arrays as numbers or lists, what they lack as text.

    not_finite: in the place of NaN and infinities (default: "NaN", "Infinity", "-Infinity").
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        if not_finite is not AS_TEXT:
            return not_finite
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Enum):
        return plain(value.value, not_finite)
    if is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(inner, not_finite) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner, not_finite) for inner in value]
    return plain(value.tolist(), not_finite) if hasattr(value, "tolist") else str(value)


def rounded(product: float) -> float:
    """Without the last digits of a product of floats, lest 0.07 x 100 be a little more than 7."""
    return round(product, 9)


def computed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some arguments that change the computation, flat: `ddp.static_graph`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in NOT_COMPUTED:
            continue
        if name in ("ddp", "post_local_sgd", "fsdp2") and isinstance(value, Mapping):
            found.update({f"{name}.{inner}": given for inner, given in value.items()})
        elif name == "device":  # which of the GPUs does not matter
            found[name] = None if value is None else str(value).partition(":")[0]
        else:
            found[name] = value
    if isinstance(found.get("optim_args"), str):
        with suppress(InvalidArgument):
            found["optim_args"] = plain(options_in(found["optim_args"]))
    # What another argument overrules does nothing, and some values say the same as others.
    overruled: dict[str, Any] = {"optim_args": None} if not found.get("optim_args") else {}
    overruled |= {"mixed_precision": None} if found.get("mixed_precision") == "no" else {}
    overruled |= {"warmup_ratio": None} if _above_0(found.get("warmup_steps")) else {}
    limited = _above_0(found.get("max_steps"))
    overruled |= {"num_train_epochs": None} if limited else {"max_steps": -1}
    return found | {name: value for name, value in overruled.items() if name in found}


def _above_0(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(computed(values), sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())


def differences(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`name old -> new`, without names that only one has: they are another kind of trainer's."""
    was, live = computed(stored), computed(plain(now))
    return [
        f"{name} {_shown(was[name], stored, name)} -> {_shown(value, now, name)}"
        for name, value in live.items()
        if name in was
        and _differ(was[name], value)
        and _differ(stored.get(name, was[name]), now.get(name, value))
    ]


def _shown(value: Any, values: Mapping[str, Any], name: str) -> str:
    return repr(values.get(name)) if value is None else repr(value)


def _differ(one: Any, other: Any) -> bool:
    return isinstance(one, bool) != isinstance(other, bool) or bool(plain(one) != plain(other))
