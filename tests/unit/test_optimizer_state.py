"""B51: optimizer state goes by parameter name, bit for bit, and what does not fit is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ckptcore import (
    CheckpointManager,
    CheckpointWarning,
    InvalidState,
    OptimizerState,
    StateMismatch,
    open_checkpoint,
)


class Two(nn.Module):
    def __init__(self, order: str = "ab", shape: tuple[int, ...] = (3,)) -> None:
        super().__init__()
        for name in order:
            self.register_parameter(f"p{name}", nn.Parameter(torch.full(shape, float(ord(name)))))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, frozen: str = ""
) -> None:
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            if name not in frozen.split():
                parameter.grad = torch.full_like(
                    parameter, step * 0.1 + (len(name) + ord(name[-1])) * 0.01
                )
        optimizer.step()


def adam(model: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, "amsgrad": True, **options})


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    names = {p: n for n, p in model.named_parameters()}
    return {
        names[p]: {k: v.clone() if torch.is_tensor(v) else v for k, v in s.items()}
        for p, s in optimizer.state.items()
    }


@pytest.fixture
def saved(tmp_path: Path) -> tuple[CheckpointManager, dict, Two]:
    model = Two()
    optimizer = adam(model)
    train(model, optimizer)
    ckpt = CheckpointManager(tmp_path)
    ckpt.save(3, {"model": model, "opt": OptimizerState(optimizer, model)})
    return ckpt, snapshot(model, optimizer), model


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("transactional", [False, True])
def test_b51_moments_follow_names(
    saved, same, order: str, trained: bool, transactional: bool
) -> None:
    ckpt, moments, source = saved
    model = Two(order)
    optimizer = adam(model)
    if trained:
        train(model, optimizer, steps=1)
    ckpt.load(
        {"model": model, "opt": OptimizerState(optimizer, model)}, transactional=transactional
    )
    found = snapshot(model, optimizer)
    same({name: found[name] for name in moments}, moments)
    assert set(moments["pa"]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert not torch.equal(moments["pa"]["exp_avg"], moments["pb"]["exp_avg"])
    for name in ("pa", "pb"):
        assert torch.equal(getattr(model, name), getattr(source, name))


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_b51_training_goes_on_as_if_nothing_happened(tmp_path: Path, same, order: str) -> None:
    reference = Two()
    whole = adam(reference)
    train(reference, whole, 3)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(3, {"model": reference, "opt": whole})
        model = Two(order)
        optimizer = adam(model)
        ckpt.load({"model": model, "opt": optimizer})
    train(reference, whole, 2)
    train(model, optimizer, 2)
    for name, parameter in reference.named_parameters():
        same(dict(model.named_parameters())[name], parameter)


def test_loading_runs_no_step_and_draws_nothing(saved) -> None:
    ckpt, _, _ = saved
    model = Two()
    optimizer = adam(model)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hidden step"))
    random = torch.get_rng_state()
    ckpt.load({"model": model, "opt": OptimizerState(optimizer, model)})
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())


def test_moments_are_restored_in_place(saved) -> None:
    ckpt, moments, _ = saved
    model = Two()
    optimizer = adam(model)
    train(model, optimizer, 1)
    before = {k: v.data_ptr() for k, v in optimizer.state[model.pa].items()}
    ckpt.load({"model": model, "opt": OptimizerState(optimizer, model)})
    assert {k: v.data_ptr() for k, v in optimizer.state[model.pa].items()} == before
    assert torch.equal(optimizer.state[model.pa]["exp_avg"], moments["pa"]["exp_avg"])


def test_live_moments_that_were_not_saved_are_dropped(tmp_path: Path) -> None:
    model = Two()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(0, {"model": model, "opt": OptimizerState(adam(model), model)})
        optimizer = adam(model)
        train(model, optimizer, 2)
        ckpt.load({"model": model, "opt": OptimizerState(optimizer, model)})
    assert snapshot(model, optimizer) == {}
    assert model.pa.tolist() == [97.0] * 3


def test_b51_parameter_that_never_had_a_gradient(tmp_path: Path, same) -> None:
    model = Two()
    optimizer = adam(model)
    train(model, optimizer, frozen="pb")
    expected = snapshot(model, optimizer)
    assert set(expected) == {"pa"}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(3, {"opt": OptimizerState(optimizer, model)})
        fresh = Two("ba")
        again = adam(fresh)
        ckpt.load({"opt": OptimizerState(again, fresh)})
    same(snapshot(fresh, again), expected)
    train(fresh, again, 1)
    assert again.state[fresh.pb]["step"].item() == 1
    assert again.state[fresh.pa]["step"].item() == 4


def test_b51_option_that_the_checkpoint_lacks_keeps_the_live_default(saved) -> None:
    ckpt, _moments, source = saved
    optimizer = adam(source)
    train(source, optimizer, 1)
    optimizer.param_groups[0].pop("foreach")
    ckpt.save(4, {"opt": OptimizerState(optimizer, source)})
    model = Two()
    live = adam(model, foreach=False)
    with pytest.warns(CheckpointWarning, match="foreach"):
        ckpt.load({"opt": OptimizerState(live, model)}, strict=True)
    assert live.param_groups[0]["foreach"] is False
    assert live.param_groups[0]["lr"] == 1e-2


def test_b51_option_that_only_the_checkpoint_has_is_warned_about(saved) -> None:
    ckpt, _, source = saved
    optimizer = adam(source)
    optimizer.param_groups[0]["of the future"] = 5
    ckpt.save(4, {"opt": OptimizerState(optimizer, source)})
    model = Two()
    live = adam(model)
    with pytest.warns(CheckpointWarning, match="of the future"):
        ckpt.load({"opt": OptimizerState(live, model)})
    train(model, live, 1)


def test_options_come_back_in_their_types(tmp_path: Path, same) -> None:
    model = Two()
    saved = adam(model, lr=torch.tensor(0.25), betas=(0.5, 0.75), eps=1e-5, weight_decay=0.0)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(0, {"opt": OptimizerState(saved, model)})
        live = adam(model, lr=torch.tensor(1.0))
        ckpt.load({"opt": OptimizerState(live, model)})
    group = live.param_groups[0]
    same(group["lr"], torch.tensor(0.25))
    same(group["betas"], (0.5, 0.75))
    same((group["eps"], group["weight_decay"]), (1e-5, 0.0))
    assert group["params"] == [model.pa, model.pb]


def groups(model: Two, split: str) -> torch.optim.Optimizer:
    if split == "one":
        return torch.optim.SGD([{"params": [model.pa, model.pb]}], lr=0.1, momentum=0.9)
    first, second = (model.pa, model.pb) if split == "a, b" else (model.pb, model.pa)
    return torch.optim.SGD(
        [{"params": [first]}, {"params": [second], "lr": 0.2}], lr=0.1, momentum=0.9
    )


@pytest.mark.parametrize(("before", "after"), [("one", "a, b"), ("a, b", "one"), ("a, b", "b, a")])
@pytest.mark.parametrize("strict", [True, False])
def test_b51_regrouping_is_refused_by_name(
    before: str, after: str, strict: bool, tmp_path: Path, same
) -> None:
    model = Two()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(0, {"opt": OptimizerState(groups(model, before), model)})
        live = groups(model, after)
        train(model, live, 1)
        held = snapshot(model, live)
        with pytest.raises(StateMismatch, match=r"p[ab].*group") as caught:
            ckpt.load({"opt": OptimizerState(live, model)}, strict=strict)
    assert set(caught.value.mismatched) >= {"pb"} or set(caught.value.mismatched) == {"pa"}
    same(snapshot(model, live), held)


def test_groups_keep_their_own_options(tmp_path: Path) -> None:
    model = Two()
    saved = groups(model, "a, b")
    saved.param_groups[1]["lr"] = 0.05
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(0, {"opt": OptimizerState(saved, model)})
        live = groups(model, "a, b")
        ckpt.load({"opt": OptimizerState(live, model)})
    assert [g["lr"] for g in live.param_groups] == [0.1, 0.05]


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
def test_b51_shapes_are_checked(saved, trained: bool) -> None:
    ckpt, _, _ = saved
    model = Two(shape=(4,))
    optimizer = adam(model)
    if trained:
        train(model, optimizer, 1)
    with pytest.raises(StateMismatch, match="pa") as caught:
        ckpt.load({"opt": OptimizerState(optimizer, model)}, strict=False)
    assert any("pa" in name for name in caught.value.mismatched)


def test_parameters_that_came_and_went(saved) -> None:
    ckpt, moments, _ = saved
    model = Two("bc")
    optimizer = adam(model)
    with pytest.raises(StateMismatch) as caught:
        ckpt.load({"opt": OptimizerState(optimizer, model)})
    assert caught.value.missing == ["opt/pc"]
    assert caught.value.unexpected == ["opt/pa"]
    report = ckpt.load({"opt": OptimizerState(optimizer, model)}, strict=False)
    assert (report.missing, report.unexpected) == (["opt/pc"], ["model", "opt/pa"])
    assert torch.equal(optimizer.state[model.pb]["exp_avg"], moments["pb"]["exp_avg"])
    assert model.pc not in optimizer.state or optimizer.state[model.pc] == {}
    assert [p.shape for p in optimizer.param_groups[0]["params"]] == [(3,), (3,)]


def test_many_parameters_went_and_one_stayed(tmp_path: Path) -> None:
    old, new = Two("abcdef"), Two("xf")
    trained = adam(old)
    train(old, trained)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"opt": OptimizerState(trained, old)})
        optimizer = adam(new)
        ckpt.load({"opt": OptimizerState(optimizer, new)}, strict=False)
    assert torch.equal(optimizer.state[new.pf]["exp_avg"], trained.state[old.pf]["exp_avg"])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("strict", [True, False])
def test_no_parameter_in_common_is_refused(count: int, strict: bool, tmp_path: Path) -> None:
    old, new = Two("abc"[:count]), Two("xyz"[:count])
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"opt": OptimizerState(adam(old), old)})
        with pytest.raises(StateMismatch):
            ckpt.load({"opt": OptimizerState(adam(new), new)}, strict=strict)


def test_wide_moments_of_narrow_parameters_keep_their_bits(tmp_path: Path, same) -> None:
    model = Two().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wide = torch.tensor([1 + 2**-20, -0.0, float("nan")])
    optimizer.state[model.pa] = {"master": wide.clone(), "step": 3, "ratio": 0.1, "tag": "x"}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(0, {"opt": OptimizerState(optimizer, model)})
        fresh = Two().bfloat16()
        live = torch.optim.SGD(fresh.parameters(), lr=0.1)
        ckpt.load({"opt": OptimizerState(live, fresh)})
    same(dict(live.state[fresh.pa]), {"master": wide, "step": 3, "ratio": 0.1, "tag": "x"})


def test_several_models(tmp_path: Path, same) -> None:
    def build() -> tuple[dict, torch.optim.Optimizer]:
        models = {"gen": Two(), "disc": Two("ba")}
        return models, torch.optim.AdamW(
            [p for m in models.values() for p in m.parameters()], lr=1e-2
        )

    models, optimizer = build()
    for number, model in enumerate(models.values()):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    optimizer.step()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {**models, "opt": optimizer})
        names = {
            t.name
            for t in open_checkpoint(tmp_path / "checkpoint-1").tensors()
            if t.component == "opt"
        }
        assert "state/gen.pa/exp_avg" in names
        assert "state/disc.pb/exp_avg" in names
        again, live = build()
        ckpt.load({**again, "opt": live})
    for key, model in models.items():
        for name, parameter in model.named_parameters():
            same(dict(live.state[getattr(again[key], name)]), dict(optimizer.state[parameter]))


def test_models_that_share_names_need_prefixes() -> None:
    one, other = Two(), Two()
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(InvalidState, match="'pa'"):
        OptimizerState(optimizer, [one, other])
    named = OptimizerState(optimizer, {"x": one, "y": other}).state_dict()["group_of"]
    assert list(named) == ["x.pa", "x.pb", "y.pa", "y.pb"]


def test_parameters_of_no_model_are_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2, 5))], lr=0.1)
    with pytest.raises(InvalidState, match=r"\[2, 5\]"):
        OptimizerState(optimizer, Two())
    with pytest.raises(InvalidState, match="none of"):
        CheckpointManager("unused").save(1, {"model": Two(), "opt": optimizer})


def test_tied_parameters_go_by_their_first_name() -> None:
    model = Two()
    model.pc = model.pa
    optimizer = adam(model)
    train(model, optimizer, 1)
    state = OptimizerState(optimizer, model).state_dict()
    assert state["group_of"] == {"pa": 0, "pb": 0}
    assert set(state["state"]) == {"pa", "pb"}


@pytest.mark.parametrize(
    "kind",
    [
        "SGD",
        "Adam",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "Adafactor",
        "LBFGS",
    ],
)
def test_every_kind_of_optimizer_goes_on_bitwise(kind: str, tmp_path: Path, same) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        options = {
            "SGD": {"lr": 0.1, "momentum": 0.9},
            "RMSprop": {"centered": True, "momentum": 0.5},
        }.get(kind, {})
        return model, getattr(torch.optim, kind)(model.parameters(), **options)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.arange(6.0).reshape(2, 3) + number).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    reference, whole = build()
    for number in range(3):
        step(reference, whole, number)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(3, {"model": reference, "opt": whole})
        model, optimizer = build()
        ckpt.load({"model": model, "opt": optimizer})
    for number in range(3, 6):
        step(reference, whole, number)
        step(model, optimizer, number)
    same(dict(model.state_dict()), dict(reference.state_dict()))


def test_names_do_not_depend_on_wrappers() -> None:
    model = Two()
    optimizer = adam(torch.compile(model))
    train(model, optimizer, 1)
    state = OptimizerState(optimizer, torch.compile(model)).state_dict()
    assert state["group_of"] == {"pa": 0, "pb": 0}


def test_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = Two()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"opt": {"a": 1}})
        with pytest.raises(StateMismatch, match="not that of an OptimizerState"):
            ckpt.load({"opt": OptimizerState(adam(model), model)})


def tensors(values: float) -> dict[str, torch.Tensor]:
    return {n: torch.full((2,), values, requires_grad=True) for n in ("a", "b")}


@pytest.mark.parametrize(
    "how", ["names said", "names of the groups", "tensors in the state", "one tensor", "a tree"]
)
def test_an_optimizer_over_tensors_without_a_module(tmp_path: Path, same, how: str) -> None:
    def build(value: float) -> tuple[dict, torch.optim.Optimizer, dict]:
        held = tensors(value)
        if how == "names of the groups":
            optimizer = torch.optim.AdamW(held.items(), lr=0.1)
        else:
            optimizer = torch.optim.AdamW(list(held.values()), lr=0.1)
        if how == "names said":
            return held, optimizer, {"held": dict(held), "opt": OptimizerState(optimizer, held)}
        if how == "one tensor":
            return held, optimizer, {**held, "opt": optimizer}
        if how == "a tree":
            tree = {"x": {"a": held["a"]}, "y": [1, {}], "z": {"b": held["b"]}}
            return held, optimizer, {"held": tree, "opt": optimizer}
        return held, optimizer, {"held": dict(held), "opt": optimizer}

    def train(held: dict, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            sum((t.square() * n).sum() for n, t in enumerate(held.values(), 1)).backward()
            optimizer.step()

    (held, optimizer, state), (other, second, again) = build(3.0), build(5.0)
    train(held, optimizer, 3)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(3, state)
        ckpt.restore(again)
    stored = {t.full_name for t in open_checkpoint(tmp_path / "checkpoint-3").tensors()}
    assert f"opt/state/{'x.a' if how == 'a tree' else 'a'}/exp_avg" in stored
    train(held, optimizer, 2)
    train(other, second, 2)
    same({n: t.detach() for n, t in other.items()}, {n: t.detach() for n, t in held.items()})


def test_names_of_the_groups_are_enough(tmp_path: Path, same) -> None:
    held = tensors(1.0)
    state = OptimizerState(torch.optim.SGD(held.items(), lr=0.1)).state_dict()
    assert state["group_of"] == {"a": 0, "b": 0}
    with pytest.raises(InvalidState, match=r"dict of its tensors by name"):
        OptimizerState(torch.optim.SGD(held.values(), lr=0.1))


KINDS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize(
    ("before", "after"),
    [(a, b) for a in KINDS for b in KINDS if a != b and {a, b} != {"adam", "adamw"}],
)
def test_another_kind_of_optimizer_is_refused_before_anything_is_touched(
    tmp_path: Path, same, before: str, after: str
) -> None:
    model, other = Two(), Two()
    optimizer, second = KINDS[before](model.parameters()), KINDS[after](other.parameters())
    train(model, optimizer)
    held = {n: p.detach().clone() for n, p in other.named_parameters()}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(3, {"model": model, "opt": optimizer})
        for strict in (True, False):
            with pytest.raises(
                StateMismatch, match=r"'opt'.*another kind of optimizer than"
            ) as caught:
                ckpt.load({"model": other, "opt": second}, strict=strict)
        assert type(second).__name__ in str(caught.value)
    same({n: p.detach() for n, p in other.named_parameters()}, held)
    assert not second.state


@pytest.mark.parametrize("after", ["adam", "adamw"])
@pytest.mark.parametrize("live_steps", [0, 1])
@pytest.mark.filterwarnings("ignore::ckptcore.CheckpointWarning")
def test_kinds_that_fit_are_taken(tmp_path: Path, same, after: str, live_steps: int) -> None:
    """Adam and AdamW have the same state; options of older torch, and of a scheduler, are no other
    kind."""
    model, other = Two(), Two()
    optimizer, second = adam(model), KINDS[after](other.parameters())
    train(model, optimizer)
    train(other, second, live_steps)
    group = optimizer.param_groups[0]
    del group["decoupled_weight_decay"], group["foreach"]
    group["initial_lr"] = 0.3
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(3, {"opt": OptimizerState(optimizer, model)})
        ckpt.load({"opt": OptimizerState(second, other)})
    same(snapshot(other, second), snapshot(model, optimizer))
