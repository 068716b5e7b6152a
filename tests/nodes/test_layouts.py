"""What each node stores of every pattern; and loads by other ranks than those that saved."""

from __future__ import annotations

import shutil

import pytest
import torch

from ckptcore import (
    CheckpointCorrupt,
    CheckpointManifest,
    CheckpointNotFound,
    Shard,
    SharingPattern,
    StateComponent,
    StateMismatch,
    ValidationLevel,
    open_checkpoint,
)
from ckptcore.format.layout import BoxLayout, LogicalTensor, Mesh, MeshLayout, WholeLayout
from ckptcore.nodes.parts import on_node
from ckptcore.replicas.shard_table import ShardTable
from ckptcore.testing.ranks import run_ranks


@pytest.fixture(autouse=True)
def split_everything(monkeypatch):
    monkeypatch.setattr("ckptcore.saving.plan.MIN_SHARE_BYTES", 1)


@pytest.mark.parametrize("writers", ["split", "lowest"])
def test_all_six_patterns_come_back_from_each_nodes_own_disk(job, writers):
    job.save(3, writers=writers)
    assert job.restores() == 3
    for node, ranks in enumerate(job.nodes):
        view = open_checkpoint(job.roots[node] / "checkpoint-3")
        writers_of = {key: part.writers for key, part in view.manifest.components.items()}
        lowest = ranks[:1]
        assert writers_of == {
            "global": lowest,
            "same": ranks if writers == "split" else lowest,
            "own": ranks,
            "group": ranks,
            "node": lowest,
            "table": ranks,
        }
        # Rank 0's, also where no rank of this node has it.
        assert view.read("global/w").tolist() == [3.0, 4.0, 5.0, 6.0, 7.0]
        assert view.values("global")["mark"] == 3
        held = [box for _, box in next(iter_layouts(view, "rows")).boxes]
        assert held == [((rank, 0), (1, 4)) for rank in ranks]
        assert isinstance(next(iter_layouts(view, "all")), WholeLayout)
        assert view.verify() == []
        names = {info.full_name for info in view.tensors()}
        assert {f"own.rank{rank:05d}/x" for rank in ranks} <= names
        assert not {f"own.rank{rank:05d}/x" for rank in set(range(4)) - set(ranks)} & names


def iter_layouts(view, name):
    return (t.layout for t in view.component("table").tensors if t.name == name)


def test_global_state_of_every_kind_is_passed_on(job):
    """Views, odd dtypes, aliases, empty tensors and more bytes than go at once."""

    def state(rank):
        big = torch.arange(3_000_001, dtype=torch.int32).roll(rank)
        values = {
            "big": big,
            "t": torch.arange(12.0).reshape(3, 4).t() + rank,
            "c": torch.full((3,), 1j + rank, dtype=torch.complex128),
            "b": torch.tensor([True, rank > 0, False]),
            "none": torch.empty(0, 3),
            "tie": big,
            "at": torch.tensor(rank),
            "n": rank,
            "f8": torch.arange(5.0).to(torch.float8_e4m3fn),
        }
        return [StateComponent("state", values, SharingPattern.GLOBAL, validate_replication=False)]

    def program(comm):
        with job.manager(comm) as ckpt:
            ckpt.save(1, state(comm.rank))
            live = state(7)
            report = ckpt.load(live)
            return report.values["state"]

    expected = state(0)[0].stateful
    for found in job.run(program):
        assert found["n"] == 0
        for name, tensor in expected.items():
            if isinstance(tensor, torch.Tensor):
                same = found[name].view(torch.uint8) if name == "f8" else found[name]
                assert torch.equal(same, tensor.view(torch.uint8) if name == "f8" else tensor), name


def test_what_is_compared_is_rank_0s_all_the_same(job):
    """Within its tolerance another rank has other bytes: they are neither stored nor is what is
    stored described by them."""

    def state(rank):
        values = {"w": torch.arange(4.0) + (rank + 1) * 1e-7}
        how = {"validate_replication": True, "validation_level": ValidationLevel.FULL, "atol": 1e-3}
        return [StateComponent("state", values, SharingPattern.GLOBAL, **how)]

    def program(comm):
        with job.manager(comm) as ckpt:
            ckpt.save(1, state(comm.rank))
            ckpt.save_async(2, state(comm.rank)).result()
            live = [state(9), state(9)]
            for step in (1, 2):
                ckpt.load(live[step - 1], step)
            return (
                [found[0].stateful["w"].tolist() for found in live],
                ckpt.verify(1),
                ckpt.verify(2),
            )

    assert job.run(program) == [([state(0)[0].stateful["w"].tolist()] * 2, [], [])] * 4


