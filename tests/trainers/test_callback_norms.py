from __future__ import annotations

import multiprocessing
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ckpt_trainers.callbacks import (
    GradNormLogger,
    ParameterNormLogger,
    WeightNormLogger,
    read_json_array,
)
from ckpt_trainers.callbacks.norms import squared_norms
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ckptcore.testing.processes import patience

from .callback_run import FakeTrainer


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model[1].weight.data[0] = 3.0
    return model


def expected(model: nn.Module, of: Any = lambda p: p) -> dict[str, float]:
    return {name: of(p).detach().norm().item() for name, p in model.named_parameters()}


def norm_records(folder: Path, name: str) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in record.items() if k != "timestamp"}
        for record in read_json_array(folder / name)
    ]


def test_the_weights_together_and_tied_ones_once() -> None:
    model = model_of()
    model.add_module("tied", nn.Linear(7, 3))
    model.get_submodule("tied").weight = model[1].weight  # type: ignore[assignment]
    trainer = FakeTrainer([WeightNormLogger()], model=model)
    trainer.log({"loss": 1.0})
    whole = sum(value**2 for value in expected(model).values()) ** 0.5
    assert trainer.state.log_history[0]["weight_norm"] == pytest.approx(whole)
    trainer.state.is_world_process_zero = False  # the same there: rank 0 is enough
    trainer.log({"loss": 1.0})
    assert "weight_norm" not in trainer.state.log_history[1]


def test_low_precision_weights_are_summed_in_float32() -> None:
    tensor = torch.full((1000, 70), 1.0, dtype=torch.bfloat16)
    assert squared_norms([tensor, torch.tensor(3.0)]).tolist() == pytest.approx([70000.0, 9.0])


