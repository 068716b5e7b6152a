"""Sharded state of which a rank has a part: it is handed its own keys, and what it has something
else for."""

from __future__ import annotations

from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptcore import (
    CheckpointManager,
    ReplicationMismatch,
    SharingPattern,
    StateComponent,
    StateMismatch,
    open_checkpoint,
    register_codec,
)
from ckptcore.format.layout import Mesh, MeshLayout
from ckptcore.testing.ranks import run_ranks

SHARDED = SharingPattern.SHARDED
HOW = [(False, False), (True, False), (False, True), (True, True)]
HOW_NAMES = ["in place", "transactional", "broadcast", "transactional, broadcast"]


class Holder:
    """A Stateful of the user's own: remembers what it was handed."""

    def __init__(self, state: Any) -> None:
        self.state, self.handed = state, None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.handed = state_dict


class Table(dict):
    """A dict of a type of its own."""


register_codec(Table, dict, lambda p: Table({key: item.clone() for key, item in p.items()}))


class Stage:
    """A Stateful around a module, whose state_dict is an OrderedDict and whose load_state_dict is
    strict."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> Any:
        return self.module.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.module.load_state_dict(state_dict)


def stage(number: int, value: float) -> nn.Module:
    module = nn.Sequential(OrderedDict([(f"l{number}", nn.Linear(2, 2))]))
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def saved(root: Path, world: int, state_of: Any, pattern: Any = SHARDED, **how: Any) -> None:
    def program(comm: Any) -> None:
        with CheckpointManager(root, comm=comm) as ckpt:
            ckpt.save(1, [StateComponent("m", state_of(comm.rank), pattern, **how)])

    run_ranks(world, program)


def handed(
    root: Path,
    world: int,
    state_of: Any,
    pattern: Any = SHARDED,
    how: tuple[bool, bool] = (False, False),
) -> list[Any]:
    """What each rank is handed: a Holder's state, or the report's values."""

    def program(comm: Any) -> Any:
        live = state_of(comm.rank)
        with CheckpointManager(root, comm=comm, load_broadcast=how[1]) as ckpt:
            report = ckpt.load([StateComponent("m", live, pattern)], transactional=how[0])
        assert (report.missing, report.unexpected) == ([], [])
        return live.handed if isinstance(live, Holder) else report.values.get("m", live)

    return run_ranks(world, program)


def plain(value: Any) -> Any:
    """Tensors and arrays as (type, items), so that == compares everything."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value).__name__, value.tolist()
    if isinstance(value, dict):
        return type(value)({key: plain(item) for key, item in value.items()})
    return (
        type(value)(plain(item) for item in value)
        if isinstance(value, list | tuple | deque)
        else value
    )


@pytest.mark.parametrize("how", HOW, ids=HOW_NAMES)
def test_stages_that_a_stateful_holds_get_their_own_keys(
    tmp_path: Path, how: tuple[bool, bool]
) -> None:
    saved(tmp_path, 2, lambda rank: Stage(stage(rank, rank + 1.0)))
    for rank, live in enumerate(handed(tmp_path, 2, lambda rank: Stage(stage(rank, 0.0)), how=how)):
        assert list(live.state_dict()) == [f"l{rank}.weight", f"l{rank}.bias"]
        assert [p.flatten().tolist() for p in live.module.parameters()] == [
            [rank + 1.0] * 4,
            [rank + 1.0] * 2,
        ]
    swapped = handed(tmp_path, 2, lambda rank: Stage(stage(1 - rank, 0.0)), how=how)
    assert [next(live.module.parameters()).flatten().tolist() for live in swapped] == [
        [2.0] * 4,
        [1.0] * 4,
    ]


def full(number: int, value: float) -> torch.Tensor:
    return torch.full((2,), value and value + number)


OWN = {
    "ordered": lambda n, v: OrderedDict({f"r{n}": full(n, v)}),
    "ordered below": lambda n, v: {"all": torch.ones(1), "o": OrderedDict({f"r{n}": full(n, v)})},
    "ordered that others have": lambda n, v: {
        "all": torch.ones(1),
        f"o{n}": OrderedDict(x=full(n, v), n=n),
    },
    "dict": lambda n, v: {f"r{n}": {"x": full(n, v)}},
    "deque": lambda n, v: {
        f"r{n}": deque([full(n, v)], maxlen=3),
        "all": OrderedDict(x=torch.ones(1)),
    },
    "deque below": lambda n, v: {"d": {f"r{n}": deque([(full(n, v), "x")])}, "all": torch.ones(1)},
    "dict of a type of its own": lambda n, v: {
        "t": Table({f"r{n}": full(n, v)}),
        "all": torch.ones(1),
    },
    "dicts in a list": lambda n, v: {"chunks": [{f"l{n}": full(n, v)}, {f"l{n + 2}": full(n, v)}]},
    "ordered in a list": lambda n, v: {"chunks": [OrderedDict({f"l{n}": full(n, v)})]},
}


