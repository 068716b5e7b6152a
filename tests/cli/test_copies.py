"""Whose values and tensors `ckpt inspect` shows, where each rank, group or node has its own; pins,
sizes and files."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from ckptcore import CheckpointManager, Communicator, Shard, SharingPattern, StateComponent
from ckptcore.testing.ranks import run_ranks

from .conftest import Ckpt

GROUPS = [[0, 2], [1, 3]]
NODES = [[0, 1], [2, 3]]


def components(rank: int) -> list[StateComponent]:
    group, node = rank % 2, rank // 2
    grid = torch.arange(16.0).reshape(4, 4)
    part = Shard(grid[rank : rank + 1].clone(), (4, 4), (rank, 0))
    return [
        StateComponent(
            "own", {"x": 10 + rank, "t": torch.full((2,), float(rank))}, SharingPattern.PER_RANK
        ),
        StateComponent(
            "stage", {"x": 20 + group}, SharingPattern.PER_GROUP, process_group_name="dp"
        ),
        StateComponent("cache", {"x": 30 + node}, SharingPattern.PER_NODE),
        StateComponent("model", {"w": torch.ones(3)}, SharingPattern.REPLICATED),
        StateComponent("table", {"grid": part}, SharingPattern.SHARDED),
        StateComponent("replay", {"items": list(range(5000))}, SharingPattern.GLOBAL),
    ]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("four")

    def save(comm: Communicator) -> None:
        with CheckpointManager(root, comm=comm, process_groups={"dp": GROUPS}) as manager:
            manager.save(7, components(comm.rank))

    run_ranks(4, save, nodes=NODES)
    return root


def values(ckpt: Ckpt, root: Path, name: str, *choice: str) -> tuple[int, dict[str, Any]]:
    document = ckpt("inspect", root, "--values", name, *choice, "--json").document
    return document["values"][name]["x"], document["values_of"][name]


def test_the_values_say_whose_they_are(ckpt: Ckpt, four: Path) -> None:
    assert values(ckpt, four, "own") == (10, {"copy": 0, "copies": 4, "of": "rank 0", "ranks": [0]})
    assert values(ckpt, four, "stage")[1] == {
        "copy": 0,
        "copies": 2,
        "of": "group 0 of dp",
        "ranks": [0, 2],
    }
    assert values(ckpt, four, "cache")[1] == {
        "copy": 0,
        "copies": 2,
        "of": "node 0",
        "ranks": [0, 1],
    }
    lines = ckpt(
        "inspect", four, *(f"--values={name}" for name in ("own", "stage", "cache", "model"))
    ).out.splitlines()
    assert "values of own for rank 0: one of 4; --rank shows another" in lines
    assert "values of stage for group 0 of dp (ranks 0,2): one of 2; --group shows another" in lines
    assert "values of cache for node 0 (ranks 0-1): one of 2; --node shows another" in lines
    assert "values of model" in lines


def test_another_copy_is_shown_on_request(ckpt: Ckpt, four: Path) -> None:
    for rank in range(4):
        assert values(ckpt, four, "own", f"--rank={rank}")[0] == 10 + rank
        assert values(ckpt, four, "stage", f"--rank={rank}")[0] == 20 + rank % 2
        assert values(ckpt, four, "cache", f"--rank={rank}")[0] == 30 + rank // 2
    assert [
        values(ckpt, four, "stage", f"--group={group}")[0] for group in ("0", "1", "00001")
    ] == [20, 21, 21]
    assert [values(ckpt, four, "cache", f"--node={node}")[0] for node in (0, 1)] == [30, 31]
    assert (
        "values of own for rank 3: one of 4"
        in ckpt("inspect", four, "--values=own", "--rank=3").out
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ["--values=own", "--rank=4"],
            3,
            "has nothing for rank 4: it has rank 0, rank 1, rank 2, rank 3",
        ),
        (
            ["--values=stage", "--group=pp"],
            3,
            "has nothing for group pp: it has group 0 of dp, group 1 of dp",
        ),
        (
            ["--values=own", "--group=0"],
            2,
            "--group is for components with a copy for each group: own is PER_RANK",
        ),
        (["--values=model", "--node=0"], 2, "--node is for components with a copy for each node"),
        (["--rank=0"], 2, "give --values too"),
    ],
)
def test_a_copy_that_is_not_there(
    ckpt: Ckpt, four: Path, arguments: list[str], code: int, said: str
) -> None:
    done = ckpt("inspect", four, *arguments)
    assert done.code == code and said in done.err and done.out == ""


def test_groups_with_keys_are_found_by_them(ckpt: Ckpt, tmp_path: Path) -> None:
    def save(comm: Communicator) -> None:
        key = ["first", "second"][comm.rank % 2]
        state = [
            StateComponent("stage", {"x": key}, "PER_GROUP", process_group_name="dp", group_key=key)
        ]
        with CheckpointManager(tmp_path, comm=comm, process_groups={"dp": GROUPS}) as manager:
            manager.save(1, state)

    run_ranks(4, save)
    assert values(ckpt, tmp_path, "stage", "--group=second")[0] == "second"
    assert values(ckpt, tmp_path, "stage", "--group=0")[1]["of"] == "group first of dp"


def names(ckpt: Ckpt, path: Path, *pattern: str) -> list[str]:
    return [t["full_name"] for t in ckpt("inspect", path, *pattern, "--json").document["tensors"]]


def test_tensors_of_each_rank_are_found_under_the_key_of_the_component(
    ckpt: Ckpt, four: Path
) -> None:
    all_ranks = [f"own.rank{rank:05d}/t" for rank in range(4)]
    assert (
        names(ckpt, four, "--tensors", "own/*")
        == names(ckpt, four, "--tensors", "own/t")
        == all_ranks
    )
    assert names(ckpt, four, "--tensors", "own.rank00002/*") == ["own.rank00002/t"]


def test_plain_values_count_in_the_size_of_a_component(ckpt: Ckpt, four: Path) -> None:
    found = {c["key"]: c for c in ckpt("inspect", four, "--json").document["components"]}
    assert found["replay"]["size_bytes"] == 0 and found["replay"]["values_bytes"] > 5000
    assert 0 < found["model"]["values_bytes"] < 100 and found["model"]["size_bytes"] == 12
    row = next(
        line.split()
        for line in ckpt("inspect", four).out.splitlines()
        if line.strip().startswith("replay")
    )
    assert float(row[4]) > 5 and row[5] == "KiB"


def test_a_pin_is_shown(ckpt: Ckpt, root: Path) -> None:
    assert ckpt("inspect", root, "--json").document["checkpoint"]["pinned"] is False
    assert "pinned" not in ckpt("inspect", root).out
    CheckpointManager(root).pin(30)
    for path in (root, root / "checkpoint-30"):
        assert ckpt("inspect", path, "--json").document["checkpoint"]["pinned"] is True
        assert any(
            line.split()[:1] == ["pinned"] for line in ckpt("inspect", path).out.splitlines()
        )
    (entry,) = ckpt("ls", root / "checkpoint-30", "--json").document["checkpoints"]
    assert entry["pinned"] is True
    (root / "checkpoint-30" / "checkpoint_manifest.json").write_text("{")
    assert (
        ckpt("inspect", root / "checkpoint-30", "--json").document["checkpoint"]["pinned"] is True
    )


def test_the_path_of_a_manifest_means_its_checkpoint(
    ckpt: Ckpt, root: Path, tmp_path: Path
) -> None:
    path = root / "checkpoint-20" / "checkpoint_manifest.json"
    for command in ("inspect", "ls", "verify"):
        assert ckpt(command, path) == ckpt(command, path.parent)
    assert ckpt("cp", path, tmp_path / "copy").code == 0
    assert (tmp_path / "copy" / "checkpoint-20").is_dir()
    path.unlink()
    assert "checkpoint-20 is uncommitted" in ckpt("inspect", path).err


def test_the_path_of_a_tensor_file_shows_its_tensors(ckpt: Ckpt, root: Path, four: Path) -> None:
    path = root / "checkpoint-20" / "model.safetensors"
    assert names(ckpt, path) == names(ckpt, path.parent, "--tensors")
    assert names(ckpt, path, "--tensors", "*bias") == ["model/layer.bias"]
    folder = four / "checkpoint-7"
    assert names(ckpt, folder / "own.rank00002.safetensors") == ["own.rank00002/t"]
    assert names(ckpt, folder / "table.rank00002.safetensors") == ["table/grid"]
    (root / "checkpoint-20" / "foreign.safetensors").touch()
    done = ckpt("inspect", root / "checkpoint-20" / "foreign.safetensors")
    assert done.code == 3 and "foreign.safetensors is no file of the checkpoint" in done.err


class Dead(MemoryFileSystem):  # type: ignore[misc]
    """An endpoint that nobody answers at."""

    protocol = "dead"
    asked: ClassVar[list[str]] = []

    def _refuse(self, path: str, *_: Any, **__: Any) -> Any:
        Dead.asked.append(path)
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused", path)

    info = ls = cat_file = _open = exists = _refuse


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "cp"])
def test_an_endpoint_that_does_not_answer_is_asked_for_one_deadline(
    ckpt: Ckpt, tmp_path: Path, command: str
) -> None:
    fsspec.register_implementation("dead", Dead, clobber=True)
    Dead.asked.clear()
    target = [tmp_path / "copy"] if command == "cp" else []
    done = ckpt(command, "dead://bucket/run", *target, "--storage-option", "retry_deadline=0.05")
    assert done.code == 4 and "Connection refused" in done.err
    # What lies around is asked for by a storage of its own, with a deadline of its own.
    assert Dead.asked and all("bucket/run/" in path for path in Dead.asked)


def test_large_bytes_and_texts_are_said_to_lie_among_the_tensors(
    ckpt: Ckpt, tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"d": {"x": b"a" * 100_000, "s": "t" * 100_000, "n": 3}})
    lines = [
        line.split(None, 1) for line in ckpt("inspect", tmp_path, "--values", "d").out.splitlines()
    ]
    assert ["x", "bytes, stored as tensor d/x U8 [100000]"] in lines and ["n", "3"] in lines
    assert ["s", "str, stored as tensor d/s U8 [100000]"] in lines
    found = ckpt("inspect", tmp_path, "--values", "d", "--json").document["values"]["d"]["x"]
    assert (found["$type"], found["value"]["$type"], found["value"]["name"]) == (
        "bytes",
        "tensor",
        "d/x",
    )


def test_ranks_and_components_as_a_matrix(ckpt: Ckpt, four: Path) -> None:
    document = ckpt("inspect", four, "--ranks", "--json").document
    assert [row["rank"] for row in document["ranks"]] == [0, 1, 2, 3]
    assert [row["node"] for row in document["ranks"]] == [0, 0, 1, 1]
    assert (
        sum(row["size_bytes"] for row in document["ranks"])
        == (document["checkpoint"]["size_bytes"])
    )
    written = {item["key"]: item["writers"] for item in document["components"]}
    for row in document["ranks"]:
        assert {key for key in row["components"] if key != "index"} <= {
            key for key, ranks in written.items() if row["rank"] in ranks
        }
        assert {"own", "table", "index"} <= row["components"].keys()
    lines = ckpt("inspect", four, "--ranks").out.splitlines()
    head = next(line.split() for line in lines if line.split()[:1] == ["rank"])
    assert (head[0], *head[-2:]) == ("rank", "index", "total")
    assert {*head[1:-2]} == {"own", "stage", "cache", "model", "table", "replay"}


def test_groups_and_copies_are_columns_where_there_are_any(ckpt: Ckpt, four: Path) -> None:
    lines = ckpt("inspect", four).out.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("  ")}
    assert rows["own"][-3:] == ["4", "-", "0-3"] and rows["stage"][-3:-1] == ["2", "dp"]
    layouts = ckpt("inspect", four, "--tensors", "table/*", "--json").document["tensors"]
    assert [tensor["layout"] for tensor in layouts] == ["4 boxes without a rule"]
