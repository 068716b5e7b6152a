"""Everything that this package raises or warns with.

CheckpointError(Exception)
├── CheckpointNotFound        (FileNotFoundError)  no checkpoint at this location or step
│   └── NoUsableCheckpoint                         there are checkpoints, and none can be restored
├── CheckpointExists          (FileExistsError)    something is in the way
├── CheckpointCorrupt         (ValueError)         bytes are not those that were saved
│   └── UnsafePath                                 a path in a manifest that leaves its checkpoint
├── UnsupportedVersion        (ValueError)         written by a newer major version of the format
├── UnknownName               (KeyError, IndexError)  no such component, copy or tensor
├── UnsupportedValue          (TypeError)          a leaf that cannot be stored; nothing was written
├── InvalidState              (ValueError)         an argument or the state is not valid
│   └── InvalidArgument                            an argument is not, whatever the state is
├── StateMismatch             (ValueError)         checkpoint and live state do not match
│   └── LoadFailed                                 found by the component itself, in its load
├── ReplicationMismatch       (ValueError)         state declared equal differs between ranks
├── CoordinationError         (RuntimeError)       the ranks did not act as one
│   ├── JoinTimeout           (TimeoutError)       a rank did not make the call
│   ├── RankLost                                   a rank's heartbeat stopped
│   └── RanksDisagree                              ranks called with different steps or plans
├── RankFailed                (RuntimeError)       another rank failed; causes by rank
├── AsyncSaveError            (RuntimeError)       a background save failed
└── StorageError              (OSError)            the storage refused an operation
    └── NoSpace                                    ... because it is full

CheckpointWarning(UserWarning)                     what was skipped, kept or not deleted

Every error carries its facts as attributes (see each class), so callers never parse messages.
"""

from __future__ import annotations

import errno
from typing import Any, ClassVar

__all__ = [
    "AsyncSaveError",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointNotFound",
    "CheckpointWarning",
    "CoordinationError",
    "InvalidArgument",
    "InvalidState",
    "JoinTimeout",
    "LoadFailed",
    "NoSpace",
    "NoUsableCheckpoint",
    "RankFailed",
    "RankLost",
    "RanksDisagree",
    "ReplicationMismatch",
    "StateMismatch",
    "StorageError",
    "UnknownName",
    "UnsafePath",
    "UnsupportedValue",
    "UnsupportedVersion",
]


class CheckpointWarning(UserWarning):
    """Something was skipped, kept or left behind; training goes on."""


class CheckpointError(Exception):
    """Base of all errors of this package. Keyword arguments become attributes.

    Attributes that a class names in `facts` always exist; they are None when they do not apply.
    `causes` maps each rank where the operation failed to what failed there; None on a single
    process.
    """

    facts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.causes: dict[int, str] | None = facts.pop("causes", None)
        for name in self.facts:
            setattr(self, name, facts.pop(name, None))
        if facts:
            raise TypeError(f"{type(self).__name__} has no fact named {', '.join(sorted(facts))}")

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Built by keyword, so that errors cross process boundaries (multiprocessing, launchers).
        facts = {name: getattr(self, name) for name in (*self.facts, "causes")}
        return _rebuild, (type(self), self.message, facts)


def _rebuild(kind: type[CheckpointError], message: str, facts: dict[str, Any]) -> CheckpointError:
    return kind(message, **facts)


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """No checkpoint at this location or step."""

    facts: ClassVar[tuple[str, ...]] = ("path", "step", "available")
    path: str | None
    step: int | None
    available: list[int] | None


class NoUsableCheckpoint(CheckpointNotFound):
    """The root holds checkpoints and none of them can be restored; `reasons` maps name to why."""

    facts: ClassVar[tuple[str, ...]] = ("path", "step", "available", "reasons")
    reasons: dict[str, str] | None


class CheckpointExists(CheckpointError, FileExistsError):
    """A committed checkpoint, or files that are not ours, stand where one is to be written."""

    facts: ClassVar[tuple[str, ...]] = ("path", "step")
    path: str | None
    step: int | None


class CheckpointCorrupt(CheckpointError, ValueError):
    """The bytes are not those that were saved. `kind` is "missing", "size", "digest", "header" or
    "format"."""

    facts: ClassVar[tuple[str, ...]] = ("path", "file", "kind", "tensor", "expected", "actual")
    path: str | None
    file: str | None
    kind: str | None
    tensor: str | None
    expected: str | int | None
    actual: str | int | None


