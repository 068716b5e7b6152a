"""Checkpoints of format 1.0 that every later version must read. make.py saved what is expected
here."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

from ckptcore import (
    CheckpointCoordinator,
    CheckpointView,
    OptimizerState,
    Shard,
    SharingPattern,
    StateComponent,
    open_checkpoint,
    scan_root,
)
from ckptcore.testing.ranks import run_ranks

ROOT = Path(__file__).parent / "format-1.0"
SINGLE, SHARDED = ROOT / "single" / "checkpoint-7", ROOT / "sharded" / "checkpoint-20"

WEIGHTS = {
    "weight": torch.tensor([[1.0, -0.0, 2.5], [math.inf, 1e-45, -3.0]]),
    "bias": torch.tensor([0.5, -0.5]),
}
MOMENTS = {
    "weight": {
        "step": torch.tensor(3.0),
        "exp_avg": torch.full((2, 3), 0.25),
        "exp_avg_sq": torch.full((2, 3), 0.125),
    },
    "bias": {
        "step": torch.tensor(3.0),
        "exp_avg": torch.full((2,), -0.25),
        "exp_avg_sq": torch.full((2,), 2.0),
    },
}
LEARNING_RATE = 0.0078125
TENSORS = {
    "bf16": torch.tensor([1.5, -2.0, math.nan], dtype=torch.bfloat16),
    "f16": torch.tensor([[0.5], [1.0]], dtype=torch.float16),
    "f8": torch.tensor([1.0, 2.0, 448.0]).to(torch.float8_e4m3fn),
    "f64": torch.tensor(math.pi, dtype=torch.float64),
    "bool": torch.tensor([True, False, True]),
    "u16": torch.tensor([0, 65535]).to(torch.uint16),
    "i64": torch.tensor([-(2**63), 2**63 - 1]),
    "c64": torch.tensor([1 + 2j], dtype=torch.complex64),
    "c128": torch.tensor([1 + 2j, -0.0 - 1j], dtype=torch.complex128),
    "empty": torch.zeros(0, 4),
    "nested": {
        "a/b~c": [torch.tensor(1), (torch.tensor(2, dtype=torch.int8),)],
        0: {"0": torch.tensor(3)},
    },
    "array": np.arange(1025, dtype=np.float32),
}
VALUES = {
    "none": [None, True, False],
    "ints": [0, -1, -(2**63), 2**64 - 1, 2**64, -(10**30)],
    "floats": [0.1, -0.0, math.inf, math.nan],
    "texts": ["", "é€", "\ud800", b"\x00\xff"],
    "tuple": (1, (2, [3])),
    "keys": {0: "int", "0": "text", None: 1, (1, "x"): 2, 1.5: 3},
    "set": {1, "a", (2, 3)},
    "frozenset": frozenset({b"x"}),
    "complex": complex(1.5, -0.0),
    "times": [
        dt.datetime(2026, 1, 31, 12, 30, 15, 250),
        dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC),
        dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
        dt.time(23, 59, tzinfo=dt.timezone(dt.timedelta(hours=-3), "BRT")),
        dt.date(2024, 2, 29),
        dt.timedelta(-1, 2, 3),
    ],
    "path": PurePosixPath("data/train.bin"),
    "numpy": [np.float32(1.5), np.int64(-3), np.str_("é"), np.datetime64("2026-01-31")],
    "arrays": [np.arange(6, dtype=">i2").reshape(2, 3), np.array(["a", "bcd"]), np.zeros((0, 2))],
    "registered": [
        OrderedDict(b=1, a=2),
        Counter("aab"),
        deque([1, 2], 5),
        bytearray(b"ba"),
        range(1, 9, 2),
        slice(None, 3, None),
        Decimal("1.50"),
        Fraction(1, 3),
        UUID(int=7),
        torch.Size([2, 3]),
        torch.device("cuda", 1),
        torch.bfloat16,
    ],
}
METRICS = {"loss": 0.25, "best": -math.inf}
METADATA = {"note": "golden é", "list": [1, None, 2.5]}

# Of four ranks on a 2 x 2 mesh.
CUTS = {"column": "s0 S0", "row": "S0 S1", "hsdp": "R S0"}
FULL = {
    "column": torch.arange(30.0).reshape(10, 3),
    "row": torch.arange(30.0).reshape(3, 10).to(torch.bfloat16),
    "hsdp": torch.arange(5),
    "boxes": torch.arange(24, dtype=torch.float64).reshape(4, 6),
    "plain": torch.tensor([1.0, 2.0]),
    "tied": torch.tensor([1.0, 2.0]),
    "stage.2": torch.tensor([7], dtype=torch.int8),  # only rank 2 has it
}
BOXES = [((0, 0), (1, 6)), ((1, 0), (3, 2)), ((1, 2), (3, 3)), ((1, 5), (3, 1))]
COMMON = {"steps": (20, 40)}
NODES = [[0, 1], [2, 3]]
GROUPS = {"dp": [[0, 2], [1, 3]]}
GROUP_KEYS = ["even", "odd"]


def test_both_are_committed_and_verify() -> None:
    for folder in (SINGLE, SHARDED):
        (info,) = scan_root(folder.parent)
        assert (info.status, info.name, info.run_id) == ("committed", folder.name, "golden")
        view = open_checkpoint(folder)
        assert view.verify() == [] and view.foreign_files() == []
        assert view.manifest.format_version == "1.0"
    assert sum(path.stat().st_size for path in ROOT.rglob("*") if path.is_file()) < 60_000


def test_the_manifest_of_one_process() -> None:
    manifest = open_checkpoint(SINGLE).manifest
    assert (manifest.step, manifest.sequence, manifest.world_size, manifest.nodes) == (
        7,
        1,
        1,
        [[0]],
    )
    assert (manifest.metrics, manifest.metrics_step, manifest.metadata) == (METRICS, 7, METADATA)
    assert manifest.training_args_hash == "abc"
    assert {key: c.tensors for key, c in manifest.components.items()} == {
        "model": 2,
        "optimizer": 6,
        "tensors": 14,
        "values": 0,
    }


def zeros(value: Any) -> Any:
    """The same structure with other tensors."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return (
            value * 0
            if isinstance(value, np.ndarray)
            else torch.zeros(value.shape, dtype=value.dtype)
        )
    if isinstance(value, dict):
        return {key: zeros(item) for key, item in value.items()}
    return type(value)(map(zeros, value)) if isinstance(value, list | tuple) else value


