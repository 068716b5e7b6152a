"""What a copy from an accelerator holds goes back whatever becomes of it. Stand-ins take the place
of the accelerator here; tests/gpu has the real one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ckptcore import AsyncSaveError, CheckpointManager, InvalidState
from ckptcore.saving import devices, staging
from ckptcore.saving.devices import DeviceCopy, start_copies


class Event:
    """A torch.cuda.Event as far as it is asked: `done`, or failing when it is waited for."""

    def __init__(self, done: bool = True, error: BaseException | None = None) -> None:
        self.done, self.error = done, error

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error


def in_flight(event: Event) -> DeviceCopy:
    """A copy that an optimizer step has to wait for, with a snapshot on the device."""
    copy = object.__new__(DeviceCopy)
    copy.device, copy.copied, copy.ended = torch.device("cpu"), event, threading.Event()
    copy.sources, copy.snapshot = [torch.ones(1)], [[(torch.zeros(1), torch.ones(1))]]
    copy.returns_at_once, copy.changed, copy.fenced = True, [], []
    copy._noting = threading.Lock()
    devices._fences.append(copy)
    return copy


@pytest.fixture(autouse=True)
def no_fences() -> Iterator[None]:
    yield
    left, devices._fences[:] = list(devices._fences), []
    devices._restless.clear()
    assert left == []


def nothing_held(copy: DeviceCopy) -> bool:
    return (
        copy not in devices._fences
        and not copy.sources
        and not copy.snapshot
        and copy.ended.is_set()
    )


@pytest.mark.parametrize("error", [RuntimeError("the device has failed"), KeyboardInterrupt()])
def test_waiting_that_fails_gives_back(error: BaseException) -> None:
    copy = in_flight(Event(error=error))
    with pytest.raises(type(error)):
        copy.wait()
    assert nothing_held(copy)
    copy.wait()  # there is nothing left to wait for


@pytest.mark.parametrize("error", [MemoryError("no host memory"), KeyboardInterrupt()])
def test_copies_of_the_other_devices_go_back_when_one_cannot_begin(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[DeviceCopy] = []

    def begin(device: torch.device, items: Any, how: str) -> DeviceCopy:
        if begun:
            raise error
        begun.append(in_flight(Event()))
        return begun[0]

    monkeypatch.setattr(devices, "DeviceCopy", begin)
    items = [(torch.ones(1), torch.ones(1)), (torch.ones(1, device="meta"), torch.ones(1))]
    with pytest.raises(type(error)):
        start_copies(items, "auto")
    assert nothing_held(begun[0])


@pytest.mark.parametrize("error", [RuntimeError("no thread"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", ["copying on the host", "waiting"])
def test_staging_that_fails_gives_back_and_the_next_save_works(
    at: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[DeviceCopy] = []

    def begin(items: Any, how: str) -> list[DeviceCopy]:
        begun.append(in_flight(Event(error=error if at == "waiting" else None)))
        begun[0].returns_at_once = at != "waiting"
        return begun

    def fails(*_: Any) -> Any:
        raise error

    state = {"w": torch.arange(5.0)}
    with CheckpointManager(tmp_path) as ckpt:
        with monkeypatch.context() as patched:
            patched.setattr(staging, "start_copies", begin)
            if at == "copying on the host":
                patched.setattr(staging, "_copy_jobs", fails)
            with pytest.raises((AsyncSaveError, KeyboardInterrupt)):
                ckpt.save_async(1, state).result()
        assert len(begun) == 1 and nothing_held(begun[0])
        assert ckpt.save_async(2, state).result().step == 2


def test_no_step_waits_for_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Event] = []

    class Stream:
        def wait_event(self, event: Event) -> None:
            waited.append(event)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    done, going = in_flight(Event()), in_flight(Event(done=False))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    devices._before_step(optimizer)
    assert waited == [going.copied] and devices._fences == [going]
    assert done.snapshot  # still to be drained to the host
    going.release()
    devices._before_step(optimizer)
    assert len(waited) == 1
    done.release()


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hooks as they are where there is a device."""
    handles: list[Any] = []
    for name, register in [
        ("register_optimizer_step_pre_hook", register_optimizer_step_pre_hook),
        ("register_optimizer_step_post_hook", register_optimizer_step_post_hook),
    ]:
        monkeypatch.setattr(devices, name, lambda hook, of=register: handles.append(of(hook)))
    monkeypatch.setattr(devices, "_hooked", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    devices.watch_optimizers()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    for handle in handles:
        handle.remove()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.tensor([0, 1])).sum().backward()
        optimizer.step()


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_what_the_forward_pass_changes_is_not_left_to_a_fence(max_norm: float | None) -> None:
    model = nn.Sequential(nn.Embedding(4, 4, max_norm=max_norm), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, 1)
    assert devices._fenced_memory() == set()  # nobody knows yet what comes between two steps
    trained(model, optimizer, 1)
    fenced = devices._fenced_memory()
    assert devices._memory(model[1].weight) in fenced
    assert devices._memory(optimizer.state[model[1].weight]["exp_avg"]) in fenced
    assert devices._memory(optimizer.state[model[0].weight]["exp_avg"]) in fenced
    assert (devices._memory(model[0].weight) in fenced) == (max_norm is None)
    trained(model, optimizer, devices.INTERVALS + 2)
    assert devices._known[optimizer].intervals == devices.INTERVALS
    assert devices._known[optimizer].versions == []  # it is not looked at for ever


@pytest.mark.usefixtures("hooks")
def test_a_compiled_step_comes_by_before_it_changes_anything() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(2):
        weight.grad = torch.ones(3)
        step()
    copy = in_flight(Event())
    copy.fenced = [(weight.detach(), torch.ones(3), weight._version)]
    step()
    assert copy.changed == [] and copy not in devices._fences
    assert weight.tolist() == [-0.5] * 3
    copy.release()


@pytest.mark.parametrize("by", ["a step that waits", "something else"])
def test_a_copy_that_something_has_changed_under_is_refused(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "side_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    copy = in_flight(Event())
    copy.snapshot, copy.fenced = [], [(weight.detach(), weight, weight._version)]
    if by == "a step that waits":
        devices._before_step(optimizer)
    with torch.no_grad():
        weight.mul_(2)
    copy.wait() if by == "something else" else copy.release()
    leaf = SimpleNamespace(tensor=weight, spec=SimpleNamespace(name="w"))
    staged = staging.StagedCopy(12, [copy], [leaf])  # type: ignore[list-item]
    if by == "a step that waits":
        staged.refuse_changed()
        assert devices._restless == set()
    else:
        with pytest.raises(InvalidState, match="'w' changed while it was copied") as caught:
            staged.refuse_changed()
        assert caught.value.key == "w"
        assert devices._restless == {devices._memory(weight)}
