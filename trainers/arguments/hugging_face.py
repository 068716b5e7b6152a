"""Hugging Face's names that are no native arguments, and what becomes of each: one table, in
hugging_face.txt.

A name stands for a native argument, has no effect, or is refused with its replacement. With the
value that a dump of untouched arguments holds for it, it is never refused and never remarked on.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .errors import InvalidArgument, raise_any

Kind = Literal["alias", "no effect", "refused"]


@dataclass(frozen=True)
class Name:
    """A name of Hugging Face's.

    target: the native argument that an alias sets. values: what its values mean there, where they
    are not the same. reason: why it has no effect, or is refused. instead: what to use.
    untouched: values that say nothing; None is one of them always.
    """

    name: str
    kind: Kind
    untouched: Sequence[Any]
    target: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    reason: str = ""
    instead: str = ""

    def is_untouched(self, value: object) -> bool:
        return value is None or any(_same(value, default) for default in self.untouched)


def _same(value: object, default: object) -> bool:
    """Equal and of one type; a mapping also where it holds a part of the default."""
    if isinstance(value, Mapping) and isinstance(default, Mapping):
        return all(key in default and _same(value[key], default[key]) for key in value)
    return type(value) is type(default) and value == default


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
# Those whose values change nothing, and why.
_ACCELERATOR_SILENT = {
    "even_batches": "no sample comes twice, and all ranks take equally many steps, with either",
    "non_blocking": "copies to the device never block",
    "use_stateful_dataloader": "a run goes on in the middle of an epoch with either",
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
_UNTOUCHED: dict[str, list[Any]] = {
    "accelerator_config": [_ACCELERATOR_UNTOUCHED],
    "fsdp_config": ["", _FSDP_UNTOUCHED],
}
_LAYERS = "set fsdp2.transformer_layers_path"


def _read_table() -> Iterator[Name]:
    table = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    for line in table.splitlines():
        if line.startswith("#"):
            continue
        name, untouched, what, more = [*map(str.strip, line.split("|")), ""][:4]
        silent = ast.literal_eval(f"[{untouched}]") + _UNTOUCHED.get(name, [])
        kind, what_for = _KINDS.get(what[0], "refused"), what.lstrip("=~ ")
        if kind != "alias":
            yield Name(name, kind, silent, reason=what_for, instead=more)
        elif ":" in more:
            values = ast.literal_eval(f"{{{more}}}")
            yield Name(name, kind, silent, target=what_for, values=values)
        else:
            yield Name(name, kind, silent, target=what_for, reason=more)


_KINDS: dict[str, Kind] = {"=": "alias", "~": "no effect"}
NAMES = {row.name: row for row in _read_table()}

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


def wishes(row: Name, value: Any) -> Iterator[Wish]:
    """What an alias asks for. Raises InvalidArgument for what cannot be asked for."""
    name = row.name
    if name == "fsdp":
        yield from _wishes_of_fsdp(value)
    elif name == "fsdp_config":
        yield from _wishes_of_fsdp_config(_read_mapping(name, value))
    elif name == "accelerator_config":
        yield Wish(name, value, name, _read_mapping(name, value))
    elif row.values:
        meaning = next((to for given, to in row.values.items() if _same(value, given)), None)
        if meaning is not None:
            yield Wish(name, value, row.target, meaning)
        elif not isinstance(value, bool):
            reason = f"is of type {type(value).__name__}"
            raise InvalidArgument(name, value, reason, "give True or False")
    else:
        yield Wish(name, value, row.target, value)
        if name == "torchdynamo":
            yield Wish(name, value, "torch_compile", True)


def _wishes_of_fsdp(value: Any) -> Iterator[Wish]:
    words = ["full_shard"] if value is True else value.split() if isinstance(value, str) else value
    instead = "give full_shard, shard_grad_op, hybrid_shard, offload, auto_wrap, or set fsdp2"
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InvalidArgument("fsdp", value, f"is of type {type(value).__name__}", instead)
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    meanings: dict[str, tuple[str, Any]] = {
        "full_shard": ("reshard_after_forward", True),
        "shard_grad_op": ("reshard_after_forward", False),
        "hybrid_shard": ("reshard_after_forward", int(local) if local.isdigit() else None),
        "offload": ("cpu_offload", True),
        "auto_wrap": ("shard_transformer_layers", True),
    }
    faults = []
    for word in words:
        target, meaning = meanings.get(word, ("", None))
        reason = "unknown"
        if word == "no_shard":
            reason, instead = "nothing would be sharded", "use DDPTrainer"
        elif target and meaning is None:
            reason = "the launcher does not say the ranks per node (LOCAL_WORLD_SIZE)"
            instead = "set fsdp2.reshard_after_forward to their number"
        elif target:
            yield Wish(f"fsdp={word}", meaning, f"fsdp2.{target}", meaning, firm=True)
            continue
        faults.append(InvalidArgument("fsdp", word, reason, instead))
    raise_any(faults)


def _wishes_of_fsdp_config(config: Mapping[str, Any]) -> Iterator[Wish]:
    faults = []
    for key, inner in config.items():
        name, shown = key.removeprefix("fsdp_"), f"fsdp_config.{key}"
        if inner is None or inner == "" or _same(inner, _FSDP_UNTOUCHED.get(name)):
            continue
        reason, instead = "FSDP2Trainer has no such setting", "leave it out, or set fsdp2"
        if name in ("reshard_after_forward", "cpu_offload"):
            yield Wish(shown, inner, f"fsdp2.{name}", inner, firm=True)
            continue
        if name == "activation_checkpointing":
            if inner is True:
                yield Wish(shown, inner, "gradient_checkpointing", True)
            if isinstance(inner, bool):
                continue
            reason, instead = f"is of type {type(inner).__name__}", "give True or False"
        elif name == "version":
            if _same(inner, 2):
                continue
            reason, instead = "only FSDP2 is supported", "set version 2, or leave it out"
        elif name in ("min_num_params", "transformer_layer_cls_to_wrap"):
            reason, instead = "modules are not wrapped by size or class", _LAYERS
        faults.append(InvalidArgument(shown, inner, reason, instead))
    raise_any(faults)


def accelerator_silent(settings: Mapping[str, Any]) -> Iterator[str]:
    """Settings that are not at their default, and change nothing."""
    for name, why in _ACCELERATOR_SILENT.items():
        default = _ACCELERATOR_UNTOUCHED.get(name, False)
        if settings.get(name, default) is not default:
            yield f"accelerator_config.{name} ({why})"


def accelerator_faults(settings: Mapping[str, Any]) -> Iterator[InvalidArgument]:
    """Settings of the Accelerator's loaders that AccelTrainer cannot follow."""
    for name, value in settings.items():
        allowed = ACCELERATOR.get(name)
        if allowed is not None and any(_same(value, one) for one in allowed):
            continue
        if allowed is None:
            reason = "AccelTrainer's loaders have no such setting"
            instead = f"there are {', '.join(ACCELERATOR)}"
        else:
            reason = "not supported" if value else "AccelTrainer's loaders always do it"
            if not isinstance(value, bool):
                reason = f"is of type {type(value).__name__}"
            choices = " or ".join(map(str, allowed))
            instead = f"give {choices}" if choices else "leave it out"
        yield InvalidArgument(f"accelerator_config.{name}", value, reason, instead)


def _read_mapping(name: str, value: Any) -> dict[str, Any]:
    """A mapping given as such, as JSON or the path of it, or as an object with fields. Raises
    InvalidArgument."""
    instead = "give a mapping or the path of a JSON file"
    if isinstance(value, str):
        try:
            inline = value.lstrip().startswith("{")
            value = json.loads(value if inline else Path(value).read_text(encoding="utf-8"))
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
            raise InvalidArgument(name, value, reason, instead) from None
        except ValueError as error:
            raise InvalidArgument(name, value, f"is not JSON: {error}", instead) from None
    elif (
        hasattr(value, "__dict__") and not isinstance(value, Mapping | type) and not callable(value)
    ):
        value = vars(value)
    if not isinstance(value, Mapping):
        raise InvalidArgument(name, value, f"is of type {type(value).__name__}", instead)
    return {str(key): inner for key, inner in value.items()}
