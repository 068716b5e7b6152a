"""The alarm `unchanged="warn"`: parameters that should train, and have the bytes of the save
before."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptcore
from ckptcore import CheckpointManager, CheckpointWarning, InvalidState, Shard, StateComponent
from ckptcore.saving.unchanged import NAMES_SHOWN
from ckptcore.testing.ranks import run_ranks


class Net(nn.Module):
    """Three layers. `train` changes what it is given, by hand."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))


def train(*modules: nn.Module) -> None:
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter += 1


def said(save: Any) -> list[str]:
    """The alarms of one call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        save()
    return [str(each.message) for each in found if "requires_grad" in str(each.message)]


def names(text: str) -> list[str]:
    return re.findall(r"[a-z]+/[\w.]*\w", text)


@pytest.mark.parametrize("reuse", [False, True])
def test_names_what_does_not_train_once(tmp_path: Path, reuse: bool) -> None:
    model = Net()
    texts = []
    with CheckpointManager(tmp_path, reuse=reuse) as ckpt:
        for step in (10, 20, 30):
            train(model.layers[0], model.layers[2])
            texts.append(said(lambda: ckpt.save(step, {"model": model})))  # noqa: B023
        train(model.layers[1])
        texts.append(said(lambda: ckpt.save(40, {"model": model})))
    assert [len(each) for each in texts] == [0, 1, 0, 1]
    (first,), (later,) = texts[1], texts[3]
    assert first.startswith("2 parameters with requires_grad=True have in step 20 the bytes of ")
    assert "the bytes of step 10: " in first
    assert names(first) == ["model/layers.1.bias", "model/layers.1.weight"]
    assert "unchanged='ignore'" in first
    assert len(names(later)) == 4  # the others, now


def test_a_parameter_that_the_optimizer_does_not_have(tmp_path: Path) -> None:
    model = Net(2)
    optimizer = torch.optim.AdamW(model.layers[1].parameters(), 0.1)
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(tmp_path) as ckpt:
        for step in (1, 2):
            model.layers[1](model.layers[0](torch.ones(2, 4))).sum().backward()
            optimizer.step()
            handle = ckpt.save_async(step, state)
            texts = said(handle.result)
    assert names(texts[0]) == ["model/layers.0.bias", "model/layers.0.weight"]


def test_quiet_for_what_is_frozen_and_for_what_is_no_parameter(tmp_path: Path) -> None:
    model = Net()
    model.layers[1].requires_grad_(False)
    model.register_buffer("mask", torch.ones(3))
    with CheckpointManager(tmp_path) as ckpt:
        for step in (1, 2):
            train(model.layers[0], model.layers[2])
            state = {"model": model, "table": torch.ones(5), "empty": nn.Parameter(torch.ones(0))}
            assert said(lambda: ckpt.save(step, state)) == []  # noqa: B023


def test_quiet_where_nothing_was_trained(tmp_path: Path) -> None:
    """A save without a step of training before it is no news; but where other state goes on, it
    is."""
    model = Net(1)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": model, "done": {"steps": 1}})
        assert said(lambda: ckpt.save(2, {"model": model, "done": {"steps": 1}})) == []
        texts = said(lambda: ckpt.save(3, {"model": model, "done": {"steps": 3}}))
    assert names(texts[0]) == ["model/layers.0.bias", "model/layers.0.weight"]


def test_a_save_that_failed_is_not_the_last_one(tmp_path: Path) -> None:
    model = Net(2)
    (tmp_path / "checkpoint-2").write_text("in the way")
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": model})
        train(model)
        with pytest.raises(ckptcore.CheckpointError):
            ckpt.save(2, {"model": model})
        train(model.layers[0])
        assert said(lambda: ckpt.save(3, {"model": model})) == []


def test_many_names_are_counted(tmp_path: Path) -> None:
    model = Net(8)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": model})
        train(model.layers[7])
        (text,) = said(lambda: ckpt.save(2, {"model": model}))
    assert len(names(text)) == NAMES_SHOWN
    assert text.startswith("14 parameters ")
    assert f" and {14 - NAMES_SHOWN} more. " in text


def test_ignore(tmp_path: Path) -> None:
    model = Net()
    with CheckpointManager(tmp_path, unchanged="ignore") as ckpt:
        for step in (1, 2):
            train(model.layers[0])
            assert said(lambda: ckpt.save(step, {"model": model})) == []  # noqa: B023


@pytest.mark.parametrize("value", ["raise", None, True])
def test_other_values_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InvalidState, match="unchanged"):
        CheckpointManager(tmp_path, unchanged=value)


def on_ranks(root: Path, state: Any, change: Any, *, node: bool = False) -> list[list[str]]:
    """What each of two ranks says of the second save. change: gets what `state` has made of the
    number of the rank. node: each has a storage of its own."""

    def program(comm: Any) -> list[str]:
        made = state(comm.rank)
        mode, where = ("node", root / f"{comm.rank}") if node else ("shared", root)
        with CheckpointManager(where, comm=comm, storage_mode=mode) as ckpt:
            ckpt.save(1, made)
            change(comm.rank, made)
            handle = ckpt.save_async(2, made)
            assert handle.exception(60) is None
            # What `result` would give: warnings are of the process, and here all ranks are one.
            texts = handle._record.warnings[:]
            handle._record.warnings.clear()
        return texts

    return run_ranks(2, program, nodes=[[0], [1]] if node else None)


def slices(rank: int) -> list[StateComponent]:
    """Three parameters, of which each rank has one half."""

    class Halves:
        def __init__(self) -> None:
            self.parts = {n: nn.Parameter(torch.ones(2, 3)) for n in ("a", "b", "c")}
            self.parts["d"] = nn.Parameter(torch.ones(2, 3), requires_grad=False)

        def state_dict(self) -> dict[str, Any]:
            return {n: Shard(p, (4, 3), (2 * rank, 0)) for n, p in self.parts.items()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    return [StateComponent("net", Halves(), "SHARDED")]


@pytest.mark.parametrize("node", [False, True], ids=["one storage", "one a node"])
def test_slices_count_where_all_of_them_stay(tmp_path: Path, node: bool) -> None:
    """a stays on both ranks; b changes on rank 1 alone, c on both; d is frozen."""

    def change(rank: int, state: list[Any]) -> None:
        with torch.no_grad():
            state[0].stateful.parts["c"] += 1
            if rank == 1:
                state[0].stateful.parts["b"] += 1

    first, second = on_ranks(tmp_path, slices, change, node=node)
    assert [names(text) for text in first] == [["net/a"]]
    assert second == []


def test_replicas_are_named_by_one_rank(tmp_path: Path) -> None:
    def state(_: int) -> list[StateComponent]:
        model = nn.ParameterList(nn.Parameter(torch.ones(5 << 20)) for _ in range(4))
        return [StateComponent("net", model, "REPLICATED")]

    def change(_: int, state: list[Any]) -> None:
        with torch.no_grad():
            for number in (0, 1):
                state[0].stateful[number] += 1

    first, second = on_ranks(tmp_path, state, change)
    written = {f.name for f in (tmp_path / "checkpoint-2").glob("*.safetensors")}
    assert len(written) == 2  # each rank has written some of it
    assert [names(text) for text in first] == [["net/2", "net/3"]]
    assert second == []


def test_what_every_rank_has_of_its_own_is_named_once(tmp_path: Path) -> None:
    def state(rank: int) -> list[StateComponent]:
        return [StateComponent("net", Net(2), "PER_RANK")]

    def change(rank: int, state: list[Any]) -> None:
        train(state[0].stateful.layers[0])

    first, second = on_ranks(tmp_path, state, change)
    assert [names(text) for text in first] == [["net/layers.1.bias", "net/layers.1.weight"]]
    assert second == []


def test_warnings_are_of_the_class_that_users_filter(tmp_path: Path) -> None:
    model = Net()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": model})
        train(model.layers[0])
        with pytest.warns(CheckpointWarning, match="4 parameters"):
            ckpt.save(2, {"model": model})
