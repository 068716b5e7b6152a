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

from .errors import InvalidArgument

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
        if isinstance(value, Mapping):
            rows = [INSIDE.get(self.inside(key)) for key in value]
            each = zip(rows, value.values(), strict=True)
            return all(row is not None and row.is_untouched(inner) for row, inner in each)
        return value is None or any(_same(value, default) for default in self.untouched)

    def inside(self, key: Any) -> str:
        """The name of what is inside its value, in `INSIDE`."""
        return f"{self.name}.{str(key).removeprefix('fsdp_')}"


def _same(value: object, default: object) -> bool:
    return type(value) is type(default) and value == default


def _read_table() -> Iterator[Name]:
    table = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
    for line in table.splitlines():
        if line.startswith("#"):
            continue
        name, untouched, what, more = [*map(str.strip, line.split("|")), ""][:4]
        silent = ast.literal_eval(f"[{untouched}]")
        kind, what_for = _KINDS.get(what[0], "refused"), what.lstrip("=~ ")
        if kind != "alias":
            yield Name(name, kind, silent, reason=what_for, instead=more)
        elif ":" in more:
            values = ast.literal_eval(f"{{{more}}}")
            yield Name(name, kind, silent, target=what_for, values=values)
        else:
            yield Name(name, kind, silent, target=what_for, reason=more)


_KINDS: dict[str, Kind] = {"=": "alias", "~": "no effect"}
_TABLE = {row.name: row for row in _read_table()}
INSIDE = {name: row for name, row in _TABLE.items() if "=" in name or "." in name}
NAMES = {name: row for name, row in _TABLE.items() if name not in INSIDE}

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


Wishes = Iterator[Wish | InvalidArgument]
_FLAG = "give True or False"


def wishes(row: Name, value: Any) -> Wishes:
    """What an alias asks for, and what of it cannot be asked for."""
    name = row.name
    if name == "fsdp":
        yield from _wishes_of_fsdp(value)
    elif name in ("fsdp_config", "accelerator_config"):
        found = _read_mapping(name, value)
        if isinstance(found, InvalidArgument):
            yield found
        elif name == "fsdp_config":
            yield from _wishes_of_fsdp_config(row, found)
        else:
            yield Wish(name, value, name, found)
    elif not row.values:
        yield Wish(name, value, row.target, value)
        if name == "torchdynamo":
            yield Wish(name, value, "torch_compile", True)
    elif not isinstance(value, bool):
        yield InvalidArgument(name, value, f"is of type {type(value).__name__}", _FLAG)
    elif value in row.values:
        yield Wish(name, value, row.target, row.values[value])


def _wishes_of_fsdp(value: Any) -> Wishes:
    words = ["full_shard"] if value is True else value.split() if isinstance(value, str) else value
    instead = "give full_shard, shard_grad_op, hybrid_shard, offload, auto_wrap, or set fsdp2"
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        yield InvalidArgument("fsdp", value, f"is of type {type(value).__name__}", instead)
        return
    for word in words:
        row = INSIDE.get(f"fsdp={word}")
        meaning = None if row is None else row.values.get(True)
        if word == "hybrid_shard" and (ranks := os.environ.get("LOCAL_WORLD_SIZE", "")).isdigit():
            meaning = int(ranks)
        if row is not None and meaning is not None:
            yield Wish(row.name, meaning, row.target, meaning, firm=True)
        elif word == "hybrid_shard":
            reason = "the launcher does not say the ranks per node (LOCAL_WORLD_SIZE)"
            other = "set fsdp2.reshard_after_forward to their number"
            yield InvalidArgument("fsdp", word, reason, other)
        else:
            reason, other = ("unknown", instead) if row is None else (row.reason, row.instead)
            yield InvalidArgument("fsdp", word, reason, other)


def _wishes_of_fsdp_config(of: Name, config: Mapping[str, Any]) -> Wishes:
    for key, value in config.items():
        row, shown = INSIDE.get(of.inside(key)), f"fsdp_config.{key}"
        silent = value in (None, "") or (row is not None and row.is_untouched(value))
        if silent or (key in ("version", "fsdp_version") and _same(value, 2)):
            continue
        if row is None or row.kind != "alias":
            row = row or INSIDE["fsdp_config.xla"]  # which says what all others do
            yield InvalidArgument(shown, value, row.reason, row.instead)
        elif row.values and not isinstance(value, bool):
            yield InvalidArgument(shown, value, f"is of type {type(value).__name__}", _FLAG)
        else:
            yield Wish(shown, value, row.target, value, firm=not row.values)


def accelerator_silent(settings: Mapping[str, Any]) -> Iterator[str]:
    """Settings that are not at their default, and change nothing."""
    for name, value in settings.items():
        row = INSIDE.get(f"accelerator_config.{name}")
        if row is not None and row.kind == "no effect" and not row.is_untouched(value):
            yield f"{row.name} ({row.reason})"


def accelerator_faults(settings: Mapping[str, Any]) -> Iterator[InvalidArgument]:
    """Settings of the Accelerator's loaders that AccelTrainer cannot follow."""
    for name, value in settings.items():
        shown, is_flag = f"accelerator_config.{name}", isinstance(value, bool)
        row = INSIDE.get(shown)
        if row is None:
            known = [each.rpartition(".")[2] for each in INSIDE if each.startswith("accelerator")]
            reason = "AccelTrainer's loaders have no such setting"
            yield InvalidArgument(shown, value, reason, f"there are {', '.join(known)}")
        elif not row.is_untouched(value) and not (is_flag and row.kind != "refused"):
            reason = row.reason if is_flag else f"is of type {type(value).__name__}"
            yield InvalidArgument(shown, value, reason, row.instead or _FLAG)


def _read_mapping(name: str, value: Any) -> dict[str, Any] | InvalidArgument:
    """A mapping given as such, as JSON or its path, or as an object; or why it is none."""
    reason = ""
    if isinstance(value, str):
        try:
            inline = value.lstrip().startswith("{")
            value = json.loads(value if inline else Path(value).read_text(encoding="utf-8"))
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
        except ValueError as error:
            reason = f"is not JSON: {error}"
    elif not (isinstance(value, Mapping | type) or callable(value)) and hasattr(value, "__dict__"):
        value = vars(value)
    if reason or not isinstance(value, Mapping):
        reason = reason or f"is of type {type(value).__name__}"
        instead = "give a mapping or the path of a JSON file"
        return InvalidArgument(name, value, reason, instead)
    return {str(key): inner for key, inner in value.items()}