def test_bytes_that_only_another_node_has_are_named_on_all_ranks(job, on_all):
    """The rows of the table go to other ranks than before: two of them are not on their node."""
    job.save(5)

    def program(comm):
        live = torch.zeros(1, 4)
        row = 3 - comm.rank
        state = [
            StateComponent("table", {"rows": Shard(live, (4, 4), (row, 0))}, SharingPattern.SHARDED)
        ]
        with job.manager(comm) as ckpt:
            try:
                ckpt.load(state, strict=False)
            finally:
                assert live.tolist() == [[0.0] * 4]

    error = on_all(job.run(program, errors=True), StateMismatch)
    text = str(error)
    assert "component 'table'" in text
    assert "tensor 'rows'" in text
    assert "the part that node 0 of 2 (ranks 0, 1) saved" in text
    assert "storage_mode='shared'" in text
    assert sorted(error.causes) == [0, 1, 2, 3]


def test_nodes_that_changed_places_are_told_which_node_has_a_ranks_state(job, on_all):
    job.save(5)
    job.roots.reverse()

    def program(comm):
        with job.manager(comm) as ckpt:
            job.restored(ckpt)

    error = on_all(job.run(program, errors=True), StateMismatch)
    assert "component 'own.rank00000' is not on this node" in str(error)
    assert "but on node 0" in str(error)


def portable(rank, mark):
    """What any number of ranks can have."""
    return [
        StateComponent(
            "global",
            {"w": torch.full((3,), mark + 100.0 * (rank > 0)), "mark": mark},
            SharingPattern.GLOBAL,
        ),
        StateComponent("same", {"w": torch.arange(6.0) + mark}, SharingPattern.REPLICATED),
        StateComponent("table", {"w": torch.arange(4.0) + mark}, SharingPattern.SHARDED),
    ]


@pytest.mark.parametrize(
    "nodes", [[[0]], [[0, 1]], [[0], [1]], [[0], [1], [2]], [[0, 1, 2], [3, 4, 5]]]
)
def test_state_that_all_ranks_share_restores_on_any_number_of_nodes(job, nodes):
    def saves(comm):
        with job.manager(comm) as ckpt:
            ckpt.save(4, portable(comm.rank, 4))

    job.run(saves)
    while len(job.roots) < len(nodes):  # a new node is given a copy of what another one has
        job.roots.append(job.roots[0].parent / f"disk{len(job.roots)}")
        shutil.copytree(job.roots[0], job.roots[-1])
    job.nodes = nodes

    def loads(comm):
        live = portable(comm.rank, -1)
        with job.manager(comm) as ckpt:
            report = ckpt.restore(live)
        return (
            report.step,
            live[0].stateful["w"].tolist(),
            live[1].stateful["w"].tolist(),
            live[2].stateful["w"].tolist(),
        )

    assert job.run(loads) == [
        (4, [4.0] * 3, [4.0 + n for n in range(6)], [4.0 + n for n in range(4)])
    ] * sum(map(len, nodes))


def test_a_rank_count_that_changed_follows_on_resize(job, on_all):
    job.save(4)
    job.nodes = [[0], [1]]

    def program(comm):
        live = [StateComponent("own", {"x": torch.zeros(1)}, SharingPattern.PER_RANK)]
        with job.manager(comm) as ckpt:
            ckpt.load(live, strict=False)

    error = on_all(job.run(program, errors=True), StateMismatch)
    assert "component 'own' was saved for 4 ranks, there are 2 now" in str(error)

    def mapped(comm):
        # The state of the old rank on the same node, and then that of one on another.
        found = []
        for old in (2 * comm.rank, 2 * (1 - comm.rank)):
            live = [
                StateComponent(
                    "own",
                    {"x": torch.zeros(1)},
                    SharingPattern.PER_RANK,
                    on_resize=lambda *_, o=old: o,
                )
            ]
            with job.manager(comm) as ckpt:
                try:
                    ckpt.load(live, strict=False)
                    found.append(live[0].stateful["x"].tolist())
                except StateMismatch as error:
                    found.append(str(error))
        return found

    results = job.run(mapped)
    assert [found[0] for found in results] == [[400.0], [402.0]]
    assert results[0][1].replace("disk1", "disk0") == results[1][1].replace("disk1", "disk0")
    assert "component 'own.rank00002' is not on this node" in results[0][1]


