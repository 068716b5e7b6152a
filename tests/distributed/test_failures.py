"""What one rank raises, all ranks raise: same type, same words, causes by rank; nothing is left and
the next save works."""

import errno

import pytest
import torch

import ckptcore.saving.plan
from ckptcore import (
    CheckpointCorrupt,
    CheckpointManager,
    CheckpointWarning,
    CoordinationError,
    InvalidState,
    LoadFailed,
    NoSpace,
    RankFailed,
    RankLost,
    SharingPattern,
    StateComponent,
    StateMismatch,
    StorageError,
    UnsupportedValue,
    open_storage,
    scan_root,
)
from ckptcore.ranks.board import BoardLost
from ckptcore.testing.faults import FaultStorage
from ckptcore.testing.ranks import run_ranks

SIZE = 3


def own(rank, value=None, **more):
    """A component of each rank's own, so that every rank writes and reads something."""
    return StateComponent(
        "own",
        value if value is not None else {"x": torch.full((4,), float(rank))},
        SharingPattern.PER_RANK,
        **more,
    )


class Raises:
    def __init__(self, error, at="state_dict"):
        self.error, self.at = error, at

    def state_dict(self):
        if self.at == "state_dict":
            raise self.error
        return {"x": torch.zeros(4)}

    def load_state_dict(self, state_dict):
        raise self.error


def failing_save(tmp_path, errors_of, state_of=own, arm=None, save=None, size=SIZE):
    """Step 1 is saved, step 2 fails as `arm` and `state_of` say, step 3 is saved; the errors of
    step 2 by rank."""

    def program(comm):
        faults = FaultStorage(open_storage(tmp_path))
        with CheckpointManager(faults, comm=comm) as ckpt:
            ckpt.save(1, [own(comm.rank)])
            if arm is not None:
                arm(faults, comm.rank)
            try:
                (save or (lambda ckpt, rank, state: ckpt.save(2, state)))(
                    ckpt, comm.rank, [state_of(comm.rank)]
                )
                failed = None
            except Exception as error:
                failed = error
            faults.clear()
            live = {"x": torch.full((4,), -1.0)}
            ckpt.load([own(comm.rank, live)])
            assert live["x"].tolist() == [float(comm.rank)] * 4
            assert ckpt.save(3, [own(comm.rank)]).status == "committed"
            return failed

    results = errors_of(size, program)
    left = sorted(entry.name for entry in tmp_path.iterdir())
    assert left == ["checkpoint-1", "checkpoint-3"]
    return results


@pytest.mark.parametrize("bad", [[0], [1], [2], [0, 2], [1, 2]])
def test_unsupported_value(tmp_path, bad, errors_of, on_all):
    def state(rank):
        return own(rank, {"a": {"b": object() if rank in bad else 1}})

    error = on_all(failing_save(tmp_path, errors_of, state), UnsupportedValue)
    assert (error.component, error.key, error.type_name) == ("own", "a/b", "builtins.object")
    assert list(error.causes) == bad and str(error).startswith(f"rank {bad[0]}: ")
    assert all(text.startswith("UnsupportedValue: ") for text in error.causes.values())
    assert ("also failed: rank 2" in str(error)) == (len(bad) > 1)


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_of_the_users_own(tmp_path, bad, errors_of, on_all):
    results = failing_save(
        tmp_path,
        errors_of,
        lambda rank: own(rank, Raises(KeyError("weights"))) if rank == bad else own(rank),
    )
    error = on_all(results, RankFailed)
    assert error.causes == {bad: "KeyError: 'weights'"} and f"rank {bad}" in str(error)
    assert type(results[bad].__cause__) is KeyError


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("kind", ["create", "write_at", "close", "sync_folder"])
def test_storage_error_while_writing(tmp_path, bad, kind, errors_of, on_all):
    def arm(faults, rank):
        if rank == bad:
            faults.fail(kind=kind, path="*.partial-*", error=errno.EIO)

    error = on_all(failing_save(tmp_path, errors_of, arm=arm), StorageError)
    assert error.errno == errno.EIO and list(error.causes) == [bad]
    assert f"rank {bad}" in str(error) and "checkpoint-2.partial-" in str(error)


