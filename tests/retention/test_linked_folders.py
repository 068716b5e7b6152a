"""A checkpoint folder that is a link to another disk is refused by its name: never passed over,
never deleted."""

import pytest

from ckptcore import CheckpointManager, KeepLast, StorageError, open_checkpoint, scan_root


@pytest.fixture
def root(tmp_path, marked):
    with CheckpointManager(tmp_path / "root", run_id="run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, marked.state(step))
    (tmp_path / "disk").mkdir()
    (tmp_path / "root" / "checkpoint-2").rename(tmp_path / "disk" / "checkpoint-2")
    (tmp_path / "root" / "checkpoint-2").symlink_to(tmp_path / "disk" / "checkpoint-2")
    return tmp_path / "root"


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("mounted", [True, False])
def test_it_is_seen_and_refused_by_name(root, marked, only, mounted):
    if only:
        (root / "checkpoint-1").rename(root / "other")
    if not mounted:
        (root.parent / "disk").rename(root.parent / "gone")
    assert [(i.name, i.status) for i in scan_root(root)][-1] == ("checkpoint-2", "unreadable")
    with CheckpointManager(root, run_id="run") as ckpt:
        for call in (ckpt.restore, ckpt.load, lambda state: ckpt.load(state, 2)):
            with pytest.raises(
                StorageError, match=r"checkpoint-2 is a symbolic link; refused.*disk/checkpoint-2"
            ):
                call(marked.state(-1))
    if mounted:
        assert open_checkpoint(root / "checkpoint-2").manifest.step == 2


def test_nothing_behind_it_is_deleted_or_replaced(root, marked):
    def kept():
        return {
            path.name: path.read_bytes()
            for path in (root.parent / "disk" / "checkpoint-2").iterdir()
        }

    before = kept()
    with CheckpointManager(root, run_id="run", keep=KeepLast(1)) as ckpt:
        for call in (lambda: ckpt.delete(2), lambda: ckpt.save(2, marked.state(2), overwrite=True)):
            with pytest.raises(StorageError, match="checkpoint-2 is a symbolic link"):
                call()
        for step in (3, 4):
            ckpt.save(step, marked.state(step))
        assert [info.step for info in ckpt.list()] == [4]
    assert kept() == before and (root / "checkpoint-2").is_symlink()


def test_a_link_to_a_file_is_no_checkpoint(root, marked):
    (root / "notes").write_text("mine")
    (root / "checkpoint-9").symlink_to(root / "notes")
    assert [info.name for info in scan_root(root)] == ["checkpoint-1", "checkpoint-2"]
