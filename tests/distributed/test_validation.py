"""Replicas are compared before anything is written: each level against planted differences, and
never for nothing."""

import math
import struct
import traceback
import tracemalloc

import numpy as np
import pytest
import torch

from ckptcore import (
    CheckpointManager,
    InvalidState,
    OptimizerState,
    RankFailed,
    RanksDisagree,
    ReplicationMismatch,
    Shard,
    SharingPattern,
    StateComponent,
    ValidationLevel,
    Value,
)
from ckptcore.testing.ranks import run_ranks

LEVELS = ["NONE", "QUICK", "TENSOR", "FULL"]


def nan(payload):
    return struct.unpack(">d", struct.pack(">Q", 0x7FF8000000000000 | payload))[0]


def last_of(dtype, wrong, size=70_000):
    x = torch.ones(size).to(dtype)
    if wrong:
        x[-1] = 2
    return {"deep": {"x": x}, "y": torch.zeros(3)}


def adamw(wrong):
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    if wrong:
        optimizer.state[model.weight]["exp_avg_sq"][1, 2] += 1e-6
    return OptimizerState(optimizer, model)


# name -> (state of a rank, key that must be named)
PLANTED = {
    "last element of bf16": (lambda wrong: last_of(torch.bfloat16, wrong), "deep/x"),
    "last element of fp8": (lambda wrong: last_of(torch.float8_e4m3fn, wrong), "deep/x"),
    "last element of fp8 e5m2": (lambda wrong: last_of(torch.float8_e5m2, wrong), "deep/x"),
    "last of bool": (lambda wrong: {"m": torch.tensor([True] * 9 + [not wrong])}, "m"),
    "last of complex128": (
        lambda wrong: {"c": torch.tensor([1j] * 9 + [2j if wrong else 1j], dtype=torch.complex128)},
        "c",
    ),
    "python int three levels deep": (
        lambda wrong: {"a": {"b": [{"c": 7 + wrong}]}, "x": torch.zeros(2)},
        "a/b/0/c",
    ),
    "int and bool": (lambda wrong: {"flag": True if wrong else 1}, "flag"),
    "float and int": (lambda wrong: {"lr": 1.0 if wrong else 1}, "lr"),
    "negative zero in a tensor": (
        lambda wrong: {"z": torch.tensor([1.0, -0.0 if wrong else 0.0])},
        "z",
    ),
    "negative zero as a float": (lambda wrong: {"s": {"z": -0.0 if wrong else 0.0}}, "s/z"),
    "nan payload in a tensor": (
        lambda wrong: {
            "n": torch.tensor([0x7FC00000 + wrong], dtype=torch.int32).view(torch.float32)
        },
        "n",
    ),
    "nan payload as a float": (lambda wrong: {"n": nan(1 + wrong)}, "n"),
    "one missing key": (
        lambda wrong: {"x": torch.zeros(2), **({} if wrong else {"y": torch.ones(2)})},
        "y",
    ),
    "one missing value": (lambda wrong: {"x": torch.zeros(2), **({} if wrong else {"n": 1})}, "n"),
    "another shape": (lambda wrong: {"x": torch.zeros((2, 3) if wrong else (3, 2))}, "x"),
    "another dtype": (
        lambda wrong: {"x": torch.zeros(2, dtype=torch.int32 if wrong else torch.float32)},
        "x",
    ),
    "adamw moments": (adamw, "state/weight/exp_avg_sq"),
    "numpy array": (lambda wrong: {"np": np.append(np.zeros(2000), float(wrong))}, "np"),
    "0-d counter": (lambda wrong: {"step": torch.tensor(5 + wrong)}, "step"),
    "strided view": (lambda wrong: {"t": torch.arange(12.0).reshape(3, 4).t() + wrong}, "t"),
}


def saving(tmp_path, errors_of, size, component_of, groups=None, deadline=60):
    def program(comm):
        with CheckpointManager(tmp_path, comm=comm, process_groups=groups) as ckpt:
            return ckpt.save(1, [component_of(comm.rank)])

    return errors_of(size, program, deadline=deadline)


