"""A save lists its root once, reads each manifest there once, and still goes by what others did
meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptcore import CheckpointManager, KeepLast, open_storage
from ckptcore.catalog.folder import delete_checkpoint, pin_checkpoint
from ckptcore.catalog.retention import RetentionPolicy
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.testing import FaultStorage

STEPS = range(1, 11)


def filled(root: Any, marked: Any) -> None:
    with CheckpointManager(root, run_id="run", io_threads=1) as ckpt:
        for step in STEPS:
            ckpt.save(step, marked.state(step))


def asked(root: Any, marked: Any, keep: RetentionPolicy | None) -> tuple[int, Counter[str]]:
    """How often a save of step 11 lists the root, and reads each manifest."""
    faults = FaultStorage(root)
    with CheckpointManager(faults, run_id="run", keep=keep, io_threads=1) as ckpt:
        ckpt.save(11, marked.state(11))
    opened = {
        step: faults.count("open", f"checkpoint-{step}/{MANIFEST_NAME}") for step in (*STEPS, 11)
    }
    return faults.count("list", ""), Counter(
        {f"{step}": count for step, count in opened.items() if count}
    )


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("keep", [None, KeepLast(11)])
def test_a_save_after_which_all_stay_lists_once_and_reads_each_manifest_once(
    make_root: Callable[[str], Any], marked: Any, kind: str, keep: RetentionPolicy | None
) -> None:
    root = make_root(kind)
    filled(root, marked)
    listed, read = asked(root, marked, keep)
    assert listed == 1
    assert {step: count for step, count in read.items() if step != "11"} == {
        f"{step}": 1 for step in STEPS
    }


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_save_that_deletes_lists_once_more_and_reads_only_what_it_deletes(
    make_root: Callable[[str], Any], marked: Any, kind: str
) -> None:
    root = make_root(kind)
    filled(root, marked)
    listed, read = asked(root, marked, KeepLast(10))
    assert listed == 2
    assert {step: count for step, count in read.items() if step != "11"} == {"1": 2} | {
        f"{n}": 1 for n in STEPS[1:]
    }
    assert marked.files(root).keys() == {f"checkpoint-{step}" for step in range(2, 12)}


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("keep", [None, KeepLast(10)])
def test_later_saves_read_no_manifest_that_has_not_changed(
    make_root: Callable[[str], Any], marked: Any, kind: str, keep: RetentionPolicy | None
) -> None:
    root = make_root(kind)
    filled(root, marked)
    faults = FaultStorage(root)
    reads: list[Counter[int]] = []
    with CheckpointManager(faults, run_id="run", keep=keep, io_threads=1) as ckpt:
        for step in range(11, 16):
            before = Counter(read_manifests(faults))
            ckpt.save(step, marked.state(step))
            reads.append(Counter(read_manifests(faults)) - before)
    for step, read in zip(range(12, 16), reads[1:], strict=True):
        # What was committed last, where another job may have replaced it before it was listed; and
        # what is deleted, before and while.
        last = {} if root.atomic_rename else {step - 1: 1}
        gone = {} if keep is None else {step - 10: 1}
        assert read == last | gone


def test_what_others_made_of_the_last_commit_is_read(
    make_root: Callable[[str], Any], marked: Any
) -> None:
    root = make_root("local")
    with CheckpointManager(root, run_id="run", io_threads=1) as ckpt:
        first = ckpt.save(1, marked.state(1))
        with CheckpointManager(root, run_id="run", io_threads=1) as other:
            theirs = other.save(1, marked.state(1), overwrite=True)
        assert (first.sequence, theirs.sequence, ckpt.save(2, marked.state(2)).sequence) == (
            1,
            2,
            3,
        )


def read_manifests(faults: FaultStorage) -> dict[int, int]:
    return {n: faults.count("open", f"checkpoint-{n}/{MANIFEST_NAME}") for n in range(1, 16)}


class Held:
    """A save of step 11 that waits between its listing and its commit, while others work on the
    root."""

    def __init__(self, root: Any, marked: Any, keep: RetentionPolicy) -> None:
        self.faults = FaultStorage(root)
        self.gate = self.faults.block(kind="create", path="checkpoint-11*")
        self.manager = CheckpointManager(self.faults, run_id="run", keep=keep, io_threads=1)
        self.state = marked.state(11)

    def during(self, work: Callable[[], Any]) -> None:
        with self.manager as ckpt:
            saving = threading.Thread(target=ckpt.save, args=(11, self.state))
            saving.start()
            try:
                self.gate.wait_reached()
                work()
            finally:
                self.gate.open()
                saving.join()


def steps(root: Any) -> set[str]:
    return {entry.name for entry in root.list()}


@pytest.fixture
def root(quick_folder: Path, marked: Any) -> Any:
    storage = open_storage(quick_folder / "run")
    filled(storage, marked)
    return storage


def test_what_others_delete_while_a_save_is_written_does_not_count_as_kept(
    root: Any, marked: Any
) -> None:
    Held(root, marked, KeepLast(3)).during(lambda: delete_checkpoint(root, "checkpoint-10"))
    assert steps(root) == {"checkpoint-8", "checkpoint-9", "checkpoint-11"}


def test_what_is_pinned_while_a_save_is_written_stays_without_a_word(
    root: Any, marked: Any
) -> None:
    Held(root, marked, KeepLast(3)).during(lambda: pin_checkpoint(root, "checkpoint-4"))
    assert steps(root) == {f"checkpoint-{step}" for step in (4, 9, 10, 11)}


def test_what_others_pin_replace_and_delete_between_two_saves_counts(
    root: Any, marked: Any
) -> None:
    """Also where the new one has the same sizes, so that only the version of its manifest tells."""
    with CheckpointManager(root, run_id="run", keep=KeepLast(4), io_threads=1) as ckpt:
        ckpt.save(11, marked.state(11))
        assert steps(root) == {f"checkpoint-{step}" for step in (8, 9, 10, 11)}
        with CheckpointManager(root, run_id="run", io_threads=1) as other:
            other.save(10, marked.state(10), overwrite=True)  # has sequence 12 now
            other.pin(8)
            other.delete(9)
        assert ckpt.save(12, marked.state(12)).sequence == 13
        assert steps(root) == {f"checkpoint-{step}" for step in (8, 10, 11, 12)}
        assert ckpt.save(13, marked.state(13)).sequence == 14
        assert steps(root) == {f"checkpoint-{step}" for step in (8, 10, 11, 12, 13)}


def test_what_another_job_puts_in_a_place_while_a_save_is_written_is_not_deleted(
    root: Any, marked: Any
) -> None:
    def replace() -> None:
        with CheckpointManager(root, run_id="other", io_threads=1) as other:
            other.save(4, marked.state(44), overwrite=True)

    Held(root, marked, KeepLast(3)).during(replace)
    assert steps(root) == {f"checkpoint-{step}" for step in (4, 9, 10, 11)}
    assert marked.restored(root, run_id="other") == (4, 44)


def test_what_another_job_of_the_run_saves_meanwhile_counts(root: Any, marked: Any) -> None:
    def save() -> None:
        with CheckpointManager(root, run_id="run", io_threads=1) as other:
            other.save(12, marked.state(12))

    Held(root, marked, KeepLast(3)).during(save)
    assert steps(root) == {f"checkpoint-{step}" for step in (10, 11, 12)}
