"""Learning rate as a pure function of the number of completed optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["warmup_cosine"]


def warmup_cosine(warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Factor on the base learning rate after t completed steps, for `torch.optim.lr_scheduler.LambdaLR`.

        t < w:   t / w
        t >= w:  (1 + cos(pi * p)) / 2,   p = min(1, (t - w) / max(1, T - w))

    with w warm-up steps and T steps in all; the first step runs at 0 where there is a warm-up.
    The ramp is the gradual warm-up of Goyal et al. 2017 (arXiv:1706.02677, section 2.2), the decay one
    period of eq. 5 of Loshchilov and Hutter, SGDR (arXiv:1608.03983), with a minimum of 0. It is the
    "cosine" schedule of Hugging Face transformers.

    It is a plain function on purpose: LambdaLR stores the attributes of callable objects in a checkpoint
    and would bring back the old length when a run is resumed with a new `max_steps`.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return step / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor
