"""Saves in the background while training goes on at once, hundreds of them: each is of one step,
whatever kind of training it is."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptcore import CheckpointManager, KeepLast, OptimizerState
from ckptcore.saving import devices

pytestmark = pytest.mark.stress
ROUNDS = 200
KINDS = ["plain", "fused", "compiled model", "compiled step", "max_norm", "graph"]


class Job:
    """About 50 MB of weights and moments: layers, and an embedding that comes last."""

    def __init__(self, kind, device):
        torch.manual_seed(1)
        self.kind = kind
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2))).to(device)
        max_norm = 1.0 if kind == "max_norm" else None
        self.table = nn.Embedding(2048, 1024, max_norm=max_norm).to(device)
        self.both = nn.ModuleList([self.layers, self.table])
        how = {"capturable": kind == "graph"} if kind != "fused" else {"fused": True}
        self.optimizer = torch.optim.AdamW(self.both.parameters(), lr=1e-2, **how)
        self.words = torch.randperm(2048, device=device)
        self.forward = torch.compile(self.layers) if kind == "compiled model" else self.layers
        step = self.optimizer.step
        self.step = torch.compile(lambda: step()) if kind == "compiled step" else step
        self.train = self.whole
        for _ in range(4):
            self.train()
        if kind == "graph":
            self.train = self.graphed()

    def whole(self):
        # The table is read first: with max_norm that is what changes it.
        self.forward(self.table(self.words)[:256]).square().mean().backward()
        self.step()
        self.optimizer.zero_grad()

    def graphed(self):
        """Steps that are replayed, as training with CUDA graphs does."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.optimizer.zero_grad(set_to_none=True)
            self.whole()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.layers(self.table(self.words)[:256]).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.graph = graph
        return graph.replay

    def state(self):
        return {"model": self.both, "optimizer": OptimizerState(self.optimizer, self.both)}

    def tensors(self):
        found = dict(self.both.state_dict())
        names = {p: n for n, p in self.both.named_parameters()}
        for parameter, held in self.optimizer.state.items():
            found |= {f"{names[parameter]}/{k}": v for k, v in held.items()}
        return found


@pytest.fixture
def root():
    """In memory: the disk is not what is tried."""
    folder = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    yield Path(folder) / "run"
    shutil.rmtree(folder)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("staging", ["overlap", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_save_is_of_one_step(kind, staging, root, device, monkeypatch):
    with CheckpointManager(root, staging=staging, keep=KeepLast(1)) as ckpt:
        job, fresh = Job(kind, device), Job(kind, device)
        fenced = 0
        for step in range(1, ROUNDS + 1):
            if staging == "auto":  # nothing, a part, or all of it as a snapshot on the device
                room = [0, 20 << 20, 1 << 40][step % 3]
                monkeypatch.setattr(devices, "_safe_bytes", lambda _, room=room: room)
            wanted = {name: tensor.clone() for name, tensor in job.tensors().items()}
            torch.cuda._sleep(500_000)  # the copy cannot begin before the device gets here
            handle = ckpt.save_async(step, job.state())
            fenced += len(devices._fences)
            job.train()
            job.train()
            handle.result(60)
            ckpt.load(fresh.state(), step)
            found = fresh.tensors()
            assert found.keys() == wanted.keys()
            torn = [name for name, t in wanted.items() if not torch.equal(found[name], t)]
            assert torn == [], f"step {step}"
        # What is replayed is not fenced, all other training is.
        assert (fenced == 0) == (kind == "graph"), fenced
        assert not devices._fences
