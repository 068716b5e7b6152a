"""torchrun --nproc-per-node 2 torchrun_script.py FOLDER: DDP training, stopped and resumed, to the
last bit."""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptcore import CheckpointManager, CheckpointWarning, RNGState, SharingPattern, StateComponent

REPLICATED, PER_RANK = SharingPattern.REPLICATED, SharingPattern.PER_RANK


class Loader:
    """Each rank's own: reshuffled every 4 batches."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def next(self) -> torch.Tensor:
        self.order = self.order or torch.randperm(4).tolist()
        return torch.full((2, 4), self.order.pop() + 1.0)

    def state_dict(self) -> dict[str, list[int]]:
        return {"order": list(self.order)}

    def load_state_dict(self, state_dict: dict[str, list[int]]) -> None:
        self.order = state_dict["order"]


def main(folder: Path) -> None:
    warnings.simplefilter("error", CheckpointWarning)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()

    def run(steps: int, save_at: int | None) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(rank)
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = Loader()
        state = [
            StateComponent("model", model, REPLICATED),
            StateComponent("optimizer", optimizer, REPLICATED),
            StateComponent("scheduler", scheduler, REPLICATED),
            StateComponent("loader", loader, PER_RANK),
            StateComponent("rng", RNGState(), PER_RANK),
        ]
        losses = []
        with CheckpointManager(folder) as ckpt:
            report = ckpt.restore(state) if save_at is None else None
            for step in range(report.step if report and report.step else 0, steps):
                loss = model(loader.next()).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses.append(loss.item())
                if step + 1 == save_at:
                    ckpt.save(step + 1, state)
        return losses, [p.detach().clone() for p in model.parameters()]

    whole, weights = run(10, save_at=6)
    resumed, again = run(10, save_at=None)
    result = {
        "losses": whole,
        "resumed": resumed,
        "same weights": all(torch.equal(a, b) for a, b in zip(weights, again, strict=True)),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
