"""A save in the background of state on an accelerator is of one step, whatever happens right after
the call."""

import pytest
import torch
from torch import nn

from ckptcore import AsyncSaveError, CheckpointManager, OptimizerState
from ckptcore.saving import devices
from ckptcore.testing.faults import FaultStorage

MODES = ["copy", "overlap", "auto"]


class Job:
    """A model with buffers that the forward pass changes, an optimizer with moments, and state that
    is nobody's."""

    def __init__(self, device, width=2048, layers=4):
        torch.manual_seed(1)
        parts = [
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(layers)
        ]
        self.model = nn.Sequential(*parts).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.input = torch.randn(64, width, device=device)
        self.plain = torch.zeros(8 << 20, device=device)
        self.counter = torch.zeros((), device=device)
        self.train()

    def train(self):
        self.model(self.input).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.plain.add_(1)
        self.counter.add_(1)

    def step_alone(self):
        """An optimizer step with nothing before it: the shortest time that a copy can have."""
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def state(self):
        return {
            "model": self.model,
            "optimizer": OptimizerState(self.optimizer, self.model),
            "rest": {
                "plain": self.plain,
                "counter": self.counter,
                "view": self.plain.view(1024, -1).t(),
            },
        }

    def tensors(self):
        found = {f"model/{k}": v for k, v in self.model.state_dict().items()}
        names = {p: n for n, p in self.model.named_parameters()}
        for parameter, held in self.optimizer.state.items():
            found |= {f"optimizer/{names[parameter]}/{k}": v for k, v in held.items()}
        return found | {"plain": self.plain, "counter": self.counter}

    def snapshot(self):
        return {name: tensor.clone() for name, tensor in self.tensors().items()}


def same_as(job, wanted):
    return [name for name, tensor in job.tensors().items() if not torch.equal(tensor, wanted[name])]


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run"


@pytest.mark.parametrize("after", ["step_alone", "train"])
@pytest.mark.parametrize("staging", MODES)
def test_b02_training_goes_on_at_once(root, device, staging, after, monkeypatch):
    job, fresh = Job(device), Job(device)
    with CheckpointManager(root, staging=staging) as ckpt:
        for round_number in range(1, 35):
            if staging == "auto":  # nothing, a part, or all of it as a snapshot on the device
                monkeypatch.setattr(
                    devices, "_safe_bytes", lambda _, n=round_number % 3: [0, 100 << 20, 1 << 40][n]
                )
            job.train()
            wanted = job.snapshot()
            torch.cuda._sleep(1_000_000)  # the copy cannot begin before the device gets here
            handle = ckpt.save_async(round_number, job.state())
            getattr(job, after)()
            job.plain.add_(1)
            job.counter.zero_()
            getattr(job, after)()
            handle.result(60)
            ckpt.load(fresh.state(), round_number)
            assert same_as(fresh, wanted) == []
            ckpt.delete(round_number)


@pytest.mark.parametrize("staging", MODES)
def test_a_snapshot_is_given_back(root, device, staging):
    job = Job(device)
    with CheckpointManager(root, staging=staging) as ckpt:
        ckpt.save_async(1, job.state()).result(60)
        job.train()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for step in (2, 3, 4):
            ckpt.save_async(step, job.state()).result(60)
        assert torch.cuda.memory_allocated() == before
        assert not devices._fences


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("staging", ["overlap", "auto"])
def test_a_snapshot_is_given_back_when_staging_fails(root, device, staging, error, monkeypatch):
    job, fresh = Job(device), Job(device)
    with CheckpointManager(root, staging=staging, on_error="warn") as ckpt:
        ckpt.save_async(1, job.state()).result(60)
        job.train()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()

        def fails(*_):
            raise error("no thread")  # a new one: its traceback holds the job

        with monkeypatch.context() as patched:
            patched.setattr("ckptcore.saving.staging._copy_jobs", fails)
            with pytest.raises((AsyncSaveError, KeyboardInterrupt)):
                ckpt.save_async(2, job.state()).result(60)
        assert not devices._fences
        assert torch.cuda.memory_allocated() == before
        job.train()
        wanted = job.snapshot()
        ckpt.save_async(3, job.state()).result(60)
        ckpt.load(fresh.state(), 3)
        assert same_as(fresh, wanted) == []


def test_auto_takes_a_snapshot_where_there_is_room(root, device):
    job = Job(device)
    faults = FaultStorage(CheckpointManager(root).storage)
    with CheckpointManager(faults, staging="auto") as ckpt:
        handle = ckpt.save_async(1, job.state())
        taken = handle._staged.copy.devices[0]
        assert devices._safe_bytes(device) > 1 << 30
        assert taken.sources == []  # nothing was left to copy from the live state
        handle.result(60)
        assert handle.staged()


def test_a_graphed_optimizer_is_not_trusted_with_a_fence(root, device):
    """Its captured step is replayed without passing the hook, so its state is copied in order."""
    job = Job(device)
    weight = torch.ones(1 << 22, device=device, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=1e-2, capturable=True)
    weight.grad = torch.ones_like(weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    state = {"weight": weight, "job": job.model}
    with CheckpointManager(root, staging="overlap") as ckpt:
        for step in range(1, 20):
            graph.replay()
            wanted = weight.detach().clone()
            handle = ckpt.save_async(step, state)
            graph.replay()
            handle.result(60)
            live = {"weight": torch.zeros_like(weight), "job": job.model}
            ckpt.load(live, step)
            assert torch.equal(live["weight"], wanted)


def test_failing_pin_is_an_error_of_the_save(root, device, monkeypatch):
    def refuse(_):
        raise MemoryError("no more memory can be pinned")

    job = Job(device)
    monkeypatch.setattr("ckptcore.saving.staging.pin", refuse)
    ckpt = CheckpointManager(root)
    with pytest.raises(Exception, match="no more memory can be pinned"):
        ckpt.save_async(1, job.state()).result(60)
    monkeypatch.undo()
    assert ckpt.save_async(2, job.state()).result(60).step == 2
    ckpt.close()
