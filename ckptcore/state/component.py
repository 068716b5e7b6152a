"""What users declare: components of a training state, and who shares each of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol, runtime_checkable

from ..errors import InvalidState

__all__ = ["OnResize", "SharingPattern", "StateComponent", "Stateful", "StatefulProvider", "ValidationLevel"]


class SharingPattern(StrEnum):
    """Who holds which part of a component's state."""

    GLOBAL = "GLOBAL"  # rank 0's state is the truth
    REPLICATED = "REPLICATED"  # all ranks hold identical state
    PER_RANK = "PER_RANK"  # every rank has its own
    PER_GROUP = "PER_GROUP"  # identical within each group of a partition
    PER_NODE = "PER_NODE"  # one state per node: that of its lowest rank
    SHARDED = "SHARDED"  # one logical state; each rank holds some keys and slices


class ValidationLevel(StrEnum):
    """How closely replicas are compared before a save."""

    NONE = "NONE"
    QUICK = "QUICK"
    TENSOR = "TENSOR"
    FULL = "FULL"


@runtime_checkable
class Stateful(Protocol):
    """Anything with torch's state protocol: modules, optimizers, schedulers, loaders, scalers, your own."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


OnResize = Literal["error", "keep"] | Callable[[int, int, int], int]


@dataclass(slots=True)
class StateComponent:
    """One named part of the state.

    process_group_name: for PER_GROUP, the group across which the state is the same. group_key: this rank's name for
    its group, by which it is found again when the groups are numbered otherwise. validation_level: how closely
    replicas are compared at a save; validate_replication: whether at all, by default for REPLICATED, PER_GROUP and
    SHARDED. atol, rtol: what FULL validation lets pass. on_resize: what happens to state that belongs to a rank, node
    or group when their number changed: "error", "keep" (live state stays, with a warning), or a function (new rank,
    new size, old size) -> old rank. required: a load may not lack it.
    Raises InvalidState for a key that cannot name files, or a group that is missing or not used.
    """

    key: str
    stateful: Any
    sharing_pattern: SharingPattern = SharingPattern.GLOBAL
    process_group_name: str | None = None
    required: bool = True
    validate_replication: bool | None = None
    validation_level: ValidationLevel = ValidationLevel.QUICK
    on_resize: OnResize = "error"
    group_key: str | None = None
    atol: float = 0.0
    rtol: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not self.key or len(self.key.encode("utf-8", "replace")) > 80:
            raise InvalidState(f"component key {self.key!r} must be a text of 1 to 80 bytes", component=str(self.key))
        if "/" in self.key or not self.key.isprintable():
            raise InvalidState(f"component key {self.key!r} must be printable and without '/'", component=self.key)
        self.sharing_pattern = SharingPattern(self.sharing_pattern)
        self.validation_level = ValidationLevel(self.validation_level)
        grouped = self.sharing_pattern is SharingPattern.PER_GROUP
        if grouped != (self.process_group_name is not None):
            need = "needs" if grouped else f"is {self.sharing_pattern.value}, and only PER_GROUP has"
            raise InvalidState(f"component {self.key!r} {need} a process_group_name", component=self.key)
        for text in (self.process_group_name, self.group_key):
            if text is not None and not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", text):
                raise InvalidState(
                    f"component {self.key!r}: {text!r} must be 1 to 64 letters, digits, '_', '-' or '.'",
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


@runtime_checkable
class StatefulProvider(Protocol):
    """An object that knows its own components; every trainer is one."""

    def get_state_components(self) -> Sequence[StateComponent]: ...

    def get_process_groups(self) -> Mapping[str, Any]: ...
