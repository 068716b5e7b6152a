"""Readers change nothing: a root that may only be read can be listed, inspected, verified and
loaded by anybody."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ckptcore import (
    CheckpointManager,
    CheckpointNotFound,
    CheckpointWarning,
    KeepBest,
    KeepLast,
    StorageError,
    open_checkpoint,
    scan_root,
)
from ckptcore.catalog.catalog import scan
from ckptcore.catalog.folder import Attempt
from ckptcore.testing import FaultStorage
from ckptcore.testing.faults import WRITE_OPERATIONS
from ckptcore.testing.processes import patience

NOBODY = 65534


def refusing(storage):
    """A storage that refuses every operation that writes; a reader must not even ask for one."""
    faults = FaultStorage(storage)
    faults.fail(kind=WRITE_OPERATIONS, error=errno.EROFS, times=None)
    return faults


def untidy(storage, marked):
    """Everything that a writer would tidy up: attempts of dead processes, an interrupted deletion,
    foreign files."""
    with CheckpointManager(storage, run_id="run", io_threads=1) as ckpt:
        for step in (1, 2, 3, 4):
            ckpt.save(step, marked.state(step), metrics={"loss": float(abs(step - 2))})
        ckpt.pin(1)
    dead = Attempt("abcdef01", Attempt.new("run").machine, 2**22 + 5, "1", 1)
    faults = FaultStorage(storage)
    faults.fail(kind="remove", times=None)
    with pytest.raises(StorageError):
        CheckpointManager(faults, run_id="run").delete(4)
    storage.make_folder(f"checkpoint-9.partial-{dead}")
    storage.write(f"checkpoint-9.partial-{dead}/model.safetensors", b"half")
    storage.write("notes.txt", b"mine")


@pytest.mark.parametrize("kind", ["local", "memory", "folder"])
def test_no_reader_asks_for_a_write(make_root, marked, kind):
    storage = make_root(kind)
    untidy(storage, marked)
    before = marked.files(storage)
    faults = refusing(storage)
    with CheckpointManager(faults, keep=KeepLast(1) | KeepBest("loss")) as ckpt:
        assert [(info.step, info.pinned) for info in ckpt.list()] == [
            (1, True),
            (2, False),
            (3, False),
        ]
        assert (ckpt.latest().step, ckpt.best().step) == (3, 2)
        assert [ckpt.verify(which) for which in ("latest", "best", 1)] == [[], [], []]
        for which, step in (("latest", 3), ("best", 2), (1, 1), ("auto", 3)):
            report = (ckpt.restore if which == "auto" else ckpt.load)(marked.state(-1), which)
            assert (report.step, marked.mark(report.values)) == (step, step)
        with pytest.raises(CheckpointNotFound):
            ckpt.load(marked.state(-1), 99)
    statuses = [(info.step, info.status) for info in scan(faults)]
    assert statuses == [
        (1, "committed"),
        (2, "committed"),
        (3, "committed"),
        (4, "partial"),
        (9, "partial"),
    ]
    assert faults.count(WRITE_OPERATIONS) == 0
    assert marked.files(storage) == before


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_writer_is_told_and_changes_nothing(make_root, marked, kind):
    storage = make_root(kind)
    untidy(storage, marked)
    before = marked.files(storage)
    with CheckpointManager(refusing(storage), run_id="run", keep=KeepLast(1)) as ckpt:
        for call in (
            lambda: ckpt.save(5, marked.state(5)),
            lambda: ckpt.save(3, marked.state(5), overwrite=True),
            lambda: ckpt.delete(2),
            lambda: ckpt.pin(2),
            lambda: ckpt.unpin(1),
        ):
            try:
                with pytest.raises(StorageError) as caught:
                    call()
            except (
                CheckpointWarning
            ) as warned:  # what is left of an attempt cannot be removed either
                raise AssertionError(f"a warning in the place of the error: {warned}") from warned
            assert caught.value.errno == errno.EROFS
    assert marked.files(storage) == before
    assert marked.restored(storage) == (3, 3)


READER = """
import json, os, sys
from ckptcore import CheckpointManager, KeepBest, open_checkpoint, scan_root, StorageError
root = sys.argv[1]
import torch
if os.getuid() == 0:
    # imports all that is needed, from folders that are perhaps root's alone
    CheckpointManager(root).verify()
    os.setgid({nobody}); os.setuid({nobody})
live = {{"model": {{f"w{{n}}": torch.zeros(4) for n in range(3)}}, "progress": {{"mark": -1, "big": 0}}}}
with CheckpointManager(root, keep=KeepBest("loss")) as ckpt:
    said = dict(steps=[i.step for i in ckpt.list()], latest=ckpt.latest().step, best=ckpt.best().step)
    said["problems"] = len(ckpt.verify())
    said["loaded"] = ckpt.restore(live).values["progress"]["mark"]
    said["w0"] = live["model"]["w0"].tolist()
    said["scanned"] = [(i.step, i.status) for i in scan_root(root)]
    said["read"] = open_checkpoint(root + "/checkpoint-2").read("model/w1").tolist()
    said["refused"] = []
    for call in (lambda: ckpt.save(9, live), lambda: ckpt.delete(2), lambda: ckpt.pin(2)):
        try:
            call()
        except StorageError as error:
            said["refused"].append(error.errno)
print(json.dumps(said))
"""


@pytest.fixture
def shared(marked):
    """A root in a folder that everybody can reach and nobody but its owner can write to."""
    folder = Path("/tmp") if os.access("/tmp", os.W_OK) else None
    if folder is None:
        pytest.skip("there is no folder that every user can reach")
    root = folder / f"ckptcore-readers-{os.getpid()}"
    before = os.umask(0o022)
    try:
        with CheckpointManager(root / "run", run_id="run") as ckpt:
            for step in (1, 2, 3):
                ckpt.save(step, marked.state(step), metrics={"loss": float(abs(step - 2))})
        for path in [root / "run", *(root / "run").rglob("*")]:
            path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
        yield root / "run"
    finally:
        os.umask(before)
        for path in [p for p in root.rglob("*") if p.is_dir()]:
            path.chmod(0o755)
        shutil.rmtree(root)


def test_another_user_reads_what_it_may_not_write(shared, marked):
    """By real permission bits: as nobody when the tests run as root, else as the owner of folders
    that are read-only."""
    program = READER.format(nobody=NOBODY)
    ran = subprocess.run(
        [sys.executable, "-c", program, str(shared)],
        capture_output=True,
        text=True,
        timeout=60 * patience(),
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": "/tmp"},
    )
    if ran.returncode and "PermissionError" in ran.stderr and "setuid" in ran.stderr:
        pytest.skip("this user may not become another one")
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = json.loads(ran.stdout)
    assert said == {
        "steps": [1, 2, 3],
        "latest": 3,
        "best": 2,
        "problems": 0,
        "loaded": 3,
        "w0": marked.state(3)["model"]["w0"].tolist(),
        "scanned": [[n, "committed"] for n in (1, 2, 3)],
        "read": marked.state(2)["model"]["w1"].tolist(),
        "refused": [errno.EACCES] * 3,
    }
    assert [info.step for info in scan_root(shared)] == [1, 2, 3]
    assert open_checkpoint(shared / "checkpoint-2").verify() == []
