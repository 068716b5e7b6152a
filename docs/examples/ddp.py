"""Data parallel: every rank has the whole model. Weights are stored once, and compared before.

torchrun --nproc-per-node 2 docs/examples/ddp.py runs/ddp --steps 1000
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptcore import CheckpointManager, KeepLast, PreemptionGuard, RNGState, Value

BATCH = 16


def batch(number: int, rank: int) -> torch.Tensor:
    """What a rank gets for a step: a function of the step, so there is no other state of it."""
    source = torch.Generator().manual_seed(number * dist.get_world_size() + rank)
    return torch.rand(BATCH, 1, generator=source) * 6 - 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="steps from save to save")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(rank)  # dropout differs from rank to rank; DDP takes rank 0's weights
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    model = DistributedDataParallel(net.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = Value(0)  # whatever else you count
    # Names are those of the bare module: a checkpoint knows no DDP. Random streams are a rank's
    # own; on another number of ranks they start anew.
    state = {
        "model": model,
        "optimizer": optimizer,
        "tokens": tokens,
        "rng": RNGState(on_resize="keep"),
    }
    with CheckpointManager(args.root, keep=KeepLast(3)) as ckpt, PreemptionGuard(ckpt) as guard:
        done = ckpt.restore(state).step or 0
        for step in range(done + 1, args.steps + 1):
            x = batch(step, rank).to(device)
            loss = (model(x) - x.sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tokens.value += BATCH * dist.get_world_size()
            if guard.should_stop(step):  # a signal to any rank: the same answer on all of them
                ckpt.save(step, state)
                break
            if step % args.every == 0 or step == args.steps:
                ckpt.save_async(step, state)
                if rank == 0:
                    print(f"step {step}: loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
