"""Every public argument, with values of every odd kind: the call works, proved by reading back what
it made, or an error of our tree comes before anything is written. Never another exception, never a
hang, and never a lost checkpoint."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import itertools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ckptcore import (
    CheckpointCoordinator,
    CheckpointError,
    CheckpointManager,
    KeepBest,
    KeepEvery,
    KeepLast,
    RetentionPolicy,
    Shard,
    SharingPattern,
    SingleProcess,
    StateComponent,
    Tier,
    ValidationLevel,
    copy_checkpoint,
    open_checkpoint,
    open_storage,
    scan_root,
)
from ckptcore.arguments import shown


class Hostile:
    """What raises whatever one does with it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("hands off")

    __index__ = __float__ = __str__ = __repr__ = __len__ = __iter__ = __eq__ = __bool__ = (
        __fspath__
    ) = lambda self, *_: self.anything
    __hash__ = object.__hash__


class HalfState:
    """A state whose own method fails."""

    def state_dict(self) -> Any:
        raise KeyError("not today")

    def load_state_dict(self, state_dict: Any) -> None:
        raise KeyError("not today")


def odd() -> list[Any]:
    """Made anew for every call: nothing that one call does to them is seen by the next."""
    loop: list[Any] = []
    loop.append(loop)
    circle: dict[str, Any] = {}
    circle["a"] = circle
    return [
        None,
        True,
        False,
        0,
        1,
        2,
        -1,
        3,
        2**31,
        2**62 - 1,
        2**62,
        2**63,
        2**64,
        10**30,
        10**5000,
        -(10**5000),
        0.0,
        1.0,
        1.5,
        -0.5,
        float("nan"),
        float("inf"),
        -float("inf"),
        1e308,
        1j,
        "",
        " ",
        "x",
        "latest",
        "best",
        "auto",
        "error",
        "keep",
        "split",
        "node",
        "shared",
        "wait",
        "warn",
        "QUICK",
        "per_rank",
        "REPLICATED",
        "loss",
        "min",
        "max",
        "../x",
        "a/b",
        "/",
        ".",
        "..",
        "~",
        "a\0b",
        "\ud800",
        "\udc80",
        "é" * 40,
        "x" * 100,
        "x" * 100_000,
        "\n",
        "\x1b[31m",
        "0.3",
        "7",
        "checkpoint-1",
        "checkpoint-2",
        "memory://fuzz/run",
        "nosuch://a",
        "s3:/a",
        b"",
        b"x",
        bytearray(b"x"),
        memoryview(b"x"),
        [],
        {},
        (),
        set(),
        frozenset({1}),
        [1],
        [0],
        [[0]],
        [[0, 1]],
        [[]],
        ["a"],
        [None],
        {1: 2},
        {"a": 1},
        {"a": float("nan")},
        {"dp": [[0]]},
        {"a": {"b": [1, 2.5, None, True]}},
        {None: 1},
        {"\ud800": 1},
        {"": 0},
        {(1, 2): 3},
        {"a": object()},
        {1: 1, "1": 2},
        loop,
        circle,
        object(),
        object,
        type,
        int,
        nn.Linear,
        lambda *_: None,
        print,
        len,
        Hostile(),
        HalfState(),
        NotImplemented,
        ...,
        torch.tensor(3),
        torch.tensor(2.5),
        torch.tensor(True),
        torch.tensor([1, 2]),
        torch.ones(2, 2),
        torch.tensor([]),
        torch.tensor(1j),
        torch.empty(2, device="meta"),
        torch.float32,
        torch.device("cpu"),
        torch.Size([1]),
        nn.Linear(1, 1),
        nn.Module(),
        np.int64(3),
        np.uint8(1),
        np.float32("nan"),
        np.float64(0.5),
        np.bool_(True),
        np.str_("x"),
        np.array(3),
        np.array([1.0, 2.0]),
        np.array(["a"]),
        np.datetime64("2020-01-01"),
        np.array([object()]),
        Path("x"),
        Path("."),
        Path("/"),
        datetime.datetime(2020, 1, 1),
        datetime.timedelta(1),
        range(3),
        slice(1),
        iter([1]),
        (i for i in (1,)),
        SharingPattern.GLOBAL,
        SharingPattern.PER_RANK,
        SharingPattern.PER_GROUP,
        SharingPattern.SHARDED,
        ValidationLevel.FULL,
        SingleProcess(),
        KeepLast(2),
        KeepBest("loss") | KeepLast(1),
        KeepEvery(2),
        Tier("x"),
        [Tier("tier")],
        [Tier("memory://fuzz/tier")],
        CheckpointError("x"),
        ValueError("x"),
        StateComponent("a", {"x": 1}),
        [StateComponent("a", {"x": 1})],
        open_storage("y"),
        Shard(torch.ones(1), (2,), (0,)),
        contextlib.nullcontext(),
    ]


