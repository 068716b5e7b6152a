"""One process. Kill it at any moment, start it again, and it goes on to the last bit.

python docs/examples/plain.py runs/plain --steps 1000
"""

import argparse
from typing import Any

import torch
from torch import nn

from ckptcore import CheckpointManager, KeepBest, KeepLast, PreemptionGuard, RNGState


class Samples:
    """Batches of a curve, in a new order every epoch. Its state is how many there were."""

    def __init__(self, batch_size: int = 16) -> None:
        self.x = torch.linspace(-3, 3, 256)[:, None]
        self.batch_size, self.drawn = batch_size, 0

    def next_batch(self) -> torch.Tensor:
        epoch, place = divmod(self.drawn, len(self.x) // self.batch_size)
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(epoch))
        self.drawn += 1
        return self.x[order[place * self.batch_size :][: self.batch_size]]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", help="a folder, or a URL such as s3://bucket/run")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="steps from save to save")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 500, 0.5)
    samples = Samples()
    state = {
        "model": model,
        "optimizer": optimizer,
        "schedule": schedule,
        "samples": samples,
        "rng": RNGState(),  # dropout draws from it
    }
    keep = KeepLast(2) | KeepBest("loss", "min")
    with CheckpointManager(args.root, keep=keep) as ckpt, PreemptionGuard(ckpt) as guard:
        done = ckpt.restore(state).step or 0  # the newest that verifies, or a fresh start
        for step in range(done + 1, args.steps + 1):
            x = samples.next_batch()
            loss = (model(x) - x.sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if guard.should_stop(step):  # SIGTERM, SIGUSR1
                ckpt.save(step, state, metrics={"loss": loss})
                break
            if step % args.every == 0 or step == args.steps:
                ckpt.save_async(step, state, metrics={"loss": loss})
                print(f"step {step}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
