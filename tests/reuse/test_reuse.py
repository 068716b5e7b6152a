"""`CheckpointManager(reuse=True)`: files whose bytes have not changed are taken over from the
checkpoint before, and every checkpoint is whole by itself."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ckpt_tools.main import main as command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ckptcore
from ckptcore import (
    CheckpointManager,
    CheckpointWarning,
    InvalidState,
    KeepLast,
    SaveEvent,
    StateComponent,
    StorageError,
)
from ckptcore.saving import unchanged
from ckptcore.testing.faults import WRITE_OPERATIONS, FaultStorage, Killed
from ckptcore.testing.power import VolatileStorage
from ckptcore.testing.ranks import run_ranks


class Tuned(nn.Module):
    """A frozen base, and an adapter that trains, whose names lie between those of the base."""

    def __init__(self, number: float = 0.0) -> None:
        super().__init__()
        self.a_base = nn.Linear(40, 40)
        self.b_adapter = nn.Linear(40, 2)
        self.c_base = nn.Linear(40, 40)
        for n, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, number + n)
        self.a_base.requires_grad_(False)
        self.c_base.requires_grad_(False)

    def step(self) -> None:
        with torch.no_grad():
            self.b_adapter.weight += 1


def inodes(root: Path, step: int) -> dict[str, int]:
    folder = root / f"checkpoint-{step}"
    return {file.name: file.stat().st_ino for file in folder.glob("*.safetensors")}


def shared(root: Path, one: int, other: int) -> set[str]:
    before, after = inodes(root, one), inodes(root, other)
    return {name for name in after if after[name] == before.get(name)}


def restored(root: Any, step: int) -> Tuned:
    model = Tuned(-50.0)
    with CheckpointManager(root) as ckpt:
        assert ckpt.load({"model": model}, step).step == step
    return model


def values(model: nn.Module) -> list[float]:
    return [parameter.flatten()[0].item() for parameter in model.parameters()]


BASE, ADAPTER = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_what_does_not_train_is_written_once(tmp_path: Path) -> None:
    events: list[SaveEvent] = []
    model = Tuned(3.0)
    with CheckpointManager(tmp_path, reuse=True, on_event=events.append) as ckpt:
        for step in (1, 2, 3):
            model.step()
            ckpt.save_async(step, {"model": model}).result()
    assert set(inodes(tmp_path, 1)) == {BASE, ADAPTER}
    assert shared(tmp_path, 1, 2) == shared(tmp_path, 2, 3) == {BASE}
    size = (tmp_path / "checkpoint-1" / BASE).stat().st_size
    assert [e.reused for e in events if e.kind == "committed"] == [0, size, size]
    for step in (1, 2, 3):
        assert values(restored(tmp_path, step)) == [3.0, 4.0, 5.0 + step, 6.0, 7.0, 8.0]
        assert ckptcore.open_checkpoint(tmp_path / f"checkpoint-{step}").verify() == []


def test_nothing_is_shared_unless_asked_for(tmp_path: Path) -> None:
    model = Tuned()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": model})
        ckpt.save(2, {"model": model})
    assert set(inodes(tmp_path, 1)) == {"model.safetensors"}
    assert shared(tmp_path, 1, 2) == set()


def test_a_changed_base_is_never_taken_over(tmp_path: Path) -> None:
    """By digests of what is in memory now, whatever requires_grad says."""
    model = Tuned(1.0)
    with CheckpointManager(tmp_path, reuse=True) as ckpt:
        ckpt.save(1, {"model": model})
        model.c_base.weight[39, 39] += 1
        ckpt.save(2, {"model": model})
    assert shared(tmp_path, 1, 2) == {ADAPTER}
    assert restored(tmp_path, 2).c_base.weight[39, 39] == 6.0
    assert restored(tmp_path, 1).c_base.weight[39, 39] == 5.0


def test_what_was_frozen_may_train_again(tmp_path: Path) -> None:
    model = Tuned(1.0)
    with CheckpointManager(tmp_path, reuse=True) as ckpt:
        ckpt.save(1, {"model": model})
        model.a_base.requires_grad_(True)
        with torch.no_grad():
            model.a_base.weight += 10
        ckpt.save(2, {"model": model})
        ckpt.save(3, {"model": model})
    assert shared(tmp_path, 1, 2) == set()
    assert shared(tmp_path, 2, 3) == {BASE, ADAPTER}
    assert values(restored(tmp_path, 3)) == [11.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_the_first_owner_may_go(tmp_path: Path) -> None:
    model = Tuned(1.0)
    with CheckpointManager(tmp_path, reuse=True, keep=KeepLast(2)) as ckpt:
        for step in range(1, 6):
            model.step()
            ckpt.save(step, {"model": model})
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-4", "checkpoint-5"]
    assert shared(tmp_path, 4, 5) == {BASE}
    for step in (4, 5):
        assert ckptcore.open_checkpoint(tmp_path / f"checkpoint-{step}").verify() == []
    shutil.rmtree(tmp_path / "checkpoint-4")
    assert values(restored(tmp_path, 5)) == [1.0, 2.0, 8.0, 4.0, 5.0, 6.0]


def test_a_file_that_somebody_replaced_is_not_taken_over(tmp_path: Path) -> None:
    model = Tuned()
    with CheckpointManager(tmp_path, reuse=True) as ckpt:
        ckpt.save(1, {"model": model})
        file = tmp_path / "checkpoint-1" / BASE
        data = file.read_bytes()
        file.unlink()
        file.write_bytes(data)
        ckpt.save(2, {"model": model})
    assert shared(tmp_path, 1, 2) == {ADAPTER}


def test_bytes_are_written_anew_now_and_then(tmp_path: Path) -> None:
    model = Tuned()
    with CheckpointManager(tmp_path, reuse=True, refresh_every=3) as ckpt:
        for step in range(1, 8):
            ckpt.save(step, {"model": model})
    again = [step for step in range(2, 8) if shared(tmp_path, step - 1, step) == set()]
    assert again == [4, 7]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP])
def test_where_there_are_no_links_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    model = Tuned(2.0)
    with CheckpointManager(tmp_path, reuse=True) as ckpt:
        ckpt.save(1, {"model": model})
        ckpt.save(2, {"model": model})
    assert shared(tmp_path, 1, 2) == set()
    assert values(restored(tmp_path, 2)) == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_a_copy_in_another_root_is_whole(tmp_path: Path) -> None:
    model = Tuned(1.0)
    with CheckpointManager(tmp_path / "a", reuse=True) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"model": model})
    ckptcore.copy_checkpoint(tmp_path / "a" / "checkpoint-2", tmp_path / "b" / "checkpoint-2")
    shutil.rmtree(tmp_path / "a")
    assert values(restored(tmp_path / "b", 2)) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_step_that_is_overwritten(tmp_path: Path) -> None:
    model = Tuned(1.0)
    with CheckpointManager(tmp_path, reuse=True) as ckpt:
        ckpt.save(1, {"model": model})
        model.step()
        ckpt.save(1, {"model": model}, overwrite=True)
        ckpt.save(2, {"model": model})
    assert shared(tmp_path, 1, 2) == {BASE, ADAPTER}
    assert values(restored(tmp_path, 1)) == values(restored(tmp_path, 2))


def test_a_memory_root_has_nothing_to_share() -> None:
    model = Tuned(1.0)
    with CheckpointManager("memory://reuse-test", reuse=True) as ckpt:
        ckpt.save(1, {"model": model})
        model.step()
        ckpt.save(2, {"model": model})
    assert values(restored("memory://reuse-test", 2))[2] == 4.0


def test_each_rank_takes_over_its_own_files(tmp_path: Path) -> None:
    def program(comm: Any) -> list[int]:
        events: list[SaveEvent] = []
        model = Tuned(10.0 * comm.rank)
        state = {"model": StateComponent("model", model, "PER_RANK")}
        with CheckpointManager(tmp_path, comm=comm, reuse=True, on_event=events.append) as ckpt:
            for step in (1, 2):
                model.step()
                ckpt.save(step, state)
        return [event.reused > 0 for event in events if event.kind == "committed"]

    assert run_ranks(2, program) == [[False, True]] * 2
    base = {f"model.rank0000{rank}-00001-of-00002.safetensors" for rank in (0, 1)}
    assert shared(tmp_path, 1, 2) == base


def test_a_checkpoint_that_was_moved_behind_a_link_is_left_alone(tmp_path: Path) -> None:
    root, model = tmp_path / "root", Tuned(1.0)
    with CheckpointManager(root, reuse=True) as ckpt:
        ckpt.save(1, {"model": model})
        shutil.move(root / "checkpoint-1", tmp_path / "moved")
        (root / "checkpoint-1").symlink_to(tmp_path / "moved")
        ckpt.save(2, {"model": model})
    assert shared(root, 1, 2) == set()
    assert ckptcore.open_checkpoint(root / "checkpoint-2").verify() == []


def test_ranks_whose_frozen_parameters_differ_get_an_error_that_says_so(tmp_path: Path) -> None:
    def program(comm: Any) -> None:
        parts = [nn.Parameter(torch.ones(3 << 20), comm.rank == 1 and n < 2) for n in range(6)]
        model = StateComponent("model", nn.ParameterList(parts), "REPLICATED")
        with CheckpointManager(tmp_path, comm=comm, reuse=True) as ckpt:
            ckpt.save(1, [model])

    for error in run_ranks(2, program, errors=True):
        assert isinstance(error, ckptcore.CoordinationError)
        assert "requires_grad differs" in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "named"), [({"reuse": "yes"}, "reuse"), ({"refresh_every": 0}, "refresh_every")]
)
def test_arguments(tmp_path: Path, what: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidState, match=named):
        CheckpointManager(tmp_path, **what)


@pytest.mark.parametrize("survives", [False, True], ids=["synced only", "everything survives"])
def test_killed_at_every_operation(tmp_path: Path, survives: bool) -> None:
    """The machine loses power in each operation of the second save in turn."""

    def program(faults: FaultStorage, at: int | None) -> int:
        """Two saves; how many operations the second one is."""
        model = Tuned(1.0)
        with CheckpointManager(faults, reuse=True) as ckpt:
            ckpt.save(10, {"model": model})
            model.step()
            before = faults.count()
            if at is not None:
                faults.kill(at=at, how="raise")
            ckpt.save(20, {"model": model})
            return faults.count() - before

    operations = program(FaultStorage(ckptcore.open_storage(tmp_path / "counted")), None)
    assert operations > 10
    steps = set()
    for at in range(1, operations + 1):
        root = tmp_path / f"killed-{at}"
        volatile = VolatileStorage(ckptcore.open_storage(root), lambda _: survives)
        faults = FaultStorage(volatile)
        with pytest.raises(Killed):
            program(faults, at)
        model = Tuned(-1.0)
        with CheckpointManager(root, reuse=True) as ckpt:
            step = ckpt.restore({"model": model}).step
            ckpt.save(30, {"model": model})
        steps.add(step)
        assert values(model)[2] == {10: 3.0, 20: 4.0}[step or 0], at
        assert ckptcore.open_checkpoint(root / "checkpoint-30").verify() == []
    # The last operation makes the names durable: before it, only what survives by luck is there.
    assert steps == ({10, 20} if survives else {10})


@pytest.mark.parametrize("after", [False, True], ids=["refused", "done and refused"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_every_operation_fails_once(tmp_path: Path, number: int, after: bool) -> None:
    """A save that fails leaves nothing, and the next one takes over what the last good one has."""
    faults = FaultStorage(ckptcore.open_storage(tmp_path))
    model, step, failed, at = Tuned(1.0), 1, 0, 1
    with CheckpointManager(faults, reuse=True, keep=KeepLast(2), refresh_every=1000) as ckpt:
        ckpt.save(step, {"model": model})
        while True:
            model.step()
            before, good = faults.count(WRITE_OPERATIONS), step
            step += 1
            faults.fail(at, error=number, kind=WRITE_OPERATIONS, after=after)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", CheckpointWarning)
                    ckpt.save(step, {"model": model})
            except StorageError:
                failed += 1
                assert not (tmp_path / f"checkpoint-{step}").exists()
                step = good
            done = faults.count(WRITE_OPERATIONS) - before
            faults.clear()
            assert ckpt.latest().step == step
            assert ckptcore.open_checkpoint(tmp_path / f"checkpoint-{step}").verify() == []
            if done < at:
                break
            at += 1
            step += 1
            ckpt.save(step, {"model": model})
            assert shared(tmp_path, step - 1, step) >= {BASE}
    assert failed >= 8


CHANGES = st.lists(
    st.sampled_from(["base", "adapter", "freeze", "thaw", "touch", "delete", "fail", "nothing"]),
    min_size=1,
    max_size=8,
)


@given(CHANGES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_happens_between_saves_each_has_its_own_values(
    tmp_path_factory: pytest.TempPathFactory, changes: list[str]
) -> None:
    root = tmp_path_factory.mktemp("root")
    faults = FaultStorage(ckptcore.open_storage(root))
    model, saved = Tuned(1.0), {}
    with (
        mock.patch.object(unchanged, "WORTH_BYTES", 1),
        CheckpointManager(faults, reuse=True, refresh_every=4) as ckpt,
    ):
        for step, change in enumerate(changes, 1):
            with torch.no_grad():
                if change == "base":
                    model.a_base.weight[0, 0] += 1
                elif change == "adapter":
                    model.step()
            if change in ("freeze", "thaw"):
                model.c_base.requires_grad_(change == "thaw")
            if change == "touch" and saved:
                for file in (root / f"checkpoint-{max(saved)}").glob("*.safetensors"):
                    os.utime(file, ns=(step, step))
            if change == "delete" and len(saved) > 1:
                ckpt.delete(min(saved))
                del saved[min(saved)]
            if change == "fail":
                faults.fail(kind=("create", "link"), path="*.safetensors")
                with pytest.raises(ckptcore.StorageError):
                    ckpt.save(step, {"model": model})
                faults.clear()
                continue
            ckpt.save(step, {"model": model})
            saved[step] = copy.deepcopy(model.state_dict())
    for step, expected in saved.items():
        assert ckptcore.open_checkpoint(root / f"checkpoint-{step}").verify() == []
        found = restored(root, step).state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected), (changes, step)


def test_who_shares_with_whom(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = Tuned(1.0)
    with CheckpointManager(tmp_path, reuse=True) as ckpt:
        for step in (1, 2):
            model.step()
            ckpt.save(step, {"model": model})
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(3, {"model": model})
    found = ckptcore.shared_files(tmp_path)
    assert [found[f"checkpoint-{n}"].shared_with for n in (1, 2, 3)] == [
        ["checkpoint-2"],
        ["checkpoint-1"],
        [],
    ]
    sizes = {info.name: info.size_bytes or 0 for info in ckptcore.scan_root(tmp_path)}
    base = (tmp_path / "checkpoint-1" / BASE).stat().st_size
    own = {name: sharing.unshared_bytes for name, sharing in found.items()}
    assert own == {
        "checkpoint-1": sizes["checkpoint-1"] - base,
        "checkpoint-2": sizes["checkpoint-2"] - base,
        "checkpoint-3": sizes["checkpoint-3"],
    }
    assert command(["ls", str(tmp_path), "--shared", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert {entry["name"]: entry["unshared_bytes"] for entry in listed} == own
    assert command(["ls", str(tmp_path), "--shared"]) == 0
    assert "shared with" in capsys.readouterr().out


def test_objects_of_a_store_are_nobody_elses(s3: Any) -> None:
    url, model = s3.new_root(), Tuned(1.0)
    with CheckpointManager(url, reuse=True, storage_options=s3.options) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"model": model})
    found = ckptcore.shared_files(url, s3.options)
    assert [sharing.shared_with for sharing in found.values()] == [[], []]
