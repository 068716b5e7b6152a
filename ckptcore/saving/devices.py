"""From accelerators into pinned host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from ..state.component import StateComponent

__all__ = ["DeviceCopy", "Staging", "pin", "unpin"]

Staging = Literal["auto", "copy", "overlap"]


def pin(block: torch.Tensor) -> None:
    """Lock host memory in place, so that a device can copy to it by itself."""
    result = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)  # type: ignore[no-untyped-call]
    if int(result) != 0:
        raise MemoryError(f"{block.numel():,} bytes of host memory could not be pinned (CUDA error {int(result)})")


def unpin(block: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())  # type: ignore[no-untyped-call]


class DeviceCopy:
    """Copies from one device, in flight."""

    @classmethod
    def start(
        cls, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], components: Sequence[StateComponent], staging: Staging
    ) -> list[DeviceCopy]:
        for target, source in pairs:
            target.copy_(source)
        return []

    def returnable(self) -> None:
        """Return when the live state may change."""

    def wait(self) -> None:
        """Return when the host has every byte."""

    def complete(self) -> bool:
        return True