def table(*layouts, shape=(4, 4)):
    """A sharded component with one tensor, held as `layouts` say: (ranks, layout)."""
    tensor = LogicalTensor(
        "w",
        "F32",
        shape,
        layouts[0][1] if isinstance(layouts[0][1], MeshLayout) else WholeLayout(0),
    )
    return ShardTable([tensor], [list(layouts)])


@pytest.mark.parametrize(
    "layout, nodes, held",
    [
        # Sharded over all four ranks: each node has two of the boxes.
        (
            MeshLayout(Mesh((4,), (0, 1, 2, 3)), ("S0",)),
            [[0, 1], [2, 3]],
            [{0: (0, 0, 1, 4), 1: (1, 0, 1, 4)}, {2: (2, 0, 1, 4), 3: (3, 0, 1, 4)}],
        ),
        # Sharded within the node and replicated over nodes: both have all of it.
        (
            MeshLayout(Mesh((2, 2), (0, 1, 2, 3)), ("R", "S0")),
            [[0, 1], [2, 3]],
            [{0: (0, 0, 2, 4), 1: (2, 0, 2, 4)}, {2: (0, 0, 2, 4), 3: (2, 0, 2, 4)}],
        ),
        # Replicated within the node: each box once.
        (
            MeshLayout(Mesh((2, 2), (0, 1, 2, 3)), ("S0", "R")),
            [[0, 1], [2, 3]],
            [{0: (0, 0, 2, 4)}, {2: (0 + 2, 0, 2, 4)}],
        ),
        # Nodes across the mesh: of either replica one box.
        (
            MeshLayout(Mesh((2, 2), (0, 1, 2, 3)), ("R", "S1")),
            [[0, 3], [1, 2]],
            [{0: (0, 0, 4, 2), 3: (0, 2, 4, 2)}, {2: (0, 0, 4, 2), 1: (0, 2, 4, 2)}],
        ),
        # Uneven: the last rank has nothing.
        (
            MeshLayout(Mesh((3,), (0, 1, 2)), ("S0",)),
            [[0, 1], [2]],
            [{0: (0, 0, 2, 4), 1: (2, 0, 2, 4)}, {}],
        ),
    ],
)
def test_a_node_stores_each_box_that_its_ranks_hold_once(layout, nodes, held):
    ranks = sorted(r for node in nodes for r in node)
    state = table((ranks, layout))
    for members, expected in zip(nodes, held, strict=True):
        made = on_node(state, members, spread=False).tensors[0]
        assert isinstance(made.layout, BoxLayout)
        assert {
            writer: (*offset, *size) for writer, (offset, size) in made.layout.boxes
        } == expected
        assert made.stored_nbytes == sum(4 * h * w for _, _, h, w in expected.values())


def test_replicas_on_a_node_share_the_writing():
    tensors = [LogicalTensor(f"w{n}", "F32", (8,), WholeLayout(0)) for n in range(6)]
    state = ShardTable(tensors, [[([0, 1, 2, 3], None)]] * 6)
    spread = [t.layout.writer for t in on_node(state, [2, 3], spread=True).tensors]
    assert sorted(spread) == [2, 2, 2, 3, 3, 3]
    assert {t.layout.writer for t in on_node(state, [2, 3], spread=False).tensors} == {2}
    assert {t.layout.boxes for t in on_node(state, [4], spread=True).tensors} == {()}


