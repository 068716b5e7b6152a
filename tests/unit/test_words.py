"""Who shares a part of the state, said in the dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptcore
from ckptcore import (
    CheckpointManager,
    Global,
    InvalidState,
    PerGroup,
    PerNode,
    PerRank,
    Replicated,
    ReplicationMismatch,
    Shard,
    Sharded,
    StateComponent,
)
from ckptcore.testing.ranks import run_ranks

WORDS = {
    Global: "GLOBAL",
    PerNode: "PER_NODE",
    PerRank: "PER_RANK",
    Replicated: "REPLICATED",
    Sharded: "SHARDED",
}


def test_each_says_its_pattern(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, process_groups={"pair": [[0]]}) as ckpt:
        state: dict[str, Any] = {word.__name__: word({"x": 1}) for word in WORDS}
        manifest = ckpt.save(1, {**state, "PerGroup": PerGroup({"x": 1}, "pair")}).manifest
    assert manifest is not None
    patterns = {key: component.pattern for key, component in manifest.components.items()}
    assert patterns == {
        **{word.__name__: pattern for word, pattern in WORDS.items()},
        "PerGroup": "PER_GROUP",
    }


def test_on_four_ranks(tmp_path: Path) -> None:
    def state(comm: Any, of: Any) -> dict[str, Any]:
        rank = comm.rank
        mine = torch.full((2,), float(of(rank)))
        return {
            "model": nn.LayerNorm(2),
            "log": Global({"of": of(rank)}),
            "loader": PerRank({"of": of(rank)}, on_resize="keep"),
            "stage": PerGroup({"of": of(rank % 2)}, "dp"),
            "table": Sharded({"t": Shard(mine, (8,), (2 * rank,))}),
            "same": Replicated({"of": of(0)}),
            "cache": PerNode({"of": of(rank)}, required=False),
        }

    def values(given: dict[str, Any]) -> list[Any]:
        found = [given[k].stateful["of"] for k in ("log", "loader", "stage", "same", "cache")]
        return [*found, given["table"].stateful["t"].tensor.tolist()]

    def program(comm: Any) -> Any:
        groups = {"dp": [[0, 2], [1, 3]]}
        with CheckpointManager(tmp_path, comm=comm, process_groups=groups) as ckpt:
            ckpt.save(1, state(comm, lambda rank: rank))
            live = state(comm, lambda rank: 100)
            ckpt.restore(live)
            with pytest.raises(ReplicationMismatch):
                ckpt.save(2, {"same": Replicated({"of": comm.rank})})
        return values(live)

    assert run_ranks(4, program) == [[0, n, n % 2, 0, 0, [n, n]] for n in range(4)]


def test_an_optimizer_finds_the_names_of_a_model_in_a_word(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": Global(model), "optimizer": Replicated(optimizer)})
    moments = ckptcore.load_state(f"{tmp_path}/checkpoint-1", "optimizer")
    assert set(moments["group_of"]) == {"weight", "bias"}


def test_wrong_uses(tmp_path: Path) -> None:
    with pytest.raises(InvalidState, match=r"Global\(\.\.\.\) takes no 'requierd'; beside the obj"):
        Global({}, requierd=False)
    with pytest.raises(
        InvalidState, match=r"PerRank\(\.\.\.\) is given Global\(\.\.\.\): say once"
    ):
        PerRank(Global({}))
    for bad in ("", None, 3, []):
        with pytest.raises(InvalidState, match="group must be printable text"):
            PerGroup({}, bad)  # type: ignore[arg-type]
    with CheckpointManager(tmp_path) as ckpt:
        with pytest.raises(InvalidState, match="component 'a': on_resize must be"):
            ckpt.save(1, {"a": PerRank({}, on_resize="no")})
        with pytest.raises(
            InvalidState, match="component 'a': its state is a StateComponent; give"
        ):
            ckpt.save(1, {"a": PerRank(StateComponent("a", {}))})
        with pytest.raises(InvalidState, match="a list as state has StateComponents only"):
            ckpt.save(1, [Global({})])
        assert ckpt.list() == [] and list(tmp_path.iterdir()) == []
    assert repr(Global({"a": 1})) == "Global({'a': 1})"
