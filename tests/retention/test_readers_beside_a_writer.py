"""Readers beside a writer that keeps few: what they conclude holds, however late their listings and
reads are."""

import errno
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore import (
    CheckpointManager,
    CheckpointNotFound,
    KeepBest,
    KeepLast,
    NoUsableCheckpoint,
    StorageError,
    copy_checkpoint,
    open_storage,
    scan_root,
)
from ckptcore.catalog.catalog import scan
from ckptcore.catalog.folder import MOST_SCANS, WITHDRAWN_NAME
from ckptcore.storage.local import LocalStorage
from ckptcore.testing import run_ranks

MANIFEST = "checkpoint_manifest.json"


@dataclass
class Writer:
    """A job that keeps one checkpoint, and saves when it is asked to."""

    root: str
    step: int = 0
    ckpt: CheckpointManager = field(init=False)

    def __post_init__(self):
        self.ckpt = CheckpointManager(self.root, run_id="train", keep=KeepLast(1), io_threads=1)

    def save(self):
        self.step += 1
        self.ckpt.save(self.step, state(self.step), metrics={"loss": -float(self.step)})


class Late(LocalStorage):
    """A reader's storage: `meanwhile` is called after the answer to an operation was made, and
    before it arrives."""

    def __init__(self, root, meanwhile):
        super().__init__(open_storage(root).root)
        self.meanwhile, self.count = meanwhile, 0

    def _after(self, kind, answer):
        self.count += 1
        self.meanwhile(kind, self.count)
        return answer

    def list(self, path=""):
        return self._after("list " + path.partition("-")[0], super().list(path))

    def open(self, path):
        return self._after("manifest" if path.endswith(MANIFEST) else "file", super().open(path))


def state(value):
    return {
        "model": {"a": torch.full((3,), float(value)), "n": value},
        "other": {"b": torch.full((2,), float(value))},
    }


def held(live):
    return {*live["model"]["a"].tolist(), *live["other"]["b"].tolist()}


def restored(ckpt):
    live = state(-1)
    report = ckpt.restore(live)
    assert (
        not report.fresh
        and held(live) == {float(report.step)}
        and report.values["model"]["n"] == report.step
    )
    return report.step


def loaded(which):
    def call(ckpt):
        live = state(-1)
        report = ckpt.load(live, which)
        assert held(live) == {float(report.step)}
        return report.step

    return call


CALLS = {
    "restore": restored,
    "load latest": loaded("latest"),
    "load best": loaded("best"),
    "latest": lambda ckpt: ckpt.latest().step,
    "best": lambda ckpt: ckpt.best().step,
    "list": lambda ckpt: [info.step for info in ckpt.list()][-1],
    "scan": lambda ckpt: [info.step for info in scan(ckpt.storage) if info.status == "committed"][
        -1
    ],
    "verify": lambda ckpt: ckpt.verify() == [] and ckpt.latest().step,
}


def reader(root, meanwhile):
    return CheckpointManager(Late(root, meanwhile), keep=KeepBest("loss"), io_threads=1)