COUNT = len(odd())
numbers = itertools.count()


def state(value: float) -> dict[str, Any]:
    return {"m": {"w": torch.full((3,), value), "n": torch.tensor(int(value))}}


class Place:
    """A folder with a root in it that holds one good checkpoint, as working directory."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.root = os.path.join(folder, "run")
        with CheckpointManager(self.root, run_id="run") as ckpt:
            ckpt.save(1, state(1.0), metrics={"loss": 1.0})

    def listing(self) -> list[str]:
        found = []
        for top, folders, files in os.walk(self.folder):
            found += [
                os.path.relpath(os.path.join(top, name), self.folder) for name in (*folders, *files)
            ]
        memory = fsspec.filesystem("memory")
        return sorted(found) + sorted(memory.store)

    def check_good(self) -> None:
        """What was there first restores, bit for bit."""
        live = state(0.0)
        report = CheckpointCoordinator(live).load_checkpoint(
            os.path.join(self.root, "checkpoint-1")
        )
        assert report.step == 1
        assert torch.equal(live["m"]["w"], torch.full((3,), 1.0))

    def check_saved(self, where: Any, expected: float, mode: Any = "shared") -> None:
        assert open_checkpoint(where).verify() == []
        live = state(0.0)
        CheckpointCoordinator(live, storage_mode=mode).load_checkpoint(where)
        assert torch.equal(live["m"]["w"], torch.full((3,), expected))
        assert live["m"]["n"].item() == int(expected)


@contextlib.contextmanager
def place() -> Iterator[Place]:
    before = os.getcwd()
    folder = tempfile.mkdtemp(prefix="fuzz-")
    memory = fsspec.filesystem("memory")
    try:
        os.chdir(folder)
        yield Place(folder)
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]


def manager(at: Place, call: Any) -> None:
    call = {"root": at.root, "run_id": "run", **call}
    with CheckpointManager(**call) as ckpt:
        info = ckpt.save(2, state(2.0), metrics={"loss": 0.5})
        assert ckpt.verify(2) == []
        live = state(0.0)
        assert ckpt.restore(live).step == 2
        assert torch.equal(live["m"]["w"], torch.full((3,), 2.0))
        assert ckpt.latest().manifest.checkpoint_id == info.manifest.checkpoint_id
        ckpt.wait(10)
        if isinstance(call.get("keep"), RetentionPolicy) and [i.step for i in ckpt.list()] == [2]:
            ckpt.save(1, state(1.0))  # it was to be deleted


def save(at: Place, call: Any) -> None:
    call = {"step": 2, "state": state(2.0), **call}
    keep = call["state"]
    with CheckpointManager(at.root, run_id="run") as ckpt:
        info = ckpt.save(**call)
    assert open_checkpoint(info.url).verify() == []
    assert info.manifest.digest == open_checkpoint(info.url).manifest.digest
    if isinstance(keep, dict) and "m" in keep:
        at.check_saved(info.url, 2.0)


def save_async(at: Place, call: Any) -> None:
    call = {"step": 2, "state": state(2.0), **call}
    with CheckpointManager(at.root, run_id="run") as ckpt:
        info = ckpt.save_async(**call).result(30)
    assert open_checkpoint(info.url).verify() == []


def loading(name: str) -> Callable[[Place, Any], None]:
    def load(at: Place, call: Any) -> None:
        live = state(0.0)
        call = {"state": live, **call}
        with CheckpointManager(at.root, run_id="run") as ckpt:
            try:
                report = getattr(ckpt, name)(**call)
            except CheckpointError:
                assert torch.equal(live["m"]["w"], torch.zeros(3)) and live["m"]["n"].item() == 0
                raise
        if call["state"] is live and call.get("keys") is None:
            assert report.step == 1
            assert torch.equal(live["m"]["w"], torch.full((3,), 1.0))

    return load


def of_step(name: str) -> Callable[[Place, Any], None]:
    def act(at: Place, call: Any) -> None:
        with CheckpointManager(at.root, run_id="run") as ckpt:
            ckpt.save(3, state(3.0))
            before = at.listing()
            try:
                getattr(ckpt, name)(**call)
            except CheckpointError:
                assert at.listing() == before
                assert ckpt.verify(3) == ckpt.verify(1) == []
                raise
            finally:
                shutil.rmtree(os.path.join(at.root, "checkpoint-3"), ignore_errors=True)
                if not os.path.exists(
                    os.path.join(at.root, "checkpoint-1")
                ):  # it was this that was to be deleted
                    ckpt.save(1, state(1.0))
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(at.root, "checkpoint-1", "checkpoint.pinned"))

    return act


def best(at: Place, call: Any) -> None:
    with CheckpointManager(at.root, run_id="run") as ckpt:
        found = ckpt.best(**call)
    assert found is None or found.step == 1


def prewarm(at: Place, call: Any) -> None:
    with CheckpointManager(at.root, run_id="run") as ckpt:
        ckpt.prewarm(**call)
        ckpt.save(2, state(2.0))
    at.check_saved(os.path.join(at.root, "checkpoint-2"), 2.0)


def component(at: Place, call: Any) -> None:
    tensors = {"w": torch.full((3,), 2.0), "n": torch.tensor(2)}
    made = StateComponent(**{"key": "m", "stateful": tensors, **call})
    groups = {made.process_group_name: [[0]]} if made.process_group_name else None
    with CheckpointManager(at.root, run_id="run", process_groups=groups) as ckpt:
        info = ckpt.save(2, [made])
    assert open_checkpoint(info.url).verify() == []
    if made.stateful is tensors:
        tensors["w"].zero_()
        with CheckpointManager(at.root, run_id="run", process_groups=groups) as ckpt:
            assert ckpt.load([made], 2).step == 2
        assert torch.equal(tensors["w"], torch.full((3,), 2.0))


def coordinator(at: Place, call: Any) -> None:
    made = CheckpointCoordinator(**{"state_components": state(2.0), **call})
    info = made.save_checkpoint(os.path.join(at.folder, "one"))
    if "state_components" not in call:
        at.check_saved(info.url, 2.0, made.storage_mode)
    assert open_checkpoint(info.url).verify() == []


def save_checkpoint(at: Place, call: Any) -> None:
    call = {"path": os.path.join(at.folder, "one"), **call}
    info = CheckpointCoordinator(state(2.0)).save_checkpoint(**call)
    at.check_saved(info.url, 2.0)


def load_checkpoint(at: Place, call: Any) -> None:
    live = state(0.0)
    call = {"path": os.path.join(at.root, "checkpoint-1"), **call}
    CheckpointCoordinator(live).load_checkpoint(**call)
    if call.get("keys") is None:
        assert torch.equal(live["m"]["w"], torch.full((3,), 1.0))


def policy(kind: Callable[..., RetentionPolicy], **rest: Any) -> Callable[[Place, Any], None]:
    def keep(at: Place, call: Any) -> None:
        made = kind(**{**rest, **call})
        with CheckpointManager(at.root, run_id="run", keep=made | KeepEvery(1)) as ckpt:
            ckpt.save(2, state(2.0), metrics={"loss": 0.5, "x": 1.0})
            assert [i.step for i in ckpt.list()] == [1, 2]

    return keep


def tier(at: Place, call: Any) -> None:
    made = Tier(**{"root": os.path.join(at.folder, "tier"), **call})
    manager(at, {"tiers": [made]})
    shutil.rmtree(os.path.join(at.folder, "tier"), ignore_errors=True)


def shard(at: Place, call: Any) -> None:
    made = Shard(**{"tensor": torch.ones(3), "global_shape": (3,), "offset": (0,), **call})
    with CheckpointManager(at.root, run_id="run") as ckpt:
        info = ckpt.save(2, {"s": {"x": made}})
    view = open_checkpoint(info.url)
    assert view.verify() == []
    assert view.read("s/x").shape == made.global_shape


def copy(at: Place, call: Any) -> None:
    call = {
        "source": os.path.join(at.root, "checkpoint-1"),
        "target": os.path.join(at.folder, "copy"),
        **call,
    }
    info = copy_checkpoint(**call)
    at.check_saved(info.url, 1.0)


def opening(at: Place, call: Any) -> None:
    call = {"url": os.path.join(at.root, "checkpoint-1"), **call}
    assert open_checkpoint(**call).verify() == []


def scanning(at: Place, call: Any) -> None:
    scan_root(**{"url": at.root, **call})


def values(at: Place, call: Any) -> None:
    open_checkpoint(os.path.join(at.root, "checkpoint-1")).values(**{"component": "m", **call})


def reading(at: Place, call: Any) -> None:
    open_checkpoint(os.path.join(at.root, "checkpoint-1")).read(**{"name": "m/w", **call})


def waiting(at: Place, call: Any) -> None:
    with CheckpointManager(at.root, run_id="run") as ckpt:
        ckpt.wait(**call)
        handle = ckpt.save_async(2, state(2.0))
        handle.wait(None)
        assert handle.result(**call).step == 2


def parameters(of: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(of).parameters if name not in ("self", "workers")]


Call = tuple[Callable[[Place, Any], None], list[str]]
CALLS: dict[str, Call] = {
    "CheckpointManager": (manager, parameters(CheckpointManager)),
    "save": (save, parameters(CheckpointManager.save)),
    "save_async": (save_async, parameters(CheckpointManager.save_async)),
    "load": (loading("load"), parameters(CheckpointManager.load)),
    "restore": (loading("restore"), parameters(CheckpointManager.restore)),
    **{name: (of_step(name), ["step"]) for name in ("pin", "unpin", "delete", "verify")},
    "best": (best, parameters(CheckpointManager.best)),
    "prewarm": (prewarm, ["state"]),
    "wait": (waiting, ["timeout"]),
    "StateComponent": (component, parameters(StateComponent)),
    "CheckpointCoordinator": (coordinator, parameters(CheckpointCoordinator)),
    "save_checkpoint": (save_checkpoint, parameters(CheckpointCoordinator.save_checkpoint)),
    "load_checkpoint": (load_checkpoint, parameters(CheckpointCoordinator.load_checkpoint)),
    "KeepLast": (policy(KeepLast), ["count"]),
    "KeepBest": (policy(KeepBest, metric="loss"), parameters(KeepBest)),
    "KeepEvery": (policy(KeepEvery), parameters(KeepEvery)),
    "Tier": (tier, parameters(Tier)),
    "Shard": (shard, parameters(Shard)),
    "copy_checkpoint": (copy, parameters(copy_checkpoint)),
    "open_checkpoint": (opening, parameters(open_checkpoint)),
    "scan_root": (scanning, parameters(scan_root)),
    "values": (values, ["component", "copy"]),
    "read": (reading, ["name", "box"]),
}
ARGUMENTS = [(call, name) for call, (_, names) in CALLS.items() for name in names]


def attempt(name: str, *arguments: tuple[str, int]) -> str:
    """What came of one call: "ok", or the name of the error."""
    made, _ = CALLS[name]
    with place() as at, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = {
            argument: odd()[number] for argument, number in arguments
        }  # in this folder: some are paths
        said = f"{name}({', '.join(f'{argument}={shown(value)}' for argument, value in values.items())})"
        before = at.listing()
        outcome = "ok"
        try:
            made(at, values)
        except CheckpointError as error:
            outcome = type(error).__name__
            assert at.listing() == before, f"{said} raised {error!r} and left something"
        except Exception as error:
            if not of_the_users_own(values, error):
                raise AssertionError(said) from error
            outcome = "of the user's own"
        at.check_good()
        return outcome


def of_the_users_own(values: dict[str, Any], error: Exception) -> bool:
    """What the user's own code raises when it is called goes through on one process: a state, and a
    function for progress."""
    whole = [
        value for name, value in values.items() if name in ("state", "stateful", "state_components")
    ]
    theirs = isinstance(error, KeyError | RuntimeError) and error.args in (
        ("not today",),
        ("hands off",),
    )
    return (bool(whole) and theirs) or (
        callable(values.get("progress")) and not isinstance(error, AssertionError)
    )


calls = st.sampled_from(sorted(CALLS)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        st.lists(
            st.tuples(st.sampled_from(CALLS[name][1]), st.integers(0, COUNT - 1)),
            min_size=1,
            max_size=2,
            unique_by=lambda pair: pair[0],
        ),
    )
)


alone = st.builds(
    lambda argument, number: (argument[0], [(argument[1], number)]),
    st.sampled_from(ARGUMENTS),
    st.integers(0, COUNT - 1),
)


@given(call=st.one_of(calls, alone))
@settings(max_examples=200, derandomize=True)
def test_arguments(call: tuple[str, Any]) -> None:
    attempt(call[0], *call[1])


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_many_arguments() -> None:
    outcomes: dict[str, int] = {}

    @given(call=st.one_of(calls, alone))
    @settings(max_examples=2000)
    def run(call: tuple[str, Any]) -> None:
        outcome = attempt(call[0], *call[1])
        outcomes[outcome] = outcomes.get(outcome, 0) + 1

    run()
    print(
        f"{sum(outcomes.values())} calls of {len(ARGUMENTS)} arguments with {COUNT} values: "
        f"{outcomes}"
    )
    assert sum(outcomes.values()) >= 2000
    assert outcomes["ok"] >= 30 and outcomes["InvalidState"] >= 500
