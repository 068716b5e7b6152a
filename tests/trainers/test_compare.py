"""The comparison that `make demo` rests on sees what differs."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptcore import CheckpointManager

from .comparison import compare_checkpoints, differing_values


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        ((1,), [1]),
        ([1, 2], [1]),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ({"a": {"b": [None, 0.1]}}, {"a": {"b": [None, 0.1 + 2**-56]}}),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.array([0.0]), np.array([-0.0])),
        (b"1", "1"),
    ],
)
def test_values_that_differ_in_type_or_bits(one: Any, other: Any) -> None:
    assert len(differing_values(one, other, "x")) in (1, 2)
    assert differing_values(one, one) == [] and differing_values(other, other) == []


def test_a_nan_is_itself_and_a_path_says_where() -> None:
    assert differing_values([math.nan, 2**70], [math.nan, 2**70]) == []
    assert differing_values({"a": [1, 2]}, {"a": [1, 3]}, "loader") == ["loader/a/1: 2 and 3"]
    assert differing_values(OrderedDict(a=1), {"a": 1}) != []


def test_checkpoints(tmp_path: Path) -> None:
    def save(name: str, **changes: Any) -> str:
        state = {
            "model": {
                "w": torch.arange(6.0).reshape(2, 3),
                "h": torch.ones(3, dtype=torch.bfloat16),
            },
            "progress": {"step": 1, "losses": [0.5, 0.25]},
        }
        with CheckpointManager(tmp_path / name) as checkpoints:
            checkpoints.save(1, state | changes)
        return str(tmp_path / name / "checkpoint-1")

    expected = save("a")
    parts = {part.name: part for part in compare_checkpoints(expected, save("b"))}
    assert {name: part.differences for name, part in parts.items()} == {"model": [], "progress": []}
    assert (parts["model"].tensors, parts["model"].tensor_bytes, parts["progress"].values) == (
        2,
        30,
        3,
    )

    one_bit = torch.arange(6.0).reshape(2, 3)
    one_bit[1, 1] = torch.nextafter(one_bit[1, 1], torch.tensor(9.0))
    changed = save("c", model={"w": one_bit, "h": torch.ones(3, dtype=torch.float16)})
    model, progress = compare_checkpoints(expected, changed)
    assert model.differences == ["model/h: BF16[3] and F16[3]", "model/w: 1 of 24 bytes differ"]
    assert progress.differences == []

    fewer = save(
        "d",
        model={"w": torch.arange(6.0).reshape(2, 3)},
        progress={"step": 1, "losses": [0.5]},
        more=[1],
    )
    model, more, progress = compare_checkpoints(expected, fewer)
    assert model.differences == [
        "model/h: in one of the two only",
        "model: key 'h' in one of the two only",
    ]
    assert len(more.differences) == 1 and more.differences[0].startswith("component more is in ")
    assert progress.differences == ["progress/losses: 2 and 1 items"]