@pytest.mark.parametrize("how", [HOW[0], HOW[3]], ids=[HOW_NAMES[0], HOW_NAMES[3]])
@pytest.mark.parametrize("wrap", [lambda state: state, Holder], ids=["plain", "stateful"])
@pytest.mark.parametrize("what", OWN)
def test_keys_of_other_ranks_are_not_handed_over(
    tmp_path: Path, what: str, wrap: Any, how: tuple[bool, bool]
) -> None:
    state = OWN[what]
    saved(tmp_path, 2, lambda rank: wrap(state(rank, 1.0)))
    found = [
        plain(got) for got in handed(tmp_path, 2, lambda rank: wrap(state(rank, 0.0)), how=how)
    ]
    for rank in range(2):
        own = plain(state(rank, 1.0))
        # Plain values are small, and everybody's.
        others = found[rank].pop(f"o{1 - rank}", None)
        assert others in (None, OrderedDict(n=1 - rank))
        assert found[rank] == own
        assert type(found[rank]) is type(own)


class Extra(nn.Module):
    def __init__(self, extra: Any, value: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), value))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


BIG = np.arange(2000.0)

# saved, live: nothing live is a tensor where one was saved
SOMETHING_ELSE = {
    "None": ({"best": torch.ones(3)}, {"best": None}),
    "None deep": ({"a": {"b": [{"best": torch.ones(3)}]}}, {"a": {"b": [{"best": None}]}}),
    "a number": ({"lr": torch.tensor(0.5)}, {"lr": 0.1}),
    "shorter list": ({"l": [torch.ones(1), torch.ones(2)]}, {"l": [torch.zeros(1)]}),
    "much shorter list": ({"l": [torch.ones(n) for n in range(4)]}, {"l": [torch.zeros(0)]}),
    "empty list": ({"l": [torch.ones(1), (torch.ones(2), 5)]}, {"l": []}),
    "shorter list in a list": (
        {"l": [[torch.ones(1), torch.ones(2)], 1]},
        {"l": [[torch.zeros(1)], 0]},
    ),
    "shorter deque": ({"d": deque([torch.ones(1), torch.ones(2)])}, {"d": deque([torch.zeros(1)])}),
    "small array": ({"h": BIG}, {"h": np.zeros(3)}),
    "key like a path": ({"a/b~c": torch.ones(2)}, {"a/b~c": None}),
    "number as key": ({7: torch.ones(2)}, {7: None}),
}


@pytest.mark.parametrize("how", [HOW[0], HOW[3]], ids=[HOW_NAMES[0], HOW_NAMES[3]])
@pytest.mark.parametrize("pattern", ["REPLICATED", "SHARDED"])
@pytest.mark.parametrize("wrap", [dict, Holder], ids=["plain", "stateful"])
@pytest.mark.parametrize("what", SOMETHING_ELSE)
def test_a_tensor_where_the_live_state_has_something_else(
    tmp_path: Path, what: str, wrap: Any, pattern: str, how: tuple[bool, bool]
) -> None:
    before, live = SOMETHING_ELSE[what]
    saved(tmp_path, 2, lambda _: wrap({"w": torch.ones(2), **before}), pattern)
    found = handed(tmp_path, 2, lambda _: wrap({"w": torch.zeros(2), **live}), pattern, how)
    assert [plain(got) for got in found] == [plain({"w": torch.ones(2), **before})] * 2


