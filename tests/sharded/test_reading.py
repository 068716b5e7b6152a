"""Reading parts: items and not what memory held before, straight into place, from few files, and
damage is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from ckptcore import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointManager,
    Shard,
    SharingPattern,
    StateComponent,
    open_checkpoint,
)
from ckptcore.format.digest import content_digest
from ckptcore.format.layout import Mesh, MeshLayout
from ckptcore.loading.reader import PartTarget
from ckptcore.loading.view import CheckpointView
from ckptcore.testing.ranks import run_ranks

FULL = torch.arange(8 * 6, dtype=torch.float64).reshape(8, 6)


def component(state: Any, pattern: str = "SHARDED") -> list[StateComponent]:
    return [StateComponent("s", state, SharingPattern(pattern))]


def saved(root: Path, world: int = 4, **more: Any) -> Path:
    """FULL in rows over the ranks, and `more` on all of them."""

    def program(comm: Any) -> None:
        size = 8 // comm.world_size
        w = Shard(FULL[comm.rank * size :][:size].clone(), (8, 6), (comm.rank * size, 0))
        with CheckpointManager(root, comm=comm) as ckpt:
            ckpt.save(1, component({"w": w, **more}))

    run_ranks(world, program)
    return root / "checkpoint-1"


@pytest.mark.parametrize("pattern", ["GLOBAL", "SHARDED"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int64, torch.bfloat16, torch.complex128, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (2, 0)], ids=str)
def test_small_tensors_are_read_as_they_are(
    tmp_path: Path, words, pattern: str, dtype: torch.dtype, shape: Any
) -> None:
    value = torch.full(shape, 1 if dtype is torch.bool else 7).to(dtype)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, component({"x": value}, pattern))
    for _ in range(5):
        _ = np.full(8, 3.7)  # memory to be used again
        found = open_checkpoint(tmp_path / "checkpoint-1").read("s/x")
        assert found.shape == shape and np.array_equal(words(found), words(value))


@pytest.mark.parametrize("pattern", ["GLOBAL", "SHARDED"])
@pytest.mark.parametrize(
    "make",
    [lambda t: t[::2][:1], lambda t: t.view(4, 2)[:1, ::2], lambda t: t[5::3]],
    ids=[0, 1, 2],
)
def test_one_item_of_a_strided_tensor(tmp_path: Path, pattern: str, make: Any) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, component({"x": make(torch.arange(8.0))}, pattern))
        live = torch.zeros(8)
        ckpt.load(component({"x": make(live)}, pattern))
    assert torch.equal(make(live), make(torch.arange(8.0)))
    assert torch.count_nonzero(live) <= 1


def test_the_smallest_number_of_indexes_is_opened(tmp_path: Path, counting) -> None:
    folder = saved(tmp_path, 4)
    storage = counting(folder)
    view = CheckpointView(storage, "")
    assert view.read("s/w", [slice(4, 6), slice(1, 2)]).tolist() == [[25.0], [31.0]]
    tensor_files = {name for name in storage.opened if name.endswith(".safetensors")}
    assert {name for name in storage.opened if name.startswith("index")} == {
        "index.rank00000.msgpack",
        "index.rank00002.msgpack",
    }
    assert tensor_files == {"s.rank00002.safetensors"}


def test_whole_pieces_go_straight_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path, 4)
    copied: list[int] = []
    put = PartTarget.put
    monkeypatch.setattr(
        PartTarget,
        "put",
        lambda self, start, data: (copied.append(len(data)), put(self, start, data)),
    )
    live = torch.zeros(8, 6, dtype=torch.float64)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.load(component({"w": live}))
    assert torch.equal(live, FULL)
    assert open_checkpoint(folder).read("s/w", [slice(0, 8), slice(0, 6)]).tolist() == FULL.tolist()
    assert copied == []


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("broadcast", [False, True])
def test_one_stored_tensor_into_two_places(tmp_path: Path, world: int, broadcast: bool) -> None:
    tied = torch.arange(5.0)
    saved(tmp_path, 2, emb=tied, head=tied)

    def load(comm: Any) -> Any:
        live = {
            "emb": torch.full((5,), -1.0),
            "head": torch.full((5,), -1.0),
            "w": torch.zeros(8, 6, dtype=torch.float64),
        }
        with CheckpointManager(tmp_path, comm=comm, load_broadcast=broadcast) as ckpt:
            ckpt.load(component(live))
        return live

    for live in run_ranks(world, load):
        assert live["emb"].tolist() == live["head"].tolist() == tied.tolist()
        assert torch.equal(live["w"], FULL)


class Own:
    """State that gives no account of its names: what is handed over is all that it gets."""

    def __init__(self, w: Any) -> None:
        self.w = w

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w = state["w"]


@pytest.mark.parametrize(
    "wrong", [torch.zeros(8, 5, dtype=torch.float64), torch.zeros(8, 6)], ids=["shape", "dtype"]
)
def test_an_object_of_yours_with_another_tensor_is_not_left_as_it_is(
    tmp_path: Path, wrong: torch.Tensor
) -> None:
    saved(tmp_path, 2)
    own = Own(wrong.clone())
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.load([StateComponent("s", own, SharingPattern.SHARDED)])
    assert (own.w.dtype, own.w.tolist()) == (
        FULL.dtype,
        FULL.tolist(),
    )  # it decides, of what was saved


@pytest.mark.parametrize("pattern", ["GLOBAL", "SHARDED"])
def test_rows_that_share_memory_do_not_swallow_rows_that_differ(
    tmp_path: Path, pattern: str
) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, component({"w": FULL}, pattern))
        own = Own(torch.zeros(1, 6, dtype=torch.float64).expand(8, 6))
        try:
            ckpt.load([StateComponent("s", own, SharingPattern(pattern))])
        except CheckpointError:
            return
    assert torch.equal(own.w, FULL)


@pytest.mark.parametrize("transactional", [False, True])
def test_damage_in_a_needed_chunk_is_said_and_elsewhere_it_is_not_read(
    tmp_path: Path, transactional: bool
) -> None:
    folder = saved(tmp_path, 4)
    file = folder / "s.rank00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    view = open_checkpoint(folder)
    assert view.read("s/w", [slice(0, 6), slice(0, 6)]).tolist() == FULL[:6].tolist()
    with pytest.raises(CheckpointCorrupt) as caught:
        view.read("s/w", [slice(5, 7), slice(0, 1)])
    assert (caught.value.file, caught.value.kind) == ("s.rank00003.safetensors", "digest")
    assert [problem.file for problem in view.verify()] == ["s.rank00003.safetensors"]
    live = torch.zeros(8, 6, dtype=torch.float64)
    with CheckpointManager(tmp_path) as ckpt, pytest.raises(CheckpointCorrupt, match="s/w"):
        ckpt.load(component({"w": live}), transactional=transactional)
    assert not transactional or not torch.count_nonzero(live)


def retable(folder: Path, change: Any) -> None:
    """Change the table of layouts in rank 0's index; all digests fit again."""
    file = folder / "index.rank00000.msgpack"
    raw = msgpack.unpackb(file.read_bytes())
    change(raw["components"]["s"]["layouts"])
    data = msgpack.packb(raw)
    file.write_bytes(data)
    manifest = folder / "checkpoint_manifest.json"
    document = json.loads(manifest.read_bytes())
    del document["digest"]
    document["files"][file.name] = [len(data), content_digest(data), 0]
    body = json.dumps(document, indent=1, sort_keys=True).removesuffix("\n}").encode()
    manifest.write_bytes(body + b',\n "digest": "%s"\n}\n' % content_digest(body).encode())


