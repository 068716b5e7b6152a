"""Another number of ranks, nodes or groups: what restores, what raises and with which sizes, what
on_resize does."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore import (
    CheckpointManager,
    CheckpointWarning,
    RankFailed,
    SharingPattern,
    StateComponent,
    StateMismatch,
)
from ckptcore.testing.ranks import run_ranks

NODES = {1: [[0]], 2: [[0], [1]], 3: [[0, 1], [2]], 4: [[0, 1], [2, 3]], 6: [[0, 1, 2], [3, 4, 5]]}


def by_two(size):
    return [list(range(start, size, 2)) for start in range(min(2, size))]


def groups_of(size, count):
    return [list(range(start, size, count)) for start in range(count)]


def save(tmp_path, size, pattern, value, partition=None, keys=None):
    def program(comm):
        mine = {"x": torch.full((3,), float(value(comm.rank))), "n": value(comm.rank)}
        key = keys[comm.rank] if keys else None
        group = "dp" if pattern == "PER_GROUP" else None
        own = StateComponent("own", mine, SharingPattern(pattern), group, group_key=key)
        with CheckpointManager(
            tmp_path, comm=comm, process_groups={"dp": partition} if partition else None
        ) as ckpt:
            return ckpt.save(1, [own])

    return run_ranks(size, program, nodes=NODES.get(size))


def load(tmp_path, size, pattern, partition=None, keys=None, **declared):
    """[(result or error, live tensor's value)] by rank."""

    def program(comm):
        live = {"x": torch.full((3,), -1.0), "n": -1}
        group = "dp" if pattern == "PER_GROUP" else None
        own = StateComponent(
            "own",
            live,
            SharingPattern(pattern),
            group,
            group_key=keys[comm.rank] if keys else None,
            **declared,
        )
        with CheckpointManager(
            tmp_path, comm=comm, process_groups={"dp": partition} if partition else None
        ) as ckpt:
            try:
                return ckpt.load([own]), live["x"].tolist()
            except (StateMismatch, RankFailed) as error:
                return error, live["x"].tolist()

    return run_ranks(size, program, nodes=NODES.get(size))


def values(results):
    assert [type(r).__name__ for r, _ in results] == ["LoadReport"] * len(results), results
    assert all(len(set(x)) == 1 for _, x in results)
    return [x[0] for _, x in results]


@pytest.mark.parametrize("pattern", ["GLOBAL", "REPLICATED"])
@pytest.mark.parametrize(("old", "new"), [(1, 4), (4, 1), (2, 3), (3, 2), (8, 2), (2, 8)])
def test_global_and_replicated_restore_everywhere(tmp_path, pattern, old, new, split_everything):
    save(tmp_path, old, pattern, lambda rank: 5)
    assert values(load(tmp_path, new, pattern)) == [5.0] * new


@pytest.mark.parametrize(
    ("pattern", "old", "new", "words"),
    [
        ("PER_RANK", 4, 2, "4 ranks, there are 2 now"),
        ("PER_RANK", 2, 3, "2 ranks, there are 3 now"),
        ("PER_RANK", 3, 1, "3 ranks, there are 1 now"),
        ("PER_NODE", 4, 1, "2 nodes, there are 1 now"),
        ("PER_NODE", 1, 3, "1 nodes, there are 2 now"),
        ("PER_GROUP", 4, 1, "2 groups, there are 1 now"),
        ("PER_GROUP", 1, 2, "1 groups, there are 2 now"),
    ],
)
def test_another_count_raises_with_both_sizes(tmp_path, pattern, old, new, words, on_all):
    partition = {size: by_two(size) for size in (1, 2, 4)} if pattern == "PER_GROUP" else {}
    save(
        tmp_path,
        old,
        pattern,
        lambda rank: rank % 2 if pattern == "PER_GROUP" else rank,
        partition.get(old),
    )
    results = load(tmp_path, new, pattern, partition.get(new))
    error = on_all([result for result, _ in results], StateMismatch)
    assert words in str(error) and "'own'" in str(error)
    assert "on_resize" in str(error)
    assert [live for _, live in results] == [[-1.0] * 3] * new


def test_nodes_of_another_size_restore_while_their_number_is_the_same(tmp_path):
    save(tmp_path, 4, "PER_NODE", lambda rank: 10 + rank)
    assert values(load(tmp_path, 6, "PER_NODE")) == [10.0] * 3 + [12.0] * 3
    assert values(load(tmp_path, 2, "PER_NODE")) == [10.0, 12.0]


@pytest.mark.parametrize(("old", "new"), [(8, 4), (4, 8), (8, 12), (4, 4)])
def test_groups_of_another_size_restore_while_their_number_is_the_same(
    tmp_path, old, new, split_everything
):
    """{0,4},{1,5},{2,6},{3,7} (dp=2) is what {0},{1},{2},{3} (dp=1) restores from, and the other
    way round."""
    save(tmp_path, old, "PER_GROUP", lambda rank: 10 + rank % 4, groups_of(old, 4))
    assert values(load(tmp_path, new, "PER_GROUP", groups_of(new, 4))) == [
        10.0 + rank % 4 for rank in range(new)
    ]


def test_group_keys_find_their_group_when_the_numbering_changed(tmp_path, files):
    save(tmp_path, 4, "PER_GROUP", lambda rank: rank % 2, by_two(4), ["even", "odd", "even", "odd"])
    assert {"own.dp-even.safetensors", "own.dp-odd.safetensors"} < files(tmp_path / "checkpoint-1")
    swapped = [[0, 1], [2, 3]]
    assert values(load(tmp_path, 4, "PER_GROUP", swapped, ["odd", "odd", "even", "even"])) == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    # Fewer groups than saved, each found by its key.
    assert values(load(tmp_path, 2, "PER_GROUP", [[0, 1]], ["odd", "odd"])) == [1.0, 1.0]


def test_unknown_group_key_raises_on_every_rank(tmp_path, on_all):
    save(tmp_path, 2, "PER_GROUP", lambda rank: rank, [[0], [1]], ["a", "b"])
    error = on_all(
        [r for r, _ in load(tmp_path, 2, "PER_GROUP", [[0], [1]], ["a", "new"])], StateMismatch
    )
    assert (
        "(a, b;" in str(error) and "this rank's is new" in str(error) and set(error.causes) == {1}
    )


def test_unknown_group_key_follows_on_resize(tmp_path):
    """Keys that do not match are a changed partition, and that is what on_resize is for."""
    save(tmp_path, 2, "PER_GROUP", lambda rank: rank + 5, [[0], [1]], ["a", "b"])
    with pytest.warns(CheckpointWarning, match="'own'"):
        results = load(tmp_path, 2, "PER_GROUP", [[0], [1]], ["b", "new"], on_resize="keep")
    assert values(results) == [6.0, -1.0]


@pytest.mark.parametrize("pattern", ["PER_RANK", "PER_NODE", "PER_GROUP"])
def test_keep_leaves_the_live_state_with_a_warning(tmp_path, pattern):
    partition = {size: by_two(size) for size in (1, 4)} if pattern == "PER_GROUP" else {}
    save(
        tmp_path,
        4,
        pattern,
        lambda rank: rank % 2 if pattern == "PER_GROUP" else rank,
        partition.get(4),
    )
    with pytest.warns(CheckpointWarning, match=r"'own'.*live state stays") as seen:
        results = load(tmp_path, 1, pattern, partition.get(1), on_resize="keep")
    assert len(seen) == 1
    assert [live for _, live in results] == [[-1.0] * 3]


def test_keep_does_nothing_while_the_number_is_the_same(tmp_path):
    save(tmp_path, 3, "PER_RANK", lambda rank: rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert values(load(tmp_path, 3, "PER_RANK", on_resize="keep")) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("pattern", ["PER_RANK", "PER_NODE", "PER_GROUP"])
def test_a_function_says_whose_state_it_is(tmp_path, pattern):
    partition = {2: [[0], [1]], 6: [[0, 3], [1, 4], [2, 5]]} if pattern == "PER_GROUP" else {}
    old, now = 2, {"PER_RANK": 6, "PER_NODE": 3, "PER_GROUP": 3}[pattern]
    save(tmp_path, old, pattern, lambda rank: 10 + rank, partition.get(old))
    asked = []

    def choose(new, size, before):
        asked.append((size, before))
        return new % before

    nodes = [[0, 1], [2, 3], [4, 5]]
    NODES[6], kept = nodes, NODES[6]
    try:
        got = values(load(tmp_path, 6, pattern, partition.get(6), on_resize=choose))
    finally:
        NODES[6] = kept
    mine = {
        "PER_RANK": list(range(6)),
        "PER_NODE": [0, 0, 1, 1, 2, 2],
        "PER_GROUP": [0, 1, 2, 0, 1, 2],
    }[pattern]
    assert got == [10.0 + number % 2 for number in mine]
    assert set(asked) == {(now, old)}


@pytest.mark.parametrize("answer", [4, -1, None, True, 1.0])
def test_a_function_that_gives_no_old_rank_is_refused(tmp_path, answer, on_all):
    save(tmp_path, 4, "PER_RANK", lambda rank: rank)
    results = load(tmp_path, 2, "PER_RANK", on_resize=lambda *_: answer)
    error = on_all([result for result, _ in results], StateMismatch)
    assert repr(answer) in str(error)


def test_a_function_that_raises_is_everybodys_error(tmp_path, on_all):
    save(tmp_path, 4, "PER_RANK", lambda rank: rank)

    def choose(new, size, before):
        if new == 1:
            raise KeyError("no such rank")
        return new

    error = on_all(
        [result for result, _ in load(tmp_path, 2, "PER_RANK", on_resize=choose)], RankFailed
    )
    assert set(error.causes) == {1} and "no such rank" in error.causes[1]


def test_what_was_saved_decides_not_what_is_declared_now(tmp_path):
    save(tmp_path, 2, "REPLICATED", lambda rank: 7)
    with pytest.warns(
        CheckpointWarning,
        match="'own' was saved REPLICATED and is declared PER_RANK now: every rank",
    ):
        assert values(load(tmp_path, 3, "PER_RANK")) == [7.0] * 3
    save(tmp_path / "own", 3, "PER_RANK", lambda rank: rank)
    with pytest.warns(
        CheckpointWarning,
        match="'own' was saved PER_RANK and is declared REPLICATED now: each rank",
    ):
        assert values(load(tmp_path / "own", 3, "REPLICATED")) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("saved", [p.value for p in SharingPattern])
@pytest.mark.parametrize("declared", [p.value for p in SharingPattern])
@pytest.mark.parametrize("size", [1, 4])
def test_a_pattern_that_changed_is_warned_of_once_by_name_or_refused(
    tmp_path, saved, declared, size
):
    """Never in silence, unless every rank was to have one and the same state both times."""
    partition = [[0]] if size == 1 else by_two(4)
    own = {"PER_RANK": lambda r: r, "PER_NODE": lambda r: r // 2 * 2, "PER_GROUP": lambda r: r % 2}
    state_of = own.get(saved, lambda r: 0)
    save(tmp_path, size, saved, state_of, partition)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", CheckpointWarning)
        results = load(tmp_path, size, declared, partition)
    heard = [str(w.message) for w in seen if issubclass(w.category, CheckpointWarning)]
    if saved == "PER_GROUP" != declared and size > 1:
        assert heard == [] and {type(result) for result, _ in results} == {StateMismatch}
        assert {tuple(live) for _, live in results} == {(-1.0,) * 3}
        return
    assert values(results) == [float(state_of(rank)) for rank in range(size)]
    common = ("GLOBAL", "REPLICATED", "SHARDED")
    if saved == declared or size == 1 or (saved in common and declared in common):
        assert heard == []
    else:
        (text,) = heard
        assert f"'own' was saved {saved} and is declared {declared} now" in text


@st.composite
def partitions(draw, size):
    ranks = draw(st.permutations(range(size)))
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=size - 1))) if size > 1 else []
    return sorted(sorted(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, size], strict=True))


