"""Groups by name: partitions, what is no partition, keys, and the dict whose patterns are
inferred."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore import (
    CheckpointManager,
    InvalidState,
    RNGState,
    SharingPattern,
    StateComponent,
    Value,
    open_checkpoint,
)
from ckptcore.ranks.communicator import partitions
from ckptcore.testing.ranks import run_ranks


def grouped(value, group="dp", **declared):
    return StateComponent("stage", value, SharingPattern.PER_GROUP, group, **declared)


def saving(tmp_path, groups_of, component_of, size, errors_of):
    def program(comm):
        with CheckpointManager(tmp_path, comm=comm, process_groups=groups_of(comm.rank)) as ckpt:
            return ckpt.save(1, [component_of(comm.rank)])

    return errors_of(size, program)


@pytest.mark.parametrize(
    ("partition", "ranks", "words"),
    [
        ([[0, 1], [2]], [3], "rank 3 is in 0 groups"),
        ([[0, 1], [1, 2, 3]], [1], "rank 1 is in 2 groups"),
        ([[0, 1], [2, 3], [4]], [4], "[4]"),
        ([[0, 1, 2, 3], [0, 1, 2, 3, -1]], [-1], "[-1]"),
        ([], [0, 1, 2, 3], "rank 0 is in 0 groups; rank 1 is in 0 groups"),
    ],
)
def test_no_partition_names_the_ranks(tmp_path, partition, ranks, words, errors_of, on_all):
    results = saving(
        tmp_path,
        lambda r: {"dp": partition},
        lambda r: grouped({"x": torch.zeros(1)}),
        4,
        errors_of,
    )
    error = on_all(results, InvalidState)
    assert error.ranks == ranks
    assert words in str(error) and "'dp'" in str(error)
    assert not (tmp_path / "checkpoint-1").exists()


def test_rank_twice_in_a_group_never_makes_a_checkpoint_that_does_not_load(
    tmp_path, split_everything
):
    def program(comm):
        def own(value):
            return [grouped({f"w{n}": torch.full((4,), value) for n in range(4)})]

        live = own(-1.0)
        with CheckpointManager(
            tmp_path, comm=comm, process_groups={"dp": [[0, 0, 1], [2, 3]]}
        ) as ckpt:
            try:
                ckpt.save(1, own(float(comm.rank // 2)))
            except InvalidState as error:
                return error.ranks
            ckpt.load(live)
        return live[0].stateful["w3"].tolist()

    refused, loaded = [[0]] * 4, [[float(rank // 2)] * 4 for rank in range(4)]
    assert run_ranks(4, program) in (refused, loaded)


def test_ranks_that_list_different_partitions(tmp_path, errors_of, on_all):
    views = [[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]]]
    results = saving(
        tmp_path, lambda r: {"dp": views[r]}, lambda r: grouped({"x": torch.zeros(1)}), 4, errors_of
    )
    error = on_all(results, InvalidState)
    assert error.ranks == [0, 1, 2, 3] and "[0, 2]" in str(error)


def test_group_that_one_rank_does_not_know(tmp_path, errors_of, on_all):
    results = saving(
        tmp_path,
        lambda r: {} if r == 2 else {"dp": [[0, 1], [2, 3]]},
        lambda r: StateComponent("m", {"x": torch.zeros(1)}, SharingPattern.REPLICATED),
        4,
        errors_of,
    )
    error = on_all(results, InvalidState)
    assert error.ranks == [2] and "ranks [2]" in str(error)


def test_missing_group_name_lists_those_that_there_are(tmp_path, errors_of, on_all):
    results = saving(
        tmp_path,
        lambda r: {"pp": [[0, 1]], "tp": [[0], [1]]},
        lambda r: grouped({"x": torch.zeros(1)}),
        2,
        errors_of,
    )
    error = on_all(results, InvalidState)
    assert "'dp'" in str(error) and "['pp', 'tp']" in str(error)
    assert sorted(error.causes) == [0, 1]


def test_extra_groups_are_recorded_and_harmless(tmp_path, errors_of):
    groups = {"dp": [[1, 0], [3, 2]], "extra": [[3], [2, 1, 0]]}
    saving(
        tmp_path,
        lambda r: groups,
        lambda r: grouped({"x": torch.full((2,), float(r // 2))}),
        4,
        errors_of,
    )
    manifest = open_checkpoint(tmp_path / "checkpoint-1").manifest
    assert manifest.groups == {"dp": [[0, 1], [2, 3]], "extra": [[0, 1, 2], [3]]}


def test_what_is_no_group_is_named(tmp_path, errors_of, on_all):
    results = saving(
        tmp_path,
        lambda r: {"dp": "pipeline"},
        lambda r: grouped({"x": torch.zeros(1)}),
        2,
        errors_of,
    )
    assert "str" in str(on_all(results, InvalidState))


@pytest.mark.parametrize(
    ("keys", "ranks"),
    [
        (["a", "a", "b", "c"], [3]),
        (["a", "a", "b", None], [3]),
        (["a", "a", "a", "a"], None),
        (["a", "b", "c", "c"], [1]),
    ],
)
def test_group_keys_must_tell_groups_apart(tmp_path, keys, ranks, errors_of, on_all):
    results = saving(
        tmp_path,
        lambda r: {"dp": [[0, 1], [2, 3]]},
        lambda r: grouped({"x": torch.zeros(1)}, group_key=keys[r]),
        4,
        errors_of,
    )
    error = on_all(results, InvalidState)
    assert (error.component, error.ranks) == ("stage", ranks)
    assert "[[0, 1], [2, 3]]" in str(error)


def test_pattern_and_group_must_go_together():
    with pytest.raises(InvalidState, match="needs a process_group_name"):
        StateComponent("m", {}, SharingPattern.PER_GROUP)
    with pytest.raises(InvalidState, match="only PER_GROUP has"):
        StateComponent("m", {}, SharingPattern.PER_RANK, "dp")


def test_provider_brings_its_groups(tmp_path):
    class Trainer:
        def __init__(self, rank):
            self.live = {"x": torch.full((2,), float(rank % 2))}

        def get_state_components(self):
            return [grouped(self.live)]

        def get_process_groups(self):
            return {"dp": [[0, 2], [1, 3]]}

    def program(comm):
        from ckptcore import CheckpointCoordinator

        trainer = Trainer(comm.rank)
        coordinator = CheckpointCoordinator(trainer, comm=comm)
        coordinator.save_checkpoint(tmp_path / "one")
        trainer.live["x"].zero_()
        CheckpointCoordinator(trainer, comm=comm).load_checkpoint(tmp_path / "one")
        return trainer.live["x"].tolist()

    assert run_ranks(4, program) == [[0.0, 0.0], [1.0, 1.0]] * 2


def test_plain_dict_on_several_ranks(tmp_path):
    def program(comm):
        model = torch.nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            model.weight.fill_(3)
        state = {"model": model, "rng": RNGState(), "step": Value(5), "notes": {"lr": [0.1]}}
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            return ckpt.save(1, state).manifest

    components = run_ranks(2, program)[0].components
    assert {key: c.pattern for key, c in components.items()} == {
        "model": "REPLICATED",
        "rng": "PER_RANK",
        "step": "REPLICATED",
        "notes": "REPLICATED",
    }


def test_plain_dict_on_one_rank_is_global(tmp_path):
    state = {"model": torch.nn.Linear(2, 2), "rng": RNGState(), "step": Value(5)}
    with CheckpointManager(tmp_path) as ckpt:
        components = ckpt.save(1, state).manifest.components
    assert {key: c.pattern for key, c in components.items()} == {
        "model": "GLOBAL",
        "rng": "PER_RANK",
        "step": "GLOBAL",
    }


@st.composite
def partition_of(draw, size):
    ranks = draw(st.permutations(range(size)))
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=size - 1))) if size > 1 else []
    return [list(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]


@given(st.data(), st.integers(1, 8))
@settings(max_examples=25)
def test_any_partition_round_trips(tmp_path_factory, data, size):
    partition = data.draw(partition_of(size))
    folder = tmp_path_factory.mktemp("partition")
    group = {rank: n for n, ranks in enumerate(partition) for rank in ranks}

    def program(comm):
        mine, live = torch.full((4,), float(group[comm.rank])), torch.full((4,), -1.0)
        with CheckpointManager(folder, comm=comm, process_groups={"dp": partition}) as ckpt:
            manifest = ckpt.save(1, [grouped({"x": mine})]).manifest
            ckpt.load([grouped({"x": live})])
        return manifest.groups["dp"], live.tolist()

    ordered = sorted(sorted(ranks) for ranks in partition)
    assert run_ranks(size, program) == [(ordered, [float(group[rank])] * 4) for rank in range(size)]


@given(st.lists(st.lists(st.integers(-1, 6), max_size=5), max_size=5), st.integers(1, 6))
@settings(max_examples=200)
def test_partitions_are_accepted_only_when_every_rank_is_in_exactly_one_group(groups, size):
    distinct = {tuple(sorted(group)) for group in groups}  # the same group said twice is one group
    count = [sum(group.count(rank) for group in distinct) for rank in range(size)]
    stray = any(rank not in range(size) for group in groups for rank in group)
    views = [{"g": [sorted(group) for group in groups]} for _ in range(size)]
    if not stray and count == [1] * size:
        assert partitions(views) == {"g": sorted(list(group) for group in distinct if group)}
    else:
        with pytest.raises(InvalidState) as error:
            partitions(views)
        assert error.value.ranks


@given(st.data(), st.integers(1, 8))
@settings(max_examples=50)
def test_ranks_that_know_only_their_own_group_make_the_same_partition(data, size):
    """A ProcessGroup or a mesh dimension tells a rank its own ranks alone."""
    partition = data.draw(partition_of(size))
    views = [{"g": [sorted(next(g for g in partition if rank in g))]} for rank in range(size)]
    assert partitions(views) == {"g": sorted(sorted(group) for group in partition)}
