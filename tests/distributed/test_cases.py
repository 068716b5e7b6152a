"""Cases that need several ranks and no processes: B22 (replicas that are none), B41 (stages under
one name)."""

import math

import pytest
import torch

from ckptcore import (
    CheckpointManager,
    OptimizerState,
    ReplicationMismatch,
    SharingPattern,
    StateComponent,
    ValidationLevel,
    open_checkpoint,
)
from ckptcore.testing.ranks import run_ranks


def save(tmp_path, errors_of, size, component_of, groups=None):
    def program(comm):
        with CheckpointManager(tmp_path, comm=comm, process_groups=groups) as ckpt:
            return ckpt.save(1, [component_of(comm.rank)])

    return errors_of(size, program)


def test_b22_a_real_difference_raises_and_nothing_is_committed(tmp_path, errors_of, on_all):
    def own(rank):
        return StateComponent(
            "m", {"w": torch.tensor([2.0 * rank, 2.0 * rank + 1])}, SharingPattern.REPLICATED
        )

    error = on_all(save(tmp_path, errors_of, 2, own), ReplicationMismatch)
    assert (error.keys, error.ranks) == (["w"], [1])
    assert "'w'" in str(error) and "rank 1" in str(error)
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("level", list(ValidationLevel))
def test_b22_the_order_of_keys_is_no_difference(tmp_path, level, errors_of, same):
    def state(rank):
        names = [f"meta{n:02d}" for n in range(16)][:: (-1) ** rank]
        return {"w": torch.arange(4.0), "meta": {name: f"value of {name}" for name in names}}

    results = save(
        tmp_path,
        errors_of,
        2,
        lambda rank: StateComponent(
            "m", state(rank), SharingPattern.REPLICATED, validation_level=level
        ),
    )
    assert [getattr(result, "status", result) for result in results] == ["committed"] * 2
    same(open_checkpoint(tmp_path / "checkpoint-1").values("m")["meta"], state(0)["meta"])


@pytest.mark.parametrize("level", list(ValidationLevel))
def test_b22_the_order_of_tensors_never_mixes_them_up(tmp_path, level, same, split_everything):
    """Same shapes, other order: a plan by position would store one tensor twice and the other not
    at all."""

    def program(comm):
        names = ["a", "b", "c", "d"][:: (-1) ** comm.rank]
        saved = {name: torch.full((4,), float(ord(name))) for name in names}
        live = {name: torch.zeros(4) for name in names}
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(
                1, [StateComponent("m", saved, SharingPattern.REPLICATED, validation_level=level)]
            )
            ckpt.load([StateComponent("m", live, SharingPattern.REPLICATED)])
        return {name: live[name].tolist() for name in sorted(live)}

    assert run_ranks(2, program) == [{name: [float(ord(name))] * 4 for name in "abcd"}] * 2


def test_b22_the_same_state_per_rank_keeps_both(tmp_path):
    def program(comm):
        live = torch.zeros(2)
        mine = torch.tensor([2.0 * comm.rank, 2.0 * comm.rank + 1])
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, [StateComponent("m", {"w": mine}, SharingPattern.PER_RANK)])
            ckpt.load([StateComponent("m", {"w": live}, SharingPattern.PER_RANK)])
        return live.tolist()

    assert run_ranks(2, program) == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("values", "equal"),
    [([0.0, -0.0], False), ([math.nan, math.nan], True), ([0x7FC00000, 0x7FC00001], False)],
)
@pytest.mark.parametrize("level", ["QUICK", "TENSOR", "FULL"])
def test_b22_equality_is_that_of_bits(tmp_path, values, equal, level, errors_of, on_all):
    def own(rank):
        value = values[rank]
        word = (
            torch.tensor([value], dtype=torch.int32).view(torch.float32)
            if isinstance(value, int)
            else None
        )
        tensor = torch.tensor([value]) if word is None else word
        return StateComponent(
            "m", {"w": tensor}, SharingPattern.REPLICATED, validation_level=ValidationLevel(level)
        )

    results = save(tmp_path, errors_of, 2, own)
    if equal:
        assert [result.status for result in results] == ["committed"] * 2
    else:
        assert on_all(results, ReplicationMismatch).keys == ["w"]


