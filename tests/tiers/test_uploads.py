"""Checkpoints get from the fast root to the durable one, in the background, and what fails is told
and tried again."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest

from ckptcore import (
    AsyncSaveError,
    CheckpointManager,
    CheckpointWarning,
    InvalidState,
    KeepBest,
    KeepLast,
    Tier,
    open_storage,
)
from ckptcore.catalog.catalog import scan


def test_each_commit_is_uploaded_and_each_root_keeps_its_own(ground: Any) -> None:
    with ground.manager(keep=KeepLast(1), keep_far=KeepLast(3)) as ckpt:
        infos = []
        for step in (10, 20, 30, 40):
            infos.append(ckpt.save(step, ground.state(step)))
            assert ckpt.wait(20)
    assert ground.steps("fast") == [40]
    assert ground.steps("slow") == [20, 30, 40]
    url = ground.slow.url
    assert ground.told("uploaded", "upload_failed") == [
        ("uploaded", step, url) for step in (10, 20, 30, 40)
    ]
    assert sorted(ground.told("deleted"), key=str) == sorted(
        [("deleted", 10, None), ("deleted", 20, None), ("deleted", 30, None), ("deleted", 10, url)],
        key=str,
    )
    for event, info in zip([e for e in ground.events if e.kind == "uploaded"], infos, strict=True):
        assert (event.name, event.nbytes, event.error, event.rank) == (
            info.name,
            info.size_bytes,
            None,
            0,
        )


def test_the_copy_is_the_same_commit(ground: Any) -> None:
    with ground.manager() as ckpt:
        info = ckpt.save_async(10, ground.state(10), metrics={"loss": 0.5}).result(20)
        ckpt.wait(20)
    for entry in ground.fast.list("checkpoint-10"):
        path = f"checkpoint-10/{entry.name}"
        assert ground.slow.read(path) == ground.fast.read(path)
    assert info is not None and info.url.startswith(ground.fast.url)


def test_every_so_many_also_after_a_restart(ground: Any) -> None:
    for steps in ((10, 20, 30), (40, 50), (60, 70)):
        ground.restart()
        with ground.manager(every=3, run_id="run") as ckpt:
            for step in steps:
                ckpt.save(step, ground.state(step))
    assert ground.steps("slow") == [30, 60]
    assert ground.steps("fast") == [10, 20, 30, 40, 50, 60, 70]


def test_training_goes_on_while_the_durable_root_does_nothing(ground: Any) -> None:
    """Five saves are committed while the first upload stands still; none of the commits is deleted
    before it is there."""
    with ground.manager(keep=KeepLast(1)) as ckpt:
        gate = ground.slow.block(kind="write_at")
        for step in (10, 20, 30, 40, 50):
            assert ckpt.save(step, ground.state(step)).step == step
            gate.wait_reached(
                20
            )  # from the first save on: else a busy machine may begin with a later one
        assert ckpt.wait(0.01) is False
        assert ground.steps("fast") == [10, 20, 30, 40, 50]
        assert ground.told("uploaded", "deleted") == []
        gate.open()
        assert ckpt.wait(20)
        assert ground.steps("slow") == [10, 20, 30, 40, 50]
        assert [step for _, step, _ in ground.told("uploaded")] == [
            10,
            50,
            40,
            30,
            20,
        ]  # the newest is worth the most
        assert ground.steps("fast") == [50]
    assert ground.told("deleted") == [("deleted", step, None) for step in (10, 40, 30, 20)]


def test_what_the_durable_root_would_not_keep_is_not_uploaded(ground: Any) -> None:
    with ground.manager(keep=KeepLast(1), keep_far=KeepLast(2) | KeepBest("loss")) as ckpt:
        gate = ground.slow.block(kind="write_at")
        ckpt.save(10, ground.state(10), metrics={"loss": 5.0})
        gate.wait_reached(20)
        for step, loss in ((20, 1.0), (30, 2.0), (40, 3.0), (50, 4.0)):
            ckpt.save(step, ground.state(step), metrics={"loss": loss})
        gate.open()
    assert ground.steps("slow") == [20, 40, 50]
    assert {step for _, step, _ in ground.told("uploaded")} == {10, 20, 40, 50}


def test_a_failed_upload_raises_at_the_next_save_and_is_tried_again(ground: Any) -> None:
    with ground.manager(keep=KeepLast(1)) as ckpt:
        ground.slow.fail(kind="write_at", error=errno.EIO)
        ckpt.save(10, ground.state(10))
        with pytest.raises(AsyncSaveError, match=r"upload of step 10 to .* failed") as caught:
            ckpt.wait(20)
        assert (caught.value.step, caught.value.__cause__.errno) == (10, errno.EIO)
        assert ground.told("uploaded", "upload_failed") == [("upload_failed", 10, ground.slow.url)]
        assert ground.events[-1].error is caught.value.__cause__
        assert ground.steps("fast") == [10]
        ckpt.save(20, ground.state(20))
        assert ckpt.wait(20)
        assert ground.steps("slow") == [10, 20]
        ground.slow.fail(kind="create")
        ckpt.save(30, ground.state(30))
        ckpt._saves.uploads.wait(20)
        with pytest.raises(AsyncSaveError, match="upload of step 30"):
            ckpt.save(40, ground.state(40))
        assert ground.steps("fast") == [30]
        ckpt.save(40, ground.state(40))
    assert ground.steps("slow") == [10, 20, 30, 40]
    assert ckpt.failed_steps == ()  # no save has failed


def test_a_failed_upload_is_a_warning_where_that_is_wanted(ground: Any) -> None:
    with ground.manager(on_error="warn") as ckpt:
        ground.slow.fail(kind="write_at")
        ckpt.save(10, ground.state(10))
        ckpt._saves.uploads.wait(20)
        with pytest.warns(CheckpointWarning, match="upload of step 10"):
            assert ckpt.save(20, ground.state(20)).step == 20
    assert ground.steps("slow") == [10, 20]


def test_a_failure_is_told_at_the_end_at_the_latest(ground: Any) -> None:
    ckpt = ground.manager()
    ground.slow.fail(kind="list", times=None)
    ckpt.save(10, ground.state(10))
    with pytest.raises(AsyncSaveError, match="upload of step 10"):
        ckpt.close()
    ckpt.close()
    ground.restart()
    ckpt = ground.manager()
    ground.slow.fail(kind="list", times=None)
    with pytest.raises(ZeroDivisionError) as caught, ckpt:
        ckpt.save(20, ground.state(20))
        ckpt._saves.uploads.wait(20)
        raise ZeroDivisionError
    assert "upload of step" in caught.value.__notes__[0]


def test_closing_waits_so_long_and_no_longer(ground: Any) -> None:
    before = threading.enumerate()
    ckpt = ground.manager(drain_timeout=0.2)
    gate = ground.slow.block(kind="write_at", path="*.safetensors")
    ckpt.save(10, ground.state(10))
    gate.wait_reached(20)
    try:
        with pytest.raises(
            AsyncSaveError,
            match=r"upload of step 10 .* has not ended after 0\.2 s and is given "
            r"up",
        ):
            ckpt.close()
    finally:
        threads = [
            t for t in threading.enumerate() if t.name == "ckptcore-upload" and t not in before
        ]
        gate.open()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert [info.status for info in scan(ground.disks[1])] == ["partial"]
    ground.restart()
    assert ground.restored() == (10, 10, ground.fast.url)  # which finishes the upload, too
    assert ground.steps("slow") == [10]


def test_a_damaged_checkpoint_is_told_once_and_not_tried_again(ground: Any) -> None:
    with ground.manager(keep=KeepLast(1)) as ckpt:
        gate = ground.slow.block(kind="open", path="checkpoint-10/*")
        ckpt.save(10, ground.state(10))
        gate.wait_reached(20)
        path = Path(ground.fast.url) / "checkpoint-10" / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        gate.open()
        with pytest.raises(AsyncSaveError, match=r"model\.safetensors.* was saved"):
            ckpt.wait(20)
        ckpt.save(20, ground.state(20))
        assert ckpt.wait(20)
    assert ground.steps("slow") == [20]
    assert ground.told("upload_failed") == [("upload_failed", 10, ground.slow.url)]
    assert [entry.name for entry in ground.fast.list()] == ["checkpoint-20"]


def test_a_step_that_is_saved_again_replaces_the_one_there(ground: Any) -> None:
    with ground.manager() as ckpt:
        ckpt.save(10, ground.state(10))
        ckpt.wait(20)
        ckpt.save(10, ground.state(11), overwrite=True)
    ground.lose_fast()
    ground.restart()
    assert ground.restored() == (10, 11, ground.slow.url)
    assert ground.steps("slow") == [10]


def test_a_step_that_is_saved_again_while_it_is_uploaded(ground: Any) -> None:
    with ground.manager() as ckpt:
        gate = ground.slow.block(2, kind="write_at")
        ckpt.save(10, ground.state(10))
        gate.wait_reached(20)
        ckpt.save(10, ground.state(11), overwrite=True)
        gate.open()
    assert ground.told("upload_failed") == []
    ground.lose_fast()
    ground.restart()
    assert ground.restored() == (10, 11, ground.slow.url)


def test_deleted_while_it_waits(ground: Any) -> None:
    with ground.manager() as ckpt:
        gate = ground.slow.block(kind="write_at")
        ckpt.save(10, ground.state(10))
        gate.wait_reached(20)
        ckpt.save(20, ground.state(20))
        ckpt.delete(20)
        gate.open()
    assert ground.told("upload_failed") == []
    assert (ground.steps("fast"), ground.steps("slow")) == ([10], [10])


def test_another_run_in_the_durable_root_is_in_the_way_and_stays(ground: Any) -> None:
    with CheckpointManager(ground.disks[1], run_id="other", io_threads=1) as other:
        other.save(10, ground.state(99))
    with ground.manager(run_id="mine", keep_far=KeepLast(1)) as ckpt:
        ckpt.save(10, ground.state(10))
        with pytest.raises(AsyncSaveError, match="committed checkpoint"):
            ckpt.wait(20)
        ckpt.save(20, ground.state(20))
        ckpt.save(30, ground.state(30))
    assert ground.steps("slow") == [10, 30]


def test_two_tiers_do_not_wait_for_each_other(ground: Any, tmp_path: Path) -> None:
    near = tmp_path / "near"
    tiers = [Tier(ground.slow, keep=KeepLast(2)), Tier(near, every=2)]
    with CheckpointManager(
        ground.fast, tiers=tiers, keep=KeepLast(1), drain_timeout=20, io_threads=1
    ) as ckpt:
        gate = ground.slow.block(kind="write_at")
        for step in (10, 20, 30, 40):
            ckpt.save(step, ground.state(step))
        gate.wait_reached(20)
        for thread in list(ckpt._saves.uploads._lanes[1].handles):
            assert thread.wait(20)
        assert sorted(p.name for p in near.iterdir()) == ["checkpoint-20", "checkpoint-40"]
        gate.open()
    assert ground.steps("slow") == [30, 40]


def test_what_makes_no_sense(tmp_path: Path) -> None:
    for wrong in ({"every": 0}, {"every": 1.5}, {"every": True}, {"keep": 3}):
        with pytest.raises(InvalidState):
            Tier(tmp_path, **wrong)
    with pytest.raises(InvalidState, match="root that all ranks share"):
        CheckpointManager(tmp_path / "fast", tiers=[Tier(tmp_path / "slow")], storage_mode="node")
    assert "hush" not in repr(Tier("memory://x", storage_options={"token": "hush"}))


def test_a_tier_is_another_root(tmp_path: Path, ground: Any) -> None:
    """Else it would be uploaded to itself, and deleted by the policies of both."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    run, far, url = tmp_path / "run", tmp_path / "far", f"memory://{tmp_path.name}/run"
    for root, *tiers in (
        (run, run),
        (run, f"{run}/"),
        (run, f"file://{run}"),
        (run, tmp_path / "link"),
        (tmp_path / "link", run),
        (run, far, far),
        (run, far, tmp_path / "far" / ".." / "far"),
        (url, url),
        (url, f"{url}/"),
        (run, far, url, f"{url}//"),
        (ground.slow, ground.slow),
    ):
        with pytest.raises(InvalidState, match="is given twice: a tier is another root"):
            CheckpointManager(root, tiers=[Tier(tier) for tier in tiers])
    for wrong in (str(far), far, ground.slow):
        with pytest.raises(InvalidState, match=r"tiers are Tier\(root\), not"):
            CheckpointManager(run, tiers=[Tier(url), wrong])
    assert sorted(
        path.name for path in tmp_path.iterdir() if path.name not in ("fast", "slow")
    ) == ["link", "run"]
    with CheckpointManager(run, tiers=[Tier(far), Tier(url), Tier(run / "below")]) as ckpt:
        assert ckpt.save(1, ground.state(1)).step == 1
    assert [
        [info.step for info in scan(open_storage(root))] for root in (run, far, url, run / "below")
    ] == [[1]] * 4
