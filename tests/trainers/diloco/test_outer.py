"""The outer step, against arithmetic written down a second time."""

from __future__ import annotations

import pytest
import torch
from ckpt_trainers.diloco import DelayedNesterov, DiLoCoError
from ckpt_trainers.diloco.outer import GlobalModel, named_parameters
from torch import Tensor, nn


def gradients(number: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{"w": torch.randn(5, 3, generator=generator)} for _ in range(number)]


def start() -> dict[str, Tensor]:
    return {"w": torch.linspace(-1, 1, 15).reshape(5, 3)}


def reference(steps: list[Tensor], lr: float, momentum: float) -> Tensor:
    """Nesterov's method in the form of Sutskever et al., in double precision."""
    w = start()["w"].double()
    velocity = torch.zeros_like(w)
    for gradient in steps:
        velocity = momentum * velocity + gradient.double()
        w = w - lr * (gradient.double() + momentum * velocity)
    return w


def test_the_default_is_nesterov() -> None:
    model = GlobalModel(start())
    for gradient in gradients(12):
        model.step([gradient])
    found = model.snapshot(model.layout)["w"]
    expected = reference([g["w"] for g in gradients(12)], 0.7, 0.9)
    assert (found.double() - expected).abs().max() < 1e-6 * expected.abs().max()


def test_delayed_nesterov_of_one_is_nesterov() -> None:
    plain = GlobalModel(start())
    delayed = GlobalModel(start(), lambda p: DelayedNesterov(p, lr=0.7, momentum=0.9, delay=1))
    for gradient in gradients(12):
        plain.step([gradient])
        delayed.step([gradient])
    found, expected = delayed.parameters["w"], plain.parameters["w"]
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


def test_delayed_nesterov_moves_its_momentum_every_third_time() -> None:
    """Algorithm 3 of arXiv 2401.09135, written down again."""
    w, momentum, waiting = start()["w"].double(), torch.zeros(5, 3).double(), torch.zeros(5, 3)
    model = GlobalModel(start(), lambda p: DelayedNesterov(p, lr=0.5, momentum=0.8, delay=3))
    for number, gradient in enumerate(gradients(8), 1):
        model.step([gradient])
        w = w - 0.5 * gradient["w"] / 3
        waiting = waiting + gradient["w"]
        if number % 3 == 0:
            momentum = 0.8 * momentum + waiting / 3
            w, waiting = w - 0.5 * 0.8 * momentum, torch.zeros(5, 3)
        assert (model.parameters["w"] - w).abs().max() < 1e-5


def test_the_mean_is_of_all_workers_in_float32() -> None:
    sent = [{"w": g["w"].bfloat16()} for g in gradients(3)]
    model = GlobalModel(start(), lambda p: torch.optim.SGD(p, lr=1.0))
    model.step(sent)
    mean = sum(g["w"].float() for g in sent) / 3
    assert torch.equal(model.parameters["w"], start()["w"] - mean)


def test_only_the_fragment_that_was_sent_moves() -> None:
    model = GlobalModel({**start(), "v": torch.ones(2)})
    model.step([{"v": torch.ones(2)}])
    model.step([{"w": torch.ones(5, 3)}])
    assert model.parameters["v"].tolist() == pytest.approx([1 - 0.7 * 1.9] * 2)
    assert model.parameters["w"].grad is None


def test_what_is_shared_is_what_is_trained_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    found = named_parameters(nn.ModuleDict({"module": model}))
    assert sorted(found) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    with pytest.raises(DiLoCoError, match="no parameter that is trained"):
        named_parameters(nn.Flatten())


def test_a_delay_is_a_whole_number() -> None:
    with pytest.raises(ValueError, match="delay=0"):
        DelayedNesterov([nn.Parameter(torch.ones(1))], delay=0)
