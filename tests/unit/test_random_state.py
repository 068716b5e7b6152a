"""Random streams, learning-rate schedules and loss scales go on exactly."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ckptcore import CheckpointManager, InvalidState, RNGState, SharingPattern, StateMismatch
from ckptcore.state.component import as_components
from ckptcore.testing.ranks import run_ranks


def draws() -> list:
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(70),
        np.random.rand(2).tolist(),
        np.random.normal(),
        np.random.randint(1000),
        torch.rand(2).tolist(),
        torch.randn(1).item(),
        torch.randperm(9).tolist(),
        nn.functional.dropout(torch.ones(16), 0.5).tolist(),
    ]


@pytest.fixture(autouse=True)
def streams_as_they_were():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@pytest.mark.parametrize("odd", [False, True], ids=["fresh", "half a pair of gaussians drawn"])
@pytest.mark.parametrize("transactional", [False, True])
def test_streams_go_on_bitwise(odd: bool, transactional: bool, tmp_path: Path) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    if odd:
        random.gauss(0, 1), np.random.normal(), torch.randn(1)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"rng": RNGState()})
        expected = [draws(), draws()]
        random.seed(7), np.random.seed(8), torch.manual_seed(9)
        draws()
        ckpt.load({"rng": RNGState()}, transactional=transactional)
        assert [draws(), draws()] == expected
        ckpt.restore({"rng": RNGState()})
        assert draws() == expected[0]


def test_saving_draws_nothing(tmp_path: Path) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    expected = draws()
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"rng": RNGState(), "model": {"w": torch.ones(2)}})
    assert draws() == expected


def test_streams_are_restored_after_everything_else(tmp_path: Path) -> None:
    class Drawing:
        def state_dict(self) -> dict:
            return {"a": 1}

        def load_state_dict(self, state: dict) -> None:
            draws()

    torch.manual_seed(5)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"rng": RNGState(), "loader": Drawing(), "z": Drawing()})
        expected = draws()
        ckpt.load({"rng": RNGState(), "loader": Drawing(), "z": Drawing()})
    assert draws() == expected


def test_pattern() -> None:
    assert RNGState.sharing_pattern is SharingPattern.PER_RANK


SCHEDULES = {
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=12),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 8),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 6)], [3]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


def schedule(kind: str):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "opt": optimizer, "lr": SCHEDULES[kind](optimizer)}


def advance(state: dict, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        state["opt"].step()
        rates.append(state["opt"].param_groups[0]["lr"])
        plateau = isinstance(state["lr"], lr_scheduler.ReduceLROnPlateau)
        state["lr"].step(1.0) if plateau else state["lr"].step()
    return rates


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("stop", [1, 4])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_learning_rates_go_on(kind: str, stop: int, tmp_path: Path) -> None:
    expected = advance(schedule(kind), 9)
    assert len(set(expected)) > 1
    first = schedule(kind)
    rates = advance(first, stop)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(stop, first)
        again = schedule(kind)
        ckpt.load(again)
    assert rates + advance(again, 9 - stop) == expected
    types = {k: type(v) for k, v in first["lr"].state_dict().items()}
    assert {k: type(v) for k, v in again["lr"].state_dict().items()} == types


def test_loss_scale(tmp_path: Path) -> None:
    scaler, fresh = (
        torch.amp.GradScaler("cpu", init_scale=2.0**n, growth_interval=5) for n in (3, 16)
    )
    scaler.scale(torch.ones(1))
    scaler.load_state_dict({**scaler.state_dict(), "scale": 512.0, "_growth_tracker": 4})
    fresh.scale(torch.ones(1))
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"scaler": scaler})
        ckpt.load({"scaler": fresh})
    assert fresh.state_dict() == scaler.state_dict()
    assert fresh.get_scale() == 512.0
    off = torch.amp.GradScaler("cpu", enabled=False)
    with CheckpointManager(tmp_path / "off") as ckpt:
        ckpt.save(1, {"scaler": off})
        ckpt.load({"scaler": torch.amp.GradScaler("cpu", enabled=False)})


ODD_STREAMS = {
    "python": lambda state: {**state, "python": (3, (1, 2), None)},
    "numpy": lambda state: {**state, "numpy": {**state["numpy"], "keys": [1]}},
    "torch": lambda state: {**state, "torch": torch.zeros(7, dtype=torch.uint8)},
    "accelerator": lambda state: {**state, "accelerator": ["cuda", [1]]},
    "nothing": lambda state: {},
}


@pytest.mark.parametrize("change", ODD_STREAMS.values(), ids=ODD_STREAMS.keys())
def test_a_state_that_is_none_leaves_all_streams_as_they_are(change) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    other = RNGState().state_dict()
    random.seed(4), np.random.seed(5), torch.manual_seed(6)
    expected = draws()
    random.seed(4), np.random.seed(5), torch.manual_seed(6)
    with pytest.raises(StateMismatch, match="not that of random streams") as caught:
        RNGState().load_state_dict(change(other))
    assert isinstance(caught.value.__cause__, Exception)
    assert draws() == expected


@pytest.mark.parametrize("size", [1, 2, 4])
def test_on_another_number_of_ranks(size: int, tmp_path: Path) -> None:
    """The dict of README's example on other numbers of ranks: what is not said is inferred, streams
    may stay."""

    def state(number: float, **how) -> dict:
        model = nn.Linear(2, 2, bias=False)
        nn.init.constant_(model.weight, number)
        return {"model": model, "rng": RNGState(**how), "n": {"at": number}}

    def save(comm) -> None:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, state(3.0))

    def restore(comm) -> tuple:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            live = state(0.0, on_resize="keep")
            ckpt.restore(live)
            error = None
            try:
                ckpt.restore(state(0.0))
            except StateMismatch as raised:
                error = str(raised)
            return live["model"].weight[0, 0].item(), error

    run_ranks(2, save)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run_ranks(size, restore)
    assert [value for value, _ in found] == [3.0] * size
    if size == 2:
        assert [error for _, error in found] == [None, None] and not caught
    else:
        assert all("RNGState(on_resize='keep')" in error for _, error in found)
        assert len(caught) == 1 and "the live state stays" in str(caught[0].message)


def test_on_resize_is_checked_where_it_is_given() -> None:
    with pytest.raises(InvalidState, match="on_resize"):
        RNGState(on_resize="ignore")


def test_an_object_that_says_its_pattern_says_what_a_resize_does_too() -> None:
    class Loader:
        sharing_pattern, on_resize = "PER_RANK", "keep"

        def state_dict(self) -> dict:
            return {}

        def load_state_dict(self, state: dict) -> None:
            pass

    class Plain(Loader):
        sharing_pattern = None  # says nothing, so its other names mean nothing either

    loader, plain = as_components({"loader": Loader(), "plain": Plain()})
    assert (loader.sharing_pattern, loader.on_resize) == ("PER_RANK", "keep")
    assert (plain.sharing_pattern, plain.on_resize) == ("GLOBAL", "error")
