"""Values of registered types that hold tensors: decoded from tensors that are read, compared, never
taken for each other."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptcore import (
    CheckpointCorrupt,
    CheckpointManager,
    ReplicationMismatch,
    StateComponent,
    open_checkpoint,
    register_codec,
)
from ckptcore.testing.ranks import run_ranks

ITEMS = 1000  # 8,000 bytes: too many for an array to be stored as a plain value


@dataclass
class Ema:
    shadow: torch.Tensor
    n: int = 0


class Frame:
    """Keeps bytes, is stored as an array that `encode` makes and nobody else holds."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw


class Reversed(Frame):
    pass


class Copied(Frame):
    pass


class Odd(Frame):
    pass


class Table(dict):
    """A dict of a type of its own."""


class Pairs(dict):
    """Another, stored as a list."""


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def array(frame: Frame) -> np.ndarray:
    return np.frombuffer(frame.raw)


register_codec(
    Ema, lambda e: {"shadow": e.shadow, "n": e.n}, lambda p: Ema(p["shadow"].clone(), p["n"])
)
register_codec(Frame, lambda f: {"v": array(f)}, lambda p: Frame(p["v"].tobytes()))
register_codec(
    Reversed, lambda f: {"v": array(f).copy()[::-1]}, lambda p: Reversed(p["v"][::-1].tobytes())
)
register_codec(Copied, lambda f: {"v": array(f).copy()}, lambda p: Copied(p["v"].tobytes()))
register_codec(Odd, lambda f: {"v": array(f)}, lambda p: Odd(p["v"].no_such_thing))
register_codec(Table, dict, lambda p: Table({key: copied(item) for key, item in p.items()}))
register_codec(
    Pairs, lambda t: list(t.items()), lambda p: Pairs((key, copied(item)) for key, item in p)
)


class Holder:
    """A Stateful of the user's own: remembers what it was handed."""

    def __init__(self, state: Any) -> None:
        self.state, self.handed = state, None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.handed = state_dict


def filled(kind: type[Frame], value: float) -> Frame:
    return kind(np.full(ITEMS, float(value)).tobytes())


def saving(root: Path, world: int, state_of: Any, pattern: str, **how: Any) -> None:
    def program(comm: Any) -> None:
        with CheckpointManager(root, comm=comm) as ckpt:
            ckpt.save(1, [StateComponent("m", state_of(comm.rank), pattern, **how)])

    run_ranks(world, program)


def loading(
    root: Path, world: int, state_of: Any, pattern: str, broadcast: bool = False, **how: Any
) -> list[Any]:
    """What each rank was handed."""

    def program(comm: Any) -> Any:
        live = state_of(comm.rank)
        with CheckpointManager(root, comm=comm, load_broadcast=broadcast) as ckpt:
            report = ckpt.load([StateComponent("m", live, pattern)], **how)
        return live.handed if isinstance(live, Holder) else report.values["m"]

    return run_ranks(world, program)


@pytest.mark.parametrize("kind", [Frame, Reversed, Copied])
def test_arrays_that_a_codec_makes_are_not_taken_for_each_other(
    tmp_path: Path, kind: type[Frame]
) -> None:
    # Each array is gone once it is copied for torch, and the next one may get its id.
    frames = [kind(np.arange(n, n + ITEMS, dtype=float).tobytes()) for n in range(4)]
    saving(tmp_path, 1, lambda _: {"f": frames}, "GLOBAL")
    with open_checkpoint(tmp_path / "checkpoint-1") as view:
        assert [t.alias_of for t in view.tensors()] == [None] * 4
        first = [view.read(f"m/f/{n}/v")[-1 if kind is Reversed else 0] for n in range(4)]
    assert first == [0, 1, 2, 3]
    live = {"f": [filled(kind, -1) for _ in range(4)]}
    found = loading(tmp_path, 1, lambda _: live, "GLOBAL")[0]["f"]
    assert [type(f) for f in found] == [kind] * 4
    assert [f.raw for f in found] == [f.raw for f in frames]


def nested(value: float) -> dict[str, Any]:
    return {
        "e": Ema(torch.full((3,), value), 5),
        "f": filled(Copied, value),
        "q": deque(
            [Ema(torch.full((2,), value + 1)), (Ema(torch.full((1,), value + 2)), "x")], maxlen=4
        ),
        "o": OrderedDict(a={"e": Ema(torch.full((4,), value + 3))}, b=[filled(Frame, value + 4)]),
        "plain": torch.full((2,), value),
    }


