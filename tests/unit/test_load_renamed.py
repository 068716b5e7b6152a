"""Loading under other names, and only some components of a state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckptcore import (
    CheckpointCoordinator,
    CheckpointManager,
    InvalidState,
    RanksDisagree,
    Shard,
    SharingPattern,
    StateComponent,
    StateMismatch,
)
from ckptcore.loading.keys import Renaming
from ckptcore.testing.ranks import run_ranks


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.base = inner


def trained(seed: int, wrapped: bool = False) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model = Wrapped(model) if wrapped else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=seed / 10)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(seed))
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "progress": {"epoch": seed}}


def same_training(a: dict[str, Any], b: dict[str, Any]) -> bool:
    one, two = (s["optimizer"].state_dict() for s in (a, b))
    weights = zip(a["model"].parameters(), b["model"].parameters(), strict=True)
    moments = (
        torch.equal(one["state"][n][k], two["state"][n][k])
        for n in one["state"]
        for k in one["state"][n]
    )
    return all(torch.equal(p, q) for p, q in weights) and all(moments)


TO_WRAPPED = {"model/": "model/base.", "optimizer/": "optimizer/base."}


def test_a_whole_run_under_other_names(tmp_path: Path) -> None:
    plain, other = trained(1), trained(2, wrapped=True)
    with CheckpointManager(tmp_path, run_id="r") as ckpt:
        ckpt.save(1, plain)
    with CheckpointManager(tmp_path) as ckpt:
        with pytest.raises(StateMismatch):
            ckpt.restore(other)
        report = ckpt.restore(other, rename=TO_WRAPPED)
        assert report.step == 1 and ckpt.run_id == "r" and other["progress"] == {"epoch": 1}
        assert same_training(plain, other) and not (report.missing or report.unexpected)
        ckpt.save(2, other)
        again = trained(3)
        ckpt.load(again, rename=lambda name: name.replace("/base.", "/"))
        assert same_training(plain, again)


def test_a_component_under_another_name(tmp_path: Path) -> None:
    one, ema = nn.Linear(2, 2), nn.Linear(2, 2)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": one, "ema": ema})
        live = nn.Linear(2, 2)
        ckpt.load({"model": live}, rename={"ema/": "model/"})
        assert torch.equal(live.weight, ema.weight)
        # What no saved name becomes is read from its own name.
        third = nn.Linear(2, 2)
        ckpt.load({"model": live, "third": third}, rename={"model/": "third/"})
        assert torch.equal(live.weight, one.weight) and torch.equal(third.weight, one.weight)
        ckpt.load({"model": live, "ema": third}, rename={"model": "ema", "ema": "model"})
        assert torch.equal(live.weight, ema.weight) and torch.equal(third.weight, one.weight)


def test_strict_within_what_is_asked_for(tmp_path: Path) -> None:
    saved = {"a.x": torch.ones(2), "a.y": torch.ones(2), "b": torch.ones(1)}
    root = str(tmp_path)
    with CheckpointManager(root) as ckpt:
        ckpt.save(1, [StateComponent("w", saved)])
        live = {"c.x": torch.zeros(2).requires_grad_(), "c.y": torch.zeros(2).requires_grad_()}
        report = ckpt.load({"w": live}, rename={"w/a.": "w/c."}, keys="w/c.x")
        assert live["c.x"].tolist() == [1, 1] and live["c.y"].tolist() == [0, 0]
        assert not report.missing
        live["c.z"] = torch.zeros(1).requires_grad_()
        with pytest.raises(StateMismatch, match=r"missing in the checkpoint: 'w/a\.z'"):
            ckpt.load({"w": live}, rename={"w/a.": "w/c."}, keys="w/c.*")
        report = ckpt.load({"w": live}, rename={"w/a.": "w/c."}, keys="w/c.*", strict=False)
        assert report.missing == ["w/c.z"] and live["c.y"].tolist() == [1, 1]
    coordinator = CheckpointCoordinator({"w": {"c.x": torch.zeros(2)}})
    coordinator.load_checkpoint(f"{root}/checkpoint-1", rename={"w/a.": "w/c."}, keys="w/c.x")


def test_whatever_is_left_over_is_told(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": nn.Linear(2, 2), "other": nn.Linear(2, 2, bias=False)})
        with pytest.raises(StateMismatch, match=r"unexpected in the checkpoint: 'model/bias'"):
            ckpt.load({"model": nn.Linear(2, 2, bias=False)}, rename={"nothing/": "model/no."})
        with pytest.raises(StateMismatch, match="unexpected in the checkpoint: 'other'"):
            ckpt.restore({"model": nn.Linear(2, 2)}, rename={"nothing/": "model/no."})
        report = ckpt.restore({"second": nn.Linear(2, 2)}, rename={"model": "second"}, keys="s*")
        assert report.step == 1


def test_sharded_state_under_other_names_on_other_ranks(tmp_path: Path) -> None:
    whole = torch.arange(8.0)

    def part(rank: int, size: int, value: torch.Tensor) -> Shard:
        n = 8 // size
        return Shard(value[rank * n : rank * n + n], (8,), (rank * n,))

    def save(comm: Any) -> None:
        held = {"old.w": part(comm.rank, 2, whole)}
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, [StateComponent("model", held, SharingPattern.SHARDED)])

    def load(comm: Any) -> list[float]:
        mine = torch.zeros(2)
        held = {"new.w": Shard(mine, (8,), (comm.rank * 2,))}
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            component = StateComponent("model", held, SharingPattern.SHARDED)
            with pytest.raises(RanksDisagree):
                ckpt.load([component], rename={f"model/{comm.rank}": "model/"})
            ckpt.load([component], rename={"model/old.": "model/new."})
        return mine.tolist()

    run_ranks(2, save)
    assert run_ranks(4, load) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("bad", [{}, 3, "a", ["a"], {"": "a"}, {"a": ""}, {"a": 3}, {3: "a"}, True])
def test_wrong_renames_are_refused(tmp_path: Path, bad: Any) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"a": {"x": 1}})
        for call in (ckpt.load, ckpt.restore):
            with pytest.raises(InvalidState, match="rename must be a dict of beginnings"):
                call({"a": {"x": 1}}, rename=bad)


def test_functions_that_go_wrong(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"a": {"x": 1, "y": 2}})
        state = {"a": {"x": 1, "y": 2}}
        with pytest.raises(InvalidState, match="'a/x' and 'a/y' the same name 'a/z'"):
            ckpt.load(state, rename=lambda name: "a/z")
        with pytest.raises(InvalidState, match="for 'a/x' it gives None"):
            ckpt.load(state, rename=lambda name: None)  # type: ignore[arg-type, return-value]
        with pytest.raises(InvalidState, match=r"fails for 'a/x' \(KeyError"):
            ckpt.load(state, rename=lambda name: {}[name])
        with pytest.raises(InvalidState, match="give one of them"):
            ckpt.load(state, rename={"a": "b"}, keys=lambda name: "a/y")


names = st.text("ab/.", min_size=1, max_size=4)


@given(st.dictionaries(names, names, min_size=1, max_size=4), st.lists(names, min_size=1))
def test_what_is_read_is_what_the_rules_make_of_it(rules: dict[str, str], saved: list[str]) -> None:
    """As the function that does the same to every saved name says."""

    def forward(name: str) -> str:
        start = next((start for start in rules if name.startswith(start)), "")
        return rules[start] + name[len(start) :] if start else name

    renaming = Renaming(rules)
    for name in saved:
        live = forward(name)
        origin = renaming.saved_name(live)
        assert forward(origin) == live or origin == live


def test_only_some_components(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, run_id="r") as ckpt:
        ckpt.save(1, trained(1))
    with CheckpointManager(tmp_path) as ckpt:
        state = trained(2)
        report = ckpt.restore(state, only=["model", "prog*"])
        assert report.step == 1 and state["progress"] == {"epoch": 1}
        assert state["optimizer"].param_groups[0]["lr"] == 0.2
        assert ckpt.run_id == "r"
        ckpt.save(2, state)
        assert [info.step for info in ckpt.list()] == [1, 2]
        state = {"progress": {"epoch": 7}}
        with pytest.raises(StateMismatch, match=r"and only=\['progress'\] loads these"):
            ckpt.restore(state)
        assert state == {"progress": {"epoch": 7}}
        ckpt.restore(state, 1, only="progress")
        assert state == {"progress": {"epoch": 1}}
        ckpt.restore(state, only=lambda key: key == "progress")
        for bad in ("modle", ["progress", "modle"], lambda key: False):
            with pytest.raises(InvalidState, match=r"the state has not; it has progress"):
                ckpt.restore(state, only=bad)
        for bad in ([], "", 3, [3], {"progress": 1}, True):
            with pytest.raises(InvalidState, match="only must be the name of a component"):
                ckpt.restore(state, only=bad)


def test_values_without_a_template_come_as_they_were_saved(tmp_path: Path) -> None:
    values = {"a": [1, (2.5, "x")], "b": torch.arange(3), "c": {"d": None}}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"values": values, "tensor": torch.ones(2)})
        report = ckpt.load({"values": None, "tensor": None})
        loaded = report.values["values"]
        assert loaded["a"] == [1, (2.5, "x")] and loaded["c"] == {"d": None}
        assert loaded["b"].tolist() == [0, 1, 2] and report.values["tensor"].tolist() == [1, 1]
        empty: dict[str, Any] = {}
        ckpt.load({"values": empty})
        assert empty["a"] == [1, (2.5, "x")] and empty["b"].tolist() == [0, 1, 2]
