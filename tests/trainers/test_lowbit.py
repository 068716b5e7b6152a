"""Training in few bits: what the recipes convert, and runs that go on in a new process as if
nothing had been."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument, TrainingArguments
from ckpt_trainers.lowbit import lower_precision
from torch import nn

from ckptcore import open_checkpoint

from .comparison import compare_checkpoints
from .conftest import TIMES
from .lowbit_runs import RUNS, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
# One order of sums; on a GPU what cuBLAS needs for that.
EXACT = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
SCRIPT = Path(__file__).with_name("lowbit_runs.py")
FP8 = {"fp8_recipe": "rowwise", "fp8_emulate": True}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 48)
        self.second = nn.Linear(48, 10)
        self.norm = nn.LayerNorm(10)


def converted(caplog: Any, model: nn.Module, **given: Any) -> tuple[nn.Module, list[str]]:
    """The model with lower precision, and what was logged."""
    caplog.clear()
    caplog.set_level(logging.INFO, logger="ckpt_trainers.lowbit")
    made = lower_precision(model, TrainingArguments(use_cpu=True, **given))
    return made, [record.getMessage() for record in caplog.records if "ckpt" in record.name]


def test_float8_layers_are_counted_and_those_left_out_are_named(caplog: Any) -> None:
    made, said = converted(caplog, Layers(), **FP8)
    assert type(made.first).__name__ == "Float8Linear" and type(made.second) is nn.Linear
    assert said == [
        "fp8_recipe='rowwise': second stays as it is (48 x 10, no multiples of 16)",
        "fp8_recipe='rowwise': converted 1/2 Linear layers",
    ]


def test_an_alignment_of_0_converts_every_layer(caplog: Any) -> None:
    made, said = converted(caplog, Layers(), **FP8, fp8_dim_alignment=0)
    assert type(made.second).__name__ == "Float8Linear"
    assert said == ["fp8_recipe='rowwise': converted 2/2 Linear layers"]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_can_be_tried_on_any_device(caplog: Any, recipe: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    given = torch.randn(8, 64)
    plain = model(given)
    made, _ = converted(caplog, model, fp8_recipe=recipe, fp8_emulate=True)
    out = made(given)
    assert not torch.equal(out, plain) and torch.allclose(out, plain, atol=0.1)
    out.sum().backward()
    assert made[0].weight.grad.abs().sum() > 0


def test_float8_on_the_cpu_says_what_it_needs() -> None:
    with pytest.raises(InvalidArgument, match=r"8\.9.*fp8_emulate=True"):
        lower_precision(Layers(), TrainingArguments(fp8_recipe="rowwise", use_cpu=True))
    with pytest.raises(InvalidArgument, match=r"8\.9, and this is the CPU.*fp8_emulate=True"):
        TrainingArguments(fp8_recipe="rowwise", use_cpu=True).check_trainer("single", 1)
    TrainingArguments(**FP8, use_cpu=True).check_trainer("single", 1)


@pytest.mark.parametrize(
    ("recipe", "group"), [("int8-dynamic-act-int4-weight", 32), ("int4-weight-only", 128)]
)
def test_fake_quantised_layers_have_the_groups_of_the_recipe(
    caplog: Any, recipe: str, group: int
) -> None:
    made, said = converted(caplog, Layers(), qat_recipe=recipe)
    first: Any = made.first
    assert type(first).__name__ == "FakeQuantizedLinear" and type(made.second) is nn.Linear
    assert first.weight_fake_quantizer.config.group_size == group
    assert list(made.state_dict()) == list(Layers().state_dict())
    assert said == [
        f"qat_recipe='{recipe}': second stays as it is (48 inputs, no multiple of {group})",
        f"qat_recipe='{recipe}': converted 1/2 Linear layers",
    ]


def test_a_model_that_is_one_layer_is_converted_too(caplog: Any) -> None:
    for given in (FP8, {"qat_recipe": "int4-weight-only"}):
        made, said = converted(caplog, nn.Linear(128, 16), **given)
        assert type(made) is not nn.Linear and "converted 1/1" in said[-1]


def test_a_recipe_that_converts_nothing_is_a_warning(caplog: Any) -> None:
    made, said = converted(caplog, nn.Linear(7, 7), **FP8)
    assert type(made) is nn.Linear
    assert said[-1] == "fp8_recipe='rowwise': converted 0/1 Linear layers"
    assert caplog.records[-1].levelno == logging.WARNING


def go_on_in_a_new_process(
    run_script: Callable[..., Any], folder: Path, names: list[str], save: int, last: int
) -> None:
    """Each run is trained to `last` in one go, and again in a new process from its checkpoint of
    step `save`: the same losses and the same states."""
    whole = {name: run(name, folder / "whole", last, save, resume=False) for name in names}
    for name in names:
        folders = (folder / part / name / f"checkpoint-{save}" for part in ("whole", "again"))
        shutil.copytree(*folders)
    done = run_script(SCRIPT, folder / "again", last, last, "cpu", *names, timeout=300)
    assert done.returncode == 0, done.stderr
    for name in names:
        same_from(folder, name, whole[name], save, last)
        given = open_checkpoint(str(folder / "again" / name / f"checkpoint-{last}"))
        args = given.manifest.metadata["training_args"]
        assert {key: args[key] for key in RUNS[name]} == RUNS[name]


def in_a_process(folder: Path, last: int, every: int, device: str, *names: str) -> None:
    words = [sys.executable, str(SCRIPT), str(folder), str(last), str(every), device, *names]
    subprocess.run(words, check=True, timeout=300, env={**os.environ, **EXACT})


def same_from(folder: Path, name: str, whole: dict[str, str], save: int, last: int) -> None:
    """The losses after step `save`, and every state of step `last`, are those of the run that was
    not interrupted."""
    losses = json.loads((folder / "again" / f"{name}.json").read_text())
    assert losses == {step: whole[step] for step in map(str, range(save + 1, last + 1))}
    folders = [str(folder / part / name / f"checkpoint-{last}") for part in ("whole", "again")]
    parts = compare_checkpoints(*folders, TIMES)
    assert {p.name: p.differences for p in parts if p.differences} == {}


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao compiles its steps, which takes longer than all of these runs."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


@pytest.mark.usefixtures("uncompiled")
def test_runs_in_few_bits_go_on_in_a_new_process_to_the_last_bit(
    tmp_path: Path, run_script: Callable[..., Any]
) -> None:
    go_on_in_a_new_process(run_script, tmp_path, ["8bit", "qat", "fp8"], save=2, last=3)


@pytest.mark.stress
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", [*RUNS])
def test_fifty_steps_in_few_bits_and_ten_more_in_a_new_process(
    name: str, tmp_path: Path, run_script: Callable[..., Any]
) -> None:
    go_on_in_a_new_process(run_script, tmp_path, [name], save=50, last=60)


@pytest.mark.stress
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")
@pytest.mark.parametrize(
    ("name", "device"), [*((name, "cuda") for name in RUNS), ("8bit", "cuda-compiled")]
)
def test_fifty_steps_on_a_gpu_and_ten_more_in_a_new_process(
    name: str, device: str, tmp_path: Path
) -> None:
    in_a_process(tmp_path / "whole", 60, 50, device, name)
    folders = (tmp_path / part / name / "checkpoint-50" for part in ("whole", "again"))
    shutil.copytree(*folders)
    in_a_process(tmp_path / "again", 60, 60, device, name)
    whole = json.loads((tmp_path / "whole" / f"{name}.json").read_text())
    assert len(whole) == 60
    same_from(tmp_path, name, whole, 50, 60)
