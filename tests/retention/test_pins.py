"""Pins: a pinned checkpoint stays whatever its state, and up to the last moment; only who has seen
the damage replaces it."""

import pytest

from ckptcore import (
    CheckpointExists,
    CheckpointManager,
    CheckpointNotFound,
    CheckpointWarning,
    InvalidState,
    KeepLast,
    scan_root,
)
from ckptcore.catalog.catalog import scan
from ckptcore.catalog.folder import PIN_NAME, WITHDRAWN_NAME, delete_checkpoint
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.testing import FaultStorage

DAMAGE = {
    "damaged": lambda storage, folder: put(storage, f"{folder}/model.safetensors", b"short"),
    "unverified": lambda storage, folder: put(storage, f"{folder}/{MANIFEST_NAME}", b"{}"),
    "uncommitted": lambda storage, folder: storage.remove(f"{folder}/{MANIFEST_NAME}"),
    "unsupported": lambda storage, folder: newer(storage, f"{folder}/{MANIFEST_NAME}"),
}


def put(storage, path, data):
    storage.remove(path)
    storage.write(path, data)


def newer(storage, path):
    from ckptcore.format.digest import content_digest

    body = storage.read(path, 1 << 20)[:-50].replace(
        b'"format_version": "1.0"', b'"format_version": "2.0"'
    )
    put(storage, path, body + b',\n "digest": "%s"\n}\n' % content_digest(body).encode())


def pinned(storage, marked, damage):
    """A root with 10, which is pinned and damaged, before 5, which is whole."""
    with CheckpointManager(storage, run_id="run") as ckpt:
        ckpt.save(5, marked.state(5))
        ckpt.save(10, marked.state(10))
        ckpt.pin(10)
    DAMAGE[damage](storage, "checkpoint-10")
    return marked.files(storage)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_pinned_one_is_pinned_whatever_its_state(make_root, marked, kind, damage):
    storage = make_root(kind)
    before = pinned(storage, marked, damage)
    status = "damaged" if damage == "unverified" else damage
    assert [(i.step, i.status, i.pinned) for i in scan(storage)] == [
        (5, "committed", False),
        (10, status, True),
    ]
    with CheckpointManager(storage, run_id="run", keep=KeepLast(1)) as ckpt:
        with pytest.raises(InvalidState, match="pinned"):
            ckpt.delete(10)
        with pytest.raises(
            CheckpointExists, match="format" if damage == "unsupported" else "pinned"
        ) as caught:
            ckpt.save(10, marked.state(11))
        assert caught.value.step == 10
        assert marked.files(storage) == before
        ckpt.save(20, marked.state(20))
        assert marked.files(storage)["checkpoint-10"] == before["checkpoint-10"]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_pinning_what_lost_its_manifest_does_not_unpin_it(make_root, marked, kind):
    storage = make_root(kind)
    before = pinned(storage, marked, "uncommitted")
    with CheckpointManager(storage, run_id="run") as ckpt:
        with pytest.raises(CheckpointNotFound):
            ckpt.pin(10)
        assert marked.files(storage) == before
        ckpt.unpin(10)
        with pytest.raises(CheckpointNotFound):
            ckpt.pin(10)
    assert marked.files(storage)["checkpoint-10"] == before["checkpoint-10"] - {PIN_NAME}
    assert [(i.step, i.status, i.pinned) for i in scan(storage)] == [
        (5, "committed", False),
        (10, "uncommitted", False),
    ]


@pytest.mark.parametrize("damage", ["damaged", "unverified", "uncommitted"])
@pytest.mark.parametrize("how", ["restore has skipped it", "overwrite"])
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_run_that_skipped_a_damaged_pinned_one_saves_the_step_again(
    make_root, marked, kind, how, damage
):
    storage = make_root(kind)
    pinned(storage, marked, damage)
    with CheckpointManager(storage, run_id="run") as ckpt:
        if how == "overwrite":
            ckpt.save(10, marked.state(11), overwrite=True)
        else:
            with pytest.warns(CheckpointWarning, match="skipped checkpoint-10"):
                assert ckpt.restore(marked.state(-1)).step == 5
            ckpt.save(10, marked.state(11))
    assert [(i.step, i.status, i.pinned) for i in scan(storage)] == [
        (5, "committed", False),
        (10, "committed", False),
    ]
    assert marked.files(storage) == marked.whole(storage, [5, 10])
    assert marked.restored(storage) == (10, 11)


@pytest.mark.parametrize(
    "left", [{PIN_NAME}, {PIN_NAME, WITHDRAWN_NAME}], ids=["pin", "pin and withdrawn"]
)
@pytest.mark.parametrize("then", ["save", "sweep"])
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_the_pin_of_one_that_was_withdrawn_is_in_nobodys_way(make_root, marked, kind, then, left):
    storage = make_root(kind)
    with CheckpointManager(storage, run_id="run") as ckpt:
        ckpt.save(10, marked.state(10))
        storage.rename(f"checkpoint-10/{MANIFEST_NAME}", f"checkpoint-10/{WITHDRAWN_NAME}")
        storage.write(f"checkpoint-10/{PIN_NAME}", b"")
        if WITHDRAWN_NAME not in left:
            for name in marked.files(storage)["checkpoint-10"] - left:
                storage.remove(f"checkpoint-10/{name}")
        assert [(i.status, i.pinned) for i in scan(storage)] == [("partial", False)]
        step = 10 if then == "save" else 20
        ckpt.save(step, marked.state(11))
    assert marked.files(storage) == marked.whole(storage, [step])
    assert marked.restored(storage) == (step, 11)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_pin_that_came_after_the_scan_counts(make_root, marked, kind):
    """Somebody pins what retention has already found to be the one to go."""
    storage = make_root(kind)

    class Pinned(FaultStorage):
        def list(self, path=""):
            found = super().list(path)
            # The first listing of the folder after the commit is that of the scan.
            met = path == "checkpoint-10" and self.count(
                "close", f"*checkpoint-20*/{MANIFEST_NAME}"
            )
            if met and PIN_NAME not in [entry.name for entry in found]:
                CheckpointManager(storage, run_id="run").pin(10)
            return found

    CheckpointManager(storage, run_id="run").save(10, marked.state(10))
    faults = Pinned(storage)
    with pytest.warns(CheckpointWarning, match="pinned"):
        CheckpointManager(faults, run_id="run", keep=KeepLast(1)).save(20, marked.state(20))
    assert [(i.step, i.status, i.pinned) for i in scan(storage)] == [
        (10, "committed", True),
        (20, "committed", False),
    ]
    assert marked.restored(storage, which=10) == (10, 10)


def test_deleting_looks_at_the_pin_itself(tmp_path, marked):
    with CheckpointManager(tmp_path, run_id="run") as ckpt:
        ckpt.save(10, marked.state(10))
        ckpt.pin(10)
        with pytest.raises(InvalidState, match="pinned"):
            delete_checkpoint(ckpt.storage, "checkpoint-10")
        assert marked.restored(tmp_path) == (10, 10)
        ckpt.unpin(10)
        delete_checkpoint(ckpt.storage, "checkpoint-10")
        with pytest.raises(CheckpointNotFound):
            ckpt.pin(10)
    assert scan_root(tmp_path) == []
