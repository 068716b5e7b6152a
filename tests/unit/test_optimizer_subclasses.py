"""Optimizers of the user's own: state that is of no parameter is stored, and what a state_dict() of
their own adds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptcore import CheckpointManager, InvalidState, OptimizerState, StateComponent
from ckptcore.testing.ranks import run_ranks


class Counting(torch.optim.SGD):
    """Keeps state under keys that are no parameters."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        state = self.state["global"]
        state["steps"] = state.get("steps", 0) + 1
        state["mean"] = state.get("mean", torch.zeros(2)) + 1.5
        self.state[7]["name"] = "seven"


class Wrapping(torch.optim.SGD):
    """Adds to state_dict() what is no state of it."""

    slow = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}


def trained(
    kind: type[torch.optim.Optimizer], steps: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)  # type: ignore[call-arg]
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("live_steps", [0, 1])
@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize(
    ("pattern", "broadcast"),
    [("GLOBAL", False), ("REPLICATED", True), ("SHARDED", False), ("SHARDED", True)],
)
def test_state_of_no_parameter(
    tmp_path: Path, same, pattern: str, broadcast: bool, transactional: bool, live_steps: int
) -> None:
    """As torch's own state_dict and load_state_dict bring it back."""

    def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[StateComponent]:
        return [
            StateComponent("m", model, pattern),
            StateComponent("o", OptimizerState(optimizer, model), pattern),
        ]

    def program(comm: Any) -> None:
        source, live = trained(Counting, 3), trained(Counting, live_steps)
        with CheckpointManager(tmp_path, comm=comm, load_broadcast=broadcast) as ckpt:
            ckpt.save(3, parts(*source))
            ckpt.load(parts(*live), transactional=transactional)
        (model, optimizer), (source_model, source_optimizer) = live, source
        same(dict(optimizer.state["global"]), {"steps": 3, "mean": torch.tensor([4.5, 4.5])})
        same(dict(optimizer.state[7]), {"name": "seven"})
        assert set(optimizer.state) == {model.weight, model.bias, "global", 7}
        same(optimizer.state[model.weight], source_optimizer.state[source_model.weight])
        optimizer.step()
        assert optimizer.state["global"]["steps"] == 4

    run_ranks(2, program)


def test_state_of_no_parameter_that_was_not_there_yet_is_dropped(tmp_path: Path) -> None:
    """As the moments of parameters are: what came after the checkpoint is no part of its state."""
    live = trained(Counting, 0)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(0, {"m": live[0], "o": live[1]})
        live[0](torch.ones(2)).sum().backward()
        live[1].step()
        assert live[1].state["global"]["steps"] == 1
        ckpt.load({"m": live[0], "o": live[1]})
    assert dict(live[1].state) == {}


def test_no_such_state_is_no_key() -> None:
    model, optimizer = trained(torch.optim.SGD, 1)
    assert list(OptimizerState(optimizer, model).state_dict()) == [
        "state",
        "group_of",
        "shapes",
        "groups",
    ]


def hooked(*args: Any, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(*args, **options)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "n": 1})
    return optimizer


def prepared(*args: Any, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(*args, **options)
    optimizer.register_state_dict_pre_hook(lambda _: None)
    return optimizer


@pytest.mark.parametrize("kind", [Wrapping, hooked])
def test_a_state_dict_with_more_that_nothing_puts_back_is_refused(
    tmp_path: Path, kind: Any
) -> None:
    model, optimizer = trained(kind, 2)
    with CheckpointManager(tmp_path) as ckpt:
        with pytest.raises(
            InvalidState, match=r"state_dict\(\) of its own, or hooks on it"
        ) as caught:
            ckpt.save(1, {"m": model, "o": optimizer})
        with pytest.raises(InvalidState, match="OptimizerState"):
            ckpt.save(1, {"m": model, "o": OptimizerState(optimizer, model)})
    assert ("'slow'" if kind is Wrapping else "'n'") in str(caught.value)
    assert "load_state_dict()" in str(caught.value)
    assert not list(tmp_path.glob("checkpoint*"))


class Whole(Wrapping):
    """Puts back what its state_dict() adds."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.slow = state_dict["slow"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "slow"})


def both_hooked(*args: Any, **options: Any) -> torch.optim.Optimizer:
    optimizer = hooked(*args, **options)
    optimizer.register_load_state_dict_pre_hook(lambda own, state: setattr(own, "slow", state["n"]))
    return optimizer


@pytest.mark.parametrize("kind", [Whole, both_hooked])
def test_a_state_dict_with_more_is_stored_as_it_is(tmp_path: Path, same, kind: Any) -> None:
    source, live = trained(kind, 2), trained(kind, 0)
    source[1].slow = 1  # type: ignore[attr-defined]
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"m": source[0], "o": source[1]})
        ckpt.load({"m": live[0], "o": live[1]})
    assert live[1].slow == 1  # type: ignore[attr-defined]
    for model, optimizer in (source, live):
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    same(dict(live[0].state_dict()), dict(source[0].state_dict()))
    moments = [
        optimizer.state[model.weight]["momentum_buffer"] for model, optimizer in (source, live)
    ]
    same(moments[1], moments[0])


@pytest.mark.parametrize("kind", [torch.optim.SGD, Counting, prepared])
def test_nothing_is_said_of_others(tmp_path: Path, kind: Any) -> None:
    model, optimizer = trained(kind, 1)
    optimizer.register_step_post_hook(lambda *_: None)
    with CheckpointManager(tmp_path) as ckpt, warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt.save(1, {"m": model, "o": optimizer})
        ckpt.load({"m": model, "o": optimizer})
