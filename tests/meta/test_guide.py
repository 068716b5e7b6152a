"""The examples of the guide's part on loading do what is said of them, one after the other."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckptcore

GUIDE = Path(ckptcore.__file__).parent.parent / "docs" / "guide.md"


def examples(title: str) -> list[str]:
    part = re.search(rf"^## {title}\n(.*?)^## ", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert part is not None, title
    return re.findall(r"```python\n(.*?)```", part.group(1), re.DOTALL)


class Net(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)
        for n, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, number + n)


def trained(number: float) -> dict:
    model = Net(number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture
def names(tmp_path: Path) -> dict:
    saved = trained(100.0)
    with ckptcore.CheckpointManager(tmp_path, keep=ckptcore.KeepBest("loss")) as ckpt:
        ckpt.save(500, {**saved, "ema": Net(200.0)}, metrics={"loss": 1.0})
        state = trained(0.0)
        yield {
            "ckpt": ckpt,
            "load_state": ckptcore.load_state,
            "ModelState": ckptcore.ModelState,
            "torch": torch,
            "copy": copy,
            "state": state,
            **state,
        }


def values(model: nn.Module) -> list[float]:
    return [parameter.flatten()[0].item() for parameter in model.parameters()]


def moments(optimizer: torch.optim.Optimizer) -> list[float]:
    return [
        optimizer.state[p]["momentum_buffer"].flatten()[0].item()
        for g in optimizer.param_groups
        for p in g["params"]
    ]


def test_the_examples(names: dict, capsys: pytest.CaptureFixture) -> None:
    out, find, weights, part, renamed, only, cast, meta, fused, no_model, on_mesh = examples(
        "Loading"
    )
    model, optimizer = names["model"], names["optimizer"]
    exec(out, names)
    assert values(model) == [100.0, 101.0, 102.0, 103.0, 104.0, 105.0]
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    exec(find, names)
    assert names["sizes"]["head.weight"].shape == (2, 4) and names["info"].step == 500
    exec(weights, names)
    assert values(model) == [100.0, 101.0, 102.0, 103.0, 104.0, 105.0]
    assert moments(optimizer) == [0.0] * 6
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    exec(part, names)
    assert values(model) == [100.0, 101.0, 102.0, 103.0, 0.0, 0.0]
    assert moments(optimizer) == [100.0] * 4 + [0.0] * 2
    exec(renamed, names)
    assert values(model) == [200.0, 201.0, 202.0, 203.0, 204.0, 205.0]
    exec(only, names)
    assert values(model) == [100.0, 101.0, 102.0, 103.0, 104.0, 105.0]
    assert moments(optimizer) == [100.0] * 4 + [0.0] * 2
    exec(cast, names)
    assert values(names["half"]) == [100.0, 101.0, 102.0, 103.0, 104.0, 105.0]
    assert "restored checkpoint-500 (step 500, 3 components)" in capsys.readouterr().out
    assert set(names["report"].cast.values()) == {"F32 -> BF16"}
    exec(meta, names)
    assert values(names["served"]) == [100.0, 101.0, 102.0, 103.0, 104.0, 105.0]
    assert names["served"].head.weight.dtype == torch.bfloat16
    exec(fused, names)
    assert names["fused"].unique().tolist() == [100.0, 102.0]
    exec(no_model, names)
    assert {name: tensor.dtype for name, tensor in names["weights"].items()} == {
        f"backbone.{n}.{part}": torch.bfloat16 for n in (0, 2) for part in ("weight", "bias")
    }
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    names["mesh"] = init_device_mesh("cpu", (2,))
    exec(on_mesh, names)  # no tensor of it was sharded
    dist.destroy_process_group()
    assert names["state"]["head.weight"].shape == (2, 4)