@pytest.mark.parametrize(
    ("transactional", "broadcast"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("live", ["the same", "nothing"])
@pytest.mark.parametrize("wrap", [dict, Holder])
@pytest.mark.parametrize("pattern", ["GLOBAL", "REPLICATED", "SHARDED"])
def test_decoding_comes_after_reading(
    tmp_path: Path, pattern: str, wrap: Any, live: str, transactional: bool, broadcast: bool
) -> None:
    saving(tmp_path, 2, lambda _: wrap(nested(7.0)), pattern)
    nothing = {"e": None, "f": None, "q": None, "o": OrderedDict(a={"e": None}, b=[])}

    def zeros(_: int) -> Any:  # of each rank its own: they are changed in place
        return wrap(nested(0.0) | (copy.deepcopy(nothing) if live == "nothing" else {}))

    for found in loading(tmp_path, 2, zeros, pattern, broadcast, transactional=transactional):
        assert list(found) == ["e", "f", "q", "o", "plain"]
        assert (type(found["e"]), found["e"].shadow.tolist(), found["e"].n) == (Ema, [7] * 3, 5)
        assert (type(found["f"]), found["f"].raw) == (Copied, filled(Copied, 7).raw)
        assert (type(found["q"]), found["q"].maxlen, len(found["q"])) == (deque, 4, 2)
        first, (second, text) = found["q"]
        assert (first.shadow.tolist(), second.shadow.tolist(), text) == ([8, 8], [9], "x")
        assert type(found["o"]) is OrderedDict and list(found["o"]) == ["a", "b"]
        assert found["o"]["a"]["e"].shadow.tolist() == [10] * 4
        assert [f.raw for f in found["o"]["b"]] == [filled(Frame, 11).raw]
        assert found["plain"].tolist() == [7, 7]


@pytest.mark.parametrize("pattern", ["GLOBAL", "REPLICATED", "SHARDED"])
@pytest.mark.parametrize("wrap", [lambda state: state, Holder], ids=["plain", "stateful"])
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("kind", [Table, Pairs])
def test_a_dict_of_a_type_of_its_own(
    tmp_path: Path, pattern: str, wrap: Any, deep: bool, kind: type[dict]
) -> None:
    def state(value: float) -> Any:
        table = kind(x=torch.full((2,), value), n=3)
        return wrap({"t": table} if deep else table)

    saving(tmp_path, 2, lambda _: state(4.0), pattern)
    for found in loading(tmp_path, 2, lambda _: state(0.0), pattern):
        table = found["t"] if deep else found
        assert (type(table), list(table), table["x"].tolist(), table["n"]) == (
            kind,
            ["x", "n"],
            [4, 4],
            3,
        )


DIFFERENT = {
    "tensor of a codec": (lambda v: {"e": Ema(torch.full((2,), v))}, "e/shadow", "e/shadow"),
    "array of a codec": (lambda v: {"f": filled(Copied, v)}, "f/v", "f/v"),
    "value of a codec": (lambda v: {"e": Ema(torch.zeros(2), int(v))}, "e/n", "e"),
    "tensor of a deque": (
        lambda v: {"a": 1, "window": deque([torch.full((4,), v)])},
        "window/0/0",
        "window/0/0",
    ),
    "codec in a deque": (
        lambda v: {"w": deque([Ema(torch.full((2,), v))])},
        "w/0/0/shadow",
        "w/0/0/shadow",
    ),
}


@pytest.mark.parametrize("level", ["QUICK", "TENSOR", "FULL"])
@pytest.mark.parametrize("pattern", ["REPLICATED", "SHARDED"])
@pytest.mark.parametrize("what", DIFFERENT)
def test_replicas_that_differ_are_refused_by_name(
    tmp_path: Path, what: str, pattern: str, level: str
) -> None:
    state_of, key, key_when_sharded = DIFFERENT[what]
    with pytest.raises(ReplicationMismatch) as found:
        saving(tmp_path, 2, lambda rank: state_of(1.0 + rank), pattern, validation_level=level)
    error = found.value
    assert (error.component, error.keys, error.ranks) == (
        "m",
        [key if pattern == "REPLICATED" else key_when_sharded],
        [1],
    )
    assert repr(error.keys[0]) in str(error)
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("level", ["QUICK", "TENSOR", "FULL"])
@pytest.mark.parametrize("pattern", ["REPLICATED", "SHARDED"])
def test_equal_replicas_pass_in_any_order(tmp_path: Path, pattern: str, level: str) -> None:
    def state(rank: int, value: float = 3.0) -> dict[str, Any]:
        pairs = [
            ("a", 1),
            ("w", deque([torch.full((4,), value)])),
            ("e", Ema(torch.full((2,), value), 6)),
        ]
        return dict(pairs[:: (-1) ** rank])

    saving(tmp_path, 2, state, pattern, validation_level=level)
    for found in loading(tmp_path, 2, lambda rank: state(rank, 0.0), pattern):
        assert (found["a"], type(found["w"]), found["w"][0].tolist()) == (1, deque, [3] * 4)
        assert (found["e"].shadow.tolist(), found["e"].n) == ([3, 3], 6)


def test_a_codec_that_fails_is_named(tmp_path: Path) -> None:
    saving(tmp_path, 1, lambda _: {"f": filled(Odd, 1)}, "GLOBAL")
    with pytest.raises(
        CheckpointCorrupt, match=r"component 'm': .*\.Odd': AttributeError.*no_such_thing"
    ):
        loading(tmp_path, 1, lambda _: {"f": filled(Odd, 0)}, "GLOBAL")


def test_values_can_be_looked_at_without_reading_tensors(tmp_path: Path) -> None:
    """Where `decode` wants tensors, what it would be given is shown."""
    state = {"e": Ema(torch.ones(3), 5), "n": 2, "q": deque([torch.ones(2)])}
    saving(tmp_path, 1, lambda _: state, "GLOBAL")
    found = open_checkpoint(tmp_path / "checkpoint-1").values("m")
    assert found["n"] == 2
    assert found["e"].payload["n"] == 5
    assert (found["e"].payload["shadow"].name, found["e"].payload["shadow"].shape) == (
        "e/shadow",
        (3,),
    )
    assert [info.name for info in found["q"]] == ["q/0/0"]
