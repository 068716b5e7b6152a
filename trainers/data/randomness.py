"""Random numbers for data: a stream of their own for every batch, and the process's generators as
they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_random(*key: int) -> None:
    """Seed what data sets draw from (random, numpy, torch on the CPU) from some numbers."""
    first, second = np.random.SeedSequence([number & (2**64 - 1) for number in key]).generate_state(
        2, np.uint64
    )
    random.seed(int(first))
    np.random.seed(int(second) & 0xFFFFFFFF)
    # Not torch.manual_seed: that one seeds the accelerators too.
    torch.default_generator.manual_seed(int(first))


def random_state() -> tuple[Any, Any, torch.Tensor]:
    """The state of the three generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_random_state(state: tuple[Any, Any, torch.Tensor]) -> None:
    """Go back to a state that `random_state` gave."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


@contextmanager
def restored_random() -> Iterator[None]:
    """Leave the process's generators as they were found."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


@contextmanager
def seeded_random(*key: int) -> Iterator[None]:
    """Within it the random numbers are a function of `key`; nothing of it is seen outside."""
    with restored_random():
        seed_random(*key)
        yield
