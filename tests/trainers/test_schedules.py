"""Learning rates against the formulas, step by step, and across a resumption."""

from __future__ import annotations

import json
import logging
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from ckpt_trainers.arguments import InvalidArgument, TrainingArguments
from ckpt_trainers.arguments.optimizer_options import SCHEDULES
from ckpt_trainers.optim import StepSchedule, make_scheduler, schedule
from hypothesis import given
from hypothesis import strategies as st
from torch import nn


def by_hand(kind: str, t: int, w: int, total: int, options: dict[str, Any]) -> float:
    """The factor in exact fractions as far as possible."""
    if t < w and kind != "constant":
        return float(Fraction(t, w))
    p = max(Fraction(0), min(Fraction(1), Fraction(t - w, max(1, total - w))))
    if kind == "linear":
        return float(1 - p)
    if kind == "cosine":
        return math.cos(math.pi * float(p) / 2) ** 2  # half-angle formula
    if kind == "cosine_with_restarts":
        turn = options.get("num_cycles", 1) * p
        return 0.0 if p == 1 else math.cos(math.pi * float(turn - math.floor(turn)) / 2) ** 2
    if kind == "polynomial":
        return float(1 - p) ** options.get("power", 1.0)
    return 1.0


@given(
    kind=st.sampled_from(sorted(SCHEDULES)),
    w=st.integers(0, 12),
    total=st.integers(1, 40),
    t=st.integers(0, 60),
    cycles=st.integers(1, 5),
    power=st.sampled_from([0.5, 1.0, 2.0, 3.0]),
)
def test_factors_are_those_of_the_formulas(
    kind: str, w: int, total: int, t: int, cycles: int, power: float
) -> None:
    options: dict[str, Any] = {
        "cosine_with_restarts": {"num_cycles": cycles},
        "polynomial": {"power": power},
    }.get(kind, {})
    assert schedule(kind, w, total, options)(t) == pytest.approx(
        by_hand(kind, t, w, total, options), abs=1e-12
    )


def test_some_values_by_heart() -> None:
    def factors(kind: str, w: int, total: int, **options: Any) -> list[float]:
        return [round(schedule(kind, w, total, options)(t), 12) for t in range(total + 2)]

    assert factors("linear", 2, 6) == [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert factors("cosine", 0, 2) == [1.0, 0.5, 0.0, 0.0]
    assert factors("cosine_with_restarts", 0, 4, num_cycles=2) == [1.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    assert factors("constant", 2, 3) == [1.0] * 5
    assert factors("constant_with_warmup", 2, 3) == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert factors("polynomial", 0, 2, power=2.0) == [1.0, 0.25, 0.0, 0.0]  # ends at 0, not at 1e-7


def test_a_restart_falls_on_its_very_step() -> None:
    factor = schedule("cosine_with_restarts", 0, 21, {"num_cycles": 7})
    assert [t for t in range(21) if factor(t) == 1.0] == [0, 3, 6, 9, 12, 15, 18]
    assert factor(21) == 0.0


def test_unknown_kinds_and_options_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="lr_scheduler_factory"):
        schedule("inverse_sqrt", 0, 10)
    with pytest.raises(InvalidArgument, match="cosine has no num_cycles"):
        schedule("cosine", 0, 10, {"num_cycles": 2})


def optimizer(lr: float = 0.5) -> torch.optim.Optimizer:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    return torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 2 * lr}], lr=lr)


