"""Parameters in slices: every rank writes its own, and any number of ranks can go on.

torchrun --nproc-per-node 2 docs/examples/fsdp2.py runs/fsdp2 --steps 500
torchrun --nproc-per-node 3 docs/examples/fsdp2.py runs/fsdp2 --steps 1000
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptcore import CheckpointManager, KeepEvery, KeepLast, PreemptionGuard, RNGState

BATCH = 48  # of all ranks together


def batch(number: int) -> torch.Tensor:
    """This rank's share of a batch that is the same on any number of ranks."""
    whole = torch.rand(BATCH, 1, generator=torch.Generator().manual_seed(number)) * 6 - 3
    return whole.tensor_split(dist.get_world_size())[dist.get_rank()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=100, help="steps from save to save")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)  # the same whole model everywhere, before it is cut
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Linear(1, 32), *layers, nn.Linear(32, 1)).to(device)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # its state is in slices, too
    state = {"model": model, "optimizer": optimizer, "rng": RNGState(on_resize="keep")}

    keep = KeepLast(2) | KeepEvery(steps=1000)
    with CheckpointManager(args.root, keep=keep) as ckpt, PreemptionGuard(ckpt) as guard:
        done = ckpt.restore(state).step or 0  # needs no step of the optimizer before
        ckpt.prewarm(state)  # optional: the first save is as quick as the others
        for step in range(done + 1, args.steps + 1):
            x = batch(step).to(device)
            loss = (model(x) - x.sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if guard.should_stop(step):
                ckpt.save(step, state)
                break
            if step % args.every == 0 or step == args.steps:
                ckpt.save_async(step, state)
                if dist.get_rank() == 0:
                    print(f"step {step}: loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
