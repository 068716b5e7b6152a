"""Optimizers that wrap or hold others: the moments come back into the one that makes the steps, or
the save refuses."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from ckptcore import (
    CheckpointManager,
    InvalidState,
    OptimizerState,
    StateComponent,
    StateMismatch,
    open_checkpoint,
)
from ckptcore.testing.ranks import run_ranks


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4))


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        own = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=own)).square().sum().backward()
        optimizer.step()


class Handing(torch.optim.Optimizer):
    """State and groups are those of the one inside, by properties, as in Accelerate."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad()


class Hidden(Handing):
    """As Handing, but nothing shows which optimizer is inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.boxed = lambda: optimizer

    optimizer = property(lambda self: self.boxed())  # type: ignore[assignment]


class Container(torch.optim.Optimizer):
    """Matrices by one optimizer, vectors by another; the base class knows the parameters only."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__(
            [p for part in parts for group in part.param_groups for p in group["params"]], {}
        )

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> Any:
        return {str(n): part.state_dict() for n, part in enumerate(self.parts)}

    def load_state_dict(self, state: Any) -> None:
        for n, part in enumerate(self.parts):
            part.load_state_dict(state[str(n)])


class Mute(Container):
    """Its own state_dict() is the empty one of the base class."""

    state_dict = torch.optim.Optimizer.state_dict
    load_state_dict = torch.optim.Optimizer.load_state_dict


class Counted(Container):
    """Has something of its own besides."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.steps += 1
        for part in self.parts:
            part.param_groups[0]["lr"] = 0.05 / self.steps

    def state_dict(self) -> Any:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.steps = state["steps"]


class Flat(Container):
    """Stores its moments by names of its own."""

    def state_dict(self) -> Any:
        packed = [part.state_dict() for part in self.parts]
        return {
            f"{n}.{p}.{k}": v
            for n, one in enumerate(packed)
            for p, s in one["state"].items()
            for k, v in s.items()
        }

    def load_state_dict(self, state: Any) -> None:
        for n, part in enumerate(self.parts):
            packed = part.state_dict()
            for name, value in state.items():
                number, p, key = name.split(".")
                if int(number) == n:
                    packed["state"].setdefault(int(p), {})[key] = value
            part.load_state_dict(packed)


class Optioned(Container):
    """Its own groups have options, too, which those inside do not share."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        every = [p for part in parts for group in part.param_groups for p in group["params"]]
        torch.optim.Optimizer.__init__(self, every, {"lr": 0.1})