@pytest.mark.filterwarnings("ignore::ckptcore.CheckpointWarning")  # options that a later torch adds
def test_one_process_resumes(same: Callable[..., None]) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    state = {"model": model, "optimizer": optimizer, "tensors": zeros(TENSORS), "values": VALUES}
    report = CheckpointCoordinator(state).load_checkpoint(SINGLE, strict=False)
    assert report.step == 7 and report.missing == []
    same(dict(model.state_dict()), WEIGHTS)
    same(OptimizerState(optimizer, model).state_dict()["state"], MOMENTS)
    assert optimizer.param_groups[0]["lr"] == LEARNING_RATE
    same(report.values["tensors"], TENSORS)
    same(open_checkpoint(SINGLE).values("values"), VALUES)


def pieces(rank: int, world: int) -> dict[str, Any]:
    """Every tensor cut along its longest dimension over the ranks, as no rank saved it."""
    found: dict[str, Any] = {}
    for name, full in FULL.items():
        dim = max(range(full.ndim), key=lambda d: full.shape[d])
        first, end = (full.shape[dim] * r // world for r in (rank, rank + 1))
        offset = tuple(first if d == dim else 0 for d in range(full.ndim))
        local = torch.zeros(
            [end - first if d == dim else n for d, n in enumerate(full.shape)], dtype=full.dtype
        )
        found[name] = Shard(local, tuple(full.shape), offset)
    return {**found, "values": {"steps": None}}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sharded_state_on_any_number_of_ranks(world: int, same: Callable[..., None]) -> None:
    def program(comm: Any) -> None:
        state, whole = pieces(comm.rank, world), zeros({**FULL, "values": {"steps": None}})
        for live in (state, whole):
            component = StateComponent("model", live, SharingPattern.SHARDED)
            report = CheckpointCoordinator([component], comm=comm).load_checkpoint(
                SHARDED, strict=False
            )
            assert report.step == 20 and report.missing == []
            assert report.values["model"]["values"] == COMMON
        for name, full in FULL.items():
            part = state[name]
            place = tuple(
                slice(o, o + n) for o, n in zip(part.offset, part.tensor.shape, strict=True)
            )
            same(part.tensor, full[place].clone(), name)
            same(whole[name], full, name)

    run_ranks(world, program)


def test_four_ranks_resume(same: Callable[..., None]) -> None:
    def program(comm: Any) -> None:
        rank = comm.rank
        components = [
            StateComponent(
                "model", zeros({**FULL, "values": {"steps": None}}), SharingPattern.SHARDED
            ),
            StateComponent("own", {"rank": -1}, SharingPattern.PER_RANK),
            StateComponent(
                "loader",
                {"position": -1},
                SharingPattern.PER_GROUP,
                "dp",
                group_key=GROUP_KEYS[rank % 2],
            ),
            StateComponent("cache", {"node": torch.tensor(-1)}, SharingPattern.PER_NODE),
            StateComponent("args", {"lr": 0.0}, SharingPattern.REPLICATED),
        ]
        coordinator = CheckpointCoordinator(components, GROUPS, comm=comm)
        report = coordinator.load_checkpoint(SHARDED)
        # In the order of the ranks that had the keys first.
        same(
            report.values["model"],
            {
                **{n: FULL[n] for n in FULL if n != "stage.2"},
                "values": COMMON,
                "stage.2": FULL["stage.2"],
            },
        )
        assert report.values["own"] == {"rank": rank}
        assert report.values["loader"] == {"position": 100 + rank % 2}
        same(report.values["cache"], {"node": torch.tensor(rank // 2)})
        assert report.values["args"] == {"lr": 0.5}

    run_ranks(4, program, nodes=NODES)


def test_sharded_state_without_torch() -> None:
    view: CheckpointView = open_checkpoint(SHARDED)
    assert (view.manifest.world_size, view.manifest.nodes, view.manifest.groups) == (
        4,
        NODES,
        GROUPS,
    )
    assert view.manifest.components["loader"].group_keys == GROUP_KEYS
    for name in ("column", "hsdp", "boxes", "plain", "tied", "stage.2"):
        np.testing.assert_array_equal(view.read(f"model/{name}"), FULL[name].numpy())
    words = FULL["row"].view(torch.uint16).numpy()
    np.testing.assert_array_equal(
        view.read("model/row", [slice(1, 3), slice(4, 7)]), words[1:3, 4:7]
    )
    assert [view.values("own", rank) for rank in range(4)] == [{"rank": rank} for rank in range(4)]
    assert sum(info.alias_of is not None for info in view.tensors()) == 1
