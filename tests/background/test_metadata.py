"""What `save_async` was given beside the state is private too when it returns."""

import pytest
import torch

from ckptcore import (
    CheckpointManager,
    SharingPattern,
    StateComponent,
    open_checkpoint,
    open_storage,
)
from ckptcore.testing import FaultStorage
from ckptcore.testing.ranks import run_ranks


def scribble(tree):
    """Change everything in nested lists and dictionaries."""
    for item in list(tree.values() if isinstance(tree, dict) else tree):
        if isinstance(item, dict | list):
            scribble(item)
    if isinstance(tree, dict):
        tree.update(dict.fromkeys(tree, "changed"), new="changed")
    else:
        tree[:] = ["changed"] * (len(tree) + 1)


def told():
    return {"hist": [1], "best": {"loss": [0.5, {"at": 3}]}, "text": "as it was", "none": None}


def test_metadata_and_metrics_are_those_of_the_call(tmp_path):
    faults = FaultStorage(open_storage(tmp_path))
    metadata, of_component, metrics = told(), told(), {"loss": torch.tensor(0.5), "epoch": 3}
    with CheckpointManager(faults, drain_timeout=20) as ckpt:
        gate = faults.block(kind="write_at")
        component = StateComponent("m", {"w": torch.ones(9)}, metadata=of_component)
        handle = ckpt.save_async(1, [component], metadata=metadata, metrics=metrics)
        scribble(metadata)
        scribble(of_component)
        component.metadata = {"another": 1}
        metrics["loss"].fill_(9.0)
        metrics["epoch"] = 9
        gate.wait_reached(20)
        gate.open()
        info = handle.result(30)
        assert metadata["hist"] == "changed" and info.manifest.metadata == told()
    for manifest in (info.manifest, open_checkpoint(tmp_path / "checkpoint-1").manifest):
        assert manifest.metadata == told()
        assert manifest.components["m"].metadata == told()
        assert manifest.metrics == {"loss": 0.5, "epoch": 3}


def test_a_list_that_grows_with_every_save(tmp_path):
    """As a training that keeps its history would do it: each checkpoint has what there was at its
    step."""
    faults, history = FaultStorage(open_storage(tmp_path)), []
    faults.delay(0.01, kind=("create", "close"))
    component = StateComponent("m", {"w": torch.ones(9)}, metadata={"history": history})
    with CheckpointManager(faults) as ckpt:
        for step in range(5):
            history.append(step)
            ckpt.save_async(step, [component], metadata={"history": history})
        history.clear()
    for step in range(5):
        manifest = open_checkpoint(tmp_path / f"checkpoint-{step}").manifest
        expected = {"history": list(range(step + 1))}
        assert (manifest.metadata, manifest.components["m"].metadata) == (expected, expected)


def test_the_callers_own_components_stay_what_they_are(tmp_path):
    """The copy is the save's: nothing that the caller holds is exchanged or changed."""
    metadata = told()
    component = StateComponent("m", {"w": torch.ones(9)}, SharingPattern.GLOBAL, metadata=metadata)
    state = [component]
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.prewarm(state)
        ckpt.save_async(1, state, metadata=metadata).result(30)
        ckpt.save(2, state, metadata=metadata)
    assert state[0] is component and component.metadata is metadata and metadata == told()


@pytest.mark.parametrize("rank", [0, 1])
def test_on_several_ranks(tmp_path, rank):
    """Rank 0's are stored; what another rank does to its own concerns nobody."""

    def program(comm):
        faults, metadata, of_component = FaultStorage(open_storage(tmp_path)), told(), told()
        own = [
            StateComponent(
                "own", {"x": torch.ones(4)}, SharingPattern.PER_RANK, metadata=of_component
            )
        ]
        with CheckpointManager(faults, comm=comm, drain_timeout=20) as ckpt:
            gate = faults.block(kind="write_at")
            handle = ckpt.save_async(1, own, metadata=metadata)
            if comm.rank == rank:
                scribble(metadata)
                scribble(of_component)
            gate.wait_reached(20)
            gate.open()
            manifest = handle.result(30).manifest
            return manifest.metadata, manifest.components["own"].metadata

    assert run_ranks(2, program) == [(told(), told())] * 2