@pytest.mark.parametrize(
    ("kind", "path"),
    [("list", "*"), ("make_folder", "*"), ("create", "*manifest*"), ("rename", "*")],
)
def test_storage_error_of_the_committing_rank(tmp_path, kind, path, errors_of, on_all):
    def arm(faults, rank):
        if rank == 0:
            faults.fail(kind=kind, path=path, error=errno.EACCES)

    error = on_all(failing_save(tmp_path, errors_of, arm=arm), StorageError)
    assert error.errno == errno.EACCES


@pytest.mark.parametrize("bad", [0, 2])
def test_full_disk_says_what_that_rank_needs(tmp_path, bad, errors_of, on_all):
    def arm(faults, rank):
        if rank == bad:
            faults.fail(kind="write_at", error=errno.ENOSPC)

    error = on_all(failing_save(tmp_path, errors_of, arm=arm), NoSpace)
    assert error.needed > 16 and list(error.causes) == [bad] and "needs" in str(error)


def test_different_errors_are_one_type_with_all_causes(tmp_path, errors_of, on_all):
    def state(rank):
        return own(rank, [own(0).stateful, Raises(ValueError("loader")), {"f": object()}][rank])

    error = on_all(failing_save(tmp_path, errors_of, state), RankFailed)
    assert set(error.causes) == {1, 2}
    assert error.causes[1] == "ValueError: loader" and error.causes[2].startswith(
        "UnsupportedValue: "
    )


@pytest.mark.parametrize("bad", [0, 1])
def test_metric_that_is_no_number_on_one_rank(tmp_path, bad, errors_of, on_all):
    """Metrics may well be one rank's alone; what is wrong with them is everybody's error all the
    same."""

    def save(ckpt, rank, state):
        ckpt.save(2, state, metrics={"loss": "low"} if rank == bad else {})

    error = on_all(failing_save(tmp_path, errors_of, save=save), InvalidState)
    assert "'loss'" in str(error)


def test_metadata_that_is_not_json(tmp_path, errors_of, on_all):
    def save(ckpt, rank, state):
        ckpt.save(2, state, metadata={"x": object()} if rank == 0 else {})

    on_all(failing_save(tmp_path, errors_of, save=save), InvalidState)


@pytest.mark.parametrize("bad", [0, 1])
def test_state_that_one_rank_cannot_declare(tmp_path, bad, errors_of, on_all):
    def save(ckpt, rank, state):
        ckpt.save(2, [*state, *state] if rank == bad else state)

    error = on_all(failing_save(tmp_path, errors_of, save=save), InvalidState)
    assert "'own'" in str(error)


@pytest.mark.parametrize("bad", [0, 1])
def test_plan_that_fails_on_one_rank(tmp_path, bad, errors_of, on_all, monkeypatch):
    """As for a tensor's name that is too long for any header, on one rank alone."""
    plan = ckptcore.saving.plan.plan_component

    def planned(key, tensors, *arguments, **more):
        return plan(
            key,
            tensors,
            *arguments,
            **more,
            header_limit=10_000 if len(tensors[0].stored_name) > 9 else 1 << 20,
        )

    monkeypatch.setattr("ckptcore.saving.plan.plan_component", planned)

    def state(rank):
        return own(rank, {"x" * (2000 if rank == bad else 3): torch.zeros(1)})

    error = on_all(failing_save(tmp_path, errors_of, state), InvalidState)
    assert "too long" in str(error) and list(error.causes) == [bad]


@pytest.mark.parametrize("rank", [0, 1])
def test_two_components_under_one_file_name(tmp_path, rank, errors_of, on_all):
    """`own` of rank 1 and the global `own.rank00001` would be the same file."""

    def save(ckpt, _, state):
        ckpt.save(2, [*state, StateComponent(f"own.rank{rank:05d}", {"y": torch.ones(2)})])

    error = on_all(failing_save(tmp_path, errors_of, save=save), InvalidState)
    assert f"own.rank{rank:05d}" in str(error)