@pytest.mark.parametrize("pattern", ["REPLICATED", "SHARDED"])
def test_a_list_at_the_top_that_was_longer(tmp_path: Path, pattern: str) -> None:
    saved(tmp_path, 2, lambda _: [torch.ones(1), torch.ones(2), {"a": torch.ones(3)}], pattern)
    for found in handed(tmp_path, 2, lambda _: [torch.zeros(1)], pattern):
        assert [plain(item) for item in found[:2]] == [("Tensor", [1]), ("Tensor", [1, 1])]
        assert found[2]["a"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("pattern", ["REPLICATED", "SHARDED"])
def test_something_else_on_one_rank_alone(tmp_path: Path, pattern: str) -> None:
    saved(tmp_path, 2, lambda _: {"w": torch.ones(2), "best": torch.full((2,), 3.0)}, pattern)
    live = [{"w": torch.zeros(2), "best": None}, {"w": torch.zeros(2), "best": torch.zeros(2)}]
    found = handed(tmp_path, 2, lambda rank: live[rank], pattern)
    assert [got["best"].tolist() for got in found] == [[3, 3]] * 2
    assert found[1]["best"] is live[1]["best"]


@pytest.mark.parametrize("pattern", ["REPLICATED", "SHARDED"])
@pytest.mark.parametrize("how", HOW, ids=HOW_NAMES)
def test_extra_state_of_a_module_that_has_none_yet(
    tmp_path: Path, pattern: str, how: tuple[bool, bool]
) -> None:
    saved(tmp_path, 2, lambda _: Extra(torch.ones(3), 4.0), pattern)
    for model in handed(tmp_path, 2, lambda _: Extra(None), pattern, how):
        assert (model.extra.tolist(), model.w.tolist()) == ([1, 1, 1], [4, 4])


@pytest.mark.parametrize("pattern", ["REPLICATED", "SHARDED"])
def test_an_option_that_was_a_tensor_comes_back_as_one(tmp_path: Path, pattern: str) -> None:
    def make(lr: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        return model, optimizer

    def parts(made: Any) -> list[StateComponent]:
        return [StateComponent("m", made[0], pattern), StateComponent("o", made[1], pattern)]

    source = make(torch.tensor(0.5))
    live = make(0.001)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, parts(source))
        ckpt.load(parts(live))
    lr = live[1].param_groups[0]["lr"]
    assert (type(lr), lr.item()) == (torch.Tensor, 0.5)
    moments = [made[1].state[made[0].weight]["exp_avg"].tolist() for made in (source, live)]
    assert moments[0] == moments[1]


@pytest.mark.parametrize("strict", [True, False])
def test_a_stateful_that_has_nothing_yet_gets_all_of_it_on_one_rank(
    tmp_path: Path, strict: bool
) -> None:
    saved(tmp_path, 2, lambda _: Holder({"a": torch.ones(3), "n": {"b": torch.ones(2)}}))
    live = Holder({})
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.load([StateComponent("m", live, SHARDED)], strict=strict)
    assert plain(live.handed) == {"a": ("Tensor", [1, 1, 1]), "n": {"b": ("Tensor", [1, 1])}}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("world", [2])
def test_a_stateful_that_has_nothing_yet_is_told(
    tmp_path: Path, errors_of, on_all, world: int, strict: bool
) -> None:
    saved(tmp_path, 1, lambda _: Holder({"a": torch.ones(3), "n": {"b": torch.ones(2)}}))
    live = [Holder({}) for _ in range(world)]

    def program(comm: Any) -> None:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.load([StateComponent("m", live[comm.rank], SHARDED)], strict=strict)

    error = on_all(errors_of(world, program), StateMismatch)
    assert "nothing in component 'm'" in str(error) and "live: nothing" in str(error)
    assert error.unexpected == ["m/a", "m/n/b"]
    assert [holder.handed for holder in live] == [None] * world


def test_a_stateful_that_has_nothing_on_one_rank_gets_nothing_there(tmp_path: Path) -> None:
    saved(tmp_path, 1, lambda _: Holder({"a": torch.ones(3)}))
    found = handed(tmp_path, 2, lambda rank: Holder({} if rank else {"a": torch.zeros(3)}))
    assert [plain(got) for got in found] == [{"a": ("Tensor", [1, 1, 1])}, {}]


@pytest.mark.parametrize("level", ["NONE", "QUICK", "TENSOR", "FULL"])
@pytest.mark.parametrize("rank_1_by", [0, 1])
@pytest.mark.parametrize("writers", ["split", "lowest"])
def test_two_meshes_that_share_a_rank(
    tmp_path: Path, mesh_shard, writers: str, rank_1_by: int, level: str
) -> None:
    """Rank 1 is the second of one mesh and the first of the other, and holds its half by one of
    them."""
    layouts = [MeshLayout(Mesh((2,), (0, 1)), ("S0",)), MeshLayout(Mesh((2,), (1, 2)), ("S0",))]
    whole = torch.arange(8.0)
    by = [0, rank_1_by, 1]  # where rank 1 goes by the first, ranks 0 and 1 have all of it

    def program(comm: Any) -> None:
        state = {"w": mesh_shard(whole, layouts[by[comm.rank]], comm.rank)}
        with CheckpointManager(tmp_path, comm=comm, writers=writers) as ckpt:
            ckpt.save(1, [StateComponent("m", state, SHARDED, validation_level=level)])

    run_ranks(3, program)
    with open_checkpoint(tmp_path / "checkpoint-1") as view:
        assert view.read("m/w").tolist() == whole.tolist()
        assert view.manifest.components["m"].size_bytes == 32
    live = [torch.zeros(8) for _ in range(2)]
    handed(tmp_path, 2, lambda rank: {"w": live[rank]})
    assert [w.tolist() for w in live] == [whole.tolist()] * 2


@pytest.mark.parametrize("lacks", [0, 1, 2])
def test_a_tolerance_where_a_replica_is_lacking(
    tmp_path: Path, mesh_shard, errors_of, on_all, lacks: int
) -> None:
    layout = MeshLayout(Mesh((3,), (0, 1, 2)), ("R",))

    def state(rank: int, off: float) -> dict[str, Any]:
        held = (
            {} if rank == lacks else {"w": mesh_shard(torch.arange(8.0) + off * rank, layout, rank)}
        )
        return {"k": torch.ones(1), **held}

    saved(tmp_path, 3, lambda rank: state(rank, 1e-6), validation_level="FULL", atol=1e-3)
    found = open_checkpoint(tmp_path / "checkpoint-1").read("m/w")
    assert np.abs(found - np.arange(8)).max() <= 2.1e-6

    def program(comm: Any) -> None:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            component = StateComponent(
                "m", state(comm.rank, 1.0), SHARDED, validation_level="FULL", atol=1e-3
            )
            ckpt.save(2, [component])

    error = on_all(errors_of(3, program), ReplicationMismatch)
    assert (error.component, error.keys) == ("m", ["w"])