class Mapped(Container):
    """Holds the others in a dict, and calls no constructor of the base class."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.by_key = {str(n): part for n, part in enumerate(parts)}

    parts = property(lambda self: list(self.by_key.values()))  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad()


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.1, amsgrad=True)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def accelerated(model: nn.Module) -> Any:
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(adamw(model))


def lightning(model: nn.Module) -> Any:
    return pytest.importorskip("lightning.pytorch.core.optimizer").LightningOptimizer(adamw(model))


MAKERS = {
    "accelerate": accelerated,
    "lightning": lightning,
    "handing": lambda m: Handing(adamw(m)),
    "handing twice": lambda m: Handing(Handing(adamw(m))),
    "hidden": lambda m: Hidden(adamw(m)),
    "container": lambda m: Container(two(m)),
    "mute": lambda m: Mute(two(m)),
    "counted": lambda m: Counted(two(m)),
    "flat": lambda m: Flat(two(m)),
    "mapped": lambda m: Mapped(two(m)),
    "optioned": lambda m: Optioned(two(m)),
    "handing a container": lambda m: Handing(Container(two(m))),
    "several": two,
}


class Steps:
    """What a list of optimizers does."""

    def __init__(self, optimizers: Any) -> None:
        self.optimizers = optimizers if isinstance(optimizers, list) else [optimizers]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            getattr(optimizer, "_optimizer", optimizer).step()  # that of Lightning wants a trainer


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("live_steps", [0, 2])
@pytest.mark.filterwarnings("error::ckptcore.CheckpointWarning")
def test_training_goes_on_as_if_nothing_happened(
    tmp_path: Path, same, kind: str, live_steps: int
) -> None:
    model, other = net(), net()
    optimizer, second = MAKERS[kind](model), MAKERS[kind](other)
    train(model, Steps(optimizer), 0, 3)
    train(other, Steps(second), 7, 7 + live_steps)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(3, {"model": model, "optimizer": optimizer})
        ckpt.restore({"model": other, "optimizer": second})
    train(model, Steps(optimizer), 3, 6)
    train(other, Steps(second), 3, 6)
    same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("kind", sorted(MAKERS.keys() - {"counted", "flat", "optioned"}))
def test_moments_go_by_name_into_the_optimizers_alone(tmp_path: Path, same, kind: str) -> None:
    """What only hands on, or holds others, is no part of what is stored."""
    model, other = net(), net()
    optimizer = MAKERS[kind](model)
    holds_two = kind in ("container", "mute", "mapped", "several", "handing a container")
    bare: Any = two(other) if holds_two else adamw(other)
    train(model, Steps(optimizer), 0, 3)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(3, {"model": model, "optimizer": optimizer})
        ckpt.restore({"model": other, "optimizer": bare})
    train(model, Steps(optimizer), 3, 6)
    train(other, Steps(bare), 3, 6)
    same(dict(other.state_dict()), dict(model.state_dict()))
    with open_checkpoint(tmp_path / "checkpoint-3") as view:
        names = {t.full_name for t in view.tensors()}
    assert {n for n in names if n.startswith("optimizer/state/0.bias/")} >= {
        "optimizer/state/0.bias/exp_avg"
    }


class Sharpness(torch.optim.Optimizer):
    """State of its own and an optimizer inside whose state it does not give away."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["old"] = parameter.detach().clone()
        self.base.step()


class Forgetful(Sharpness):
    """Its own state_dict() and load_state_dict() pass over the moments inside."""

    def state_dict(self) -> Any:
        return {"olds": [values["old"] for values in self.state.values()]}

    def load_state_dict(self, state_dict: Any) -> None:
        pass


class Copying(torch.optim.SGD):
    """Its `state` is a copy each time: nothing can be put into it."""

    @property  # type: ignore[misc]
    def state(self) -> Any:  # type: ignore[override]
        return dict(self.kept)

    @state.setter
    def state(self, value: Any) -> None:
        self.kept = value


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda m: Sharpness(adamw(m)),
            "Sharpness keeps state of its own besides that of the AdamW inside",
        ),
        (
            lambda m: Forgetful(adamw(m)),
            "Forgetful and the optimizers inside it hold state that its state_dict.. does not: "
            "'step' of the AdamW",
        ),
        (lambda m: Copying(m.parameters(), lr=0.1), "Copying.state is another object each time"),
    ],
)
def test_state_that_would_be_lost_is_refused_with_what_to_do(
    tmp_path: Path, same, make: Any, why: str
) -> None:
    model = net()
    optimizer = make(model)
    if not isinstance(optimizer, Copying):
        train(model, optimizer, 0, 2)
    with CheckpointManager(tmp_path) as ckpt:
        with pytest.raises(InvalidState, match=why) as caught:
            ckpt.save(2, {"model": model, "optimizer": optimizer})
        assert "OptimizerState([...], models)" in str(caught.value)
        assert not list(tmp_path.glob("checkpoint*"))
        if isinstance(optimizer, Copying):
            return
        # What the message says works.
        ckpt.save(2, {"model": model, "optimizer": OptimizerState([optimizer.base], model)})
        other = net()
        second = make(other)
        ckpt.restore({"model": other, "optimizer": OptimizerState([second.base], other)})
    train(model, optimizer, 2, 4)
    train(other, second, 2, 4)
    same(dict(other.state_dict()), dict(model.state_dict()))


class Deaf(torch.optim.SGD):
    """Lets go of what it is given as soon as it is asked again."""

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.state.clear()


class DeafToItself(Counted):
    def load_state_dict(self, state: Any) -> None:
        """Takes nothing."""