def rates(scheduler: Any, steps: int) -> list[tuple[float, ...]]:
    """The rates of the next steps, each as the step would use it."""
    seen = []
    for _ in range(steps):
        seen.append(tuple(float(group["lr"]) for group in scheduler.optimizer.param_groups))
        assert seen[-1] == tuple(float(rate) for rate in scheduler.get_last_lr())
        scheduler.optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_b44_rates_after_a_stop_at_any_step_are_those_of_the_whole_run(kind: str) -> None:
    args = TrainingArguments(max_steps=10, warmup_steps=3, lr_scheduler_type=kind)
    whole = rates(make_scheduler(args, optimizer(), 10), 10)
    assert whole[0] == (0.0, 0.0) and whole[3] == (0.5, 1.0)
    assert all(second == 2 * first for first, second in whole)
    for stop in range(1, 10):
        before = make_scheduler(args, optimizer(), 10)
        assert rates(before, stop) == whole[:stop]
        stored = json.loads(json.dumps(before.state_dict()))
        after = make_scheduler(args, optimizer(), 10)
        after.load_state_dict(stored)
        assert rates(after, 10 - stop) == whole[stop:]


def test_b44_a_resumed_run_has_its_own_total_and_base_rates() -> None:
    short = make_scheduler(TrainingArguments(lr_scheduler_type="linear"), optimizer(), 10)
    rates(short, 5)
    assert float(short.get_last_lr()[0]) == 0.25
    groups = optimizer(lr=1.0)
    longer = make_scheduler(TrainingArguments(lr_scheduler_type="linear"), groups, 20)
    # What loading the optimizer's state does: the old run's rates are in the groups.
    for group, old in zip(groups.param_groups, short.optimizer.param_groups, strict=True):
        group.update({"lr": old["lr"], "initial_lr": old["initial_lr"]})
    longer.load_state_dict(short.state_dict())
    assert rates(longer, 2) == [(0.75, 1.5), (0.7, 1.4)]
    assert [group["initial_lr"] for group in groups.param_groups] == [1.0, 2.0]


def test_rates_that_are_tensors_are_changed_in_place() -> None:
    rate = torch.tensor(0.5)
    one = torch.optim.AdamW(
        [nn.Parameter(torch.zeros(1))], lr=rate, capturable=False, foreach=False
    )
    held = one.param_groups[0]["lr"]
    assert isinstance(held, torch.Tensor)
    scheduler = make_scheduler(TrainingArguments(lr_scheduler_type="linear"), one, 4)
    assert rates(scheduler, 4) == [(0.5,), (0.375,), (0.25,), (0.125,)]
    assert one.param_groups[0]["lr"] is held and held.item() == 0.0
    scheduler.load_state_dict({"last_epoch": 2})
    assert one.param_groups[0]["lr"] is held and held.item() == 0.25
    assert one.param_groups[0]["initial_lr"].item() == 0.5


def test_warm_up_as_a_share_of_all_steps() -> None:
    args = TrainingArguments(warmup_ratio=0.2, lr_scheduler_type="constant_with_warmup")
    assert rates(make_scheduler(args, optimizer(), 9), 4) == [
        (0.0, 0.0),
        (0.25, 0.5),
        (0.5, 1.0),
        (0.5, 1.0),
    ]


def test_a_constant_rate_has_no_warm_up_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    constant = make_scheduler(
        TrainingArguments(warmup_steps=4, lr_scheduler_type="constant"), optimizer(), 9
    )
    assert rates(constant, 2) == [(0.5, 1.0)] * 2
    (record,) = caplog.records
    assert "4 warm-up steps have no effect" in record.message
    make_scheduler(TrainingArguments(lr_scheduler_type="constant"), optimizer(), 9)
    assert len(caplog.records) == 1


def test_a_factory_replaces_it_all() -> None:
    groups = optimizer()
    made = torch.optim.lr_scheduler.ConstantLR(groups)
    assert (
        make_scheduler(
            TrainingArguments(), groups, 9, factory=lambda given: made if given is groups else None
        )
        is made
    )  # type: ignore[arg-type,return-value]


def test_the_state_is_the_number_of_steps_and_nothing_else() -> None:
    scheduler = make_scheduler(TrainingArguments(), optimizer(), 9)
    assert isinstance(scheduler, StepSchedule) and scheduler.state_dict() == {"last_epoch": 0}
    rates(scheduler, 3)
    assert scheduler.state_dict() == {"last_epoch": 3}
