"""What is restored from two roots: the newest that is whole, from the fast one where both have
it."""

from __future__ import annotations

import contextlib
import errno
import warnings
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore import (
    AsyncSaveError,
    CheckpointCorrupt,
    CheckpointManager,
    CheckpointNotFound,
    CheckpointWarning,
    KeepBest,
    KeepLast,
    StorageError,
    Tier,
    open_storage,
)
from ckptcore.catalog.catalog import scan
from ckptcore.testing import FaultStorage, Killed


def saved(ground: Any, *steps: int, **how: Any) -> None:
    with ground.manager(run_id="run", **how) as ckpt:
        for step in steps:
            ckpt.save(step, ground.state(step), metrics={"loss": abs(step - 20.0)})
    ground.restart()


def damage(ground: Any, step: int, file: str = "model.safetensors", cut: bool = False) -> None:
    """In the fast root: one bit, or the end of the file."""
    path = Path(ground.fast.url) / f"checkpoint-{step}" / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data[:-1] if cut else data)


def test_the_fast_root_is_preferred(ground: Any) -> None:
    saved(ground, 10, 20, 30)
    assert ground.restored() == (30, 30, ground.fast.url)
    for which in ("latest", 30):
        assert ground.restored(which) == (30, 30, ground.fast.url)
    assert ground.restored("best", keep=KeepBest("loss")) == (20, 20, ground.fast.url)
    assert ground.slow.count("open", "*.safetensors") == 0


def test_after_the_loss_of_the_fast_root_the_run_goes_on(ground: Any) -> None:
    saved(ground, 10, 20, 30)
    ground.lose_fast()
    with ground.manager(keep=KeepLast(1), keep_far=KeepLast(2)) as ckpt:
        state = ground.state(-1)
        report = ckpt.restore(state)
        assert (report.step, ground.mark(state, report), ckpt.run_id) == (30, 30, "run")
        assert report.skipped == {}
        info = ckpt.save(40, ground.state(40))
        assert (info.run_id, info.sequence) == ("run", 4)
        assert ckpt.wait(20)
        assert [i.step for i in ckpt.list()] == [30, 40]
    assert (ground.steps("fast"), ground.steps("slow")) == ([40], [30, 40])
    ground.restart()
    assert ground.restored() == (40, 40, ground.fast.url)


def test_a_save_without_a_restore_has_the_right_number_too(ground: Any) -> None:
    saved(ground, 10, 20, 30)
    ground.lose_fast()
    with ground.manager(run_id="another") as ckpt:
        assert ckpt.save(5, ground.state(5)).sequence == 4
        assert ckpt.save(6, ground.state(6)).sequence == 5
    ground.lose_fast()
    ground.restart()
    assert ground.restored() == (6, 6, ground.slow.url)  # of the run that committed last


def test_loads_from_the_durable_root_what_the_fast_one_has_not_any_more(ground: Any) -> None:
    saved(ground, 10, 20, 30, keep=KeepLast(1))
    with ground.manager(keep=KeepBest("loss")) as ckpt:
        assert [(i.step, i.url.rpartition("/")[0]) for i in ckpt.list()] == [
            (10, ground.slow.url),
            (20, ground.slow.url),
            (30, ground.fast.url),
        ]
        assert ckpt.latest().url == f"{ground.fast.url}/checkpoint-30"
        assert ckpt.best().url == f"{ground.slow.url}/checkpoint-20"
        assert ckpt.verify(10) == [] and ckpt.verify() == []
        for which, step in (("best", 20), (10, 10), ("latest", 30)):
            state = ground.state(-1)
            assert ground.mark(state, ckpt.load(state, which)) == step
        with pytest.raises(CheckpointNotFound, match="steps there: 10, 20, 30"):
            ckpt.load(ground.state(-1), 11)


class Guarded(MemoryFileSystem):  # type: ignore[misc]
    """Opens for a token only, as a service does that the fast root knows nothing of."""

    protocol = "guarded"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def __init__(self, token: str = "none", **options: Any) -> None:
        super().__init__(**options)
        if token != "the right one":
            raise PermissionError("which token?")


