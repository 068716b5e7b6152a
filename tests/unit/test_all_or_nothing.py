"""A load that fails half-way: who refused, on which rank, what was overwritten; and nothing was,
where that was asked for."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptcore import (
    CheckpointManager,
    CheckpointWarning,
    LoadFailed,
    NoUsableCheckpoint,
    RNGState,
    SharingPattern,
    StateComponent,
    StateMismatch,
)
from ckptcore.testing.ranks import run_ranks


class Refuses:
    """Refuses what it is handed, as often as it says; `after`: when it has changed something."""

    def __init__(self, value: int, refusals: int = 0) -> None:
        self.value, self.refusals = value, refusals

    def state_dict(self) -> Any:
        return {"value": self.value, "t": torch.full((2,), float(self.value))}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]
        if self.refusals:
            self.refusals -= 1
            raise KeyError("momentum")


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def build(value: float, refusals: int = 0) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + value)
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {
                "step": torch.tensor(value),
                "exp_avg": p.detach() + 1,
                "exp_avg_sq": p.detach() + 2,
            }
    return {
        "model": model,
        "optimizer": optimizer,
        "box": Box({"t": torch.full((3,), value), "n": value}),
        "plain": {
            "n": value,
            "list": [value, {"t": torch.full((2,), value)}],
            "a": np.full(2, value),
        },
        "bad": Refuses(int(value), refusals),
        "after": {"n": value},
        "rng": RNGState(),
    }


def content(state: dict[str, Any]) -> str:
    parts = {
        k: v if isinstance(v, dict) else v.state_dict() for k, v in state.items() if k != "rng"
    }
    return repr(parts)


@pytest.fixture
def saved(tmp_path: Path) -> CheckpointManager:
    ckpt = CheckpointManager(tmp_path)
    ckpt.save(1, build(1.0))
    return ckpt


@pytest.mark.parametrize("how", ["load", "restore"])
def test_a_refusal_says_who_where_and_what_is_overwritten(saved, how: str) -> None:
    live = build(5.0, refusals=1)
    with pytest.raises(
        LoadFailed, match=r"component 'bad' on rank 0 could not be loaded: KeyError: 'momentum'"
    ) as caught:
        getattr(saved, how)(live)
    error = caught.value
    assert isinstance(error.__cause__, KeyError) and isinstance(error, StateMismatch)
    assert (error.component, error.rank) == ("bad", 0)
    assert set(error.overwritten) == {"model", "optimizer", "box", "plain", "bad"}
    assert "as before: 'after', 'rng'" in str(error) and "do not train on it" in str(error)
    assert live["after"] == {"n": 5.0}


@pytest.mark.parametrize("how", ["load", "restore"])
def test_transactional_is_all_or_nothing(saved, how: str) -> None:
    live = build(5.0, refusals=1)
    before, moment = content(live), live["optimizer"].state[live["model"][0].weight]["exp_avg"]
    random = torch.get_rng_state()
    with pytest.raises(
        LoadFailed, match=r"component 'bad'.*; live state is as it was before the load$"
    ):
        getattr(saved, how)(live, transactional=True)
    assert content(live) == before
    assert live["optimizer"].state[live["model"][0].weight]["exp_avg"] is moment
    assert torch.equal(torch.get_rng_state(), random)
    getattr(saved, how)(live, transactional=True)
    assert content(live) == content(build(1.0))


def test_what_cannot_be_put_back_is_named(saved) -> None:
    live = build(5.0, refusals=2)  # refuses what it had before, too
    with pytest.raises(
        LoadFailed,
        match=r"these could not be: 'bad' \(KeyError: 'momentum'\); do not train on "
        r"it$",
    ):
        saved.load(live, transactional=True)
    assert content({**live, "bad": Box(0)}) == content({**build(5.0), "bad": Box(0)})


def test_an_interrupted_load_is_put_back(saved) -> None:
    class Interrupts(Box):
        def load_state_dict(self, state: Any) -> None:
            if state["n"] == 1.0:
                raise KeyboardInterrupt

    live = build(5.0)
    before = content(live)
    with pytest.raises(KeyboardInterrupt) as caught:
        saved.load({**live, "after": Interrupts({"n": 5.0})}, transactional=True)
    assert content(live) == before
    assert caught.value.__notes__ == ["live state is as it was before the load"]


@pytest.mark.parametrize("transactional", [False, True])
def test_on_ranks_all_are_put_back(tmp_path: Path, transactional: bool) -> None:
    def program(comm: Any) -> Any:
        live = {"w": torch.zeros(3)}
        bad = Refuses(0, refusals=comm.rank == 1)
        parts = [
            StateComponent("w", live, SharingPattern.REPLICATED),
            StateComponent("bad", bad, SharingPattern.REPLICATED),
        ]
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(
                1, [StateComponent("w", {"w": torch.ones(3)}), StateComponent("bad", Refuses(1))]
            )
            with pytest.raises(LoadFailed) as caught:
                ckpt.load(parts, transactional=transactional)
        return (
            live["w"].tolist(),
            bad.value,
            caught.value.component,
            caught.value.rank,
            str(caught.value),
        )

    for rank, (w, value, component, failed, text) in enumerate(run_ranks(2, program)):
        assert (component, failed) == ("bad", 1)
        assert (w, value) == (([0.0] * 3, 0) if transactional else ([1.0] * 3, 1)), rank
        assert ("as it was before the load" if transactional else "overwritten by now") in text


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("where", ["model", "extra"])
@pytest.mark.parametrize("kind", [dict, Box])
@pytest.mark.parametrize("why", ["required", "keep"])
def test_a01_what_is_passed_over_leaves_nothing_behind(
    tmp_path: Path, where: str, kind: Any, why: str
) -> None:
    """A component that the older checkpoint lacks, or that stays because the number of ranks is
    another."""
    rule = (
        {"required": False}
        if why == "required"
        else {"sharing_pattern": "PER_RANK", "on_resize": "keep"}
    )

    def parts(value: float, extra: bool = True) -> list[StateComponent]:
        model = StateComponent("model", kind({"w": torch.full((1 << 16,), value)}))
        return [model, StateComponent("extra", kind({"w": torch.full((1 << 16,), value)}), **rule)][
            : 1 + extra
        ]

    if why == "keep":

        def older(comm: Any) -> None:
            with CheckpointManager(tmp_path, comm=comm, run_id="run") as ckpt:
                ckpt.save(1, parts(1.0))

        run_ranks(2, older)
    with CheckpointManager(tmp_path, run_id="run") as ckpt:
        if why == "required":
            ckpt.save(1, parts(1.0, extra=False))
        ckpt.save(2, parts(2.0))
    name = (
        f"{where}.rank00000.safetensors"
        if (where, why) == ("extra", "keep")
        else f"{where}.safetensors"
    )
    flip(tmp_path / "checkpoint-2" / name)
    live = parts(0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        report = CheckpointManager(tmp_path, run_id="run").restore(live)
    held = [(c.stateful if kind is dict else c.stateful.value)["w"].unique().tolist() for c in live]
    assert (report.step, held) == (1, [[1.0], [0.0]])


def test_a_mismatch_after_a_damaged_checkpoint_does_not_deny_what_that_left(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": nn.Linear(2, 2)})
        ckpt.save(2, {"model": nn.Linear(2, 2), "w": {"t": torch.ones(3)}})
    flip(tmp_path / "checkpoint-2" / "model.safetensors")
    with pytest.raises(StateMismatch, match=r"live state was partly overwritten by checkpoint-2"):
        CheckpointManager(tmp_path).restore({"model": nn.Linear(2, 2), "w": {"t": torch.zeros(3)}})


def test_a_fresh_start_is_refused_with_what_the_damage_left(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": nn.Linear(2, 2)})
    flip(tmp_path / "checkpoint-1" / "model.safetensors")
    with pytest.raises(NoUsableCheckpoint, match="partly overwritten"):
        CheckpointManager(tmp_path).restore({"model": nn.Linear(2, 2)})


def test_a_component_that_need_not_be_there_on_either_side(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(
            1,
            [StateComponent("model", {"w": 1}), StateComponent("cache", {"x": 1}, required=False)],
        )
        report = ckpt.restore([StateComponent("model", {"w": 0})])
        assert report.unexpected == ["cache"]
        ckpt.save(2, [StateComponent("model", {"w": 1}), StateComponent("cache", {"x": 1})])
        with pytest.raises(StateMismatch, match="'cache'"):
            ckpt.restore([StateComponent("model", {"w": 0})])
