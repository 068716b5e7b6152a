"""Every pattern on every world size: the values on every rank, and exactly the files that belong to
it."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckptcore import (
    CheckpointManager,
    SharingPattern,
    StateComponent,
    StateMismatch,
    open_checkpoint,
)
from ckptcore.testing.ranks import run_ranks

MANIFEST = "checkpoint_manifest.json"
SIZES = [1, 2, 3, 4, 8]
GROUPS = {
    1: [[0]],
    2: [[0], [1]],
    3: [[0, 2], [1]],
    4: [[0, 2], [1, 3]],
    8: [[0, 4], [1, 5], [2, 6], [3, 7]],
}
NODES = {
    1: [[0]],
    2: [[0], [1]],
    3: [[0, 1], [2]],
    4: [[0, 1], [2, 3]],
    8: [[0, 1, 2], [3, 4, 5, 6], [7]],
}


def parts(pattern, size):
    """[(label in file names, ranks that share the copy)] in order of their lowest rank."""
    return {
        "GLOBAL": [("", list(range(size)))],
        "REPLICATED": [("", list(range(size)))],
        "PER_RANK": [(f".rank{rank:05d}", [rank]) for rank in range(size)],
        "PER_GROUP": [(f".dp-{n:05d}", ranks) for n, ranks in enumerate(GROUPS[size])],
        "PER_NODE": [(f".node{n:05d}", ranks) for n, ranks in enumerate(NODES[size])],
    }[pattern]


def state(value, **more):
    return {
        "w": torch.full((5,), float(value)),
        "b": torch.full((2, 2), value, dtype=torch.int64),
        "n": value,
        **more,
    }


def truth(pattern, size, rank):
    """The rank whose state comes back on `rank`."""
    return next(ranks[0] for _, ranks in parts(pattern, size) if rank in ranks)


def held(pattern, size, rank):
    """What `rank` holds at the save: where only the lowest rank counts, the others hold something
    else."""
    if pattern in ("GLOBAL", "PER_NODE"):
        return 100 + rank
    return 100 + truth(pattern, size, rank)


def component(pattern, value):
    return StateComponent(
        "own", value, SharingPattern(pattern), "dp" if pattern == "PER_GROUP" else None
    )


def saved(tmp_path, pattern, size, writers="split"):
    def program(comm):
        groups = {"dp": GROUPS[size]} if pattern == "PER_GROUP" else None
        with CheckpointManager(tmp_path, comm=comm, process_groups=groups, writers=writers) as ckpt:
            return ckpt.save(7, [component(pattern, state(held(pattern, size, comm.rank)))])

    return run_ranks(size, program, nodes=NODES[size])


def loaded(tmp_path, pattern, size, make, **how):
    """[what the rank's load returned or raised, its live state after] by rank."""

    def program(comm):
        live = make()
        groups = {"dp": GROUPS[size]} if pattern == "PER_GROUP" else None
        with CheckpointManager(tmp_path, comm=comm, process_groups=groups) as ckpt:
            try:
                return ckpt.load([component(pattern, live)], **how), live
            except StateMismatch as error:
                return error, live

    return run_ranks(size, program, nodes=NODES[size])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pattern", ["GLOBAL", "REPLICATED", "PER_RANK", "PER_GROUP", "PER_NODE"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
class TestEveryPattern:
    @pytest.fixture(autouse=True)
    def _split(self, split, request):
        if split:
            request.getfixturevalue("split_everything")

    def test_files(self, tmp_path, pattern, size, split, files):
        infos = saved(tmp_path, pattern, size)
        expected, writers = {MANIFEST}, set()
        for label, ranks in parts(pattern, size):
            shared = split and pattern in ("REPLICATED", "PER_GROUP") and len(ranks) > 1
            names = (
                [f"own{label}-0000{n}-of-00002.safetensors" for n in (1, 2)]
                if shared
                else [f"own{label}.safetensors"]
            )
            expected |= {*names, *([f"own{label}.safetensors.index.json"] if shared else [])}
            writers |= set(ranks[: len(names)])
        expected |= {f"index.rank{rank:05d}.msgpack" for rank in writers}
        assert files(tmp_path) == {"checkpoint-7"}
        assert files(tmp_path / "checkpoint-7") == expected
        manifest = open_checkpoint(tmp_path / "checkpoint-7").manifest
        assert {info.manifest.digest for info in infos} == {manifest.digest}
        assert {info.status for info in infos} == {"committed"}
        assert (manifest.world_size, manifest.nodes) == (size, NODES[size])
        own = manifest.components["own"]
        assert (own.pattern, own.writers, own.tensors) == (
            pattern,
            sorted(writers),
            2 * len(parts(pattern, size)),
        )
        assert own.partition == (GROUPS[size] if pattern == "PER_GROUP" else None)
        assert own.size_bytes == (5 * 4 + 4 * 8) * len(parts(pattern, size))
        assert set(own.files) == {name for name in expected if name.endswith(".safetensors")}
        assert set(manifest.files) == expected - {MANIFEST}

    def test_values(self, tmp_path, pattern, size, split, same):
        saved(tmp_path, pattern, size)
        for rank, (report, live) in enumerate(loaded(tmp_path, pattern, size, lambda: state(-1))):
            expected = state(held(pattern, size, truth(pattern, size, rank)))
            same(report.values["own"], expected)
            same({"w": live["w"], "b": live["b"]}, {"w": expected["w"], "b": expected["b"]})
            assert (report.step, report.missing, report.unexpected, report.fresh) == (
                7,
                [],
                [],
                False,
            )

    def test_strict_refuses_other_keys_and_touches_nothing(
        self, tmp_path, pattern, size, split, on_all, same
    ):
        saved(tmp_path, pattern, size)

        def make():  # a module's names count
            tensors = {"w": torch.zeros(5), "extra": torch.ones(3)}
            return nn.ParameterDict(
                {name: nn.Parameter(t, requires_grad=False) for name, t in tensors.items()}
            )

        results = loaded(tmp_path, pattern, size, make)
        error = on_all([result for result, _ in results], StateMismatch)
        assert (error.missing, error.unexpected) == (["own/extra"], ["own/b", "own/n"])
        assert "own/extra" in str(error) and "own/b" in str(error)
        assert sorted(error.causes or [0]) == list(range(size))
        for _, live in results:
            same(
                {name: live[name].data for name in ("w", "extra")},
                {"w": torch.zeros(5), "extra": torch.ones(3)},
            )

    def test_not_strict_loads_the_rest_and_lists_the_others(
        self, tmp_path, pattern, size, split, same
    ):
        saved(tmp_path, pattern, size)

        def make():
            return {"w": torch.zeros(5), "extra": torch.ones(3), "n": 0}

        for rank, (report, live) in enumerate(loaded(tmp_path, pattern, size, make, strict=False)):
            expected = held(pattern, size, truth(pattern, size, rank))
            same(live["w"], torch.full((5,), float(expected)))
            same(live["extra"], torch.ones(3))
            assert report.values["own"]["n"] == expected
            assert (report.missing, report.unexpected) == (["own/extra"], ["own/b"])


@pytest.mark.parametrize("pattern", ["GLOBAL", "PER_NODE"])
def test_state_that_is_not_looked_at_may_hold_anything(tmp_path, pattern, same):
    def program(comm):
        mine = state(1) if truth(pattern, 4, comm.rank) == comm.rank else {"junk": object()}
        live = state(0)
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, [component(pattern, mine)])
            ckpt.load([component(pattern, live)])
        return live["w"]

    for live in run_ranks(4, program, nodes=NODES[4]):
        same(live, torch.ones(5))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_state_dict_is_called_on_every_rank_in_the_order_of_the_components(tmp_path, size):
    def program(comm):
        calls = []

        class Watched:
            def __init__(self, key):
                self.key = key

            def state_dict(self):
                calls.append(f"save {self.key}")
                return {"x": torch.zeros(2)}

            def load_state_dict(self, state_dict):
                calls.append(f"load {self.key}")

        patterns = {"c": "GLOBAL", "a": "REPLICATED", "b": "PER_NODE"}
        components = [
            StateComponent(key, Watched(key), SharingPattern(p)) for key, p in patterns.items()
        ]
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, components)
            saves = list(calls)
            ckpt.load(components)
        return saves, [call for call in calls if call.startswith("load")]

    expected = (["save c", "save a", "save b"], ["load c", "load a", "load b"])
    assert run_ranks(size, program) == [expected] * size