@pytest.mark.parametrize("outdated", [1, 2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_listings_that_are_out_of_date_when_they_arrive(tmp_path, call, outdated):
    writer = Writer(str(tmp_path))
    writer.save()
    left = [None] * outdated

    def meanwhile(kind, _):
        if kind == "list " and left:
            left.pop()
            writer.save()

    assert CALLS[call](reader(str(tmp_path), meanwhile)) == writer.step == outdated + 1


@pytest.mark.parametrize(
    "call", [name for name in CALLS if name not in ("scan", "latest", "best", "list", "verify")]
)
@pytest.mark.parametrize("times", [1, 4])
def test_a_checkpoint_that_goes_while_it_is_read(tmp_path, call, times):
    """The next newer one is loaded, all of it; what was read of the other does not stay."""
    writer = Writer(str(tmp_path))
    writer.save()
    left = [None] * times

    def meanwhile(kind, _):
        if kind == "file" and left:
            left.pop()
            writer.save()

    assert CALLS[call](reader(str(tmp_path), meanwhile)) == writer.step == times + 1


def test_all_ranks_go_on_to_the_same_one(tmp_path):
    writer = Writer(str(tmp_path))
    writer.save()
    left = [None, None]

    def meanwhile(kind, _):
        if kind == "file" and left:
            left.pop()
            writer.save()

    def program(comm):
        own = meanwhile if comm.rank == 1 else lambda *_: None
        with CheckpointManager(Late(str(tmp_path), own), comm=comm, io_threads=1) as ckpt:
            return restored(ckpt), loaded("latest")(ckpt)

    assert run_ranks(2, program) == [(3, 3), (3, 3)]


def test_fresh_takes_two_listings_without_anything(tmp_path):
    """The first commit of the run comes after the reader's first listing was made."""
    writer = Writer(str(tmp_path))
    left = [None]

    def meanwhile(kind, _):
        if kind == "list " and left:
            left.pop()
            writer.save()

    tmp_path.joinpath("notes.txt").write_text("so that there is a root")
    assert restored(reader(str(tmp_path), meanwhile)) == 1
    assert reader(str(tmp_path / "none"), lambda *_: None).restore(state(-1)).fresh


def test_what_is_really_damaged_is_no_deletion(tmp_path):
    Writer(str(tmp_path)).save()
    (tmp_path / "checkpoint-1" / "model.safetensors").unlink()
    with pytest.raises(NoUsableCheckpoint, match=r"checkpoint-1: .*model\.safetensors is missing"):
        reader(str(tmp_path), lambda *_: None).restore(state(-1))
    assert [info.status for info in scan_root(tmp_path)] == ["damaged"]


def test_a_step_that_was_deleted_while_it_was_read_is_not_found(tmp_path):
    writer = Writer(str(tmp_path))
    writer.save()

    def meanwhile(kind, _):
        if kind == "file" and writer.step == 1:
            writer.save()

    with pytest.raises(CheckpointNotFound, match=r"no checkpoint of step 1; steps there: 2"):
        reader(str(tmp_path), meanwhile).load(state(-1), 1)
    with pytest.raises(CheckpointNotFound, match="deleted or replaced while it was copied"):
        source = Late(
            str(tmp_path / "checkpoint-2"), lambda kind, _: kind == "file" and deleted(tmp_path)
        )
        copied(source, tmp_path / "copy")


def deleted(root):
    if (root / "checkpoint-2" / MANIFEST).exists():
        CheckpointManager(root, run_id="train").delete(2)


def copied(source, target):
    from ckptcore.copy.checkpoint import copy_between

    return copy_between(source, "", open_storage(target), "checkpoint-2")


def test_what_an_interrupted_deletion_left_costs_one_more_listing(tmp_path):
    """It is nothing that is on its way out, and stays as it is until somebody sweeps it."""
    with CheckpointManager(tmp_path, run_id="train") as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step))
    (tmp_path / "checkpoint-1" / MANIFEST).rename(tmp_path / "checkpoint-1" / WITHDRAWN_NAME)
    listings = []
    ckpt = reader(str(tmp_path), lambda kind, _: kind == "list " and listings.append(kind))
    assert [info.step for info in ckpt.list()] == [2] and len(listings) == 2


def test_a_root_that_never_stands_still_is_an_error_that_says_so(tmp_path):
    """Not "there is none": somebody would start again from nothing."""
    writer = Writer(str(tmp_path))
    writer.save()

    def meanwhile(kind, _):
        if kind == "list ":
            (tmp_path / f"checkpoint-{writer.step}").rename(
                tmp_path / f"checkpoint-{writer.step + 1}"
            )
            writer.step += 1

    for call in (CALLS["latest"], CALLS["restore"]):
        with pytest.raises(StorageError, match="changes faster than it can be looked at") as caught:
            call(reader(str(tmp_path), meanwhile))
        assert caught.value.errno == errno.EAGAIN
    assert writer.step == 1 + 2 * MOST_SCANS


@pytest.mark.parametrize(
    "call", [name for name in CALLS if name != "verify"]
)  # what goes meanwhile has no verdict
@given(when=st.sets(st.integers(1, 40), max_size=4))
@settings(max_examples=12, deadline=None)
def test_whenever_others_save_and_delete(tmp_path_factory, call, when):
    """However the operations of a reader and of a writer follow each other, no answer is older than
    the call."""
    root = tmp_path_factory.mktemp("root")
    writer = Writer(str(root))
    writer.save()
    ckpt = reader(str(root), lambda _, count: count in when and writer.save())
    first = writer.step
    assert first <= CALLS[call](ckpt) <= writer.step


def test_copies_are_of_what_is_there(tmp_path):
    Writer(str(tmp_path / "run")).save()
    assert copy_checkpoint(tmp_path / "run" / "checkpoint-1", tmp_path / "copy").step == 1
