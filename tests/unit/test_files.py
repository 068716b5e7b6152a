"""The files of a checkpoint: readable by stock tools, equal for equal state, split where they would
be too large."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import ckptcore.saving.plan
from ckptcore import CheckpointManager, OptimizerState, RNGState, StateMismatch, open_checkpoint
from ckptcore.saving.plan import plan_component


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    return {
        "model": model,
        "optimizer": OptimizerState(optimizer, model),
        "rng": RNGState(),
        "values": {"names": {"b", "a", "c"}, "step": 3, "table": np.arange(2000.0)},
    }


def test_model_file_is_an_ordinary_one(tmp_path: Path, same) -> None:
    model, optimizer = trained()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(3, state(model, optimizer))
    folder = tmp_path / "checkpoint-3"
    stock, expected = (
        safetensors.torch.load_file(folder / "model.safetensors"),
        dict(model.state_dict()),
    )
    same({name: stock[name] for name in expected}, expected)
    assert len(stock) == len(expected)
    fresh = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    assert safetensors.torch.load_model(fresh, folder / "model.safetensors") == (set(), [])
    same(dict(fresh.state_dict()), dict(model.state_dict()))
    for file in folder.glob("*.safetensors"):
        assert safetensors.torch.load_file(file)


def test_equal_state_gives_equal_files(tmp_path: Path) -> None:
    model, optimizer = trained()
    with CheckpointManager(tmp_path / "a") as one, CheckpointManager(tmp_path / "b") as other:
        first = one.save(3, state(model, optimizer))
        second = other.save(3, state(model, optimizer))
    folders = [tmp_path / "a" / "checkpoint-3", tmp_path / "b" / "checkpoint-3"]
    names = [sorted(f.name for f in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    assert names[0] == [
        "checkpoint_manifest.json",
        "index.rank00000.msgpack",
        "model.safetensors",
        "optimizer.safetensors",
        "rng.rank00000.safetensors",
        "values.safetensors",
    ]
    for name in names[0][1:]:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    digests = [{n: f.digest for n, f in info.manifest.files.items()} for info in (first, second)]
    assert digests[0] == digests[1]
    sums = [
        {k: c.checksum for k, c in info.manifest.components.items()} for info in (first, second)
    ]
    assert sums[0] == sums[1]
    assert first.manifest.checkpoint_id != second.manifest.checkpoint_id


def test_changed_state_changes_the_digest_of_its_component_alone(tmp_path: Path) -> None:
    model, optimizer = trained()
    values = state(model, optimizer)
    with CheckpointManager(tmp_path) as ckpt:
        first = ckpt.save(1, values).manifest.components
        values["values"]["step"] = 4
        second = ckpt.save(2, values).manifest.components
    assert {key for key in first if first[key].checksum != second[key].checksum} == {"values"}


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(plan_component, max_file_bytes=200)
    monkeypatch.setattr(ckptcore.saving.plan, "plan_component", small)


@pytest.mark.usefixtures("small_files")
def test_split_model_is_laid_out_as_hugging_face_does(tmp_path: Path, same) -> None:
    model, _ = trained()
    with CheckpointManager(tmp_path) as ckpt:
        info = ckpt.save(1, {"model": model})
        folder = tmp_path / "checkpoint-1"
        files = sorted(f.name for f in folder.glob("*.safetensors"))
        assert len(files) > 1
        assert files == [
            f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
        ]
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        expected = dict(model.state_dict())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
        assert set(index["weight_map"]) == set(expected)
        stock = {}
        for file in set(index["weight_map"].values()):
            part = safetensors.torch.load_file(folder / file)
            assert {name for name, where in index["weight_map"].items() if where == file} == set(
                part
            )
            stock |= part
        same({name: stock[name] for name in expected}, expected)
        assert set(info.manifest.files) == {
            *files,
            "model.safetensors.index.json",
            "index.rank00000.msgpack",
        }
        assert info.manifest.components["model"].files == files
        fresh = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        ckpt.load({"model": fresh})
        same(dict(fresh.state_dict()), expected)
        assert ckpt.verify() == []


@pytest.mark.usefixtures("small_files")
def test_split_model_opens_with_stock_transformers_rules(tmp_path: Path) -> None:
    # What transformers asks for: an index, metadata "format": "pt" in each file, no file outside
    # the folder.
    model, _ = trained()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": model})
    for file in (tmp_path / "checkpoint-1").glob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_header_is_split_before_stock_readers_refuse_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ckptcore.saving.plan, "plan_component", partial(plan_component, header_limit=12_000)
    )
    saved = {f"{'n' * 100}{i}": torch.tensor([float(i)]) for i in range(60)}
    live = {name: torch.zeros(1) for name in saved}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": saved})
        ckpt.load({"c": live})
    assert live == saved
    heads = [
        int.from_bytes(f.read_bytes()[:8], "little")
        for f in (tmp_path / "checkpoint-1").glob("*.safetensors")
    ]
    assert len(heads) > 1
    assert max(heads) <= 12_000


def test_names_listed_twice_over_components_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckptcore import InvalidState

    monkeypatch.setattr(
        ckptcore.saving.plan, "plan_component", partial(plan_component, max_file_bytes=4)
    )
    state = {
        "m": {"a": torch.ones(1), "b": torch.ones(1)},
        "m-00001-of-00002": {"a": torch.ones(1)},
    }
    with CheckpointManager(tmp_path) as ckpt, pytest.raises(InvalidState, match="m-00001-of-00002"):
        ckpt.save(1, state)
    assert list(tmp_path.iterdir()) == []


def test_component_without_tensors_has_no_file(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        info = ckpt.save(1, {"v": {"a": 1}, "e": {}})
        assert ckpt.load({"v": {"a": 0}, "e": {}}).values == {"v": {"a": 1}, "e": {}}
    assert set(info.manifest.files) == {"index.rank00000.msgpack"}
    assert info.manifest.components["v"].files == []


def test_foreign_files_are_reported_and_ignored(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": {"w": torch.ones(2)}})
        safetensors.torch.save_file(
            {"w": torch.zeros(2), "x": torch.zeros(2)},
            tmp_path / "checkpoint-1" / "model-2.safetensors",
        )
        live = {"w": torch.zeros(2)}
        ckpt.load({"model": live})
        assert live["w"].tolist() == [1.0, 1.0]
        assert ckpt.verify() == []
    assert open_checkpoint(tmp_path / "checkpoint-1").foreign_files() == ["model-2.safetensors"]


def test_view_reads_without_live_state(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(
            1,
            {
                "m": {
                    "w": torch.arange(6.0).reshape(2, 3),
                    "b": torch.ones(2, dtype=torch.bfloat16),
                },
                "v": {"a": (1,)},
            },
        )
    view = open_checkpoint(tmp_path / "checkpoint-1")
    assert view.read("m/w", (slice(0, 1), slice(1, 3))).tolist() == [[1.0, 2.0]]
    assert view.read("m/b").tolist() == [0x3F80, 0x3F80]
    assert view.values("v") == {"a": (1,)}
    assert view.values("m")["w"].shape == (2, 3)
    with pytest.raises(KeyError):
        view.read("m/none")


def test_random_streams_do_not_matter_to_the_files(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        before = (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )
        ckpt.save(1, {"rng": RNGState(), "m": {"a": 1}})
        assert before == (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )
        with pytest.raises(StateMismatch):
            ckpt.restore({"rng": RNGState()})
        assert before == (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )
