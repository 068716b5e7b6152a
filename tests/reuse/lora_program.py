"""FSDP2 over a model with LoRA adapters from peft: trains, saves with reuse=True, and dies by SIGKILL
in the save of step `--kill`. Run under torchrun by test_lora.py."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckptcore import CheckpointManager, SaveEvent


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digest(named: dict[str, torch.Tensor]) -> str:
    state = hashlib.sha256()
    for name, tensor in sorted(named.items()):
        state.update(name.encode() + full(tensor.detach()).numpy().tobytes())
    return state.hexdigest()


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("root")
    given.add_argument("--until", type=int, required=True)
    given.add_argument("--kill", type=int)
    args = given.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = get_peft_model(Net(), LoraConfig(r=4, target_modules=["first", "second"]))
    if dist.get_world_size() > 1:
        fully_shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 0.05)
    state = {"model": model, "optimizer": optimizer}
    reused: list[int] = []

    def watch(event: SaveEvent) -> None:
        if event.kind == "committed":
            reused.append(event.reused)
        if event.kind == "staged" and event.step == args.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    with CheckpointManager(args.root, reuse=True, on_event=watch) as ckpt:
        first = (ckpt.restore(state).step or 0) + 1
        for step in range(first, args.until + 1):
            data = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            model(data).pow(2).mean().backward()  # the same data on every rank
            optimizer.step()
            optimizer.zero_grad()
            ckpt.save_async(step, state)
    moments = {
        f"{name}: {key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
    }
    found = {
        "first": first,
        "weights": digest(dict(model.named_parameters())),
        "moments": digest(moments),
        "reused": reused,
    }
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
