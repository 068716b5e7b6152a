"""What users declare: components of a training state, and who shares each of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, Self, runtime_checkable

from ..arguments import check_flag, check_mapping, check_name, check_number, shown
from ..errors import InvalidState

__all__ = [
    "OnResize",
    "SharingPattern",
    "StateComponent",
    "Stateful",
    "StatefulProvider",
    "ValidationLevel",
]


class _Words(StrEnum):
    """Words that may be written in any case."""

    @classmethod
    def of(cls, value: Any) -> Self:
        """The word that a text is; what is no text is not compared with any."""
        return cls(value) if isinstance(value, str) else cls._missing_(value)

    @classmethod
    def _missing_(cls, value: object) -> Any:
        found = cls.__members__.get(value.upper()) if isinstance(value, str) else None
        if found is None:
            words = ", ".join(repr(member.value) for member in cls)
            raise InvalidState(f"{cls.__name__} must be one of {words}, not {shown(value)}")
        return found


class SharingPattern(_Words):
    """Who holds which part of a component's state. Raises InvalidState for another word."""

    GLOBAL = "GLOBAL"  # rank 0's state is the truth
    REPLICATED = "REPLICATED"  # all ranks hold identical state
    PER_RANK = "PER_RANK"  # every rank has its own
    PER_GROUP = "PER_GROUP"  # identical within each group of a partition
    PER_NODE = "PER_NODE"  # one state per node: that of its lowest rank
    SHARDED = "SHARDED"  # one logical state; each rank holds some keys and slices


class ValidationLevel(_Words):
    """How closely replicas are compared before a save. Raises InvalidState for another word."""

    NONE = "NONE"
    QUICK = "QUICK"
    TENSOR = "TENSOR"
    FULL = "FULL"


