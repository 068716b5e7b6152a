"""Who shares a part of the state, said where the part stands in a dict."""

from __future__ import annotations

from typing import Any, ClassVar

from ..arguments import check_name, shown
from ..errors import InvalidState

# What else a StateComponent takes, beside its key, its state and who shares it.
_OPTIONS = frozenset(
    {
        "atol",
        "group_key",
        "ignore",
        "metadata",
        "on_resize",
        "required",
        "rtol",
        "validate_replication",
        "validation_level",
    }
)


class Declared:
    """A part of a state and who shares it; its key in the dict is its name."""

    pattern: ClassVar[str] = "GLOBAL"

    def __init__(self, stateful: Any, **options: Any) -> None:
        self.word, self.stateful, self.options = type(self).__name__, stateful, options
        if isinstance(stateful, Declared):
            raise InvalidState(
                f"{self.word}(...) is given {stateful.word}(...): say once who shares it"
            )
        if unknown := sorted(options.keys() - _OPTIONS):
            raise InvalidState(
                f"{self.word}(...) takes no {unknown[0]!r}; beside the object it takes "
                f"{', '.join(sorted(_OPTIONS))}"
            )

    def __repr__(self) -> str:
        return f"{self.word}({shown(self.stateful)})"

    @property
    def declared(self) -> dict[str, Any]:
        """All that it says of a StateComponent."""
        return {"sharing_pattern": self.pattern, **self.options}


class Global(Declared):
    """In a dict of state: rank 0's state is the one that counts, `{"log": Global(log)}`.

    stateful: object with `state_dict()` and `load_state_dict()`, module, optimizer, or plain values
        and tensors.
    **options: what StateComponent takes besides, such as `required=False`.

    Raises InvalidState for an option that there is not.
    """


class Replicated(Declared):
    """In a dict of state: all ranks hold the same, `{"ema": Replicated(ema)}`.

    stateful: object with `state_dict()` and `load_state_dict()`, module, optimizer, or plain values
        and tensors.
    **options: what StateComponent takes besides, such as `validation_level="full"`.

    Raises InvalidState for an option that there is not.
    """

    pattern = "REPLICATED"


class PerRank(Declared):
    """In a dict of state: every rank has its own, `{"loader": PerRank(loader, on_resize="keep")}`.

    stateful: object with `state_dict()` and `load_state_dict()`, module, optimizer, or plain values
        and tensors.
    **options: what StateComponent takes besides, such as `on_resize="keep"`.

    Raises InvalidState for an option that there is not.
    """

    pattern = "PER_RANK"


class PerNode(Declared):
    """In a dict of state: one for each node, that of its lowest rank, `{"cache": PerNode(cache)}`.

    stateful: object with `state_dict()` and `load_state_dict()`, module, optimizer, or plain values
        and tensors.
    **options: what StateComponent takes besides, such as `on_resize="keep"`.

    Raises InvalidState for an option that there is not.
    """

    pattern = "PER_NODE"


class Sharded(Declared):
    """In a dict of state: each rank holds some keys, or slices of tensors, of one state,
    `{"table": Sharded(table)}`.

    stateful: object with `state_dict()` and `load_state_dict()`, module, optimizer, or plain values
        and tensors.
    **options: what StateComponent takes besides.

    Raises InvalidState for an option that there is not.
    """

    pattern = "SHARDED"


class PerGroup(Declared):
    """In a dict of state: the same in each group of ranks, and another in each,
    `{"loader": PerGroup(loader, "tp")}`.

    stateful: object with `state_dict()` and `load_state_dict()`, module, optimizer, or plain values
        and tensors.
    group: text, name of the process group across which the state is the same; see
        `process_groups` of CheckpointManager.
    **options: what StateComponent takes besides, such as `group_key`.

    Raises InvalidState for a group that is no name, and an option that there is not.
    """

    pattern = "PER_GROUP"

    def __init__(self, stateful: Any, group: str, **options: Any) -> None:
        self.group = check_name("group", group)
        super().__init__(stateful, **options)

    @property
    def declared(self) -> dict[str, Any]:
        return {**super().declared, "process_group_name": self.group}
