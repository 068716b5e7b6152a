"""What is known of a mesh and of a table of tensors is computed once, not at each tensor and each
save."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptcore import Shard
from ckptcore.errors import ReplicationMismatch
from ckptcore.format.layout import BoxLayout, Mesh, MeshLayout
from ckptcore.format.values import decode
from ckptcore.replicas import shard_table
from ckptcore.replicas.shard_table import (
    Description,
    ShardTable,
    ShardTables,
    decide,
    describe,
    descriptions,
    merged_values,
    structures_of,
    values_of,
)
from ckptcore.state.tree import capture

from .test_planning import described, matrices

# Counts how often torch is asked to describe a mesh, for 40 tensors on two meshes, and what is kept
# when they are gone.
PROGRAM = """
import gc, json, torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from ckptcore.state import layout

dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
asked = 0
described = DeviceMesh.mesh

def count(mesh):
    global asked
    asked += 1
    return described.fget(mesh)

flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
DeviceMesh.mesh = property(count)
made = [DTensor.from_local(torch.zeros(2, 3), flat, [Shard(0)], run_check=False) for _ in range(20)]
made += [DTensor.from_local(torch.zeros(2, 3), grid, [Shard(0), Replicate()], run_check=False) for _ in range(20)]
asked = 0
parts = [layout.local_shard(tensor) for tensor in made]
found = {"asked": asked, "boxes": [parts[0].box, parts[20].box], "meshes": [p.layout.mesh.shape for p in parts[::20]]}
found["kept"] = len(layout._mesh_facts)
layout._forget_mesh(id(flat), None)  # as of a mesh that had this address before
found["still"] = len({id(flat)} & layout._mesh_facts.keys())
layout._forget_mesh(id(flat), layout._mesh_facts[id(flat)].of)
found["gone"] = len({id(flat)} & layout._mesh_facts.keys())
print(json.dumps(found))
"""


def test_a_mesh_is_described_once(run_script: Callable[..., Any]) -> None:
    done = run_script(PROGRAM, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {
        "asked": 2,
        "boxes": [[[2, 0], [2, 3]], [[0, 0], [2, 3]]],
        "meshes": [[4], [2, 2]],
        "kept": 2,
        "still": 1,
        "gone": 0,
    }


def saves(tables: list[ShardTables], states: list[Description]) -> list[dict[str, ShardTable]]:
    """One save of component "m" on all ranks: what each rank then has."""
    mine = [{"m": state} for state in states]
    reports = [each.report(said) for each, said in zip(tables, mine, strict=True)]
    verdict = decide(reports, spread=True)
    sent = [descriptions(said, verdict, rank) for rank, said in enumerate(mine)]
    structures = structures_of(sent, verdict)
    travelled.append(sum(map(len, sent)))
    return [t.update(said, verdict, structures) for t, said in zip(tables, mine, strict=True)]


travelled: list[int] = []


def test_values_that_change_leave_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = MeshLayout(Mesh((2, 4), tuple(range(8))), ("R", "S0"))
    calls = []
    planned = shard_table.table_of
    monkeypatch.setattr(
        shard_table,
        "table_of",
        lambda *given, **how: calls.append(given[0]) or planned(*given, **how),
    )
    tables = [ShardTables() for _ in range(8)]
    first = saves(tables, [described(matrices(5, layout), 1)] * 8)
    assert len(calls) == 8  # at the first save, on each rank
    for step in (2, 3):
        state = described(matrices(5, layout), step)
        assert state.values != described(matrices(5, layout), 1).values
        again = saves(tables, [state] * 8)
        assert all(now["m"] is then["m"] for now, then in zip(again, first, strict=True))
    assert len(calls) == 8
    other = saves(tables, [described(matrices(6, layout), 1)] * 8)
    assert len(calls) == 8 + 8
    assert [t.name for t in other[0]["m"].tensors][:5] == [t.name for t in first[0]["m"].tensors]


def test_descriptions_travel_when_they_differ_and_are_new() -> None:
    layout = MeshLayout(Mesh((2,), (0, 1)), ("S0",))
    tables = [ShardTables() for _ in range(3)]
    same = described(matrices(3, layout))
    own = described({"own": ((4,), None)})
    travelled.clear()
    first = saves(tables, [same, same, own])
    assert travelled == [2]  # rank 0's, which is rank 1's too, and rank 2's
    assert [[t.name for t in made["m"].tensors] for made in first] == [
        [*(t.name for t in first[0]["m"].tensors[:3]), "own"]
    ] * 3
    assert saves(tables, [same, same, own]) == first and travelled == [2, 0]
    tables[1] = ShardTables()  # a rank that does not have it
    assert saves(tables, [same, same, own]) == first and travelled == [2, 0, 2]
    saves(tables, [same, same, described({"own": ((5,), None)})])
    assert travelled[3] == 2


def test_values_are_put_together_where_ranks_have_others() -> None:
    """One description keeps its tree; several are put together and numbered anew. Both refer to the
    same tensors."""
    layout = MeshLayout(Mesh((8,), tuple(range(8))), ("S0",))
    some = described(matrices(4, layout))
    more = described(matrices(4, layout) | {"own": ((3,), None)})
    tables = [ShardTables() for _ in range(8)]
    states = [some] * 4 + [more] * 4
    made = saves(tables, states)
    verdict = decide([t.report({"m": s}) for t, s in zip(tables, states, strict=True)], spread=True)
    assert verdict.groups == {} and verdict.senders == {"m": [[0, 1, 2, 3], [4, 5, 6, 7]]}
    sent = [values_of({"m": state}, verdict, rank) for rank, state in enumerate(states)]
    assert [list(each) for each in sent] == [["m"], [], [], [], ["m"], [], [], []]
    merged = merged_values(made[0], verdict, sent)["m"]
    names = [t.name for t in made[0]["m"].tensors]
    refs = decode(merged.tree, lambda ref: names[ref.index])
    assert refs == {name: name for name in names} | {"step": 1}
    assert decide([tables[0].report({"m": some})] * 8, spread=True).senders == {}


def test_values_that_differ_for_one_key_are_refused() -> None:
    layout = MeshLayout(Mesh((2,), (0, 1)), ("S0",))
    tables = [ShardTables() for _ in range(2)]
    states = [described(matrices(1, layout), step) for step in (1, 2)]
    made = saves(tables, states)
    verdict = decide([t.report({"m": s}) for t, s in zip(tables, states, strict=True)], spread=True)
    sent = [values_of({"m": state}, verdict, rank) for rank, state in enumerate(states)]
    with pytest.raises(ReplicationMismatch, match=r"plain value 'step' is 2 .* on rank 1") as found:
        merged_values(made[0], verdict, sent)
    assert found.value.ranks == [1] and found.value.keys == ["step"]


def test_ranks_whose_slices_alone_differ_send_no_values_and_share_layouts() -> None:
    """So work and messages grow as ranks + tensors, however many slices there are."""
    world, count = 16, 50
    states = []
    for rank in range(world):
        slices = {f"t{n:02d}": Shard(torch.ones(1, 4), (world, 4), (rank, 0)) for n in range(count)}
        states.append(describe(capture("m", {**slices, "step": 1}, sharded=True)))
    tables = [ShardTables() for _ in range(world)]
    made = saves(tables, states)
    reports = [t.report({"m": s}) for t, s in zip(tables, states, strict=True)]
    verdict = decide(reports, spread=True)
    assert verdict.groups == {} and verdict.senders == {}
    table = made[0]["m"]
    assert [t.name for t in table.tensors] == [f"t{n:02d}" for n in range(count)]
    boxes = tuple((rank, ((rank, 0), (1, 4))) for rank in range(world))
    assert table.tensors[0].layout == BoxLayout(boxes)
    assert {id(t.layout) for t in table.tensors} == {id(table.tensors[0].layout)}
    assert {id(layouts) for layouts in table.layouts} == {id(table.layouts[0])}
    assert all(each["m"].tensors == table.tensors for each in made)
    changed = describe(
        capture("m", {"t00": Shard(torch.ones(1, 4), (world, 4), (0, 0)), "step": 2}, sharded=True)
    )
    assert changed.values_hash != states[0].values_hash