def test_writers_that_differ_between_ranks(tmp_path, errors_of, split_everything):
    """The plans differ, so they cannot cover every byte once: an error on all, and no
    checkpoint."""

    def program(comm):
        state = [
            StateComponent(
                "m", {f"w{n}": torch.ones(4) for n in range(4)}, SharingPattern.REPLICATED
            )
        ]
        with CheckpointManager(
            tmp_path, comm=comm, writers="lowest" if comm.rank == 1 else "split"
        ) as ckpt:
            return ckpt.save(1, state)

    results = errors_of(3, program)
    assert all(isinstance(result, CoordinationError) for result in results), results
    assert len({str(result) for result in results}) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("root", ["local", "memory"])
def test_board_that_is_lost_after_the_commit_does_not_undo_it(tmp_path, root, monkeypatch):
    """Rank 0 can tell nobody any more that it published; what is published stays."""
    url = tmp_path if root == "local" else f"memory://{tmp_path.name}"

    def program(comm):
        with CheckpointManager(url, comm=comm) as ckpt:
            ckpt.save(1, [own(comm.rank)])
            put = comm.board.put

            def lost(key, value):
                if "/out/" in key and b"checkpoint_id" in value:
                    raise BoardLost("gone")
                put(key, value)

            if comm.rank == 0:
                comm.board = Proxy(comm.board, lost)
            ckpt.save(1, [own(comm.rank)], overwrite=True)

    results = run_ranks(2, program, errors=True, liveness_timeout=1)
    assert [type(result) for result in results] == [RankLost] * 2
    assert [(info.step, info.status) for info in scan_root(url) if info.status != "partial"] == [
        (1, "committed")
    ]


class Proxy:
    """A board with another `put`."""

    def __init__(self, board, put):
        self.board, self.put = board, put

    def put_all(self, keys, value):
        for key in keys:
            self.put(key, value)

    def __getattr__(self, name):
        return getattr(self.board, name)


def test_interrupted_rank_tells_the_others_and_is_not_kept(tmp_path):
    def program(comm):
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(2, [own(comm.rank, Raises(KeyboardInterrupt()) if comm.rank == 1 else None)])

    results = run_ranks(SIZE, program, errors=True)
    assert [type(result) for result in results] == [RankFailed, KeyboardInterrupt, RankFailed]
    assert results[0].causes == results[2].causes == {1: "KeyboardInterrupt: "}
    assert not (tmp_path / "checkpoint-2").exists()


def loading(tmp_path, errors_of, arm=None, live_of=None, step=2, size=SIZE):
    """Steps 1 and 2 are saved; `step` is loaded with faults on some ranks (None: restored), then
    step 1 without."""

    def program(comm):
        faults = FaultStorage(open_storage(tmp_path))
        with CheckpointManager(faults, comm=comm) as ckpt:
            for number in (1, 2):
                ckpt.save(
                    number, [own(comm.rank, {"x": torch.full((4,), 10.0 * number + comm.rank)})]
                )
            if arm is not None:
                arm(faults, comm.rank)
            with comm.round("damaged"):
                pass
            live = {"x": torch.full((4,), -1.0)}
            stateful = live_of(comm.rank) if live_of is not None else live
            try:
                components = [own(comm.rank, stateful)]
                result = ckpt.restore(components) if step is None else ckpt.load(components, step)
            except Exception as error:
                result = error
            faults.clear()
            last = {"x": torch.full((4,), -1.0)}
            ckpt.load([own(comm.rank, last)], step=1)
            assert last["x"].tolist() == [10.0 + comm.rank] * 4
            return result, live["x"].tolist()

    return errors_of(size, program)


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_damage_that_one_rank_sees(tmp_path, bad, errors_of, on_all):
    def arm(faults, rank):
        if rank == bad:
            flip(tmp_path / "checkpoint-2" / f"own.rank{bad:05d}.safetensors")

    results = loading(tmp_path, errors_of, arm)
    error = on_all([result for result, _ in results], CheckpointCorrupt)
    assert (error.file, error.tensor, error.kind) == (
        f"own.rank{bad:05d}.safetensors",
        "own/x",
        "digest",
    )
    assert list(error.causes) == [bad] and f"rank {bad}: " in str(error)