def replicated(state, level, **more):
    return StateComponent(
        "m", state, SharingPattern.REPLICATED, validation_level=ValidationLevel(level), **more
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", list(PLANTED))
def test_planted_difference(tmp_path, name, level, size, errors_of, on_all):
    make, key = PLANTED[name]
    wrong = size - 1
    results = saving(tmp_path, errors_of, size, lambda rank: replicated(make(rank == wrong), level))
    if level == "NONE":
        assert [result.status for result in results] == ["committed"] * size
        return
    error = on_all(results, ReplicationMismatch)
    assert (error.component, error.keys, error.ranks) == ("m", [key], [wrong])
    assert repr(key) in str(error) and f"rank {wrong}" in str(error) and "REPLICATED" in str(error)
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("level", ["TENSOR", "FULL"])
def test_any_byte_counts(tmp_path, level, errors_of, on_all):
    def state(rank):
        x = torch.zeros(3 << 20, dtype=torch.uint8)
        x[1_234_567] = rank
        return {"x": x}

    error = on_all(
        saving(tmp_path, errors_of, 2, lambda rank: replicated(state(rank), level)),
        ReplicationMismatch,
    )
    assert error.keys == ["x"]
    if level == "FULL":
        assert error.details["x"]["first index"] == 1_234_567


def test_default_level_is_quick_for_replicas_and_none_for_one_truth():
    def level(pattern, group=None, **more):
        return StateComponent("m", {}, SharingPattern(pattern), group, **more).validated

    assert level("REPLICATED") is ValidationLevel.QUICK
    assert level("PER_GROUP", "dp") is ValidationLevel.QUICK
    assert {level("GLOBAL"), level("PER_NODE"), level("PER_RANK")} == {ValidationLevel.NONE}
    assert level("GLOBAL", validate_replication=True) is ValidationLevel.QUICK
    assert level("REPLICATED", validate_replication=False) is ValidationLevel.NONE


@pytest.mark.parametrize(("pattern", "wrong"), [("GLOBAL", [1, 2, 3]), ("PER_NODE", [1, 3])])
def test_one_truth_is_compared_when_asked(tmp_path, pattern, wrong, on_all, errors_of):
    def program(comm):
        own = StateComponent(
            "m",
            {"x": torch.tensor([comm.rank])},
            SharingPattern(pattern),
            validate_replication=True,
        )
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            return ckpt.save(1, [own])

    error = on_all(errors_of(4, program, nodes=[[0, 1], [2, 3]]), ReplicationMismatch)
    assert error.keys == ["x"]
    # For nodes, the first copy that differs is enough to say so.
    assert set(error.ranks) <= set(wrong) and error.ranks


def test_difference_inside_one_group_is_known_everywhere(tmp_path, errors_of, on_all):
    groups = {"dp": [[0, 1], [2, 3]]}

    def own(rank):
        return StateComponent(
            "m", {"x": torch.tensor([1.0 if rank == 3 else 0.0])}, SharingPattern.PER_GROUP, "dp"
        )

    error = on_all(saving(tmp_path, errors_of, 4, own, groups), ReplicationMismatch)
    assert (error.component, error.keys, error.ranks) == ("m", ["x"], [3])


@pytest.mark.parametrize("named", ["pp", "tp"])
@pytest.mark.parametrize("names", ["local", "global"])
def test_the_wrong_group_is_caught_with_a_hint(tmp_path, named, names, errors_of, on_all):
    """(dp=2, pp=2, tp=2): stage weights are shared over dp; the pipeline or tensor group is what
    people name."""
    mesh = torch.arange(8).view(2, 2, 2)
    groups = {
        "dp": mesh.permute(1, 2, 0).reshape(-1, 2).tolist(),
        "pp": mesh.permute(0, 2, 1).reshape(-1, 2).tolist(),
        "tp": mesh.reshape(-1, 2).tolist(),
    }

    def own(rank, group):
        _, pp, tp = (mesh == rank).nonzero()[0].tolist()
        key = f"layers.{pp if names == 'global' else 0}.weight"
        return StateComponent(
            "stage", {key: torch.full((4,), 10.0 * pp + tp)}, SharingPattern.PER_GROUP, group
        )

    error = on_all(
        saving(tmp_path, errors_of, 8, lambda rank: own(rank, named), groups), ReplicationMismatch
    )
    assert error.component == "stage" and error.keys[0].startswith("layers.")
    assert repr(named) in str(error) and "across which the state is the same" in str(error)
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []
    assert [
        r.status for r in saving(tmp_path, errors_of, 8, lambda rank: own(rank, "dp"), groups)
    ] == ["committed"] * 8


def test_numbers_of_full(tmp_path, errors_of, on_all):
    """Three of many elements differ, two of them beyond the first chunk of 4 MiB."""

    def state(rank):
        big = torch.zeros(1_500_000)
        small = torch.ones(4, dtype=torch.bfloat16)
        if rank == 1:
            big[1_048_576] = -0.25
            big[1_200_000], big[1_499_999] = 3.0, math.nan
            small[2] = 1.5
        return {"big": big, "same": torch.ones(2), "small": small}

    error = on_all(
        saving(tmp_path, errors_of, 3, lambda rank: replicated(state(rank), "FULL")),
        ReplicationMismatch,
    )
    assert (error.keys, error.ranks) == (["big", "small"], [1])
    big = {
        "differing": 3,
        "first index": 1_048_576,
        "largest difference": 3.0,
        "beyond tolerance": 3,
    }
    small = {"differing": 1, "first index": 2, "largest difference": 0.5, "beyond tolerance": 1}
    assert error.details == {"big": big, "small": small}
    assert "1048576" in str(error)


def test_several_ranks_and_many_keys_are_listed(tmp_path, errors_of, on_all):
    def state(rank):
        return {f"k{n:02d}": torch.full((2,), float(rank if n % 2 else 0)) for n in range(60)}

    error = on_all(
        saving(tmp_path, errors_of, 4, lambda rank: replicated(state(rank), "QUICK")),
        ReplicationMismatch,
    )
    assert error.ranks == [1, 2, 3]
    assert error.keys[:2] == ["k01", "k03"] and len(error.keys) >= 20
    assert "and 25 more" in str(error)


@pytest.mark.parametrize(("atol", "rtol"), [(1e-3, 0.0), (0.0, 1e-2)])
@pytest.mark.parametrize("count", [1, 12])
def test_tolerance_relaxes_full(tmp_path, atol, rtol, count, errors_of):
    def state(rank):
        return {f"x{n}": torch.full((5,), 1.0 + rank * 1e-4) for n in range(count)}

    results = saving(
        tmp_path, errors_of, 2, lambda rank: replicated(state(rank), "FULL", atol=atol, rtol=rtol)
    )
    assert [getattr(result, "status", result) for result in results] == ["committed"] * 2


@pytest.mark.parametrize(
    ("level", "state"),
    [
        ("TENSOR", lambda rank: {"x": torch.tensor([1.0 + rank * 1e-4])}),
        ("QUICK", lambda rank: {"x": torch.tensor([1.0 + rank * 1e-4])}),
        ("FULL", lambda rank: {"x": torch.tensor([1.0 + rank])}),
        ("FULL", lambda rank: {"x": torch.tensor([1.0, math.nan if rank else 1.0])}),
        ("FULL", lambda rank: {"n": 1.0 + rank * 1e-4}),
        ("FULL", lambda rank: {"x": torch.tensor([1.0 + rank * 1e-4]), "n": rank}),
        ("FULL", lambda rank: {"x": torch.tensor([1.0 + rank * 1e-4]), "l": (1,) if rank else [1]}),
        ("FULL", lambda rank: {"x": torch.tensor([1.0 + rank * 1e-4]), "d": {} if rank else []}),
    ],
)
def test_tolerance_relaxes_nothing_else(tmp_path, level, state, errors_of, on_all):
    results = saving(tmp_path, errors_of, 2, lambda rank: replicated(state(rank), level, atol=1e-2))
    on_all(results, ReplicationMismatch)


def shuffled(rank, size=17):
    order = torch.randperm(size, generator=torch.Generator().manual_seed(rank)).tolist()
    return {f"key{n}": (torch.full((3,), float(n)) if n % 2 else n) for n in order}


EQUAL = {
    "nan": lambda rank: {"x": torch.tensor([math.nan, 1.0]), "y": math.nan, "z": nan(5)},
    "keys in another order": shuffled,
    "nested keys in another order": lambda rank: {"a": {"b": shuffled(rank)}},
    "sets": lambda rank: {
        "s": set("abcdef"[:: (-1) ** rank]),
        "f": frozenset(range(rank, rank - 9, -1) or [0]) and {1},
    },
    "strides": lambda rank: {
        "t": torch.arange(12.0).reshape(3, 4).t().contiguous()
        if rank
        else torch.arange(12.0).reshape(3, 4).t()
    },
    "views of something larger": lambda rank: {"v": torch.zeros(100)[rank * 5 : rank * 5 + 5]},
    "empty": lambda rank: {"e": torch.zeros(0, 4), "d": {}, "l": [], "t": (), "n": None},
    "adamw": lambda rank: adamw(False),
    "requires grad": lambda rank: {
        "p": torch.nn.Parameter(torch.ones(2)) if rank else torch.ones(2)
    },
    "fp8": lambda rank: {"q": torch.ones(70_000).to(torch.float8_e4m3fn)},
    "half of a conjugate": lambda rank: {
        "c": torch.tensor([1 + 2j]).conj() if rank else torch.tensor([1 - 2j])
    },
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", list(EQUAL))
def test_equal_content_never_raises(tmp_path, name, level, errors_of, same, split_everything):
    def program(comm):
        state = EQUAL[name](comm.rank)
        live = EQUAL[name](comm.rank)
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, [replicated(state, level)])
            if isinstance(live, dict):
                for tensor in [t for t in live.values() if isinstance(t, torch.Tensor)]:
                    with torch.no_grad():
                        tensor.zero_()
                values = ckpt.load([replicated(live, level)]).values["m"]
                same(by_key(values), by_key(EQUAL[name](comm.rank)))
        return "saved"

    assert errors_of(3, program) == ["saved"] * 3


def by_key(value):
    if isinstance(value, dict):
        return {key: by_key(value[key]) for key in sorted(value)}
    return (
        value.detach().clone().contiguous().resolve_conj()
        if isinstance(value, torch.Tensor)
        else value
    )


@pytest.mark.parametrize(
    "dtype",
    [
        "float4_e2m1fn_x2",
        "float8_e8m0fnu",
        "uint16",
        "uint32",
        "uint64",
        "complex32",
        "float8_e4m3fnuz",
    ],
)
def test_full_knows_every_dtype(tmp_path, dtype, errors_of, on_all):
    def state(rank):
        raw = torch.full((64,), 0x38, dtype=torch.uint8)
        raw[-1] += rank
        return {"x": raw.view(getattr(torch, dtype))}

    error = on_all(
        saving(tmp_path, errors_of, 2, lambda rank: replicated(state(rank), "FULL")),
        ReplicationMismatch,
    )
    assert error.keys == ["x"] and error.details["x"]["differing"] == 1


def test_memory_of_full_is_bounded(tmp_path, errors_of, on_all):
    """96 MiB that differ in every element are compared in a few chunks of 4 MiB."""

    def state(rank):
        return {"x": torch.full((24 << 20,), float(rank))}

    states = [state(0), state(1)]
    tracemalloc.start()
    try:
        results = saving(tmp_path, errors_of, 2, lambda rank: replicated(states[rank], "FULL"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    error = on_all(results, ReplicationMismatch)
    assert error.details["x"]["differing"] == 24 << 20
    assert peak < 64 << 20


@pytest.mark.parametrize("order", [["near", "far"], ["far", "near"]])
def test_one_sharded_component_within_its_tolerance_excuses_no_other(
    tmp_path, order, errors_of, on_all
):
    def program(comm):
        states = {
            "near": {"x": torch.full((8,), 1 + comm.rank * 1e-6)},
            "far": {"x": torch.full((8,), 1.0 + comm.rank)},
        }
        how = {"near": {"validation_level": "FULL", "atol": 1e-3}, "far": {}}
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(
                1,
                [
                    StateComponent(key, states[key], SharingPattern.SHARDED, **how[key])
                    for key in order
                ],
            )

    error = on_all(errors_of(2, program), ReplicationMismatch)
    assert (error.component, error.keys, error.ranks) == ("far", ["x"], [1])


@pytest.mark.parametrize("far", [2, 3])
def test_one_part_within_the_tolerance_excuses_no_other(tmp_path, far, errors_of, on_all):
    """Ranks 0 and 2 hold one half of a tensor, ranks 1 and 3 the other one."""

    def state(rank):
        part = torch.ones(4) + (0 if rank < 2 else 1 if rank == far else 1e-6)
        leaf = Shard(part, (8,), (4 * (rank % 2),))
        return StateComponent(
            "s", {"x": leaf}, SharingPattern.SHARDED, validation_level="FULL", atol=1e-3
        )

    error = on_all(saving(tmp_path, errors_of, 4, state), ReplicationMismatch)
    assert (error.component, error.keys) == ("s", ["x"])


# name -> (state of a rank, key that must be named): what differs has the name of something that is
# equal
NAMESAKES = {
    "number and its text": (lambda rank: {0: 1.0 + rank, "0": 2.0}, "0~2int"),
    "None and its text": (lambda rank: {None: 1.0 + rank, "None": 2.0}, "None~2NoneType"),
    "number and its text, deep": (
        lambda rank: {"a": [{"0": 2.0, 0: [1.0 + rank]}]},
        "a/0/0~2int/0",
    ),
    "text of a number": (lambda rank: {0: 1.0, "0": 2.0 + rank}, "0"),
    "name of the structure": (lambda rank: {"(structure)": 1.0 + rank}, "(structure)"),
    "name of the structure, a tensor": (
        lambda rank: {"(structure)": torch.tensor([1.0 + rank])},
        "(structure)",
    ),
}


@pytest.mark.parametrize("level", ["QUICK", "FULL"])
@pytest.mark.parametrize("name", list(NAMESAKES))
def test_namesakes_hide_nothing(tmp_path, name, level, errors_of, on_all):
    make, key = NAMESAKES[name]
    results = saving(
        tmp_path, errors_of, 2, lambda rank: replicated({**make(rank), "w": torch.ones(2)}, level)
    )
    error = on_all(results, ReplicationMismatch)
    assert (error.component, error.keys, error.ranks) == ("m", [key], [1])
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pattern", ["REPLICATED", "SHARDED"])
@pytest.mark.parametrize("large", [2**60, -(2**60), 2**53])
def test_a_tolerance_is_not_for_whole_numbers_that_differ(
    tmp_path, large, pattern, errors_of, on_all
):
    def own(rank):
        state = {"seed": torch.tensor([5, large + rank]), "x": torch.ones(3)}
        return StateComponent(
            "m", state, SharingPattern(pattern), validation_level="FULL", atol=1e-6
        )

    error = on_all(saving(tmp_path, errors_of, 2, own), ReplicationMismatch)
    assert (error.keys, error.ranks) == (["seed"], [1])
    numbers = {"differing": 1, "first index": 1, "largest difference": 1.0, "beyond tolerance": 1}
    assert error.details["seed"] == numbers


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("which", ["atol", "rtol"])
@pytest.mark.parametrize("pattern", ["REPLICATED", "SHARDED"])
def test_ranks_with_another_tolerance_disagree(tmp_path, pattern, which, odd, errors_of, on_all):
    """Else each would go by its own: the same state, refused here and passed there."""

    def own(rank):
        state = {f"w{n}": torch.ones(2) + 1e-4 * rank for n in range(3)}
        tolerance = {which: 1e-2 if rank == odd else 0.0}
        return StateComponent(
            "m", state, SharingPattern(pattern), validation_level="FULL", **tolerance
        )

    error = on_all(saving(tmp_path, errors_of, 3, own), RanksDisagree)
    assert "component 'm'" in str(error) and "0.01" in str(error)
    assert str(error).endswith(
        "ranks that differ from rank 0: [2]" if odd else "ranks that differ from rank 0: [1, 2]"
    )
    assert not tmp_path.exists() or list(tmp_path.iterdir()) == []


SHAPES = ({"rank 0": "F32 [2]", "rank 1": "F32 [3]"}, {"rank 0": "F32 [2]", "rank 1": "F64 [2]"})
# name -> (state of a rank, keys, details)
DIFFERENCES = {
    "shape": (lambda rank: {"w": torch.ones(2 + rank)}, ["w"], {"w": SHAPES[0]}),
    "dtype": (
        lambda rank: {"w": torch.ones(2, dtype=[torch.float32, torch.float64][rank])},
        ["w"],
        {"w": SHAPES[1]},
    ),
    "value": (
        lambda rank: {"n": {"lr": 5 + rank}},
        ["n/lr"],
        {"n/lr": {"rank 0": "5 (int)", "rank 1": "6 (int)"}},
    ),
    "type": (
        lambda rank: {"n": [1, True][rank]},
        ["n"],
        {"n": {"rank 0": "1 (int)", "rank 1": "True (bool)"}},
    ),
    "long": (
        lambda rank: {"n": "x" * 5000 + str(rank)},
        ["n"],
        {"n": {f"rank {r}": f"'{'x' * 27}...{'x' * 27}{r}' (str)" for r in (0, 1)}},
    ),
    "missing": (
        lambda rank: {"a": 1, **({"b": 2} if rank else {})},
        ["b"],
        {"b": {"rank 0": "nothing", "rank 1": "2 (int)"}},
    ),
    "list for tuple": (
        lambda rank: {"w": torch.ones(1), "l": [(1,), [1]][rank]},
        ["l"],
        {"l": {"rank 0": "tuple of length 1", "rank 1": "list of length 1"}},
    ),
    "empty": (
        lambda rank: {"w": torch.ones(1), "d": [{}, []][rank]},
        ["d"],
        {"d": {"rank 0": "dict with keys []", "rank 1": "list of length 0"}},
    ),
    "text for number": (
        lambda rank: {"d": {[0, "0"][rank]: 5}},
        ["d"],
        {"d": {"rank 0": "dict with keys [0]", "rank 1": "dict with keys ['0']"}},
    ),
    "bare": (
        lambda rank: Value([7, 8][rank]),
        ["value"],
        {"value": {"rank 0": "7 (int)", "rank 1": "8 (int)"}},
    ),
}


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("name", list(DIFFERENCES))
def test_both_sides_are_shown(tmp_path, name, level, errors_of, on_all):
    make, keys, details = DIFFERENCES[name]
    error = on_all(
        saving(tmp_path, errors_of, 2, lambda rank: replicated(make(rank), level)),
        ReplicationMismatch,
    )
    assert (error.keys, error.ranks, error.details) == (keys, [1], details)
    first = details[keys[0]]
    assert f"{keys[0]!r}: {first['rank 0']} on rank 0, {first['rank 1']} on rank 1" in str(error)
    assert f"{keys[0]!r} on rank 1 differs from rank 0;" in str(error)


@pytest.mark.parametrize("level", LEVELS[1:])
def test_memory_that_is_shared_on_one_rank_only(tmp_path, level, errors_of, on_all):
    def state(rank):
        w = torch.ones(2)
        return {"a": w, "b": w if rank else torch.ones(2)}

    how = {"atol": 1.0} if level == "FULL" else {}
    error = on_all(
        saving(tmp_path, errors_of, 2, lambda rank: replicated(state(rank), level, **how)),
        ReplicationMismatch,
    )
    assert (error.keys, error.details) == (
        ["b"],
        {"b": {"rank 0": "memory of its own", "rank 1": "the memory of 'a'"}},
    )


def test_zeros_of_two_signs_differ_in_their_bits(tmp_path, errors_of, on_all):
    def state(rank):
        return {
            "x": torch.tensor([-0.0 if rank else 0.0, 1.0]),
            "y": torch.tensor([math.nan if rank else 1.0]),
        }

    error = on_all(
        saving(tmp_path, errors_of, 2, lambda rank: replicated(state(rank), "FULL")),
        ReplicationMismatch,
    )
    assert error.details["x"] == {
        "differing": 1,
        "beyond tolerance": 1,
        "first index": 0,
        "largest difference": 0.0,
        "equal as numbers": 1,
    }
    assert (
        "'x': 1 element differs, the first at index 0, in bits alone: the numbers are equal"
        in str(error)
    )
    assert "'x', 'y' on rank 1 differ from rank 0" in str(error)
    error = on_all(
        saving(tmp_path, errors_of, 2, lambda rank: replicated({"y": state(rank)["y"]}, "FULL")),
        ReplicationMismatch,
    )
    assert "with NaN or infinity on one side" in str(error)


def test_values_of_sharded_state_are_shown(tmp_path, errors_of, on_all):
    def own(rank):
        return StateComponent("m", {"n": 5 + rank, "x": torch.ones(2)}, SharingPattern.SHARDED)

    error = on_all(saving(tmp_path, errors_of, 2, own), ReplicationMismatch)
    assert "plain value 'n' is 6 (int) on rank 1 and 5 (int) on lower ranks" in str(error)


def test_a_rank_prints_one_traceback_with_the_reason_last(tmp_path):
    """What all ranks raise is not chained to its twin; what failed in the user's own code is."""

    class Bad:
        def state_dict(self):
            raise KeyError("momentum")

        def load_state_dict(self, state):
            pass

    def program(comm, state):
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            try:
                ckpt.save(1, state(comm.rank))
            except Exception as error:
                return traceback.format_exception(error), error
            finally:
                with comm.round("every rank has its verdict", joining=True):
                    pass

    for lines, _ in run_ranks(2, lambda comm: program(comm, lambda rank: {"m": {"n": rank}})):
        text = "".join(lines)
        assert text.count("Traceback (most recent call last)") == 1
        assert (
            lines[-1].startswith("ckptcore.errors.ReplicationMismatch: ")
            and "0 (int) on rank 0" in lines[-1]
        )
    found = run_ranks(
        2, lambda comm: program(comm, lambda rank: {"m": Bad() if rank else {"n": 1}})
    )
    for rank, (lines, error) in enumerate(found):
        text = "".join(lines)
        assert isinstance(error, RankFailed) and "rank 1: KeyError: 'momentum'" in lines[-1]
        assert text.count("Traceback (most recent call last)") == 1 + rank
        assert ("in state_dict" in text) == bool(rank)


def test_what_nobody_declared_is_not_called_declared(tmp_path, errors_of, on_all):
    class Own:
        sharing_pattern = "REPLICATED"

        def __init__(self, number):
            self.number = number

        def state_dict(self):
            return {"n": self.number}

    Own.load_state_dict = lambda self, state: None

    def program(comm, state):
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, state(comm.rank))

    for state in (
        lambda rank: {"m": {"n": rank}},
        lambda rank: {"m": StateComponent("m", {"n": rank}, required=False)},
    ):
        error = on_all(errors_of(2, lambda comm, s=state: program(comm, s)), ReplicationMismatch)
        assert (
            "component 'm' was taken to be REPLICATED (a dict's value, on 2 ranks), but 'n' on "
            "rank 1" in str(error)
        )
        assert "if it should be the same, find what made the ranks differ" in str(error)
        assert str(error).endswith(
            ": StateComponent('m', ..., 'PER_RANK') as the dict's value says so"
        )
    for state in (
        lambda rank: {"m": Own(rank)},
        lambda rank: {"m": StateComponent("m", {"n": rank}, "REPLICATED")},
        lambda rank: [StateComponent("m", {"n": rank}, "REPLICATED")],
    ):
        error = on_all(errors_of(2, lambda comm, s=state: program(comm, s)), ReplicationMismatch)
        assert "component 'm' is declared REPLICATED, but 'n' on rank 1" in str(error)


STATISTICS = ["*.running_*", "*.num_batches_tracked"]


@pytest.mark.parametrize("level", LEVELS[1:])
def test_parts_that_are_ignored_may_differ_and_are_all_of_one_rank(
    tmp_path, level, split_everything
):
    def network(rank, weight=1.0):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.fill_(weight + number)
        model[1].running_mean.fill_(100 + rank)
        model[1].num_batches_tracked.fill_(10 + rank)
        return model

    def program(comm):
        model = network(comm.rank)
        loop = {"steps": [1, torch.ones(2)], "log": {"loss": comm.rank, 2: ()}}
        state = [
            StateComponent("model", model, "REPLICATED", validation_level=level, ignore=STATISTICS),
            StateComponent("loop", loop, "REPLICATED", validation_level=level, ignore=["log/loss"]),
        ]
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, state)
            ckpt.load(state)
        return model.state_dict(), loop

    for found, loop in run_ranks(3, program):
        for name, tensor in network(0).state_dict().items():
            assert torch.equal(found[name], tensor), name
        assert loop["log"] == {"loss": 0, 2: ()}


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("what", ["1.weight", "steps", "log"])
def test_what_is_not_ignored_is_compared(tmp_path, level, what, errors_of, on_all):
    def program(comm):
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(4))
        for tensor in model.state_dict().values():
            tensor.fill_(1)
        model[1].running_mean.fill_(comm.rank)
        loop = {"steps": [1, 2], "log": {"loss": comm.rank}}
        if comm.rank == 1:
            if what == "1.weight":
                model[1].weight.data[0] = 2
            elif what == "steps":
                loop["steps"].append(3)
            else:
                loop["log"]["other"] = 0
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(
                1,
                [
                    StateComponent(
                        "m", model, "REPLICATED", validation_level=level, ignore=STATISTICS
                    ),
                    StateComponent(
                        "l", loop, "REPLICATED", validation_level=level, ignore=["log/loss"]
                    ),
                ],
            )

    error = on_all(errors_of(2, program), ReplicationMismatch)
    assert error.ranks == [1]
    assert {"1.weight": ["1.weight"], "steps": ["steps/2"], "log": ["log/other"]}[
        what
    ] == error.keys


def test_ignored_parts_are_the_same_on_all_ranks_and_not_of_sharded_state(
    tmp_path, errors_of, on_all
):
    def program(comm):
        part = StateComponent("m", {"n": 1}, "REPLICATED", ignore=["n"] if comm.rank else [])
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, [part])

    on_all(errors_of(2, program), RanksDisagree)
    with pytest.raises(InvalidState, match="ignore is for state that every rank holds whole"):
        StateComponent("m", {}, "SHARDED", ignore=["n"])
    for wrong in ("n", [1], [""], None, {"n"}):
        with pytest.raises(InvalidState, match="component 'm': ignore must be a list of names"):
            StateComponent("m", {}, "REPLICATED", ignore=wrong)
    for no_replicas in ("GLOBAL", "PER_RANK"):
        assert StateComponent("m", {}, no_replicas, ignore=["n"]).ignore == ("n",)
