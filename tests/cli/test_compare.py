"""`ckpt show`, `diff` and `plan`: what is in a checkpoint, what changed, what a restore would read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptcore import CheckpointManager, Communicator, Shard, SharingPattern, StateComponent
from ckptcore.testing.ranks import run_ranks

from .conftest import Ckpt
from .test_copies import four  # noqa: F401  (a fixture)


def show(ckpt: Ckpt, path: Path, name: str, *options: str) -> dict[str, Any]:
    return ckpt("show", path, name, *options, "--json").document


def test_a_tensor_and_its_numbers(ckpt: Ckpt, tmp_path: Path) -> None:
    odd = torch.tensor([[1.0, float("nan")], [float("inf"), -3.0], [0.0, 2.0]])
    state = {
        "w": odd,
        "half": odd.bfloat16(),
        "f8": torch.ones(3).to(torch.float8_e4m3fn),
        "c": torch.tensor([3 + 4j]),
        "n": torch.tensor(7),
        "none": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
    }
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"m": state})
    for name in ("w", "half"):
        tensor = show(ckpt, tmp_path, f"m/{name}", "--stats")["tensor"]
        found = tensor["statistics"]
        assert (found["items"], found["nan"], found["infinite"], found["zero"]) == (6, 1, 1, 1)
        assert (found["min"], found["max"], found["mean"]) == (-3.0, 2.0, 0.0)
        assert found["std"] == pytest.approx(np.std([1, -3, 0, 2]))
        assert sum(found["histogram"]) == 4
        assert tensor["first"] == [1.0, "NaN", "Infinity", -3.0, 0.0, 2.0]
    assert show(ckpt, tmp_path, "m/f8", "--stats")["tensor"]["statistics"]["mean"] == 1.0
    assert show(ckpt, tmp_path, "m/c", "--stats")["tensor"]["statistics"]["max"] == 5.0
    assert show(ckpt, tmp_path, "m/n")["tensor"]["first"] == [7]
    assert show(ckpt, tmp_path, "m/none", "--stats")["tensor"]["statistics"] is None
    assert show(ckpt, tmp_path, "m/flags", "--first", "1")["tensor"]["first"] == [True]
    text = ckpt("show", tmp_path, "m/w", "--stats").out
    assert "histogram" in text and "1 nan, 1 infinite, 1 zero" in text


def test_values_and_names_with_slashes(ckpt: Ckpt, root: Path) -> None:
    assert show(ckpt, root, "train/big")["value"] == 2**70
    assert show(ckpt, root, "train/nested/list/0/deep~1er")["value"] is True
    assert show(ckpt, root, "train/nested/list/0/deep/er")["value"] is True
    assert show(ckpt, root, "train/by_rank/0")["value"] == "zero"
    assert show(ckpt, root, "train")["value"]["step"] == 30
    missing = ckpt("show", root, "train/bog")
    assert missing.code == 3 and "did you mean train/big" in missing.err
    assert ckpt("show", root, "nothing/x").code == 3
    alias = show(ckpt, root, "model/tied.weight")["tensor"]
    other = show(ckpt, root, "model/layer.weight")["tensor"]
    assert {alias["alias_of"], other["alias_of"]} - {None} < {"layer.weight", "tied.weight"}
    assert alias["first"] == other["first"] == [30.0, 31.0, 32.0, 33.0, 34.0, 35.0]


def test_whose_copy(ckpt: Ckpt, four: Path) -> None:  # noqa: F811
    for rank in range(4):
        found = show(ckpt, four, "own/t", "--rank", str(rank))
        assert found["tensor"]["first"] == [rank, rank] and found["of"]["of"] == f"rank {rank}"
    assert show(ckpt, four, "own.rank00002/t")["tensor"]["first"] == [2, 2]
    assert show(ckpt, four, "stage/x", "--group", "1")["value"] == 21
    boxes = show(ckpt, four, "table/grid")["tensor"]["boxes"]
    assert [(box["offset"], box["writer"]) for box in boxes] == [([n, 0], n) for n in range(4)]


def test_diff_of_a_root_is_what_the_last_save_changed(ckpt: Ckpt, root: Path) -> None:
    document = ckpt("diff", root, "--json").document
    assert (document["a"]["step"], document["b"]["step"], document["same"]) == (20, 30, False)
    changes = {c["key"]: (c["change"], c["changed"], c["values"]) for c in document["components"]}
    assert changes == {"model": ("changed", 3, 0), "train": ("changed", 0, 1)}
    (value,) = document["values"]
    assert (value["path"], value["a"], value["b"]) == ("step", 20, 30)
    assert {t["name"]: t["changed_bytes"] for t in document["tensors"]} == {
        "layer.bias": 6,
        "layer.weight": 24,
        "tied.weight": 24,
    }
    assert ckpt("diff", root).code == 0 and ckpt("diff", root, "--exit-code").code == 1
    stats = ckpt("diff", root, "--stats", "--json").document["tensors"]
    assert {t["name"]: (t["items_differ"], t["max_abs"], t["mean_abs"]) for t in stats} == {
        "layer.bias": (3, 10.0, 10.0),
        "layer.weight": (6, 10.0, 10.0),
        "tied.weight": (6, 10.0, 10.0),
    }


def test_a_frozen_run_is_told(ckpt: Ckpt, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"m": {"w": torch.tensor([float("nan"), 1.0])}})
    done = ckpt("diff", tmp_path, "--exit-code")
    assert done.code == 0 and "nothing changed: a frozen run?" in done.out
    assert ckpt("diff", tmp_path / "checkpoint-1").code == 2


def test_what_is_only_on_one_side_and_other_shapes(ckpt: Ckpt, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with CheckpointManager(a) as manager:
        manager.save(
            1, {"m": {"x": torch.ones(2), "y": torch.ones(2), "z": torch.ones(2)}, "old": {"k": 1}}
        )
    with CheckpointManager(b) as manager:
        manager.save(1, {"m": {"x": torch.ones(3), "y": torch.ones(2).half(), "w": torch.ones(2)}})
    document = ckpt("diff", a, b, "--json").document
    assert {t["name"]: t["change"] for t in document["tensors"]} == {
        "w": "only_b",
        "x": "shape",
        "y": "dtype",
        "z": "only_a",
    }
    assert {c["key"]: c["change"] for c in document["components"]} == {
        "m": "changed",
        "old": "only_a",
    }
    assert "shape -> [3]" in ckpt("diff", a, b).out


def test_other_layouts_are_compared_by_reading(ckpt: Ckpt, tmp_path: Path) -> None:
    grid = torch.arange(16.0).reshape(4, 4)

    def save(ranks: int, root: Path, extra: float) -> None:
        def one(comm: Communicator) -> None:
            step = 4 // ranks
            low = comm.rank * step
            part = Shard((grid + extra)[low : low + step].clone(), (4, 4), (low, 0))
            state = [StateComponent("t", {"grid": part}, SharingPattern.SHARDED)]
            with CheckpointManager(root, comm=comm) as manager:
                manager.save(1, state)

        run_ranks(ranks, one)

    for name, ranks, extra in (("a", 4, 0), ("b", 2, 0), ("c", 2, 1)):
        save(ranks, tmp_path / name, extra)
    told = ckpt("diff", tmp_path / "a", tmp_path / "b", "--json").document
    assert told["components"][0]["change"] == "unknown" and not told["same"]
    assert ckpt("diff", tmp_path / "a", tmp_path / "b", "--stats", "--json").document["same"]
    (tensor,) = ckpt("diff", tmp_path / "a", tmp_path / "c", "--stats", "--json").document[
        "tensors"
    ]
    assert (tensor["change"], tensor["max_abs"]) == ("changed", 1.0)


def test_diff_reads_no_tensor(ckpt: Ckpt, root: Path) -> None:
    for step in (20, 30):
        shard = root / f"checkpoint-{step}" / "model.safetensors"
        shard.write_bytes(b"\xff" * shard.stat().st_size)
    assert ckpt("diff", root).code == 0
    assert ckpt("diff", root, "--stats").code == 1


def test_plan_for_other_numbers_of_ranks(ckpt: Ckpt, four: Path) -> None:  # noqa: F811
    same = ckpt("plan", four, "--world-size", "4", "--json")
    assert same.code == 0
    rows = {row["key"]: row for row in same.document["components"]}
    assert rows["own"]["restores"] == "yes" and rows["own"]["most_bytes"] == 8
    assert rows["table"]["most_bytes"] == 16 and rows["table"]["most_reads"] == 1
    other = ckpt("plan", four, "--world-size", "2", "--json")
    assert other.code == 1
    rows = {row["key"]: row for row in other.document["components"]}
    assert rows["own"]["restores"] == "no" and "on_resize" in rows["own"]["why"]
    assert rows["stage"]["restores"] == rows["cache"]["restores"] == "depends"
    assert (rows["table"]["most_bytes"], rows["table"]["most_reads"]) == (32, 2)
    assert [row["size_bytes"] for row in other.document["ranks"]] == [44, 44]
    whole = ckpt("plan", four, "--world-size", "8", "--layout", "whole", "--json").document
    assert {row["key"]: row["most_bytes"] for row in whole["components"]}["table"] == 64
    many = ckpt("plan", four, "--world-size", "1000000", "--json").document
    assert many["sampled"] and len(many["ranks"]) == 16
    assert "would not restore" in ckpt("plan", four, "--world-size", "2").err
    assert ckpt("plan", four).code == 2
