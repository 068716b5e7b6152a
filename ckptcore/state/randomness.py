"""The random streams of a process, saved and restored together."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointWarning, InvalidState, StateMismatch
from .component import OnResize, SharingPattern


class RNGState:
    """The random streams of python, numpy and torch, on the CPU and every accelerator. Each rank
    has its own.

    Restored after everything else, so that nothing draws between restoring and the first step.

    on_resize: what happens on another number of ranks: "error" (default), "keep" (the streams go on
        as they are, with a warning), or a function (new rank, new size, old size) -> old rank.

    Raises InvalidState for anything else.
    """

    sharing_pattern = SharingPattern.PER_RANK
    restore_last = True

    def __init__(self, on_resize: OnResize = "error") -> None:
        if on_resize not in ("error", "keep") and not callable(on_resize):
            raise InvalidState(
                f"on_resize must be 'error', 'keep' or a function, not {on_resize!r}"
            )
        self.on_resize = on_resize

    def state_dict(self) -> dict[str, Any]:
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        accelerator = _accelerator()
        return {
            "python": random.getstate(),
            "numpy": {
                "kind": kind,
                "keys": keys,
                "position": position,
                "has_gauss": has_gauss,
                "cached": cached,
            },
            "torch": torch.get_rng_state(),
            "accelerator": None
            if accelerator is None
            else [accelerator[0], accelerator[1].get_rng_state_all()],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        try:
            _rehearse(state_dict)
        except (
            Exception
        ) as error:  # each of the three libraries has its own ways to refuse what it did not write
            what = f"{type(error).__name__}: {error}"
            raise StateMismatch(
                f"the saved state is not that of random streams ({what})"
            ) from error
        accelerator = _accelerator()
        saved = state_dict["accelerator"]
        if saved is not None:
            kind, states = saved
            if (
                accelerator is None
                or accelerator[0] != kind
                or len(accelerator[1].get_rng_state_all()) != len(states)
            ):
                warnings.warn(
                    f"random streams of {len(states)} {kind} devices are in the checkpoint; this "
                    "process has other devices, "
                    "whose streams stay as they are",
                    CheckpointWarning,
                    stacklevel=2,
                )
            else:
                accelerator[1].set_rng_state_all(states)
        np.random.set_state(_numpy_state(state_dict))
        random.setstate(state_dict["python"])
        torch.set_rng_state(state_dict["torch"])


def _numpy_state(state_dict: Mapping[str, Any]) -> tuple[Any, ...]:
    n = state_dict["numpy"]
    return n["kind"], n["keys"], n["position"], n["has_gauss"], n["cached"]


def _rehearse(state_dict: Mapping[str, Any]) -> None:
    """Set streams of nobody's to the state, so that one that is no such state leaves the real ones
    as they are."""
    saved = state_dict["accelerator"]
    if saved is not None:
        kind, states = saved
        if not isinstance(kind, str) or not all(
            isinstance(state, torch.Tensor) for state in states
        ):
            raise TypeError("the streams of accelerators are not tensors")
    np.random.RandomState().set_state(_numpy_state(state_dict))
    random.Random().setstate(state_dict["python"])
    torch.Generator().set_state(state_dict["torch"])


def _accelerator() -> tuple[str, Any] | None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = getattr(torch, device.type, None) if device is not None else None
    return (
        None
        if device is None or not hasattr(module, "get_rng_state_all")
        else (device.type, module)
    )