@pytest.mark.parametrize("bad", [0, 2])
def test_missing_file_touches_no_live_state_anywhere(tmp_path, bad, errors_of, on_all):
    def arm(faults, rank):
        if rank == bad:
            (tmp_path / "checkpoint-2" / f"own.rank{bad:05d}.safetensors").unlink()

    results = loading(tmp_path, errors_of, arm)
    error = on_all([result for result, _ in results], CheckpointCorrupt)
    assert error.kind == "missing" and list(error.causes) == [bad]
    assert [live for _, live in results] == [[-1.0] * 4] * SIZE


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(
    ("kind", "path"),
    [("open", "*manifest*"), ("open", "*index.rank*"), ("read_into", "*own.rank*")],
)
def test_storage_error_of_one_reader(tmp_path, bad, kind, path, errors_of, on_all):
    def arm(faults, rank):
        if rank == bad:
            faults.fail(kind=kind, path=f"checkpoint-2/{path}", error=errno.EACCES, times=None)

    error = on_all([result for result, _ in loading(tmp_path, errors_of, arm)], StorageError)
    assert error.errno == errno.EACCES and list(error.causes) == [bad]


@pytest.mark.parametrize("step", ["latest", None])
def test_newest_that_cannot_be_read_is_not_silently_passed_over(tmp_path, step, errors_of, on_all):
    def arm(faults, rank):
        faults.fail(kind="open", path="checkpoint-2/*manifest*", error=errno.EACCES, times=None)

    results = loading(tmp_path, errors_of, arm, step=step)
    assert "checkpoint-2" in str(on_all([result for result, _ in results], StorageError))


def test_ranks_that_see_different_checkpoints(tmp_path, errors_of, on_all):
    def program(comm):
        root = tmp_path / ("here" if comm.rank < 2 else "elsewhere")
        alone = CheckpointManager(root, comm=None)
        if comm.rank in (0, 2):
            alone.save(1, [StateComponent("own", {"x": torch.zeros(4)})])
        with comm.round("saved"):
            pass
        with CheckpointManager(root, comm=comm) as ckpt:
            ckpt.load([StateComponent("own", {"x": torch.ones(4)})])

    error = on_all(errors_of(3, program), CheckpointCorrupt)
    assert "ranks [2]" in str(error)


@pytest.mark.parametrize("bad", [0, 1])
def test_live_state_that_does_not_fit_on_one_rank(tmp_path, bad, errors_of, on_all):
    def live(rank):  # a plain dict would take what was saved, in its saved shape
        module = torch.nn.Module()
        module.register_buffer("x", torch.full((5 if rank == bad else 4,), -1.0))
        return module

    results = loading(tmp_path, errors_of, live_of=live)
    error = on_all([result for result, _ in results], StateMismatch)
    assert list(error.causes) == [bad] and error.mismatched == {"own/x": ("F32 [4]", "F32 [5]")}


def test_load_state_dict_that_raises_on_one_rank(tmp_path, errors_of, on_all):
    def live(rank):
        return Raises(ZeroDivisionError("no"), "load") if rank == 1 else {"x": torch.zeros(4)}

    error = on_all([result for result, _ in loading(tmp_path, errors_of, live_of=live)], LoadFailed)
    assert (error.component, error.rank, error.overwritten) == ("own", 1, ["own"])
    assert (
        list(error.causes) == [1]
        and "could not be loaded: ZeroDivisionError: no" in error.causes[1]
    )


@pytest.mark.parametrize("bad", [0, 2])
def test_restore_passes_over_what_one_rank_cannot_read(tmp_path, bad, errors_of):
    """All ranks together, with one warning in the whole job."""

    def arm(faults, rank):
        if rank == bad:
            flip(tmp_path / "checkpoint-2" / f"own.rank{bad:05d}.safetensors")

    with pytest.warns(CheckpointWarning, match=f"checkpoint-2.*own.rank{bad:05d}") as seen:
        results = loading(tmp_path, errors_of, arm, step=None)
    assert len(seen) == 1
    assert [(report.step, list(report.skipped)) for report, _ in results] == [
        (1, ["checkpoint-2"])
    ] * SIZE
    assert [live for _, live in results] == [[10.0 + rank] * 4 for rank in range(SIZE)]