@runtime_checkable
class Stateful(Protocol):
    """Anything with torch's state protocol: modules, optimizers, schedulers, loaders, scalers, your
    own."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


RESIZES = ("error", "keep")
OnResize = Literal["error", "keep"] | Callable[[int, int, int], int]


@dataclass(slots=True)
class StateComponent:
    """One named part of the state.

    key: text, its name in the checkpoint and in the names of its files.
    stateful: object with `state_dict()` and `load_state_dict()`, a module, an optimizer, or plain
        values and tensors.
    sharing_pattern: SharingPattern, who shares it (default GLOBAL; in a dict, what the dict's other
        values get).
    process_group_name: text, for PER_GROUP the group across which the state is the same (default
        None).
    required: bool, a load must find it in the checkpoint (default True).
    validate_replication: bool, compare replicas at a save (default None: for REPLICATED, PER_GROUP
        and SHARDED).
    validation_level: ValidationLevel, how closely replicas are compared (default QUICK).
    on_resize: what happens to state of a rank, node or group when their number changed: "error"
        (default), "keep" (live state stays, with a warning), or a function (new rank, new size, old
        size) -> old rank.
    group_key: text, this rank's name for its group, which finds it again when groups are numbered
        otherwise (default None).
    atol: float >= 0, absolute difference that FULL validation lets pass (default 0).
    rtol: float >= 0, relative difference that FULL validation lets pass (default 0).
    metadata: dict of anything that JSON holds, for the manifest (default empty).
    inferred: bool, set by the engine for what was given without a StateComponent (default False).

    Raises InvalidState for a key that cannot name files, a group that is missing or not used, and a
    value of another type.
    """

    key: str
    stateful: Any
    sharing_pattern: SharingPattern = None  # type: ignore[assignment]
    process_group_name: str | None = None
    required: bool = True
    validate_replication: bool | None = None
    validation_level: ValidationLevel = ValidationLevel.QUICK
    on_resize: OnResize = "error"
    group_key: str | None = None
    atol: float = 0.0
    rtol: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)
    # Nobody said the pattern. Not for users to say; it is an argument so that it survives
    # dataclasses.replace.
    inferred: bool = field(default=False, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        _check_key(self.key)
        self.inferred = check_flag("inferred", self.inferred) or self.sharing_pattern is None
        try:
            self._check()
        except InvalidState as error:
            error.component = self.key
            error.message = f"component {self.key!r}: {error.message}"
            raise
        self._check_group()

    def _check(self) -> None:
        pattern = SharingPattern.GLOBAL if self.sharing_pattern is None else self.sharing_pattern
        self.sharing_pattern = SharingPattern.of(pattern)
        self.validation_level = ValidationLevel.of(self.validation_level)
        if isinstance(self.stateful, type):
            raise InvalidState(
                f"its state is the class {self.stateful.__qualname__}; give an object of it"
            )
        check_flag("required", self.required)
        if self.validate_replication is not None:
            check_flag("validate_replication", self.validate_replication)
        if not callable(self.on_resize) and not (
            isinstance(self.on_resize, str) and self.on_resize in RESIZES
        ):
            what = (
                "on_resize must be 'error', 'keep', or a function (new rank, new size, old size) "
                "-> old rank"
            )
            raise InvalidState(f"{what}, not {shown(self.on_resize)}")
        self.atol, self.rtol = check_number("atol", self.atol), check_number("rtol", self.rtol)
        if not isinstance(self.metadata, dict):
            check_mapping("metadata", self.metadata)
            self.metadata = dict(self.metadata or {})

    def _check_group(self) -> None:
        grouped = self.sharing_pattern is SharingPattern.PER_GROUP
        if grouped != (self.process_group_name is not None):
            need = (
                "needs" if grouped else f"is {self.sharing_pattern.value}, and only PER_GROUP has"
            )
            raise InvalidState(
                f"component {self.key!r} {need} a process_group_name", component=self.key
            )
        for text in (self.process_group_name, self.group_key):
            if text is not None and not (
                isinstance(text, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text)
            ):
                raise InvalidState(
                    f"component {self.key!r}: {shown(text)} must be 1 to 64 letters, digits, '_', "
                    "'-' or '.'",
                    component=self.key,
                )

    @property
    def sharded(self) -> bool:
        """Whether slices of tensors are expected in its state."""
        return self.sharing_pattern is SharingPattern.SHARDED

    @property
    def validated(self) -> ValidationLevel:
        """The level at which its replicas are compared."""
        default = self.sharing_pattern.value in ("REPLICATED", "PER_GROUP", "SHARDED")
        wanted = default if self.validate_replication is None else self.validate_replication
        return self.validation_level if wanted else ValidationLevel.NONE


def _check_key(key: Any) -> None:
    if not isinstance(key, str) or not key or len(key.encode("utf-8", "replace")) > 80:
        raise InvalidState(
            f"component key {shown(key)} must be a text of 1 to 80 bytes", component=shown(key)
        )
    if "/" in key or not key.isprintable():
        raise InvalidState(
            f"component key {key!r} must be printable and without '/'", component=key
        )


@runtime_checkable
class StatefulProvider(Protocol):
    """An object that knows its own components; every trainer is one.

    Where it has `get_process_groups() -> Mapping[str, group]`, too, those groups are used.
    """

    def get_state_components(self) -> Sequence[StateComponent]: ...


def process_groups_of(state: Any, given: Any = None) -> dict[str, Any]:
    """Process groups by name: those given, else what a StatefulProvider says; none for None. What
    they are is for the ranks to find out together. Raises InvalidState."""
    if given is None and isinstance(state, StatefulProvider):
        given = getattr(state, "get_process_groups", dict)()
    found = check_mapping("process_groups", given)
    for name in found:
        check_name("process_groups: a name", name)
    return found


def differing_components(first: Sequence[str], other: Sequence[str], rank: int) -> str:
    """How the components of `rank` differ from those of rank 0, in words."""
    only_first = [
        f"component {key!r} is on rank 0 and not on rank {rank}"
        for key in first
        if key not in other
    ]
    only_other = [
        f"component {key!r} is on rank {rank} and not on rank 0"
        for key in other
        if key not in first
    ]
    found = only_first + only_other
    if not found:
        return (
            f"components are {list(first)} on rank 0 and {list(other)} on rank {rank}: the order "
            "counts"
        )
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"components differ: {', '.join(found[:3])}{more}"