@pytest.mark.parametrize("size", SIZES)
def test_one_writer_with_lowest(tmp_path, size, files, split_everything):
    saved(tmp_path, "REPLICATED", size, writers="lowest")
    assert files(tmp_path / "checkpoint-7") == {
        MANIFEST,
        "own.safetensors",
        "index.rank00000.msgpack",
    }


def test_lowest_of_each_group_writes(tmp_path, files, split_everything):
    saved(tmp_path, "PER_GROUP", 4, writers="lowest")
    assert files(tmp_path / "checkpoint-7") == {
        MANIFEST,
        "own.dp-00000.safetensors",
        "own.dp-00001.safetensors",
        "index.rank00000.msgpack",
        "index.rank00001.msgpack",
    }


def test_bytes_are_split_by_size_and_stock_readers_find_them(tmp_path, same, split_everything):
    tensors = {f"layer.{n}.weight": torch.arange(float(40 + n)) * (n + 1) for n in range(12)}

    def program(comm):
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            return ckpt.save(1, [StateComponent("model", dict(tensors), SharingPattern.REPLICATED)])

    manifest = run_ranks(4, program)[0].manifest
    folder = tmp_path / "checkpoint-1"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    found = {}
    for number in range(1, 5):
        name = f"model-{number:05d}-of-00004.safetensors"
        part = load_file(folder / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == set(part)
        assert manifest.files[name].writer == number - 1
        assert 3 * 40 * 4 <= sum(t.nbytes for t in part.values()) <= 3 * 52 * 4
        found |= part
    same(dict(sorted(found.items())), dict(sorted(tensors.items())))
    assert {manifest.files[f"index.rank{rank:05d}.msgpack"].writer for rank in range(4)} == {
        0,
        1,
        2,
        3,
    }


def test_small_state_is_not_split(tmp_path, files):
    saved(tmp_path, "REPLICATED", 8)
    assert files(tmp_path / "checkpoint-7") == {
        MANIFEST,
        "own.safetensors",
        "index.rank00000.msgpack",
    }


@pytest.mark.parametrize("tensors", [{}, {"empty": torch.zeros(0, 3)}, {"one": torch.ones(())}])
def test_fewer_tensors_than_ranks(tmp_path, tensors, same, split_everything):
    def program(comm):
        live = {key: torch.full_like(t, 9) for key, t in tensors.items()}
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, [StateComponent("m", {**tensors, "n": 3}, SharingPattern.REPLICATED)])
            return ckpt.load(
                [StateComponent("m", {**live, "n": 0}, SharingPattern.REPLICATED)]
            ).values["m"]

    for values in run_ranks(3, program):
        same(values, {**tensors, "n": 3})


def test_objects_of_memory_storage_are_split_as_well(tmp_path, split_everything, same):
    root = f"memory://{tmp_path.name}"

    def program(comm):
        live = state(0)
        with CheckpointManager(root, comm=comm) as ckpt:
            ckpt.save(1, [component("REPLICATED", state(4))])
            ckpt.save(1, [component("REPLICATED", state(5))], overwrite=True)
            ckpt.load([component("REPLICATED", live)])
            assert ckpt.verify() == []
        return live["w"]

    for live in run_ranks(3, program):
        same(live, torch.full((5,), 5.0))
    assert len(open_checkpoint(f"{root}/checkpoint-1").manifest.components["own"].files) == 2