class Stages:
    """Two ranks as two stages, each with two virtual stages of two layers: rank 0 has layers 0, 1,
    4 and 5."""

    def __init__(self, rank, seed):
        torch.manual_seed(seed + rank)
        self.layers = {
            4 * virtual + 2 * rank + n: torch.nn.Linear(3, 3) for virtual in (0, 1) for n in (0, 1)
        }
        self.local = torch.nn.ModuleDict(
            {
                f"virtual{v}": torch.nn.ModuleList(
                    [self.layers[4 * v + 2 * rank + n] for n in (0, 1)]
                )
                for v in (0, 1)
            }
        )
        self.optimizer = torch.optim.AdamW(self.local.parameters(), lr=1e-2)

    def train(self):
        for layer in self.layers.values():
            layer(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        return self

    def everything(self):
        moments = OptimizerState(self.optimizer, self.local).state_dict()["state"]
        return {
            "weights": {k: v.clone() for k, v in self.local.state_dict().items()},
            "moments": moments,
        }


def stage_components(stages, pattern, group=None, **more):
    return [
        StateComponent("stage", stages.local, pattern, group, **more),
        StateComponent(
            "optimizer", OptimizerState(stages.optimizer, stages.local), pattern, group, **more
        ),
    ]


@pytest.mark.parametrize("pattern", ["GLOBAL", "REPLICATED"])
def test_b41_local_names_that_collide_are_refused(tmp_path, pattern, errors_of, on_all):
    def program(comm):
        stages = Stages(comm.rank, 1).train()
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            return ckpt.save(
                1, stage_components(stages, SharingPattern(pattern), validate_replication=True)
            )

    error = on_all(errors_of(2, program), ReplicationMismatch)
    assert error.component == "stage" and error.ranks == [1]
    assert error.keys == sorted(
        f"virtual{v}.{n}.{k}" for v in (0, 1) for n in (0, 1) for k in ("weight", "bias")
    )
    assert not (tmp_path / "checkpoint-1").exists()


def test_b41_every_stage_restores_per_group(tmp_path, same):
    """All 8 layers and their moments, under names that are the same in both stages."""

    def program(comm):
        trained, fresh = Stages(comm.rank, 1).train(), Stages(comm.rank, 50)
        with CheckpointManager(tmp_path, comm=comm, process_groups={"dp": [[0], [1]]}) as ckpt:
            ckpt.save(1, stage_components(trained, SharingPattern.PER_GROUP, "dp"))
            ckpt.load(stage_components(fresh, SharingPattern.PER_GROUP, "dp"))
        return trained, fresh

    results = run_ranks(2, program)
    for trained, fresh in results:
        same(fresh.everything(), trained.everything())
        assert len(fresh.everything()["moments"]) == 8
    assert sorted(number for trained, _ in results for number in trained.layers) == list(range(8))
    first, second = (fresh.local.state_dict() for _, fresh in results)
    assert all(not torch.equal(first[name], second[name]) for name in first)


def test_b41_a_stage_with_a_layer_missing_names_it(tmp_path, errors_of, on_all):
    from ckptcore import StateMismatch

    def program(comm):
        stages = Stages(comm.rank, 1)
        with CheckpointManager(tmp_path, comm=comm, process_groups={"dp": [[0], [1]]}) as ckpt:
            ckpt.save(1, stage_components(stages, SharingPattern.PER_GROUP, "dp"))
            if comm.rank == 1:
                stages.local["virtual1"].append(torch.nn.Linear(3, 3))
            ckpt.load(stage_components(stages, SharingPattern.PER_GROUP, "dp"))

    error = on_all(errors_of(2, program), StateMismatch)
    assert error.missing == ["stage/virtual1.2.weight", "stage/virtual1.2.bias"]
    assert list(error.causes) == [1]
