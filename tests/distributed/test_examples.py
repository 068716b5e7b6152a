"""How to declare the usual layouts. Each example trains nothing: what a rank holds is a number that
says whose it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from ckptcore import CheckpointManager, RNGState, SharingPattern, StateComponent, open_checkpoint
from ckptcore.testing.processes import patience
from ckptcore.testing.ranks import run_ranks

REPLICATED, PER_RANK = SharingPattern.REPLICATED, SharingPattern.PER_RANK
PER_GROUP, PER_NODE = SharingPattern.PER_GROUP, SharingPattern.PER_NODE


def lines(mesh: torch.Tensor, dim: int) -> list[list[int]]:
    """The ranks along one dimension of a mesh: what `mesh["dp"]` of a DeviceMesh says, as lists."""
    return mesh.movedim(dim, -1).reshape(-1, mesh.shape[dim]).tolist()


def filled(number: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((4, 4), float(number)), "bias": torch.full((4,), float(number))}


def read(state: dict[str, torch.Tensor]) -> float:
    (value,) = {float(x) for tensor in state.values() for x in tensor.reshape(-1)}
    return value


def test_data_parallel_times_pipeline(tmp_path: Path) -> None:
    """(dp=2, pp=4). A stage is the same over dp; the loader that feeds a pipeline is the same over
    pp."""
    mesh = torch.arange(8).view(2, 4)
    groups = {"dp": lines(mesh, 0), "pp": lines(mesh, 1)}
    assert groups == {"dp": [[0, 4], [1, 5], [2, 6], [3, 7]], "pp": [[0, 1, 2, 3], [4, 5, 6, 7]]}

    def train(comm):
        replica, stage = divmod(comm.rank, 4)

        def state(weights, position):
            return [
                StateComponent("stage", weights, PER_GROUP, process_group_name="dp"),
                StateComponent("loader", position, PER_GROUP, process_group_name="pp"),
                StateComponent("rng", RNGState(), PER_RANK),
                StateComponent("schedule", {"step": torch.tensor(70)}, REPLICATED),
            ]

        with CheckpointManager(tmp_path, comm=comm, process_groups=groups) as ckpt:
            ckpt.save(70, state(filled(stage), {"next sample": 1000 * replica, "epoch": 2}))
            weights = filled(-1)
            report = ckpt.restore(state(weights, {"next sample": 0, "epoch": 0}))
        return read(weights), report.values["loader"]["next sample"]

    assert run_ranks(8, train) == [(rank % 4, 1000 * (rank // 4)) for rank in range(8)]
    manifest = open_checkpoint(tmp_path / "checkpoint-70").manifest
    assert manifest.components["stage"].files == [f"stage.dp-0000{n}.safetensors" for n in range(4)]
    assert manifest.groups == groups

    # The same four stages on one replica: the loaders are two, so that is for the user to say.
    def smaller(comm):
        weights, position = filled(-1), {"next sample": 0, "epoch": 0}
        alone = {"dp": [[0], [1], [2], [3]], "pp": [[0, 1, 2, 3]]}
        state = [
            StateComponent("stage", weights, PER_GROUP, "dp"),
            StateComponent("loader", position, PER_GROUP, "pp", on_resize=lambda new, size, old: 1),
        ]
        with CheckpointManager(tmp_path, comm=comm, process_groups=alone) as ckpt:
            report = ckpt.load(state, strict=False)
        return read(weights), report.values["loader"]["next sample"], report.unexpected

    assert run_ranks(4, smaller) == [(rank, 1000, ["rng", "schedule"]) for rank in range(4)]


def test_data_parallel_times_tensor_parallel(tmp_path: Path) -> None:
    """(dp=2, tp=2). A slice of a layer is the same over dp; norms and the like are the same
    everywhere."""
    mesh = torch.arange(4).view(2, 2)

    def train(comm):
        part = comm.rank % 2

        def state(parallel, whole):
            return [
                StateComponent(
                    "parallel", parallel, PER_GROUP, process_group_name="dp", group_key=f"tp{part}"
                ),
                StateComponent("norms", whole, REPLICATED),
            ]

        parallel, whole = filled(-1), filled(-1)
        with CheckpointManager(tmp_path, comm=comm, process_groups={"dp": lines(mesh, 0)}) as ckpt:
            ckpt.save(1, state(filled(10 + part), filled(7)))
            ckpt.load(state(parallel, whole))
        return read(parallel), read(whole)

    assert run_ranks(4, train) == [(10.0, 7.0), (11.0, 7.0)] * 2
    names = {path.name for path in (tmp_path / "checkpoint-1").glob("*.safetensors")}
    assert names == {
        "parallel.dp-tp0.safetensors",
        "parallel.dp-tp1.safetensors",
        "norms.safetensors",
    }

    # Another order of ranks on the machines, as long as each says which slice it has.
    def moved(comm):
        parallel, part = filled(-1), comm.rank // 2
        own = StateComponent("parallel", parallel, PER_GROUP, "dp", group_key=f"tp{part}")
        with CheckpointManager(
            tmp_path, comm=comm, process_groups={"dp": [[0, 1], [2, 3]]}
        ) as ckpt:
            ckpt.load([own], strict=False)
        return read(parallel)

    assert run_ranks(4, moved) == [10.0, 10.0, 11.0, 11.0]


def test_several_nodes(tmp_path: Path) -> None:
    """A cache per node, held by its ranks in common: stored once for each, restored to every rank
    of the node."""
    nodes = [[0, 1, 2], [3, 4]]

    def train(comm):
        node = next(n for n, ranks in enumerate(nodes) if comm.rank in ranks)
        cache = filled(-1)
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(
                1,
                [
                    StateComponent("cache", filled(node), PER_NODE),
                    StateComponent("model", filled(5), REPLICATED),
                ],
            )
            ckpt.load(
                [
                    StateComponent("cache", cache, PER_NODE),
                    StateComponent("model", filled(0), REPLICATED),
                ]
            )
        return read(cache)

    assert run_ranks(5, train, nodes=nodes) == [0.0, 0.0, 0.0, 1.0, 1.0]
    manifest = open_checkpoint(tmp_path / "checkpoint-1").manifest
    assert manifest.nodes == nodes
    assert manifest.components["cache"].files == [
        "cache.node00000.safetensors",
        "cache.node00001.safetensors",
    ]
    assert manifest.components["cache"].writers == [0, 3]


def test_torchrun_on_two_processes(tmp_path: Path) -> None:
    script = Path(__file__).parent / "torchrun_script.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        script,
        tmp_path,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        env=environment,
        timeout=100 * patience(),
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for result in results:
        assert result["resumed"] == result["losses"][6:] and len(result["losses"]) == 10
        assert result["same weights"] is True
    assert results[0]["losses"] != results[1]["losses"]
    manifest = open_checkpoint(tmp_path / "checkpoint-6").manifest
    assert manifest.world_size == 2 and manifest.nodes == [[0, 1]]
    assert {key: c.pattern for key, c in manifest.components.items()} == {
        "model": "REPLICATED",
        "optimizer": "REPLICATED",
        "scheduler": "REPLICATED",
        "loader": "PER_RANK",
        "rng": "PER_RANK",
    }
