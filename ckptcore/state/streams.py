"""Accelerators: streams of their own for copies, pinned memory, and the moment when memory holds
what was asked of it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ..storage.chunks import MakeMemory

__all__ = ["own_stream", "pinned_memory", "synchronize", "side_stream"]

_of_thread = threading.local()


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """This thread's stream for copies: what it does neither waits for training nor is waited
    for."""
    streams: dict[torch.device, torch.cuda.Stream] = _of_thread.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return streams[device]


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Copies from or to `device` are made on this thread's stream, and are complete afterwards."""
    if device.type != "cuda":
        yield
        return
    stream = side_stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def pinned_memory(device: torch.device) -> MakeMemory | None:
    """How to make host memory that `device` copies from and to by itself; None where any memory
    will do."""
    return _pinned if device.type == "cuda" else None


def _pinned(nbytes: int) -> memoryview:
    return memoryview(
        torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy().data
    )


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for what this thread has asked of `devices`, so that copies on other streams find it
    done."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
