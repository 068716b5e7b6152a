"""OptimizerState over stages and slices: by name, complete, without side effects, and regroupings
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptcore import (
    CheckpointManager,
    CheckpointWarning,
    InvalidState,
    ModelState,
    OptimizerState,
    ReplicationMismatch,
    SharingPattern,
    StateComponent,
    StateMismatch,
    open_checkpoint,
)
from ckptcore.state.tree import differences
from ckptcore.testing.ranks import run_ranks

SHARDED = SharingPattern.SHARDED
LAYERS = 6


class Stage(nn.Module):
    """Some layers of a model, under the names that they have in the whole model."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in layers:
            self.layers[str(number)] = layer = nn.Linear(3, 2)
            own = torch.Generator().manual_seed(number)  # the ranks are threads: no global stream
            for parameter in layer.parameters():
                parameter.data.normal_(generator=own)

    def fill(self, value: float) -> Stage:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)
        return self


def stages(world: int, rank: int, virtual: int = 1) -> list[Stage]:
    """The layers of a rank's stages, dealt out in turn over all virtual stages."""
    cuts = [
        list(range(LAYERS))[n * LAYERS // (world * virtual) : (n + 1) * LAYERS // (world * virtual)]
        for n in range(world * virtual)
    ]
    return [Stage(cuts[rank + world * n]) for n in range(virtual)]


def adamw(models: list[Stage], groups: int = 2, **how: Any) -> torch.optim.Optimizer:
    named = [(n, p) for model in models for n, p in model.named_parameters()]
    if groups == 1:
        return torch.optim.AdamW([p for _, p in named], lr=0.01, **how)
    decay = [p for n, p in named if n.endswith("weight")]
    rest = [p for n, p in named if not n.endswith("weight")]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.3}, {"params": rest, "lr": 0.05}], lr=0.01, **how
    )


def train(
    models: list[Stage], optimizer: torch.optim.Optimizer, steps: int, frozen: tuple[str, ...] = ()
) -> None:
    """Gradients that depend on name and step alone, so that every layout does the same."""
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for model in models:
            for name, parameter in model.named_parameters():
                if name not in frozen:
                    own = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
                    parameter.grad = torch.randn(parameter.shape, generator=own)
        optimizer.step()


