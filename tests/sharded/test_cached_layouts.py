"""What is known of a mesh and of a table of tensors is computed once, not at each tensor and each
save."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ckptcore.format.layout import Mesh, MeshLayout
from ckptcore.ranks import sharding
from ckptcore.ranks.sharding import merge_descriptions

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
parts = [layout.local_part(tensor) for tensor in made]
found = {"asked": asked, "boxes": [parts[0].box, parts[20].box], "meshes": [p.layout.mesh.shape for p in parts[::20]]}
found["kept"] = len(layout._mesh_facts)
layout._forget_mesh(id(flat), None)  # as of a mesh that had this address before
found["still"] = len({id(flat)} & layout._mesh_facts.keys())
layout._forget_mesh(id(flat), layout._mesh_facts[id(flat)].of)
found["gone"] = len({id(flat)} & layout._mesh_facts.keys())
print(json.dumps(found))
"""


def test_a_mesh_is_described_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {
        "asked": 2,
        "boxes": [[[2, 0], [2, 3]], [[0, 0], [2, 3]]],
        "meshes": [[4], [2, 2]],
        "kept": 2,
        "still": 1,
        "gone": 0,
    }


def test_values_that_change_leave_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = MeshLayout(Mesh((2, 4), tuple(range(8))), ("R", "S0"))
    groups = [list(range(8))]
    calls = []
    planned = sharding._layout
    monkeypatch.setattr(
        sharding, "_layout", lambda *given: calls.append(given[1]) or planned(*given)
    )
    states = [
        merge_descriptions("steps", [described(matrices(5, layout), step)], groups)
        for step in (1, 2, 3)
    ]
    assert len(calls) == 5  # once for each tensor, at the first save
    assert states[0].tensors == states[1].tensors == states[2].tensors
    assert len({state.tree for state in states}) == 3
    other = merge_descriptions("steps", [described(matrices(6, layout), 1)], groups)
    assert len(calls) == 5 + 6 and [t.name for t in other.tensors][:5] == [
        t.name for t in states[0].tensors
    ]


def test_a_table_from_one_description_refers_to_its_tensors_by_their_names() -> None:
    """One description keeps its tree; several are put together and numbered anew. Both refer to the
    same tensors."""
    layout = MeshLayout(Mesh((8,), tuple(range(8))), ("S0",))
    text = described(matrices(4, layout))
    alone = merge_descriptions("m", [text], [list(range(8))])
    several = merge_descriptions(
        "m",
        [text, described(matrices(4, layout) | {"own": ((3,), None)})],
        [list(range(4)), list(range(4, 8))],
    )
    assert [t.name for t in several.tensors] == [*(t.name for t in alone.tensors), "own"]
    assert alone.tree == sharding.decode(text)["tree"]
