"""Checkpoints with a name of their own beside that of the step: save(..., name="after-warmup")."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptcore import (
    CheckpointExists,
    CheckpointInfo,
    CheckpointManager,
    CheckpointNotFound,
    CheckpointWarning,
    InvalidState,
    KeepLast,
    RanksDisagree,
    Storage,
    Tier,
    copy_checkpoint,
    delete_checkpoint,
    find_leftovers,
    open_checkpoint,
    open_storage,
    scan_root,
    sweep_root,
)
from ckptcore.testing import FaultStorage, Killed
from ckptcore.testing.ranks import run_ranks

NAMED = "checkpoint-5-after-warmup"


def state(n: float = 0.0) -> dict[str, Any]:
    return {"model": {"w": torch.full((3,), float(n))}}


def names(root: Any) -> list[str]:
    return [info.name for info in scan_root(root)]


@pytest.fixture(params=["renames", "in place"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return tmp_path if request.param == "renames" else f"memory://{secrets.token_hex(6)}/r"


def test_it_stands_beside_the_one_of_its_step(root: Any) -> None:
    with CheckpointManager(root) as ckpt:
        ckpt.save(5, state(1))
        info = ckpt.save_async(5, state(2), name="after-warmup").result()
        assert info is not None and (info.name, info.label, info.step) == (NAMED, "after-warmup", 5)
        assert [i.name for i in ckpt.list()] == ["checkpoint-5", NAMED]
        live = state()
        found = {}
        for which in ("after-warmup", NAMED, "latest", 5, "checkpoint-5", info):
            report = ckpt.load(live, which)
            found[str(which)] = (str(report.path).rpartition("/")[2], live["model"]["w"][0].item())
        assert found.pop("checkpoint-5") == ("checkpoint-5", 1)
        assert set(found.values()) == {(NAMED, 2)}
        assert [getattr(ckpt.find(which), "name", None) for which in ("after-warmup", "no")] == [
            NAMED,
            None,
        ]
    with CheckpointManager(root) as again:
        live = state()
        assert again.restore(live).step == 5 and live["model"]["w"][0] == 2
        assert again.restore(live, "after-warmup").path == info.url
        assert again.save(6, state(3)).sequence == 3


def test_where_it_is_there_already(root: Any) -> None:
    with CheckpointManager(root) as ckpt:
        ckpt.save(5, state(1), name="a")
        with pytest.raises(CheckpointExists, match="checkpoint-5-a"):
            ckpt.save(5, state(2), name="a")
        assert ckpt.save(5, state(2), name="a", exists="skip").sequence == 1
        assert ckpt.save(5, state(2), name="b", exists="skip").sequence == 2
        assert ckpt.save(5, state(2), exists="skip").name == "checkpoint-5"
        assert ckpt.save(5, state(4), name="a", exists="replace").sequence == 4
        assert names(root) == ["checkpoint-5-b", "checkpoint-5", "checkpoint-5-a"]
        assert ckpt.conflicts(4)[0].name == "checkpoint-5" and len(ckpt.conflicts(4)) == 1


def test_a_step_that_has_several_is_not_acted_on(root: Any) -> None:
    with CheckpointManager(root) as ckpt:
        ckpt.save(5, state(1))
        ckpt.save(5, state(2), name="after-warmup")
        for act in (ckpt.delete, ckpt.pin, ckpt.unpin, ckpt.verify):
            with pytest.raises(InvalidState, match=f"step 5 has checkpoint-5 and {NAMED}: say"):
                act(5)
            with pytest.raises(CheckpointNotFound, match="no checkpoint 'warmup'; steps"):
                act("warmup")
        assert ckpt.verify("after-warmup") == [] and ckpt.verify("latest") == []
        ckpt.pin("after-warmup")
        with pytest.raises(InvalidState, match="pinned"):
            ckpt.delete(NAMED)
        ckpt.unpin(NAMED)
        ckpt.delete("checkpoint-5")
        assert names(root) == [NAMED]
        ckpt.delete(5)
        assert names(root) == []


def test_retention_counts_it_like_any_other_unless_it_is_pinned(root: Any) -> None:
    with CheckpointManager(root, keep=KeepLast(2)) as ckpt:
        for step, name in ((1, "a"), (1, None), (2, "kept"), (3, None), (3, "b"), (4, None)):
            ckpt.save(step, state(step), name=name)
            if name == "kept":
                ckpt.pin(name)
    assert names(root) == ["checkpoint-2-kept", "checkpoint-3-b", "checkpoint-4"]


def test_of_one_name_at_several_steps_the_last_is_meant(root: Any) -> None:
    with CheckpointManager(root) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step), name="best-so-far")
        ckpt.load(state(), 1)
        with pytest.warns(CheckpointWarning, match="saved of steps 2, 3: that is abandoned"):
            ckpt.save(2, state(9))
        report = ckpt.load(live := state(), "best-so-far")
        assert (report.step, live["model"]["w"][0]) == (1, 1)
        assert ckpt.find("checkpoint-3-best-so-far") is not None


def test_a_folder_that_somebody_named_so_is_none(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=KeepLast(1)) as ckpt:
        ckpt.save(5, state(1))
        shutil.copytree(tmp_path / "checkpoint-5", tmp_path / "checkpoint-5-backup")
        (tmp_path / "checkpoint-5-notes").mkdir()
        (tmp_path / "checkpoint-5-notes" / "a.txt").write_text("x")
        (tmp_path / "checkpoint-7-empty").mkdir()
        assert names(tmp_path) == ["checkpoint-5"]
        ckpt.save(6, state(2))
        sweep_root(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-5-backup",
        "checkpoint-5-notes",
        "checkpoint-6",
        "checkpoint-7-empty",
    ]
    with open_checkpoint(tmp_path / "checkpoint-5-backup") as view:
        assert view.verify() == [] and view.manifest.step == 5
    with CheckpointManager(tmp_path) as ckpt:
        with pytest.raises(CheckpointExists, match="checkpoint-5-backup"):
            ckpt.save(5, state(3), name="backup")
        with pytest.raises(CheckpointExists, match=r"checkpoint-5-notes.*'a.txt'"):
            ckpt.save(5, state(3), name="notes")
        assert ckpt.save(7, state(3), name="empty").name == "checkpoint-7-empty"
        assert ckpt.load(state(), str(tmp_path / "checkpoint-5-backup")).step == 5


WRONG = ["", "a/b", "..", ".hidden", "ü", "checkpoint-5", "latest", "best", "auto", "12", "a b"]
WRONG += [
    "a.partial-x",
    "a.replaced-x",
    5,
    b"x",
    "x" * 101,
    "a\n",
    "-a",
    "a-",
    "a:b",
    "a\\b",
    ("a",),
]


@pytest.mark.parametrize("bad", WRONG, ids=repr)
def test_odd_names_are_refused_before_anything_is_written(tmp_path: Path, bad: Any) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        for save in (ckpt.save, ckpt.save_async):
            for exists in ("error", "skip"):
                with pytest.raises(InvalidState, match="name "):
                    save(1, state(1), name=bad, exists=exists)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["a", "x" * 100, "epoch=3-step=5", "v1.2+3", "A_b"])
def test_names_that_fit(root: Any, name: str) -> None:
    with CheckpointManager(root) as ckpt:
        info = ckpt.save(5, state(1), name=name)
        assert info.name == f"checkpoint-5-{name}" and ckpt.load(state(), name).path == info.url
    assert names(root) == [info.name]


@pytest.mark.filterwarnings("ignore")
def test_wherever_a_save_is_killed_the_others_count(root: Any) -> None:
    def save(storage: Storage, step: int, **more: Any) -> CheckpointInfo:
        manager = CheckpointManager(storage, io_threads=1, run_id="r")
        return manager.save(step, state(step), **more)

    def fresh(number: int) -> Storage:
        return open_storage(f"{root}/{number}")

    counting = FaultStorage(fresh(0))
    save(counting, 1, name="a")
    for at in range(1, counting.count() + 1):
        storage = fresh(at)
        save(storage, 1)
        faults = FaultStorage(storage)
        faults.kill(at=at, how="raise")
        try:
            save(faults, 1, name="a")
        except Killed:
            pass
        assert "checkpoint-1" in names(storage.url)
        save(storage, 2, name="b")
        sweep_root(storage.url)
        assert find_leftovers(storage.url) == []
        left = {entry.name for entry in storage.list()}
        assert left >= {"checkpoint-1", "checkpoint-2-b"}
        # An empty folder with a name of its own may be somebody's, who is about to fill it.
        assert not any(storage.list(name) for name in left - {*names(storage.url)})
        assert save(storage, 1, name="a", exists="replace").label == "a"


def test_it_goes_to_tiers_and_copies_under_its_name(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "a", tiers=[Tier(tmp_path / "b")]) as ckpt:
        ckpt.save(5, state(1))
        info = ckpt.save(5, state(2), name="after-warmup")
        ckpt.wait()
        assert names(tmp_path / "b") == ["checkpoint-5", NAMED]
        delete_checkpoint(info)
        report = ckpt.load(live := state(), "after-warmup")
        assert report.path == str(tmp_path / "b" / NAMED) and live["model"]["w"][0] == 2
        copy_checkpoint(tmp_path / "b" / NAMED, tmp_path / "c" / NAMED)
    assert names(tmp_path / "c") == [NAMED]


def test_all_ranks_give_the_same_name(tmp_path: Path) -> None:
    def program(comm: Any) -> Any:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            for exists in ("error", "skip"):
                with pytest.raises(RanksDisagree):
                    ckpt.save(5, state(1), name=f"r{comm.rank}", exists=exists)
            info = ckpt.save(5, state(1), name="a")
            live = state()
            assert ckpt.load(live, "a").step == 5 and live["model"]["w"][0] == 1
            ckpt.delete("a")
            return info.name, [i.name for i in ckpt.list()]

    assert run_ranks(2, program) == [("checkpoint-5-a", [])] * 2