@pytest.mark.parametrize("kind", ["Deaf", "DeafToItself"])
def test_what_did_not_arrive_is_an_error(tmp_path: Path, kind: str) -> None:
    def make(model: nn.Module) -> Any:
        options = {"lr": 0.1, "momentum": 0.9}
        return Deaf(model.parameters(), **options) if kind == "Deaf" else DeafToItself(two(model))

    model, other = net(), net()
    optimizer = make(model)
    train(model, optimizer, 0, 2)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(2, {"model": model, "optimizer": optimizer})
        with pytest.raises(StateMismatch, match=kind) as caught:
            ckpt.load({"model": other, "optimizer": make(other)})
    assert "live state was changed" in str(caught.value)
    assert any("momentum_buffer" in name for name in caught.value.missing)


def test_several_optimizers_are_one_state(tmp_path: Path, same) -> None:
    model = net()
    optimizers = two(model)
    train(model, Steps(optimizers), 0, 2)
    optimizers[0].state["global"] = {"seen": 7}
    state = OptimizerState(optimizers, model).state_dict()
    assert state["group_of"] == {"0.weight": 0, "2.weight": 0, "0.bias": 1, "2.bias": 1}
    assert state["other"] == {0: {"global": {"seen": 7}}}
    assert (set(state["state"]["0.weight"]), state["groups"][1]["lr"]) == ({"momentum_buffer"}, 0.1)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(2, {"model": model, "optimizer": OptimizerState(optimizers, model)})
        other = net()
        again = two(other)
        ckpt.load({"model": other, "optimizer": OptimizerState(again, other)})
        assert again[0].state["global"] == {"seen": 7}
        with pytest.raises(StateMismatch, match="1 parameter groups, 2 were saved"):
            ckpt.load({"model": other, "optimizer": OptimizerState(adamw(other), other)})
    with pytest.raises(InvalidState, match=r"'0.weight' is in several"):
        OptimizerState([adamw(model), adamw(model)], model)


def test_a_restored_wrapper_keeps_no_copy_of_the_state(tmp_path: Path) -> None:
    """What a wrapper's __dict__ got would hide a state that the optimizer inside replaces later."""
    model, other = net(), net()
    optimizer, second = accelerated(model), accelerated(other)
    train(model, optimizer, 0, 1)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer})
        ckpt.restore({"model": other, "optimizer": second})
    assert "state" not in vars(second)
    second.optimizer.load_state_dict(optimizer.optimizer.state_dict())
    assert second.state is second.optimizer.state


def test_fabric_stores_the_names_of_the_bare_model(tmp_path: Path, same) -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    bare, other = net(), net()
    optimizer = adamw(bare)
    model, wrapped = fabric.setup(bare, optimizer)
    train(model, wrapped, 0, 2)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(2, {"model": model, "optimizer": wrapped})
        plain = adamw(other)
        ckpt.load({"model": other, "optimizer": plain})
        with open_checkpoint(tmp_path / "checkpoint-2") as view:
            assert not [t.full_name for t in view.tensors() if "_forward_module" in t.full_name]
        again, second = fabric.setup(held := net(), adamw(held))
        ckpt.load({"model": again, "optimizer": second})
    for resumed, its in ((other, plain), (again, second)):
        assert torch.equal(
            its.state[next(resumed.parameters())]["exp_avg"],
            optimizer.state[bare[0].weight]["exp_avg"],
        )
    train(model, wrapped, 2, 4)
    train(other, plain, 2, 4)
    train(again, second, 2, 4)
    same(dict(other.state_dict()), dict(bare.state_dict()))
    same(dict(again.state_dict()), dict(bare.state_dict()))