def snapshot(models: list[Stage], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            found[name] = parameter.detach().clone()
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = value.clone() if torch.is_tensor(value) else value
    return found


def components(
    models: list[Stage], optimizer: torch.optim.Optimizer, *others: StateComponent
) -> list[StateComponent]:
    merged = {str(n): model for n, model in enumerate(models)}
    model = Union(list(merged.values()))
    return [
        StateComponent("model", model, SHARDED),
        StateComponent("opt", OptimizerState(optimizer, models), SHARDED),
        *others,
    ]


class Union:
    """The states of several stages as one."""

    def __init__(self, models: list[Stage]) -> None:
        self.parts = [ModelState(model) for model in models]

    def state_dict(self) -> dict[str, Any]:
        return {name: value for part in self.parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in self.parts:
            own = part.state_dict()
            part.load_state_dict({name: state[name] for name in own})

    def differences(self, saved: dict[str, Any]) -> Any:
        return differences(saved, self.state_dict())


FROZEN = ("layers.2.bias", "layers.3.weight", "layers.3.bias")
LAYOUTS = [(1, 1), (2, 1), (3, 1), (6, 1), (1, 2), (3, 2), (8, 1)]


@pytest.fixture(params=[(4, 1), (2, 2), (1, 1)], ids=lambda p: f"from {p[0]} ranks of {p[1]}")
def saved(request, tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A root with a checkpoint after 3 steps; the whole state then and one step later."""
    ranks, virtual = request.param

    def save(comm: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        models = stages(comm.world_size, comm.rank, virtual)
        optimizer = adamw(models, amsgrad=True)
        train(models, optimizer, 3, FROZEN)
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(3, components(models, optimizer))
        then = snapshot(models, optimizer)
        train(models, optimizer, 1, FROZEN)
        return then, snapshot(models, optimizer)

    found = run_ranks(ranks, save)
    then: dict[str, Any] = {}
    later: dict[str, Any] = {}
    for first, second in found:
        then |= first
        later |= second
    assert len(then) == 2 * LAYERS + 4 * (2 * LAYERS - len(FROZEN))
    return tmp_path, then, later


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
def test_b51_any_pipeline_to_any_other(saved, same, trained: bool) -> None:
    root, then, later = saved
    for ranks, virtual in LAYOUTS:

        def load(comm: Any, virtual: int = virtual) -> tuple[dict[str, Any], dict[str, Any]]:
            models = [model.fill(-1) for model in stages(comm.world_size, comm.rank, virtual)]
            if not any(True for model in models for _ in model.parameters()):
                return {}, {}  # more ranks than layers: AdamW takes no empty list
            optimizer = adamw(models, amsgrad=True)
            if trained:
                train(models, optimizer, 5)
            with CheckpointManager(root, comm=comm) as ckpt:
                ckpt.load(components(models, optimizer))
            first = snapshot(models, optimizer)
            train(models, optimizer, 1, FROZEN)
            return first, snapshot(models, optimizer)

        if ranks > LAYERS:
            continue
        got: dict[str, Any] = {}
        after: dict[str, Any] = {}
        for first, second in run_ranks(ranks, load):
            got |= first
            after |= second
        same(dict(sorted(got.items())), dict(sorted(then.items())))
        same(dict(sorted(after.items())), dict(sorted(later.items())))


def test_b51_loading_makes_no_hidden_step(saved, monkeypatch: pytest.MonkeyPatch) -> None:
    root, then, _ = saved

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a step was made")

    def load(comm: Any) -> None:
        models = [model.fill(-1) for model in stages(comm.world_size, comm.rank)]
        optimizer = adamw(models, amsgrad=True)
        with CheckpointManager(root, comm=comm) as ckpt:
            monkeypatch.setattr(torch.optim.AdamW, "step", never)
            ckpt.load(components(models, optimizer))
        for model in models:
            for name, parameter in model.named_parameters():
                assert parameter.grad is None
                state = optimizer.state.get(parameter, {})
                assert ("layers." in name) and (bool(state) == (name not in FROZEN))
                assert name in FROZEN or state["step"].item() == 3.0 == then[f"{name}.step"].item()
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.05]

    run_ranks(2, load)


def test_b51_a_rank_whose_parameters_never_had_a_gradient(tmp_path: Path) -> None:
    frozen = tuple(f"layers.{n}.{kind}" for n in (3, 4, 5) for kind in ("weight", "bias"))

    def save(comm: Any) -> None:
        models = stages(1, 0)
        optimizer = adamw(models)
        train(models, optimizer, 2, frozen)
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, components(models, optimizer))

    def load(comm: Any) -> tuple[list[str], set[float]]:
        models = stages(2, comm.rank)
        optimizer = adamw(models)
        train(models, optimizer, 1)
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.load(components(models, optimizer))
        names = {p: n for model in models for n, p in model.named_parameters()}
        return sorted(names[p] for p in optimizer.state), {
            s["step"].item() for s in optimizer.state.values()
        }

    run_ranks(1, save)
    first, second = run_ranks(2, load)
    assert first == (
        [f"layers.{n}.{kind}" for n in (0, 1, 2) for kind in ("bias", "weight")],
        {2.0},
    )
    assert second == ([], set())


def test_a_rank_that_has_nothing(tmp_path: Path) -> None:
    def save(comm: Any) -> None:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, components_of_model(stages(1, 0)[0]))

    def components_of_model(model: nn.Module) -> list[StateComponent]:
        return [StateComponent("model", model, SHARDED)]

    def load(comm: Any) -> int:
        model = stages(1, 0)[0].fill(0) if comm.rank == 1 else nn.Module()
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.load(components_of_model(model))
            ckpt.save(2, components_of_model(model))
        return sum(int(torch.count_nonzero(p)) for p in model.parameters())

    run_ranks(1, save)
    assert run_ranks(3, load) == [0, 8 * LAYERS, 0]
    with open_checkpoint(tmp_path / "checkpoint-2") as view:
        assert len(view.tensors()) == 2 * LAYERS and view.verify() == []


def test_a_state_of_one_process_goes_to_the_stages_of_a_pipeline(tmp_path: Path, same) -> None:
    models = stages(1, 0)
    optimizer = adamw(models)
    train(models, optimizer, 2)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(2, {"model": models[0], "opt": OptimizerState(optimizer, models)})
    assert (
        open_checkpoint(tmp_path / "checkpoint-2").manifest.components["model"].pattern == "GLOBAL"
    )
    then = snapshot(models, optimizer)

    def load(comm: Any) -> dict[str, Any]:
        mine = [model.fill(0) for model in stages(comm.world_size, comm.rank)]
        own = adamw(mine)
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.load(components(mine, own))
        return snapshot(mine, own)

    first, second = run_ranks(2, load)
    same(dict(sorted({**first, **second}.items())), dict(sorted(then.items())))


def saving(root: Path, world: int, make: Any) -> None:
    def program(comm: Any) -> None:
        with CheckpointManager(root, comm=comm) as ckpt:
            ckpt.save(1, make(comm))

    run_ranks(world, program)


def loading(root: Path, make: Any) -> Any:
    def program(comm: Any) -> Any:
        with CheckpointManager(root, comm=comm) as ckpt:
            return ckpt.load(make(comm))

    return program


def of_pipeline(comm: Any, groups: int = 2, **how: Any) -> list[StateComponent]:
    models = stages(comm.world_size, comm.rank)
    optimizer = adamw(models, groups, **how)
    train(models, optimizer, 1)
    return components(models, optimizer)


def test_b51_regrouping_is_refused_with_names(tmp_path: Path, errors_of, on_all) -> None:
    saving(tmp_path, 3, of_pipeline)
    error = on_all(
        errors_of(2, loading(tmp_path, lambda comm: of_pipeline(comm, groups=1))), StateMismatch
    )
    assert "2 were saved" in error.message and "layers.0.bias" in error.message
    assert error.mismatched is not None and error.mismatched["layers.0.bias"] == (
        "group 1",
        "group 0",
    )

    def swapped(comm: Any) -> list[StateComponent]:
        models = stages(comm.world_size, comm.rank)
        named = [(n, p) for model in models for n, p in model.named_parameters()]
        one = [
            p
            for n, p in named
            if (n != "layers.4.bias" and n.endswith("weight")) or n == "layers.4.bias"
        ]
        two = [p for n, p in named if not any(p is q for q in one)]
        optimizer = torch.optim.AdamW([{"params": one}, {"params": two}])
        return components(models, optimizer)

    error = on_all(errors_of(2, loading(tmp_path, swapped)), StateMismatch)
    assert list(error.causes) == [1]
    assert error.mismatched == {"layers.4.bias": ("group 1", "group 0")}


def test_options_that_differ_between_stages_are_refused(tmp_path: Path, errors_of, on_all) -> None:
    def program(comm: Any) -> None:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, of_pipeline(comm, betas=(0.9, 0.9 + comm.rank / 100)))

    error = on_all(errors_of(2, program), ReplicationMismatch)
    assert (error.component, error.ranks) == ("opt", [1])
    assert error.keys == ["groups/0/betas/1"]


def test_b51_options_that_are_new_or_gone_warn(tmp_path: Path) -> None:
    saving(tmp_path, 2, of_pipeline)

    def changed(comm: Any) -> list[StateComponent]:
        made = of_pipeline(comm)
        for group in made[1].stateful.optimizer.param_groups:
            group["fancy"] = 5
            del group["differentiable"]
        return made

    live: dict[int, Any] = {}

    def program(comm: Any) -> None:
        live[comm.rank] = changed(comm)
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.load(live[comm.rank])

    with pytest.warns(CheckpointWarning, match=r"'fancy'.*'differentiable'"):
        run_ranks(1, program)
    groups = live[0][1].stateful.optimizer.param_groups
    assert [(g["fancy"], g["differentiable"], g["lr"]) for g in groups] == [
        (5, False, 0.01),
        (5, False, 0.05),
    ]


def test_stages_with_one_name_for_two_parameters(tmp_path: Path) -> None:
    one, two = Stage([0]), Stage([0])
    optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters()])
    with pytest.raises(InvalidState, match=r"layers\.0\.weight") as caught:
        OptimizerState(optimizer, [one, two])
    assert caught.value.key == "layers.0.weight"
    assert set(OptimizerState(optimizer, {"a": one, "b": two}).state_dict()["group_of"]) == {
        "a.layers.0.weight",
        "a.layers.0.bias",
        "b.layers.0.weight",
        "b.layers.0.bias",
    }


@pytest.mark.parametrize("pattern", ["SHARDED", "REPLICATED"])
def test_schedulers_and_scalers_next_to_it(tmp_path: Path, pattern: str) -> None:
    def others(comm: Any, steps: int) -> tuple[Any, ...]:
        models = stages(comm.world_size, comm.rank)
        optimizer = adamw(models)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + steps), growth_interval=7)
        off = torch.amp.GradScaler("cpu", enabled=False)
        for _ in range(steps):
            train(models, optimizer, 1)
            scheduler.step()
        made = components(
            models,
            optimizer,
            StateComponent("scheduler", scheduler, pattern),
            StateComponent("scaler", scaler, pattern),
            StateComponent("off", off, pattern),
        )
        return made, optimizer, scheduler, scaler

    def save(comm: Any) -> Any:
        made, _, scheduler, scaler = others(comm, 3)
        scaler._growth_tracker = None
        scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 5})
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(3, made)
        return scheduler.get_last_lr(), scheduler.state_dict(), scaler.state_dict()

    def load(comm: Any) -> Any:
        made, optimizer, scheduler, scaler = others(comm, 0)
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.load(made)
        assert [group["lr"] for group in optimizer.param_groups] == scheduler.get_last_lr()
        return scheduler.get_last_lr(), scheduler.state_dict(), scaler.state_dict()

    expected = run_ranks(3, save)[0]
    assert expected[2]["_growth_tracker"] == 5 and expected[2]["scale"] == 128.0
    for world in (1, 2):
        assert run_ranks(world, load) == [expected] * world
