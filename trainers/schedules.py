"""Learning rates as a pure function of the number of completed optimizer steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from .arguments import InvalidArgument, MinimalTrainingArguments
from .arguments.native import SCHEDULES

__all__ = ["StepSchedule", "make_scheduler", "schedule"]

logger = logging.getLogger(__name__)

Factor = Callable[[int], float]


def schedule(
    kind: str, warmup_steps: int, total_steps: int, kwargs: Mapping[str, Any] | None = None
) -> Factor:
    """Factor on the base learning rate after t completed steps: of w steps of warm-up and T steps
    in all,

        t < w:   t / w, unless the kind is "constant", which has no warm-up
        t >= w:  a function of p = (t - w) / max(1, T - w), at most 1, of the kind:

        linear                  1 - p
        cosine                  (1 + cos(pi p)) / 2, one period of eq. 5 of Loshchilov and Hutter
        (arXiv:1608.03983) cosine_with_restarts    (1 + cos(pi frac(n p))) / 2, and 0 at p = 1; n =
        num_cycles constant                1 constant_with_warmup    1 polynomial              (1 -
        p) ** power

    The first step runs at 0 where there is a warm-up.
    """
    if kind not in SCHEDULES:
        raise InvalidArgument(
            "lr_scheduler_type", kind, "unknown", "give the trainer a lr_scheduler_factory"
        )
    options = {**SCHEDULES[kind], **(kwargs or {})}
    if unknown := sorted(options.keys() - SCHEDULES[kind].keys()):
        raise InvalidArgument(
            "lr_scheduler_kwargs", kwargs, f"{kind} has no {unknown[0]}", "leave it out"
        )
    span = max(1, total_steps - warmup_steps)

    def decay(done: int) -> float:
        progress = min(max(done / span, 0.0), 1.0)
        if kind == "linear":
            return 1.0 - progress
        if kind == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        if kind == "cosine_with_restarts":
            # The remainder is taken before the division, so that a restart falls on its very step.
            return (
                0.0
                if done >= span
                else 0.5 * (1.0 + math.cos(math.pi * (options["num_cycles"] * done % span / span)))
            )
        if kind == "polynomial":
            return float((1.0 - progress) ** options["power"])
        return 1.0

    def factor(step: int) -> float:
        if step < warmup_steps and kind != "constant":
            return step / warmup_steps
        return decay(step - warmup_steps)

    return factor


class StepSchedule(LambdaLR):
    """LambdaLR whose whole state is the number of completed steps.

    A resumed run gets the learning rates that its own arguments give at that step: neither the old
    total number of steps nor the old base rates come back with the state. Rates that are tensors
    are changed in place.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Factor) -> None:
        super().__init__(optimizer, factor)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = self.last_epoch + 1
        # The optimizer's state, loaded before this, had the rates of the run that was saved.
        for group, base, factor in zip(
            self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True
        ):
            _set(group, "initial_lr", base)
            _set(group, "lr", base * factor(self.last_epoch))
        self._last_lr = [_value(group["lr"]) for group in self.optimizer.param_groups]


def _set(group: dict[str, Any], name: str, value: float | torch.Tensor) -> None:
    if isinstance(group.get(name), torch.Tensor):
        group[name].fill_(value)
    else:
        group[name] = _value(value)


def _value(value: float | torch.Tensor) -> float | torch.Tensor:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def make_scheduler(
    args: MinimalTrainingArguments,
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    factory: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
) -> LRScheduler:
    """The scheduler of a run of so many steps; it is stepped once per optimizer step."""
    if factory is not None:
        return factory(optimizer)
    warmup = args.warmup(total_steps)
    if args.lr_scheduler_type == "constant" and warmup:
        logger.info(
            "the schedule 'constant' has no warm-up: %d warm-up steps have no effect", warmup
        )
    return StepSchedule(
        optimizer, schedule(args.lr_scheduler_type, warmup, total_steps, args.lr_scheduler_kwargs)
    )