class Lookahead(torch.optim.Optimizer):
    """Slow weights and a count of its own, which its own state_dict() gives."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, p in zip(
                self.slow, (p for g in self.param_groups for p in g["params"]), strict=True
            ):
                p.data.copy_(slow.lerp_(p.detach(), 0.5))

    def state_dict(self) -> Any:
        return {"inner": self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state["inner"])
        self.slow, self.count = [t.clone() for t in state["slow"]], state["count"]


# What a nest of optimizers is made of: a kind, and the kinds inside.
LEAVES = st.sampled_from(["SGD", "AdamW", "RMSprop", "Adafactor"])
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from([Handing, Hidden, Lookahead, Sharpness]), inner),
        st.tuples(
            st.sampled_from([Container, Counted, Mute]), st.lists(inner, min_size=1, max_size=2)
        ),
    ),
    max_leaves=4,
)


def told(nest: Any) -> bool:
    """Whether all that is hidden is in the state_dict() of what is hidden; of the rest not even
    torch knows."""
    kind, inner = (nest, []) if isinstance(nest, str) else nest
    inner = inner if isinstance(inner, list) else [inner]
    silent = kind is Hidden and any(name in str(inner) for name in ("Sharpness", "Mute"))
    return not silent and all(map(told, inner))


def nested(nest: Any, parameters: list[nn.Parameter]) -> Any:
    """The optimizer that a nest describes; the parameters are dealt out over those in a
    container."""
    if isinstance(nest, str):
        options = {"momentum": 0.9} if nest in ("SGD", "RMSprop") else {}
        return getattr(torch.optim, nest)(parameters, lr=0.01, **options)
    kind, inner = nest
    if not isinstance(inner, list):
        return kind(nested(inner, parameters))
    number = len(inner)
    return kind(
        [nested(one, parameters[n::number]) for n, one in enumerate(inner) if parameters[n::number]]
    )


@settings(max_examples=60)
@example(nest=(Lookahead, (Sharpness, "SGD")), live_steps=0)
@example(nest=(Container, [(Lookahead, "SGD"), "AdamW"]), live_steps=2)
@given(nest=NESTS.filter(told), live_steps=st.sampled_from([0, 2]))
def test_any_nest_of_optimizers_goes_on_exactly_or_is_refused(
    same, nest: Any, live_steps: int
) -> None:
    model, other = net(), net()
    optimizer, second = (nested(nest, list(m.parameters())) for m in (model, other))
    train(model, optimizer, 0, 3)
    train(other, second, 7, 7 + live_steps)
    with tempfile.TemporaryDirectory() as folder, CheckpointManager(folder) as ckpt:
        try:
            ckpt.save(3, {"model": model, "optimizer": optimizer})
        except InvalidState:
            # Where state is in no state_dict(), and something else is in one alone.
            more = "Lookahead" in str(nest) or "Counted" in str(nest)
            assert "Sharpness" in str(nest) or ("Mute" in str(nest) and more), (
                "refused without need"
            )
            return
        ckpt.restore({"model": other, "optimizer": second})
    train(model, optimizer, 3, 6)
    train(other, second, 3, 6)
    same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("kind", ["handing", "container", "counted", "flat"])
@pytest.mark.parametrize("pattern", ["REPLICATED", "GLOBAL", "PER_RANK"])
def test_every_rank_gets_the_moments(tmp_path: Path, same, kind: str, pattern: str) -> None:
    models = [net() for _ in range(4)]  # made here: the ranks are threads, and draw from one stream
    optimizers = [MAKERS[kind](model) for model in models]
    for n in (0, 1):
        train(models[n], optimizers[n], 0, 3)

    def program(comm: Any) -> None:
        def parts(n: int) -> list[StateComponent]:
            return [
                StateComponent("model", models[n], pattern),
                StateComponent("opt", optimizers[n], pattern),
            ]

        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(3, parts(comm.rank))
            ckpt.restore(parts(2 + comm.rank))

    run_ranks(2, program)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 3, 6)
    for model in models[1:]:
        same(dict(model.state_dict()), dict(models[0].state_dict()))


def test_an_optimizer_of_lazy_parameters_is_known_by_their_names(tmp_path: Path) -> None:
    """They have no shape before the first step, which is where a restored program is."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.LazyLinear(3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    (model, optimizer), (other, second) = make(), make()
    assert OptimizerState(second, other).state_dict()["shapes"] == {
        "0.weight": None,
        "0.bias": None,
    }
    train(model, optimizer, 0, 2)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(2, {"opt": OptimizerState(optimizer, model)})
        other(torch.zeros(5, 4))
        ckpt.load({"opt": OptimizerState(second, other)})
    assert torch.equal(
        second.state[other[0].weight]["momentum_buffer"],
        optimizer.state[model[0].weight]["momentum_buffer"],
    )