class UnsafePath(CheckpointCorrupt):
    """A file name in a manifest is not a plain name inside the checkpoint."""


class UnknownName(CheckpointError, KeyError, IndexError):
    """The checkpoint has no component, copy or tensor of this name; `available` are those that it
    has."""

    facts: ClassVar[tuple[str, ...]] = ("path", "key", "available")
    path: str | None
    key: str | None
    available: list[str] | None


class UnsupportedVersion(CheckpointError, ValueError):
    """The checkpoint was written by a newer major version of the format."""

    facts: ClassVar[tuple[str, ...]] = ("path", "found", "supported")
    path: str | None
    found: str | None
    supported: str | None


class UnsupportedValue(CheckpointError, TypeError):
    """A leaf of the state cannot be stored. Raised before any byte is written."""

    facts: ClassVar[tuple[str, ...]] = ("component", "key", "type_name")
    component: str | None
    key: str | None
    type_name: str | None


class InvalidState(CheckpointError, ValueError):
    """The state, its component keys, or what was declared about them are not valid."""

    facts: ClassVar[tuple[str, ...]] = ("component", "key", "ranks")
    component: str | None
    key: str | None
    ranks: list[int] | None


class InvalidArgument(InvalidState):
    """What was passed in is not valid, whatever the state is: a usage error."""


class StateMismatch(CheckpointError, ValueError):
    """Checkpoint and live state do not fit together; live state was not touched, unless it is a
    LoadFailed.

    missing: full names that the live state has and the checkpoint lacks.
    unexpected: full names that the checkpoint has and the live state lacks.
    mismatched: full name -> (what the checkpoint holds, what the live state holds).
    """

    facts: ClassVar[tuple[str, ...]] = ("path", "missing", "unexpected", "mismatched")
    path: str | None
    missing: list[str] | None
    unexpected: list[str] | None
    mismatched: dict[str, tuple[str, str]] | None


class LoadFailed(StateMismatch):
    """A component refused the state that it was handed, on `rank`; its own error is the
    `__cause__`.

    overwritten: keys of the components that are not what they were, or not in whole. With
    transactional=True they were put back; the message says so.
    """

    facts: ClassVar[tuple[str, ...]] = (*StateMismatch.facts, "component", "rank", "overwritten")
    component: str | None
    rank: int | None
    overwritten: list[str] | None


class ReplicationMismatch(CheckpointError, ValueError):
    """State that was declared equal differs between ranks. Raised on every rank."""

    facts: ClassVar[tuple[str, ...]] = ("component", "keys", "ranks", "details")
    component: str | None
    keys: list[str] | None
    ranks: list[int] | None
    details: dict[str, Any] | None


class CoordinationError(CheckpointError, RuntimeError):
    """The ranks did not act as one."""

    facts: ClassVar[tuple[str, ...]] = ("ranks", "step")
    ranks: list[int] | None
    step: int | None


class JoinTimeout(CoordinationError, TimeoutError):
    """The ranks named did not make the call that must be made on every rank."""


class RankLost(CoordinationError):
    """The heartbeat of the ranks named stopped."""


class RanksDisagree(CoordinationError):
    """The ranks called with different steps, paths or plans."""


class RankFailed(CheckpointError, RuntimeError):
    """An operation failed on some rank with an error that is not ours; `causes` says where and
    how."""


class AsyncSaveError(CheckpointError, RuntimeError):
    """A background save failed; its own error is the `__cause__`."""

    facts: ClassVar[tuple[str, ...]] = ("step",)
    step: int | None


class StorageError(CheckpointError, OSError):
    """The storage refused an operation. `errno` is that of the operating system where there is
    one."""

    facts: ClassVar[tuple[str, ...]] = ("path", "errno", "needed", "free")
    path: str | None
    needed: int | None
    free: int | None


class NoSpace(StorageError):
    """The storage is full. `needed` and `free` are bytes; None where the storage does not say."""

    def __init__(self, message: str, **facts: Any) -> None:
        facts.setdefault("errno", errno.ENOSPC)
        super().__init__(message, **facts)