def index_of(partition, rank):
    return next(number for number, ranks in enumerate(partition) if rank in ranks)


@given(
    st.data(),
    st.integers(2, 5),
    st.sampled_from(["PER_GROUP", "PER_NODE"]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=60)
def test_a_rank_gets_what_a_rank_of_its_own_group_saved(
    tmp_path_factory, data, size, pattern, renamed, same_size
):
    """Or every rank gets a StateMismatch that says what there was and what there is, and live state
    is as it was."""
    new_size = size if same_size else data.draw(st.integers(1, 5))
    old, new = data.draw(partitions(size)), data.draw(partitions(new_size))
    folder = tmp_path_factory.mktemp("partition")
    saved, declared = ("dp", "pp") if renamed else ("dp", "dp")
    kind = SharingPattern(pattern)

    def names(group):
        return group if pattern == "PER_GROUP" else None

    def save_all(comm):
        mine = {"x": torch.full((3,), 10.0 + index_of(old, comm.rank))}
        with CheckpointManager(folder, comm=comm, process_groups={saved: old}) as ckpt:
            ckpt.save(1, [StateComponent("own", mine, kind, names(saved))])

    def load_all(comm):
        live = {"x": torch.full((3,), -1.0)}
        with CheckpointManager(folder, comm=comm, process_groups={declared: new}) as ckpt:
            try:
                ckpt.load([StateComponent("own", live, kind, names(declared))])
            except StateMismatch as error:
                return live["x"].tolist(), str(error)
        return live["x"].tolist(), None

    run_ranks(size, save_all, nodes=old)
    results = run_ranks(new_size, load_all, nodes=new)
    same = old == new if size == new_size else len(old) == len(new)
    if pattern == "PER_GROUP" and len(old) > 1:
        same = same and not renamed
    if same or (len(old) == len(new) == 1):
        assert results == [([10.0 + index_of(new, rank)] * 3, None) for rank in range(new_size)]
        return
    assert [live for live, _ in results] == [[-1.0] * 3] * new_size
    (error,) = {text for _, text in results}
    assert "'own'" in error and "on_resize" in error
    if len(old) == len(new):
        assert str(old) in error and str(new) in error
        assert pattern == "PER_NODE" or (repr(saved) in error and repr(declared) in error)
    else:
        assert f"{len(old)} {kind.value[4:].lower()}s, there are {len(new)} now" in error


def test_another_partition_follows_on_resize(tmp_path):
    """A changed partition of as many groups is a change like that of their number."""
    save(tmp_path, 4, "PER_GROUP", lambda rank: 10 + rank % 2, by_two(4))
    swapped = [[0, 1], [2, 3]]
    with pytest.warns(
        CheckpointWarning, match=r"\[\[0, 2\], \[1, 3\]\] of 'dp'.*live state stays"
    ) as seen:
        results = load(tmp_path, 4, "PER_GROUP", swapped, on_resize="keep")
    assert len(seen) == 1 and [live for _, live in results] == [[-1.0] * 3] * 4
    chosen = load(tmp_path, 4, "PER_GROUP", swapped, on_resize=lambda new, size, old: old - 1 - new)
    assert values(chosen) == [11.0, 11.0, 10.0, 10.0]


def test_group_state_loaded_without_its_group_says_what_to_declare(tmp_path, on_all):
    save(tmp_path, 2, "PER_GROUP", lambda rank: rank, [[0], [1]])
    error = on_all([result for result, _ in load(tmp_path, 2, "REPLICATED")], StateMismatch)
    assert "PER_GROUP" in str(error) and "'dp'" in str(error) and "2 groups" in str(error)


def test_optional_component_may_be_absent_on_any_world_size(tmp_path):
    save(tmp_path, 2, "REPLICATED", lambda rank: 3)

    def program(comm):
        live, late = {"x": torch.zeros(3), "n": 0}, {"y": torch.full((2,), 8.0)}
        components = [
            StateComponent("own", live, SharingPattern.REPLICATED),
            StateComponent("ema", late, SharingPattern.PER_RANK, required=False),
        ]
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.load(components)
        return live["x"].tolist(), late["y"].tolist()

    assert run_ranks(3, program) == [([3.0] * 3, [8.0] * 2)] * 3
