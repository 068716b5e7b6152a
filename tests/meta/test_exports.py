"""The public names, and the tree of errors as its docstring draws it."""

from __future__ import annotations

import builtins
import inspect
import pickle
import re

import pytest

import ckptcore
from ckptcore import errors

EXPORTS = [
    "AsyncSaveError",
    "CheckpointCoordinator",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointManifest",
    "CheckpointNotFound",
    "CheckpointView",
    "CheckpointWarning",
    "Communicator",
    "ComponentManifest",
    "CoordinationError",
    "ExportReport",
    "Global",
    "ImportReport",
    "InvalidArgument",
    "InvalidState",
    "JoinTimeout",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "Leftover",
    "LoadFailed",
    "LoadReport",
    "ModelState",
    "NoSpace",
    "NoUsableCheckpoint",
    "Opaque",
    "OptimizerState",
    "PerGroup",
    "PerNode",
    "PerRank",
    "PreemptionGuard",
    "PreflightReport",
    "Problem",
    "RNGState",
    "RankFailed",
    "RankLost",
    "RanksDisagree",
    "Refusal",
    "Replicated",
    "ReplicationMismatch",
    "RetentionPolicy",
    "SaveEvent",
    "SaveHandle",
    "Shard",
    "Sharded",
    "Sharing",
    "SharingPattern",
    "SingleProcess",
    "StateComponent",
    "StateMismatch",
    "Stateful",
    "StatefulProvider",
    "Storage",
    "StorageError",
    "StoreCommunicator",
    "StoredBox",
    "TensorBoardEvents",
    "TensorInfo",
    "Tier",
    "UnknownName",
    "UnsafePath",
    "UnsupportedValue",
    "UnsupportedVersion",
    "ValidationLevel",
    "Value",
    "__version__",
    "canonical_names",
    "copy_checkpoint",
    "delete_checkpoint",
    "export_checkpoint",
    "find_leftovers",
    "hf_files",
    "import_checkpoint",
    "join_url",
    "kept_by",
    "load_foreign",
    "load_state",
    "masked_url",
    "open_checkpoint",
    "open_storage",
    "pin_checkpoint",
    "preflight",
    "quantization_config",
    "register_codec",
    "register_tensor_class",
    "register_wrapper",
    "restore_candidates",
    "scan_root",
    "shared_files",
    "split_url",
    "sweep_root",
    "unpin_checkpoint",
]


def test_exports() -> None:
    assert sorted(ckptcore.__all__) == EXPORTS


@pytest.mark.parametrize("name", EXPORTS)
def test_every_export_is_there(name: str) -> None:
    found = getattr(ckptcore, name)
    assert name in dir(ckptcore)
    if inspect.isclass(found) or inspect.isfunction(found):
        assert found.__name__ == name
        assert found.__module__.startswith("ckptcore.")


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="'nothing'"):
        _ = ckptcore.nothing


def drawn() -> dict[str, tuple[str, str | None]]:
    """Class name -> (parent in the drawing, built-in in parentheses)."""
    found: dict[str, tuple[str, str | None]] = {}
    stack = ["CheckpointError"]
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([│ ]*)(?:├──|└──) (\w+)\s*(?:\((\w+)\))?", line)
        if match:
            depth = len(match.group(1)) // 4 + 1
            del stack[depth:]
            found[match.group(2)] = (stack[-1], match.group(3))
            stack.append(match.group(2))
    return found


CLASSES = [
    cls
    for name, cls in vars(errors).items()
    if inspect.isclass(cls) and issubclass(cls, Exception) and cls.__module__ == errors.__name__
]


def test_the_drawing_has_every_error() -> None:
    assert set(drawn()) | {"CheckpointError", "CheckpointWarning"} == {
        cls.__name__ for cls in CLASSES
    }
    assert sorted(errors.__all__) == sorted(cls.__name__ for cls in CLASSES)
    assert {cls.__name__ for cls in CLASSES} <= set(EXPORTS)


@pytest.mark.parametrize("name", sorted(drawn()))
def test_errors_are_as_drawn(name: str) -> None:
    parent, builtin = drawn()[name]
    cls = getattr(errors, name)
    assert cls.__mro__[1].__name__ == parent
    if builtin is not None:
        assert issubclass(cls, getattr(builtins, builtin))


@pytest.mark.parametrize(
    "cls",
    [cls for cls in CLASSES if issubclass(cls, errors.CheckpointError)],
    ids=lambda c: c.__name__,
)
def test_facts_are_attributes_and_survive_a_pickle(cls: type[errors.CheckpointError]) -> None:
    empty = cls("it failed")
    assert str(empty) == "it failed"
    assert all(getattr(empty, fact) is None for fact in cls.facts if fact != "errno")
    error = cls("it failed", **dict.fromkeys(cls.facts, 28))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert (str(again), [getattr(again, fact) for fact in cls.facts]) == (
        "it failed",
        [28] * len(cls.facts),
    )
    with pytest.raises(TypeError, match="no fact named nonsense"):
        cls("it failed", nonsense=1)
    if cls is not errors.CheckpointError:
        assert cls.__doc__