def test_a_damaged_part_on_one_node_is_passed_over_by_all(job):
    job.save(1, 2)
    file = job.roots[1] / "checkpoint-2" / "index.rank00003.msgpack"
    file.write_bytes(file.read_bytes()[:-1])
    assert job.restores() == 1
    assert len(job.said) == 1
    assert "damaged on node 1 (ranks 2, 3)" in job.said[0]
    assert "index.rank00003.msgpack" in job.said[0]


def test_the_newest_that_all_nodes_have_is_restored(job):
    job.save(1, 2, 3)
    shutil.rmtree(job.roots[1] / "checkpoint-3")
    shutil.rmtree(job.roots[0] / "checkpoint-2")
    assert job.restores() == 1
    assert len(job.said) == 1
    assert (
        "checkpoint-3: not on node 1 (ranks 2, 3); checkpoint-2: not on node 0 (ranks 0, 1)"
        in job.said[0]
    )

    def asks(comm):
        with job.manager(comm) as ckpt:
            with pytest.raises(CheckpointNotFound, match="checkpoint-3: not on node 1") as found:
                job.restored(ckpt, "load", 3)
            assert job.restored(ckpt, "load", "latest") == 1
            return found.value.available

    assert job.run(asks) == [[1]] * 4


@pytest.mark.parametrize(
    "fields, wrong",
    [
        ({"storage_mode": "node"}, "makes no sense"),
        ({"node": 0}, "makes no sense"),
        ({"storage_mode": "else", "node": 0}, "makes no sense"),
        ({"storage_mode": "node", "node": 2}, "there is no node 2"),
        ({"storage_mode": "node", "node": -1}, "-1"),
        ({"storage_mode": "node", "node": True}, "True"),
        ({"storage_mode": "node", "node": 0, "nodes": [[0, 1], [2]]}, "not a partition"),
        ({"storage_mode": "node", "node": 0, "nodes": [[0, 1], [1, 2, 3]]}, "not a partition"),
        ({"storage_mode": "node", "node": 0, "nodes": [[], [0, 1, 2, 3]]}, "there is no node 0"),
    ],
)
def test_a_manifest_that_makes_no_sense_of_its_node_is_refused(fields, wrong):
    made = CheckpointManifest(
        "id", 1, "run", "attempt", 1, "now", world_size=4, nodes=[[0, 1], [2, 3]], node=1
    )
    again = CheckpointManifest.decode(made.encode())
    assert (again.node, again.storage_mode, list(again.stored_ranks), again.extra) == (
        1,
        "node",
        [2, 3],
        {},
    )
    made.node = None
    made.nodes = fields.get("nodes", made.nodes)
    made.extra = {key: value for key, value in fields.items() if key != "nodes"}
    with pytest.raises(CheckpointCorrupt, match=wrong):
        CheckpointManifest.decode(made.encode())


def test_damage_that_only_reading_finds_is_passed_over_by_all(job):
    job.save(1, 2)
    file = job.roots[1] / "checkpoint-2" / "own.rank00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    def verifies(comm):
        with job.manager(comm) as ckpt:
            return [
                (p.file, p.kind, p.message.partition(":")[0]) for p in ckpt.verify(2)
            ], ckpt.verify(1)

    assert (
        job.run(verifies)
        == [([("own.rank00003.safetensors", "digest", "node 1 (ranks 2, 3)")], [])] * 4
    )
    assert job.restores() == 1
    assert len(job.said) == 1

    def loads(comm):
        with job.manager(comm) as ckpt:
            with pytest.raises(CheckpointCorrupt) as found:
                job.restored(ckpt, "load", 2)
            return str(found.value).partition(":")[0]

    assert set(job.run(loads)) == {"rank 3"}


def test_two_ranks_that_are_two_nodes(folder):
    def program(comm):
        from ckptcore import CheckpointManager

        with CheckpointManager(folder / str(comm.rank), comm=comm, storage_mode="node") as ckpt:
            ckpt.save(1, {"a": {"x": 1}, "b": {"w": torch.ones(3)}})
            return ckpt.latest().manifest.node, sorted(
                p.name for p in (folder / str(comm.rank)).iterdir()
            )

    assert run_ranks(2, program, nodes=[[0], [1]]) == [(0, ["checkpoint-1"]), (1, ["checkpoint-1"])]
