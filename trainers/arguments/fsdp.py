"""Hugging Face's `fsdp` and `fsdp_config`, as values of FSDP2Trainer's `fsdp2`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from .accelerator import read_mapping
from .errors import InvalidArgument
from .vocabulary import at_default

__all__ = ["apply_fsdp"]

_LAYERS = "set fsdp2.transformer_layers_path"
_WORDS = "give full_shard, shard_grad_op, hybrid_shard, offload, auto_wrap, or set fsdp2"

# Keys that FSDP2 has no use for, with the value that says nothing.
_SILENT = {
    "min_num_params": 0,
    "transformer_layer_cls_to_wrap": [],
    "xla": False,
    "xla_fsdp_v2": False,
    "xla_fsdp_grad_ckpt": False,
}


def apply_fsdp(values: dict[str, Any]) -> None:
    """Takes both names out of `values` and puts what they mean into its `fsdp2`."""
    wanted: dict[str, tuple[str, Any]] = {}  # field of fsdp2 -> (who says so, value)

    def want(source: str, name: str, value: Any) -> None:
        if name in wanted and not _same(wanted[name][1], value):
            raise InvalidArgument(
                source, value, f"contradicts {wanted[name][0]}", f"set fsdp2.{name} alone"
            )
        wanted[name] = (source, value)

    for word in _words(values.pop("fsdp", None)):
        name, value = _meaning(word)
        want(f"fsdp={word}", name, value)
    config = values.pop("fsdp_config", None)
    for key, value in read_mapping(
        "fsdp_config", None if at_default("fsdp_config", config) else config
    ).items():
        name = key.removeprefix("fsdp_")
        shown = f"fsdp_config.{key}"
        if value is None or (name in _SILENT and _same(_SILENT[name], value)) or value == "":
            continue
        if name in ("reshard_after_forward", "cpu_offload"):
            want(shown, name, value)
        elif name == "activation_checkpointing":
            if not isinstance(value, bool):
                raise InvalidArgument(
                    shown, value, f"is of type {type(value).__name__}", "give True or False"
                )
            if value:
                values["gradient_checkpointing"] = True
        elif name == "version":
            if value != 2 or isinstance(value, bool):
                raise InvalidArgument(
                    shown, value, "only FSDP2 is supported", "set version 2, or leave it out"
                )
        elif name in ("min_num_params", "transformer_layer_cls_to_wrap"):
            raise InvalidArgument(shown, value, "modules are not wrapped by size or class", _LAYERS)
        else:
            raise InvalidArgument(
                shown, value, "FSDP2Trainer has no such setting", "leave it out, or set fsdp2"
            )
    _merge(values, wanted)


def _merge(values: dict[str, Any], wanted: Mapping[str, tuple[str, Any]]) -> None:
    if not wanted:
        return
    given = values.get("fsdp2", {})
    if is_dataclass(given) and not isinstance(given, type):
        # Of an instance only what differs from the default is known to be meant.
        each = {field.name: (getattr(given, field.name), field.default) for field in fields(given)}
        given = {
            name: value for name, (value, default) in each.items() if not _same(value, default)
        }
    if not isinstance(given, Mapping):
        return  # of the wrong type, which is said when the types are checked
    for name, (source, value) in wanted.items():
        if name in given and not _same(given[name], value):
            raise InvalidArgument(
                source,
                value,
                f"contradicts fsdp2.{name}={given[name]!r}",
                f"give one of the two, best fsdp2.{name}",
            )
    values["fsdp2"] = {**given, **{name: value for name, (_, value) in wanted.items()}}


def _words(value: Any) -> list[str]:
    if at_default("fsdp", value):
        return []
    if value is True:
        return ["full_shard"]
    if isinstance(value, str):
        return value.split()
    if isinstance(value, list | tuple) and all(
        isinstance(word, str) for word in map(_plain, value)
    ):
        return [_plain(word) for word in value]
    raise InvalidArgument("fsdp", value, f"is of type {type(value).__name__}", _WORDS)


def _plain(word: Any) -> Any:
    return getattr(word, "value", word)


def _meaning(word: str) -> tuple[str, Any]:
    if word == "no_shard":
        raise InvalidArgument("fsdp", word, "nothing would be sharded", "use DDPTrainer")
    if word == "hybrid_shard":
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not local.isdigit():
            raise InvalidArgument(
                "fsdp",
                word,
                "the launcher does not say the ranks per node (LOCAL_WORLD_SIZE)",
                "set fsdp2.reshard_after_forward to their number",
            )
        return "reshard_after_forward", int(local)
    meanings: dict[str, tuple[str, Any]] = {
        "full_shard": ("reshard_after_forward", True),
        "shard_grad_op": ("reshard_after_forward", False),
        "offload": ("cpu_offload", True),
        "auto_wrap": ("shard_transformer_layers", True),
    }
    if word not in meanings:
        raise InvalidArgument("fsdp", word, "unknown", _WORDS)
    return meanings[word]


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
