"""Copies that are killed, fail or meet each other: what counts is whole, and the next copy finishes
the work."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore import CheckpointExists, NoSpace, Storage, StorageError
from ckptcore.catalog.catalog import scan, sweep
from ckptcore.catalog.folder import Attempt
from ckptcore.testing import FaultStorage, Killed, VolatileStorage
from ckptcore.testing.rules import WRITE_OPERATIONS

KINDS = ["local", "memory", "folder"]


def killed_at(copies: Any, target: Storage, k: int, **how: Any) -> bool:
    """Whether a copy into the target has as many as k operations; it died in the k-th of them."""
    faults = FaultStorage(target)
    faults.kill(k, how="raise")
    try:
        copies.make(faults, **{"threads": 1, **how})
    except Killed:
        return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_operation(
    make_root: Callable[[str], Storage], copies: Any, kind: str
) -> None:
    """Then run again: absent or whole before, whole after, and nothing else is left."""
    seen = []
    for k in itertools.count(1):
        target = make_root(kind)
        if not killed_at(copies, target, k):
            break
        seen.append(len(copies.never_torn(target)))
        copies.make(target, threads=1)
        copies.check(target)
    assert seen == sorted(seen) and set(seen) == {0, 1}  # from one operation on it is there
    assert len(seen) > 20


@pytest.mark.parametrize("kind", KINDS)
def test_killed_again_and_again(
    make_root: Callable[[str], Storage], copies: Any, kind: str
) -> None:
    """Each run comes a little further, because it keeps what the one before had finished."""
    target = make_root(kind)
    kept: list[int] = [0]
    for _ in range(100):
        faults = FaultStorage(target)
        faults.kill(3, how="raise", kind="close", path="*.safetensors")
        try:
            copies.make(faults, threads=1, progress=lambda copied, k, total: kept.append(k))
            break
        except Killed:
            assert copies.never_torn(target) == []
    copies.check(target)
    assert max(kept) > 0.9 * copies.total() / 2


@pytest.mark.parametrize("kind", KINDS)
def test_killed_while_it_replaces_another(
    make_root: Callable[[str], Storage], copies: Any, kind: str
) -> None:
    """Where folders can be renamed, the old one or the new one is there at every moment."""
    for k in itertools.count(1):
        target = make_root(kind)
        copies.make(target, "b")
        if not killed_at(copies, target, k, overwrite=True):
            break
        marks = copies.never_torn(target)
        if kind == "local":
            assert marks in ([2], [1], [1, 2], [2, 1])
        else:
            assert marks in ([2], [1], [])
        copies.make(target, overwrite=True)
        assert 1 in copies.never_torn(target)
        sweep(target, scan(target), "somebody", pytest.fail)
        sweep(target, scan(target), "somebody", pytest.fail)
        copies.check(target)
    assert k > 20


@pytest.mark.parametrize("first", ["power", "process"])
def test_power_lost_at_every_operation(
    make_root: Callable[[str], Storage], copies: Any, first: str
) -> None:
    """Every byte and name that nobody made durable is lost, also after a second copy that kept what
    the first one had."""
    for k in itertools.count(1):
        target = make_root("local")
        if not killed_at(copies, target if first == "process" else VolatileStorage(target), k):
            break
        assert len(copies.never_torn(target)) in (0, 1)
        machine = VolatileStorage(target)
        copies.make(machine, threads=1)
        machine.lose_power()
        copies.check(target)


@given(data=st.data())
@settings(max_examples=40)
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_any_series_of_misfortunes(
    make_root: Callable[[str], Storage], copies: Any, kind: str, data: Any
) -> None:
    """Kills, errors, lost answers and short writes, of several threads, in any order; then one copy
    in peace."""
    target = make_root(kind)
    for _ in range(data.draw(st.integers(1, 4), label="runs")):
        faults = FaultStorage(target)
        how = data.draw(st.sampled_from(["kill", "fail", "after", "short", "full"]), label="how")
        at = data.draw(st.integers(1, 60), label="at")
        if how == "kill":
            faults.kill(at, how="raise")
        elif how == "short":
            faults.short(at % 12 + 1, keep=0.5)
        else:
            faults.fail(
                at, error=errno.ENOSPC if how == "full" else errno.EIO, after=how == "after"
            )
        try:
            copies.make(faults)
        except (Killed, StorageError):
            pass
        assert copies.never_torn(target) in ([], [1])
    copies.make(target)
    sweep(target, scan(target), "somebody", pytest.fail)
    copies.check(target)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_complete_is_kept(
    make_root: Callable[[str], Storage], copies: Any, kind: str
) -> None:
    target = FaultStorage(make_root(kind))
    target.fail(kind="create", path="*checkpoint_manifest.json")
    with pytest.raises(StorageError):
        copies.make(target)
    assert scan(target)[0].status == "partial"
    seen: list[tuple[int, int, int]] = []
    target.log.clear()
    copies.make(target, progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (0, copies.total(), copies.total())
    assert target.count("create", "*.safetensors") == 0
    copies.check(target)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_complete_and_is_damaged_is_not_kept(
    make_root: Callable[[str], Storage], copies: Any, kind: str
) -> None:
    target = make_root(kind)
    assert killed_at(copies, target, 10**6) is False
    target = make_root(kind)
    faults = FaultStorage(target)
    faults.fail(kind="create", path="*checkpoint_manifest.json")
    with pytest.raises(StorageError):
        copies.make(faults)
    (left,) = [entry.name for entry in target.list()]
    changed = 0
    for name in (
        "own.rank00001.safetensors",
        "index.rank00000.msgpack",
        "model.safetensors.index.json",
    ):
        data = bytearray(target.read(path := f"{left}/{name}"))
        data[len(data) // 2] ^= 8
        target.remove(path)
        target.write(path, bytes(data))
        changed += len(data)
    seen: list[tuple[int, int, int]] = []
    copies.make(target, progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (changed, copies.total() - changed, copies.total())
    copies.check(target)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_gets_its_space_back(
    make_root: Callable[[str], Storage], copies: Any, kind: str
) -> None:
    target = make_root(kind)
    tight = FaultStorage(target, quota=copies.total() // 2)
    with pytest.raises(NoSpace) as caught:
        copies.make(tight)
    assert (caught.value.needed, caught.value.free) == (copies.total(), copies.total() // 2)
    assert tight.count("write_at", "*.safetensors") == 0
    tight = FaultStorage(target)
    tight.fail(6, kind="write_at", error=errno.ENOSPC)
    with pytest.raises(NoSpace):
        copies.make(tight)
    for storage in (tight, target):
        assert [e for e in storage.list() if storage.list(e.name)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_progress_may_end_it(make_root: Callable[[str], Storage], copies: Any, kind: str) -> None:
    target = make_root(kind)

    def stop(copied: int, kept: int, total: int) -> None:
        if copied > total // 2:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        copies.make(target, progress=stop)
    assert copies.never_torn(target) == []
    copies.make(target)
    copies.check(target)

    def interrupt(copied: int, kept: int, total: int) -> None:
        raise KeyboardInterrupt

    other = make_root(kind)
    with pytest.raises(KeyboardInterrupt):
        copies.make(other, progress=interrupt)
    copies.make(other)
    copies.check(other)


@pytest.mark.parametrize("kind", KINDS)
def test_two_copies_at_the_same_time(
    make_root: Callable[[str], Storage], copies: Any, kind: str
) -> None:
    """The second one neither disturbs the first nor takes its files for leftovers."""
    target = make_root(kind)
    slow = FaultStorage(target)
    gate = slow.block(5, kind="write_at")
    outcome: list[Any] = []

    def first() -> None:
        try:
            outcome.append(copies.make(slow))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    try:
        gate.wait_reached(20)
        if kind == "local":
            copies.make(target)
        else:
            with pytest.raises(CheckpointExists, match="written by another job"):
                copies.make(target)
        assert sweep(target, scan(target), "somebody", pytest.fail) == []
    finally:
        gate.open()
        thread.join(20)
    assert outcome[0].status == "committed"
    copies.check(target)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_whose_leftovers_are_swept(
    make_root: Callable[[str], Storage], copies: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a machine that is gone: by the run that uploads, and by no other; the next copy
    takes them up."""
    target = make_root(kind)
    for run, removed in (("mine", True), (None, False)):
        with monkeypatch.context() as patch:
            patch.setattr("ckptcore.catalog.folder._machine", lambda: "0badc0de")
            assert killed_at(copies, target, 25, run_id=run)
        (left,) = scan(target)
        assert left.status == "partial"
        assert sweep(target, [left], "another run", pytest.fail) == []
        assert sweep(target, [left], "mine", pytest.fail) == ([left.name] if removed else [])
    copies.make(target)
    copies.check(target)


def test_an_attempt_of_a_copy_is_told_from_those_of_its_run() -> None:
    attempt = Attempt.new("copies of run")
    assert attempt.run != Attempt.new("run").run


def test_operations_of_a_copy(make_root: Callable[[str], Storage], copies: Any) -> None:
    """On a disk: files are synced before they get their names, then the folder, the manifest, and
    one rename."""
    target = FaultStorage(make_root("local"))
    copies.make(target, threads=1)
    changes = [
        (op.kind, op.path.rpartition("/")[2]) for op in target.log if op.kind in WRITE_OPERATIONS
    ]
    names = [name for kind, name in changes if kind == "rename"]
    assert names[-1] == copies.name
    assert {*names[:-1]} == {e.name for e in copies.source().list(copies.name)} - {
        "checkpoint_manifest.json"
    }
    assert [kind for kind, _ in changes[-6:]] == [
        "create",
        "write_at",
        "close",
        "sync_folder",
        "rename",
        "sync_folder",
    ]
    assert changes[-7][0] == "sync_folder"
    for number, (kind, _) in enumerate(changes[:-3]):
        if kind == "rename":
            assert changes[number - 1][0] == "close"
