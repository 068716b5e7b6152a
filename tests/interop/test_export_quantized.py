"""Weights in few bits, out of checkpoints of trained and of plain models."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from ckptcore import CheckpointManager, InvalidState, export_checkpoint
from ckptcore.interop.quantization import quantization_config

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
RECIPE, FLOAT8 = "int8-dynamic-act-int4-weight", "float8-dynamic-act-float8-weight"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 64)
        self.first = nn.Linear(64, 48)
        self.last = nn.Linear(48, 8, bias=False)


def saved(root: Path, model: nn.Module, **metadata: Any) -> Path:
    with CheckpointManager(root) as manager:
        files = {"config.json": '{"hidden_size": 64}'}
        manager.save(1, {"model": model, "files": files}, metadata=metadata)
    return root / "checkpoint-1"


def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    with safe_open(folder / "model.safetensors", "pt") as file:
        said = file.metadata()
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    recipe = said["quantization_recipe"]
    found, left = unflatten_tensor_state_dict(parts, said)
    assert left == {}
    return found, {"recipe": recipe}


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        pytest.param(
            FLOAT8, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
    ],
)
@pytest.mark.parametrize("by", ["model", "linear"])
def test_linear_layers_are_what_torchao_makes_of_them(tmp_path: Path, recipe: str, by: str) -> None:
    torch.manual_seed(0)
    model = Model()
    source = saved(tmp_path / "root", model)
    how: dict[str, Any] = {"model": Model} if by == "model" else {"linear": ["first.*", "last.*"]}
    report = export_checkpoint(source, tmp_path / "out", quantize=recipe, **how)
    found, said = read(tmp_path / "out")
    assert said == {"recipe": recipe}
    from torchao.quantization import quantize_

    def fits(module: nn.Module, _: str) -> bool:
        linear = isinstance(module, nn.Linear)
        return linear and (recipe != RECIPE or module.in_features % 32 == 0)

    quantize_(model, quantization_config(recipe), filter_fn=fits)
    wanted = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert type(found[name]) is type(tensor.detach()), name
        plain = [t.dequantize() if hasattr(t, "qdata") else t for t in (found[name], tensor)]
        assert torch.equal(*plain), name
    assert report.quantized == (1 if recipe == RECIPE else 2) and report.verified == 4
    kept = ["last.weight: not quantised (48 inputs, no multiple of 32)"]
    assert report.left == (kept if recipe == RECIPE else [])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_size"] == 64
    assert config["quantization_config"]["quant_method"] == "torchao"


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it can")
def test_a_recipe_that_needs_a_gpu_says_so(tmp_path: Path) -> None:
    source = saved(tmp_path / "root", Model())
    with pytest.raises(InvalidState, match=r"'first.weight' cannot be quantised.*CUDA") as caught:
        export_checkpoint(source, tmp_path / "out", quantize=FLOAT8, model=Model)
    assert caught.value.key == "first.weight" and not (tmp_path / "out").exists()


def test_the_recipe_of_the_training_is_kept_to(tmp_path: Path) -> None:
    trained = {"qat_recipe": "int4-weight-only"}
    source = saved(tmp_path / "root", Model(), training_args=trained)
    with pytest.raises(InvalidState, match="trained for the recipe 'int4-weight-only'"):
        export_checkpoint(source, tmp_path / "out", quantize=RECIPE, model=Model)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"quantize": "int3"}, "'int3' is none of"),
        ({"quantize": RECIPE}, "give the model, or patterns"),
        ({"quantize": RECIPE, "model": "no.such:thing"}, "is no function as in"),
        ({"quantize": RECIPE, "linear": ["last.*"]}, "no linear layer fits"),
        ({"quantize": RECIPE, "model": Model, "format": "torch"}, "is written as 'hf'"),
    ],
)
def test_what_cannot_be_quantised_is_said(tmp_path: Path, how: dict[str, Any], said: str) -> None:
    source = saved(tmp_path / "root", Model())
    with pytest.raises(InvalidState, match=said):
        export_checkpoint(source, tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()
