"""A Trainer of Lightning's: stopped and started again, it makes the same steps as one that went on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning.pytorch")

from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

from ckptcore import CheckpointWarning, InvalidState, KeepLast, open_checkpoint, scan_root  # noqa: E402
from ckptcore.integrations.lightning import EngineCheckpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Module(lightning.LightningModule):
    """stop_at: the batch before which it fails."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.stop_at, self.batches, self.seen = stop_at, 0, {}

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        if self.trainer.fit_loop.total_batch_idx == self.stop_at:
            raise KeyboardError
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        self.seen[self.trainer.fit_loop.total_batch_idx] = (batch.tolist(), loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class KeyboardError(RuntimeError):
    pass


class Counter(lightning.Callback):
    """A callback with a state."""

    count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict["count"]


def fit(root: Path, seed: int, module: Module, loader: type, every: int, accumulate: int) -> Any:
    lightning.seed_everything(seed, verbose=False)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    data = torch.arange(60.0).view(20, 3) / 60
    keeper = EngineCheckpoint(str(root), every, keep=KeepLast(2))
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        accumulate_grad_batches=accumulate,
        callbacks=[Counter(), keeper],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    trainer.fit(module, loader(data, batch_size=2, shuffle=True))
    return trainer


def outcome(trainer: Any, module: Module) -> list[Any]:
    moments = trainer.optimizers[0].state
    return [
        [p.tolist() for p in module.parameters()],
        [moments[p]["exp_avg_sq"].tolist() for p in module.parameters()],
        trainer.lr_scheduler_configs[0].scheduler.get_last_lr(),
        [c.count for c in trainer.callbacks if isinstance(c, Counter)],
        torch.rand(3).tolist(),
    ]


@pytest.mark.parametrize(
    ("loader", "every", "accumulate"),
    [
        (StatefulDataLoader, 7, 1),
        (StatefulDataLoader, 10, 1),
        (torch.utils.data.DataLoader, 10, 1),
        (StatefulDataLoader, 3, 2),
    ],
    ids=["inside", "at the end", "at the end, no position", "accumulated"],
)
def test_a_resumed_run_is_the_run_that_went_on(
    tmp_path: Path, loader: type, every: int, accumulate: int
) -> None:
    whole = Module()
    expected = outcome(fit(tmp_path / "whole", 0, whole, loader, every, accumulate), whole)
    stopped = Module(stop_at=13)
    with pytest.raises(KeyboardError):
        fit(tmp_path / "run", 0, stopped, loader, every, accumulate)
    (last,) = [info.step for info in scan_root(tmp_path / "run")][-1:]
    resumed = Module()
    assert (
        outcome(fit(tmp_path / "run", 1, resumed, loader, every, accumulate), resumed) == expected
    )
    assert min(resumed.seen) == last * accumulate
    assert resumed.seen == {n: s for n, s in whole.seen.items() if n >= last * accumulate}


def test_where_to_go_on_from(tmp_path: Path) -> None:
    def run(keeper: EngineCheckpoint, path: Any = None) -> Any:
        options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=6, callbacks=[keeper], default_root_dir=tmp_path, **options
        )
        loader = torch.utils.data.DataLoader(torch.ones(4, 3), batch_size=2)
        trainer.fit(Module(), loader, ckpt_path=path, weights_only=False if path else None)
        return trainer

    root = str(tmp_path / "run")
    first = run(EngineCheckpoint(root, 2))
    with pytest.raises(InvalidState, match=r"which='best'.* goes on from the best"):
        first.validate(ckpt_path="best")
    with pytest.raises(IsADirectoryError) as caught:
        run(EngineCheckpoint(root, 2), f"{root}/checkpoint-4")
    assert "leave ckpt_path out" in caught.value.__notes__[0]
    first.save_checkpoint(tmp_path / "stock.ckpt")
    with pytest.raises(InvalidState, match=r"ckpt_path and .*checkpoint-6: .*leave ckpt_path"):
        run(EngineCheckpoint(root, 2), str(tmp_path / "stock.ckpt"))
    assert (
        run(EngineCheckpoint(str(tmp_path / "b"), 2), str(tmp_path / "stock.ckpt")).global_step == 6
    )
    keeper = EngineCheckpoint(root, 1, which="checkpoint-4")
    with pytest.warns(CheckpointWarning, match="abandoned"):
        run(keeper)
    assert keeper.report.step == 4 and keeper.saved == 6


def test_the_parts_and_metrics_of_a_checkpoint(tmp_path: Path) -> None:
    module = Module()
    trainer = fit(tmp_path, 0, module, torch.utils.data.DataLoader, 15, 1)
    assert [info.step for info in scan_root(tmp_path)] == [15, 30]
    manifest = open_checkpoint(tmp_path / "checkpoint-30").manifest
    parts = {"model", "optimizer", "scheduler", "callbacks", "precision", "loops", "rng"}
    assert set(manifest.components) == parts
    assert manifest.metrics["loss"] == pytest.approx(module.seen[29][1])
    assert trainer.checkpoint_callback.report.fresh


@pytest.mark.parametrize(
    ("mode", "every", "order"),
    [
        ("one", 13, "torchdata"),
        ("ddp", 13, "torchdata"),
        ("ddp", 13, "torch"),
        ("ddp", 10, "Lightning"),
        ("fsdp2", 13, "torchdata"),
    ],
)
def test_processes_that_were_killed_go_on(
    tmp_path: Path, processes: Any, mode: str, every: int, order: str
) -> None:
    how, number = {"mode": mode, "every": every, "order": order}, 1 if mode == "one" else 2
    run = partial(processes, "lightning_ranks.py", "lightning_fit", number, **how)
    expected = run(root=str(tmp_path / "whole"), seed=0)
    killed = run(root=str(tmp_path / "run"), seed=0, kill_at=16)
    assert killed == [-9] * number
    resumed = run(root=str(tmp_path / "run"), seed=1)
    for rank in range(number):
        losses = expected[rank]["losses"]
        assert resumed[rank]["warned"] == []
        after = {number: losses[number] for number in losses if int(number) >= every}
        assert resumed[rank] == {**expected[rank], "losses": after}
    assert len({str(found["draw"]) for found in expected}) == number
    newest = scan_root(tmp_path / "run")[-1].url
    model = open_checkpoint(newest).manifest.components["model"]
    wanted = {"one": "GLOBAL", "ddp": "REPLICATED", "fsdp2": "SHARDED"}
    assert model.pattern == wanted[mode]


def test_an_order_that_lightning_loses_is_warned_of(tmp_path: Path, processes: Any) -> None:
    how = {"mode": "ddp", "every": 10, "order": "lost"}
    where = {"root": str(tmp_path / "run"), "seed": 0}
    found = processes("lightning_ranks.py", "lightning_fit", 2, **where, **how)
    assert [result["warned"] for result in found] == [["RandomSampler"], []]