def test_what_only_a_tier_has_is_loaded_by_its_url(
    ground: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the storage options of that tier, which are not those of the manager."""
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    monkeypatch.setattr(Guarded, "store", {})
    monkeypatch.setattr(Guarded, "pseudo_dirs", [""])
    tiers = [
        Tier(tmp_path / "near", every=2),
        Tier("guarded://far/run", storage_options={"token": "the right one"}),
    ]
    with CheckpointManager(tmp_path / "run", keep=KeepLast(1), tiers=tiers) as ckpt:
        for step in (10, 20, 30):
            ckpt.save(step, ground.state(step))
            assert ckpt.wait(20)
    with CheckpointManager(tmp_path / "run", tiers=tiers) as ckpt:
        urls = [info.url for info in ckpt.list()]
        assert urls == [
            "guarded://far/run/checkpoint-10",
            str(tmp_path / "near" / "checkpoint-20"),
            str(tmp_path / "run" / "checkpoint-30"),
        ]
        for step, url in zip(
            (10, 20, 30, 20), [*urls, "guarded://far/run/checkpoint-20"], strict=True
        ):
            for load in (ckpt.load, ckpt.restore):
                state = ground.state(-1)
                report = load(state, url)
                assert (report.step, report.path, ground.mark(state, report)) == (step, url, step)
        with pytest.raises(CheckpointNotFound, match="guarded://far/run/checkpoint-40"):
            ckpt.load(ground.state(-1), "guarded://far/run/checkpoint-40")
    with (
        CheckpointManager(tmp_path / "run") as ckpt,
        pytest.raises(StorageError, match="which token"),
    ):
        ckpt.load(ground.state(-1), urls[0])


def test_pins_and_deletions_are_for_all_copies(ground: Any) -> None:
    saved(ground, 10, 20, 30)
    with ground.manager(run_id="run", keep=KeepLast(1), keep_far=KeepLast(1)) as ckpt:
        ckpt.pin(10)
        ckpt.save(40, ground.state(40))
    assert (ground.steps("fast"), ground.steps("slow")) == ([10, 40], [10, 40])
    assert [[i.pinned for i in scan(disk)] for disk in ground.disks] == [[True, False]] * 2
    ground.restart()
    with ground.manager() as ckpt:
        ckpt.unpin(10)
        ckpt.delete(10)
        ckpt.delete(40)
        assert ckpt.latest() is None
    assert (ground.steps("fast"), ground.steps("slow")) == ([], [])


@pytest.mark.parametrize("cut", [True, False])
def test_a_damaged_checkpoint_is_taken_from_the_other_root(ground: Any, cut: bool) -> None:
    saved(ground, 10, 20)
    damage(ground, 20, cut=cut)
    assert ground.restored("latest") == (20, 20, ground.slow.url)
    assert ground.restored(20) == (20, 20, ground.slow.url)
    with ground.manager() as ckpt:
        state = ground.state(-1)
        if cut:  # to be seen without reading it
            assert ckpt.restore(state).step == 20
        else:
            with pytest.warns(
                CheckpointWarning, match=r"restored checkpoint-20 .*; skipped checkpoint-20: "
            ):
                report = ckpt.restore(state)
            assert ground.mark(state, report) == 20
            assert list(report.skipped) == ["checkpoint-20"]


def test_both_copies_damaged(ground: Any) -> None:
    saved(ground, 10, 20)
    damage(ground, 20)
    data = bytearray(ground.slow.read("checkpoint-20/model.safetensors"))
    data[-2] ^= 1
    ground.disks[1].remove("checkpoint-20/model.safetensors")
    ground.disks[1].write("checkpoint-20/model.safetensors", bytes(data))
    assert ground.restored() == (10, 10, ground.fast.url)
    with pytest.raises(CheckpointCorrupt):
        ground.restored("latest")


def test_a_durable_root_that_cannot_be_read_is_no_verdict(ground: Any) -> None:
    saved(ground, 10)
    ground.slow.fail(kind="list", error=errno.EACCES, times=None)
    with pytest.raises(StorageError):
        ground.restored()
    ground.restart()
    ground.slow.fail(kind="list", error=errno.EACCES, times=None)
    ckpt = ground.manager(run_id="run", on_error="warn")
    ckpt.save(20, ground.state(20))  # a save goes on without it
    with pytest.warns(CheckpointWarning, match="upload of step"):
        ckpt.close()
    assert ground.steps("fast") == [10, 20]


def test_an_upload_that_was_killed_is_finished_by_the_next_process(ground: Any) -> None:
    """At every operation on the durable root; what counts there is whole at every moment."""
    base = ground.disks
    counted = FaultStorage(base[1])
    ground.slow = counted
    saved(ground, 10)
    total = counted.count()
    assert total > 20
    for k in range(2, total + 1, 3):
        ground.lose_fast()
        ground.disks = base[::-1]
        ground.lose_fast()  # the durable one, for this test alone
        ground.disks = base
        ground.restart()
        ground.slow.kill(k, how="raise")
        with pytest.raises((AsyncSaveError, Killed)), ground.manager(run_id="run") as ckpt:
            ckpt.save(10, ground.state(10))
        whole = [info.status for info in scan(base[1])]
        assert whole in ([], ["partial"], ["committed"])
        ground.restart()
        if scan(base[0]):
            assert ground.restored() == (10, 10, ground.fast.url)
            assert ground.steps("slow") == [10]


def test_what_was_left_waiting_is_held_and_finished_by_the_next_process(ground: Any) -> None:
    with pytest.raises(AsyncSaveError), ground.manager(run_id="run", keep=KeepLast(1)) as ckpt:
        ground.slow.fail(kind="create", times=None)
        ckpt.save(10, ground.state(10))
    ground.restart()
    with ground.manager(run_id="run", keep=KeepLast(1)) as ckpt:
        gate = ground.slow.block(kind="create")
        ckpt.save(20, ground.state(20))
        gate.wait_reached(20)
        assert ground.steps("fast") == [10, 20]
        gate.open()
    assert ground.steps("slow") == [10, 20]


@given(data=st.data())
@settings(max_examples=25)
def test_any_series_of_misfortunes(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Saves, uploads that fail, restarts and lost machines in any order: what was committed last
    and is anywhere is restored, and the run's steps and numbers never go back."""
    folder = tmp_path_factory.mktemp("series")
    disks = open_storage(folder / "fast"), open_storage(folder / "slow")
    fast: dict[int, int] = {}
    slow: dict[int, int] = {}
    step, last_sequence = 0, 0
    while data.draw(st.integers(0, 5), label="more") and step < 12:
        faults = FaultStorage(disks[1])
        broken = data.draw(st.booleans(), label="broken")
        ckpt = CheckpointManager(
            disks[0],
            tiers=[Tier(faults)],
            run_id="run",
            keep=KeepLast(2),
            io_threads=1,
            on_error="warn",
            drain_timeout=20,
        )
        with warnings.catch_warnings(), contextlib.closing(ckpt):
            warnings.simplefilter("ignore", CheckpointWarning)
            state: dict[str, Any] = {"progress": {"mark": -1}}
            report = ckpt.restore(state)
            known = {**slow, **fast}
            assert report.fresh == (not known)
            if known:
                assert report.step == max(known) and report.values["progress"] == {
                    "mark": known[max(known)]
                }
            if broken:
                faults.fail(data.draw(st.integers(1, 30), label="at"), times=None)
            for _ in range(data.draw(st.integers(0, 3), label="saves")):
                step += 1
                info = ckpt.save(step, {"progress": {"mark": step * 7}})
                assert (info.sequence or 0) > last_sequence
                last_sequence = info.sequence or 0
        if data.draw(st.booleans(), label="lose"):
            for entry in disks[0].list() if (folder / "fast").exists() else []:
                for file in disks[0].list(entry.name):
                    disks[0].remove(f"{entry.name}/{file.name}")
                disks[0].remove_folder(entry.name)
        fast, slow = (
            {
                info.step or 0: (info.step or 0) * 7
                for info in scan(disk)
                if info.status == "committed"
            }
            for disk in disks
        )
        if not broken:
            assert not known or max(known) in slow
        last_sequence = max(
            [info.sequence or 0 for disk in disks for info in scan(disk)], default=0
        )
