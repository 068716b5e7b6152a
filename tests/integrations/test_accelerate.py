"""A loop of Accelerate's: stopped and restored, it makes the same steps as one that went on."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

accelerate = pytest.importorskip("accelerate")

from accelerate.utils import DataLoaderConfiguration, set_seed  # noqa: E402

from ckptcore import CheckpointManager, InvalidState, open_checkpoint  # noqa: E402
from ckptcore.integrations.accelerate import state_of  # noqa: E402

SAMPLES, BATCH = 20, 2  # ten batches an epoch


class Counter:
    """Something that the user has registered."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict["count"]


class Program:
    """A run in a process of its own, as far as Accelerate goes: it keeps what is shared in classes."""

    def __init__(self, seed: int, accumulate: int = 1, stateful: bool = True) -> None:
        accelerate.Accelerator().free_memory()
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        gc.collect()
        set_seed(seed)
        self.accelerator = accelerate.Accelerator(
            cpu=True,
            gradient_accumulation_steps=accumulate,
            dataloader_config=DataLoaderConfiguration(
                use_stateful_dataloader=stateful, use_seedable_sampler=True, data_seed=5
            ),
        )
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        data = torch.arange(SAMPLES * 3.0).view(SAMPLES, 3) / 60
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
        prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.state = state_of(self.accelerator)
        self.seen: list[Any] = []

    def train(self, last: int, ckpt: CheckpointManager | None = None, save_at: int = 0) -> None:
        """To micro-batch `last`; saved in the middle of an epoch, or at its last batch."""
        while True:
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(batch).square().mean()
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.counter.count += 1
                self.seen.append((batch.tolist(), loss.item(), self.scheduler.get_last_lr()))
                if ckpt is not None and self.counter.count == save_at:
                    ckpt.save_async(save_at, self.state)
                if self.counter.count == last:
                    return

    def outcome(self) -> list[Any]:
        inner = self.optimizer.optimizer.state
        moments = [inner[p]["exp_avg_sq"].tolist() for p in self.model.parameters()]
        weights = [p.tolist() for p in self.model.parameters()]
        step = self.accelerator.step
        return [weights, moments, self.scheduler.get_last_lr(), torch.rand(3).tolist(), step]


@pytest.mark.parametrize(("save_at", "accumulate"), [(7, 1), (10, 1), (14, 2)])
def test_a_resumed_run_is_the_run_that_went_on(
    tmp_path: Path, save_at: int, accumulate: int
) -> None:
    whole = Program(0, accumulate)
    with CheckpointManager(tmp_path) as ckpt:
        whole.train(24, ckpt, save_at)
    expected = whole.outcome()
    resumed = Program(1, accumulate)
    with CheckpointManager(tmp_path) as ckpt:
        report = ckpt.restore(resumed.state)
    assert (report.step, report.missing, report.unexpected) == (save_at, [], [])
    assert resumed.counter.count == save_at
    resumed.train(24)
    assert resumed.seen == whole.seen[save_at:]
    assert resumed.outcome() == expected


def test_the_parts_go_by_their_names(tmp_path: Path) -> None:
    program = Program(0)
    program.train(1)
    with CheckpointManager(tmp_path) as ckpt:
        info = ckpt.save(1, program.state)
    stored = set(open_checkpoint(info.url).manifest.components)
    parts = {"model", "optimizer", "scheduler", "loader", "custom", "accelerator", "rng"}
    assert stored == set(program.state) == parts


def test_the_epoch_comes_back_to_a_loader_without_a_position(tmp_path: Path) -> None:
    whole = Program(0, stateful=False)
    with CheckpointManager(tmp_path) as ckpt:
        whole.train(20, ckpt, 10)
    resumed = Program(1, stateful=False)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.restore(resumed.state)
    resumed.train(20)
    assert [batch for batch, *_ in resumed.seen] == [batch for batch, *_ in whole.seen[10:]]


def test_half_an_accumulation_is_not_saved(tmp_path: Path) -> None:
    program = Program(0, accumulate=2)
    program.train(3)
    with (
        CheckpointManager(tmp_path) as ckpt,
        pytest.raises(InvalidState, match="gradients are being accumulated"),
    ):
        ckpt.save(3, program.state)
    assert list(tmp_path.glob("checkpoint-*")) == []


def test_nothing_prepared_is_no_state() -> None:
    with pytest.raises(InvalidState, match="call it after prepare"):
        state_of(accelerate.Accelerator(cpu=True))


@pytest.mark.parametrize("mode", ["one", "ddp", "fsdp2"])
def test_processes_that_were_killed_go_on(tmp_path: Path, processes: Any, mode: str) -> None:
    how, number = {"mode": mode, "save_at": 13}, 1 if mode == "one" else 2
    run = partial(processes, "accelerate_ranks.py", "accelerate_loop", number, **how)
    expected = run(root=str(tmp_path / "whole"), seed=0)
    killed = run(root=str(tmp_path / "run"), seed=0, kill_at=17)
    assert killed == [-9] * number
    resumed = run(root=str(tmp_path / "run"), seed=1)
    for rank in range(number):
        losses = expected[rank]["losses"]
        after = {step: losses[step] for step in losses if int(step) > 13}
        assert resumed[rank] == {**expected[rank], "losses": after}
    assert len({str(found["draw"]) for found in expected}) == number
    model = open_checkpoint(tmp_path / "run" / "checkpoint-13").manifest.components["model"]
    wanted = {"one": "GLOBAL", "ddp": "REPLICATED", "fsdp2": "SHARDED"}
    assert model.pattern == wanted[mode]