@pytest.mark.parametrize("model", [nn.Linear(2, 2, device="meta"), nn.Identity()])
def test_models_without_weights_turn_them_off_with_one_warning(
    model: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = FakeTrainer(
        [WeightNormLogger(), GradNormLogger(), ParameterNormLogger()],
        tmp_path / "logs",
        model=model,
    )
    trainer.fire("on_train_begin")
    for _ in range(2):
        trainer.fire("on_pre_optimizer_step")
        trainer.log({"loss": 1.0})
        trainer.evaluate(eval_loss=1.0)
    assert sorted(record.message for record in caplog.records) == [
        f"{name} is off: the model has no weights here"
        for name in ("GradNormLogger", "ParameterNormLogger", "WeightNormLogger")
    ]
    assert "weight_norm" not in trainer.state.log_history[0]
    assert norm_records(tmp_path / "logs", "parameter_norms.json") == []


def backward(model: nn.Module, step: int) -> None:
    model.zero_grad()
    model(torch.full((2, 5), float(step))).pow(2).mean().backward()


def train(
    trainer: FakeTrainer, model: nn.Module, to: int, every: int
) -> dict[int, dict[str, float]]:
    """Evaluates now and then, as a trainer does; the norms of the gradients by step."""
    if not trainer.begun:
        trainer.fire("on_train_begin")
    trainer.begun = True
    norms = {}
    for step in range(trainer.state.global_step + 1, to + 1):
        trainer.fire("on_step_begin")
        backward(model, step)
        trainer.fire("on_pre_optimizer_step")
        norms[step] = {
            name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None
        }
        model.zero_grad()
        trainer.state.global_step, trainer.state.epoch = step, step / 10
        if step % every == 0:
            trainer.evaluate(eval_loss=1.0)
    return norms


def test_gradients_are_taken_at_the_steps_of_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    model[0].bias.requires_grad_(False)
    trainer = FakeTrainer([GradNormLogger()], tmp_path / "logs", model=model)
    trainer.state.eval_steps = 3
    taken: list[int] = []
    monkeypatch.setattr(
        "ckpt_trainers.callbacks.norms.squared_norms",
        lambda t: taken.append(len(t)) or squared_norms(t),
    )
    norms = train(trainer, model, 7, 3)
    assert taken == [3, 3]  # of two steps, three parameters each
    records = norm_records(tmp_path / "logs", "gradient_norms.json")
    assert [(r["global_step"], r["epoch"]) for r in records] == [(3, 0.3), (6, 0.6)]
    for record in records:
        assert record["grad_norms"] == pytest.approx(norms[record["global_step"]])
    trainer.evaluate(eval_loss=1.0)  # at step 7, where none was due
    trainer.evaluate(eval_loss=1.0)  # nor is there anything new to say
    checkpoint = trainer.save()
    train(trainer, model, 9, 3)
    (*_, late, _) = records_after = norm_records(tmp_path / "logs", "gradient_norms.json")
    assert [r["global_step"] for r in records_after] == [3, 6, 7, 9]
    assert late["grad_norms"] == pytest.approx(norms[7])
    resumed = FakeTrainer([GradNormLogger()], tmp_path / "logs", model=model)
    resumed.restore(checkpoint)
    resumed.fire("on_train_begin")
    assert norm_records(tmp_path / "logs", "gradient_norms.json") == [*records, late]


def test_the_gradients_of_a_step_are_let_go_before_the_next(tmp_path: Path) -> None:
    model = model_of()
    trainer = FakeTrainer([GradNormLogger()], tmp_path / "logs", model=model)
    trainer.fire("on_train_begin")
    for ending in ("on_step_begin", "on_train_end"):
        backward(model, 1)
        trainer.fire("on_pre_optimizer_step")
        held = weakref.ref(model[0].weight.grad)  # type: ignore[arg-type]
        model.zero_grad()
        assert held() is not None
        trainer.fire(ending)
        assert held() is None


def test_without_gradients_and_without_a_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = FakeTrainer(
        [GradNormLogger()], tmp_path / "logs", model=model_of(), fuse_optim_with_backward=True
    )
    train(trainer, model_of(), 4, 1)
    assert norm_records(tmp_path / "logs", "gradient_norms.json") == []
    assert len(caplog.records) == 1 and "fuse_optim_with_backward" in caplog.text
    without = FakeTrainer([GradNormLogger(), ParameterNormLogger()], model=model_of())
    train(without, model_of(), 2, 1)
    assert len(caplog.records) == 1


def test_norms_and_spectral_norms(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(4, 6), nn.Linear(3, 3))
    torch.nn.init.zeros_(model[2].weight)
    before = torch.get_rng_state()
    trainer = FakeTrainer(
        [ParameterNormLogger(power_iter_steps=150)], tmp_path / "logs", model=model
    )
    trainer.fire("on_train_begin")
    trainer.evaluate(eval_loss=1.0)
    assert torch.equal(torch.get_rng_state(), before)

    def largest(parameter: torch.Tensor) -> float:
        matrix = parameter.detach().flatten(1) if parameter.ndim > 1 else parameter.detach()[None]
        return float(torch.linalg.matrix_norm(matrix, 2))

    (record,) = norm_records(tmp_path / "logs", "parameter_norms.json")
    assert record["norms"] == pytest.approx(expected(model))
    spectral = {name: largest(p) for name, p in model.named_parameters()}
    assert record["spectral_norms"] == pytest.approx(spectral, rel=1e-4)
    assert record["spectral_norms"]["2.weight"] == 0
    # A matrix that was all zero is looked at again.
    model[2].weight.data.fill_(1.0)
    trainer.evaluate(eval_loss=1.0)
    again = norm_records(tmp_path / "logs", "parameter_norms.json")[1]
    assert again["spectral_norms"]["2.weight"] == pytest.approx(3.0)


def test_power_iteration_starts_where_it_ended(tmp_path: Path) -> None:
    model = nn.Linear(40, 40, bias=False)
    true = float(torch.linalg.matrix_norm(model.weight.detach(), 2))
    callback = ParameterNormLogger(log_norms=False, power_iter_steps=2)
    trainer = FakeTrainer([callback], tmp_path / "logs", model=model)
    trainer.fire("on_train_begin")
    for step in range(60):
        trainer.state.global_step = step
        trainer.evaluate(eval_loss=1.0)
    records = norm_records(tmp_path / "logs", "parameter_norms.json")
    found = [record["spectral_norms"]["weight"] for record in records]
    assert all("norms" not in record for record in records)
    assert true - found[0] > true - found[-1] and found[-1] == pytest.approx(true, rel=1e-2)
    callback._vectors["weight"] = torch.ones(3)  # of another shape: made anew
    trainer.evaluate(eval_loss=1.0)


def spread(rank: int, folder: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        model = model_of()
        for module in model:
            for name, parameter in list(module.named_parameters()):
                placement = Shard(0) if name == "weight" else Replicate()
                setattr(
                    module,
                    name,
                    nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement])),
                )
        loggers = [WeightNormLogger(), GradNormLogger(), ParameterNormLogger(power_iter_steps=100)]
        trainer = FakeTrainer(loggers, Path(folder) / "logs", model=model)
        trainer.state.is_world_process_zero = rank == 0
        trainer.fire("on_train_begin")
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 2
        trainer.fire("on_pre_optimizer_step")
        trainer.log({"loss": 1.0})
        trainer.state.global_step = 1
        trainer.evaluate(eval_loss=1.0)
        results.put((rank, trainer.state.log_history[0]["weight_norm"]))
    finally:
        dist.destroy_process_group()


def test_norms_of_parameters_that_are_spread_over_ranks(tmp_path: Path) -> None:
    """One weight of 7 and one of 3 rows in shards, biases on both ranks."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [
        context.Process(target=spread, args=(rank, str(tmp_path), results)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=60 * patience()) for _ in ranks)
    for process in ranks:
        process.join(30 * patience())
    assert [process.exitcode for process in ranks] == [0, 0]
    model = model_of()
    norms = expected(model)
    whole = sum(value**2 for value in norms.values()) ** 0.5
    assert found == pytest.approx({0: whole, 1: whole})
    (gradients,) = norm_records(tmp_path / "logs", "gradient_norms.json")
    assert gradients["grad_norms"] == pytest.approx(
        {name: 2 * value for name, value in norms.items()}
    )
    (parameters,) = norm_records(tmp_path / "logs", "parameter_norms.json")
    assert parameters["norms"] == pytest.approx(norms)
    largest = float(torch.linalg.matrix_norm(model[0].weight.detach(), 2))
    assert parameters["spectral_norms"]["0.weight"] == pytest.approx(largest, rel=1e-3)