def row_of(table: Any, name: str) -> Any:
    return next(row for row in table["tensors"] if row[0] == name)


CRAFTED = {
    "a hole": lambda t: row_of(t, "w")[4]["boxes"].pop(1),
    "a box twice": lambda t: row_of(t, "w")[4]["boxes"].append(row_of(t, "w")[4]["boxes"][0]),
    "another shape": lambda t: row_of(t, "w").__setitem__(2, [9, 6]),
    "another dtype": lambda t: row_of(t, "w").__setitem__(1, "F32"),
    "no dtype": lambda t: row_of(t, "w").__setitem__(1, "F33"),
    "another writer": lambda t: row_of(t, "w")[4]["boxes"][1].__setitem__(0, 2),
    "a mesh without ranks": lambda t: (
        t["meshes"].append([[0], []]),
        row_of(t, "m").__setitem__(4, [len(t["meshes"]) - 1, "S0", 0]),
    ),
    "a mesh of other ranks": lambda t: t["meshes"][0].__setitem__(1, [3, 2, 1, 0]),
    "other placements": lambda t: row_of(t, "m")[4].__setitem__(1, "S0 R"),
    "an alias of something else": lambda t: row_of(t, "m").__setitem__(slice(3, 5), [0, None]),
    "no table": lambda t: t.clear(),
    "a table of something else": lambda t: t.update(tensors=5),
    "a tensor less": lambda t: t["tensors"].pop(),
    "a huge tensor": lambda t: row_of(t, "w").__setitem__(2, [1 << 61, 1 << 61]),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_crafted_tables_give_errors_of_ours_and_no_wrong_item(
    tmp_path: Path, mesh_shard, what: str
) -> None:
    layout = MeshLayout(Mesh((2, 2), (0, 1, 2, 3)), ("R", "S0"))

    def program(comm: Any) -> None:
        w = Shard(FULL[comm.rank * 2 :][:2].clone(), (8, 6), (comm.rank * 2, 0))
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(
                1, component({"w": w, "m": mesh_shard(FULL, layout, comm.rank), "z": torch.ones(2)})
            )

    run_ranks(4, program)
    folder = tmp_path / "checkpoint-1"
    retable(folder, CRAFTED[what])

    def read(name: str) -> Any:
        return open_checkpoint(folder).read(f"s/{name}")

    def load() -> Any:
        live = {"w": torch.full_like(FULL, -1), "m": torch.full_like(FULL, -1), "z": torch.zeros(2)}
        with CheckpointManager(tmp_path) as ckpt:
            ckpt.load(component(live))
        return live

    refused = 0
    for name in ("w", "m"):
        try:
            found = read(name)
        except (CheckpointError, KeyError) as error:
            assert isinstance(error, CheckpointError) or what == "a tensor less", error
            refused += 1
        else:
            assert np.array_equal(found, FULL), name
    try:
        live = load()
    except CheckpointError:
        refused += 1
    else:
        assert torch.equal(live["w"], FULL) and torch.equal(live["m"], FULL)
    for use in (lambda view: view.tensors(), lambda view: view.values("s")):
        try:
            use(open_checkpoint(folder))
        except CheckpointError:
            refused += 1
    assert refused, "nobody has noticed"
    assert open_checkpoint(folder).verify() != []
