"""Two models, two optimizers, an average of weights: a state is whatever you put into it.

python docs/examples/gan.py runs/gan --steps 1000
torchrun --nproc-per-node 2 docs/examples/gan.py runs/gan --steps 1000
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckptcore import CheckpointManager, KeepLast, PreemptionGuard, RNGState

BATCH, NOISE = 64, 4


def real(count: int) -> torch.Tensor:
    """Points on a circle, with some noise."""
    angle = torch.rand(count, 1) * 6.2832
    return torch.cat([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2)


def descend(loss: torch.Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters() if dist.is_initialized() else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="steps from save to save")
    args = parser.parse_args()

    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    average = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    makes = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judges = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # every rank draws samples of its own
    state = {
        "generator": generator,
        "critic": critic,
        "average": average,
        "makes": makes,
        "judges": judges,
        "rng": RNGState(on_resize="keep"),  # all data and noise come from it
    }
    with CheckpointManager(args.root, keep=KeepLast(2)) as ckpt, PreemptionGuard(ckpt) as guard:
        done = ckpt.restore(state).step or 0
        for step in range(done + 1, args.steps + 1):
            fake = generator(torch.randn(BATCH, NOISE))
            wrong = softplus(-critic(real(BATCH))) + softplus(critic(fake.detach()))
            descend(wrong.mean(), critic, judges)
            descend(softplus(-critic(fake)).mean(), generator, makes)
            average.update_parameters(generator)
            if guard.should_stop(step):
                ckpt.save(step, state)
                break
            if step % args.every == 0 or step == args.steps:
                ckpt.save_async(step, state)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
