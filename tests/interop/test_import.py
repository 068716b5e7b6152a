"""What other libraries wrote, without transformers: files of torch.save, torch.distributed.checkpoint,
folders without a manifest; and that none of it is ever executed."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import subprocess
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from ckptcore import (
    CheckpointCoordinator,
    CheckpointManager,
    CheckpointNotFound,
    InvalidState,
    SingleProcess,
    export_checkpoint,
    import_checkpoint,
    load_foreign,
    open_checkpoint,
)
from ckptcore.interop import dcp as reading
from ckptcore.interop.scratch import SMALL
from ckptcore.testing.processes import RankProcesses


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def next_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_file_of_torch_save_trains_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    model, optimizer = trained()
    file = tmp_path / "state.pt"
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "lr": 0.5}
    torch.save(state, file)
    live, live_optimizer = fresh()
    report = import_checkpoint(file, tmp_path / "root", model=live)
    assert (report.format, report.step, report.left) == ("torch", 7, [])
    assert [c.key for c in report.components] == ["model", "optimizer", "values"]
    assert report.verified == 4 + 4 * 3
    with CheckpointManager(tmp_path / "root") as manager:
        manager.load({"model": live, "optimizer": live_optimizer})
    assert same(next_step(live, live_optimizer), next_step(model, optimizer))
    view = open_checkpoint(tmp_path / "root" / "checkpoint-7")
    assert view.values("values") == {"step": 7, "lr": 0.5}
    assert view.manifest.metadata["format"] == "torch"


def test_numbered_parameters_without_names_are_left_and_said(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "s.pt")
    report = import_checkpoint(tmp_path / "s.pt", tmp_path / "root")
    assert [c.key for c in report.components] == ["model"]
    (left,) = report.left
    assert "numbers its 4 parameters" in left and "give model=" in left
    names = [[name for name, _ in model.named_parameters()]]
    again = import_checkpoint(tmp_path / "s.pt", tmp_path / "other", names=names)
    assert [c.key for c in again.components] == ["model", "optimizer"] and again.left == []
    turned = [[*reversed(names[0])]]  # the shapes of the moments do not fit these
    wrong = import_checkpoint(tmp_path / "s.pt", tmp_path / "third", names=turned)
    assert "has shape" in wrong.left[0] and len(wrong.components) == 1
    named = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 4)).sum().backward()
    named.step()
    torch.save({"model": model.state_dict(), "optimizer": named.state_dict()}, tmp_path / "n.pt")
    assert import_checkpoint(tmp_path / "n.pt", tmp_path / "fourth").left == []


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    report = import_checkpoint(tmp_path / "w.pt", tmp_path / "root", dry_run=True)
    assert report.info is None and report.components[0].size_bytes == 12
    assert not (tmp_path / "root").exists()


def test_where_it_goes(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    report = import_checkpoint(tmp_path / "w.pt", tmp_path / "root" / "checkpoint-12")
    assert report.info is not None and report.info.step == 12
    with pytest.raises(InvalidState, match="cannot become checkpoint-12"):
        import_checkpoint(tmp_path / "w.pt", tmp_path / "root" / "checkpoint-12", step=3)
    renamed = import_checkpoint(
        tmp_path / "w.pt",
        tmp_path / "root",
        step=13,
        components={"model": "net"},
        rename=lambda name: f"module.{name}",
    )
    assert renamed.info is not None
    assert list(open_checkpoint(renamed.info.url).values("net")) == ["module.w"]


def test_ties_and_all_dtypes_come_through(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    state: dict[str, Any] = {"a": weight, "b": weight, "bf16": weight.bfloat16()}
    state |= {
        "f8": weight.to(torch.float8_e4m3fn),
        "bits": torch.tensor([True]),
        "n": torch.tensor(3),
    }
    state["nan"] = torch.tensor([float("nan"), -0.0])
    torch.save(state, tmp_path / "s.pt")
    report = import_checkpoint(tmp_path / "s.pt", tmp_path / "root")
    assert report.info is not None and report.verified == 7
    tensors = {t.name: t for t in open_checkpoint(report.info.url).tensors()}
    assert {tensors["a"].alias_of, tensors["b"].alias_of} == {None, "a"}
    export_checkpoint(report.info.url, tmp_path / "back.pt", format="torch", component="model")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (back[name], tensor)))
    assert back["a"].data_ptr() == back["b"].data_ptr()


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    """The layout of per-component files: weights in safetensors, the rest in *_state.pt."""
    model, optimizer = trained()
    folder = tmp_path / "old"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer_state.pt")
    torch.save({"last_epoch": 3}, folder / "scheduler_state.pt")
    torch.save({"global_step": 30, "epoch": 1}, folder / "trainer_state.pt")
    for rank in (0, 1):
        torch.save({"at": rank}, folder / f"dataset_state_{rank}.pt")
    (folder / "notes.md").write_text("hello")
    live, live_optimizer = fresh()
    report = import_checkpoint(folder, tmp_path / "root", model=live)
    assert (report.format, report.step) == ("legacy", 30)
    keys = {c.key for c in report.components}
    assert keys == {"model", "optimizer", "scheduler", "trainer", "loader", "files"}
    assert any("those of 2 ranks" in text for text in report.left)
    loaded = load_foreign({"model": live, "optimizer": live_optimizer}, folder, model=live)
    assert loaded.step == 30
    assert same(next_step(live, live_optimizer), next_step(model, optimizer))


def test_a_load_of_such_a_folder_says_what_it_is_and_what_to_do(tmp_path: Path) -> None:
    for name, kind in (
        ("model.safetensors", "a Hugging Face folder"),
        ("optimizer_state.pt", "a folder of torch.save"),
        (".metadata", "a folder of torch.distributed.checkpoint"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).touch()
        coordinator = CheckpointCoordinator({"model": nn.Linear(1, 1)}, comm=SingleProcess())
        with pytest.raises(CheckpointNotFound) as caught:
            coordinator.load_checkpoint(folder)
        assert f"{name} looks like {kind}" in str(caught.value)
        assert f"ckpt import {folder} ROOT" in str(caught.value)
        assert "load_foreign" in str(caught.value)


def test_lightning(tmp_path: Path) -> None:
    model, optimizer = trained()
    document = {
        "pytorch-lightning_version": "2.6",
        "state_dict": model.state_dict(),
        "global_step": 5,
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": 1}],
        "loops": {},
        "callbacks": {"x": {"best": 1}},
        "epoch": 0,
    }
    torch.save(document, tmp_path / "last.ckpt")
    report = import_checkpoint(tmp_path / "last.ckpt", tmp_path / "root", model=model)
    assert (report.format, report.step) == ("lightning", 5)
    assert {"model", "optimizer", "scheduler", "values", "callbacks"} == {
        c.key for c in report.components
    }


# ---------------------------------------------------------------- torch.distributed.checkpoint


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What FSDP2 on four ranks saved with torch's own functions."""
    folder = tmp_path_factory.mktemp("fsdp")
    ranks = RankProcesses(Path(__file__).with_name("fsdp_program.py"))
    ranks.run("save", 4, {"name": "dcp"}, folder=folder)
    return folder / "dcp"


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """By torch's own reader, on one process."""
    metadata = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return state


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fsdp2_on_four_ranks_comes_in_and_goes_out_bit_by_bit(fsdp: Path, tmp_path: Path) -> None:
    report = import_checkpoint(fsdp, tmp_path / "root")
    assert (report.format, report.left) == ("dcp", [])
    assert {c.key: c.tensors for c in report.components} == {
        "model": 3,
        "optimizer": 9,
        "values": 0,
    }
    assert report.step == 2 and report.info is not None
    before = whole(fsdp)
    view = open_checkpoint(report.info.url)
    assert torch.equal(torch.from_numpy(view.read("model/0.weight")), before["model.0.weight"])

    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with CheckpointManager(tmp_path / "root") as manager:
        manager.load({"model": model, "optimizer": optimizer})
    assert torch.equal(model[1].weight, before["model.1.weight"])
    moment = optimizer.state[model[0].bias]["exp_avg"]
    assert torch.equal(moment, before["optimizer.state.0.bias.exp_avg"])
    assert optimizer.param_groups[0]["lr"] == 1e-2

    out = export_checkpoint(report.info.url, tmp_path / "out", format="dcp")
    assert out.verified == 12
    after = whole(tmp_path / "out")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)

    export_checkpoint(report.info.url, tmp_path / "hf")
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(weights["0.weight"], before["model.0.weight"])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_large_pieces_are_mapped_and_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch.load reads from memory stays in the heap: 0.4 GiB of a folder of 1 GiB."""
    state = {f"w{n}": torch.randn(300, 300) for n in range(3)} | {"small": torch.ones(2)}
    dcp.save({"model": state}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    in_memory: list[int] = []
    load = reading.load_bytes

    def counted(data: bytes, name: str) -> Any:
        in_memory.append(len(data))
        return load(data, name)

    monkeypatch.setattr(reading, "load_bytes", counted)
    report = import_checkpoint(tmp_path / "dcp", tmp_path / "root", scratch=tmp_path)
    assert report.verified == 4 and max(in_memory) < SMALL
    assert not list(tmp_path.glob("ckptcore-*"))
    (piece,) = (tmp_path / "dcp").glob("*.distcp")
    piece.write_bytes(piece.read_bytes()[:-400_000])
    report = import_checkpoint(tmp_path / "dcp", tmp_path / "again", scratch=tmp_path)
    assert any("is shorter than its metadata say" in text for text in report.left)


def test_flat_names_as_torchtitan_writes_them(tmp_path: Path) -> None:
    state: dict[str, Any] = {"layers.0.w": torch.ones(2, 3), "norm.w": torch.ones(3)}
    for name in ("layers.0.w", "norm.w"):
        state[f"optimizer.state.{name}.exp_avg"] = state[name] * 2
        state[f"optimizer.param_groups.{name}.lr"] = 0.1 if name == "norm.w" else 0.2
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    report = import_checkpoint(tmp_path / "dcp", tmp_path / "root")
    assert report.info is not None
    view = open_checkpoint(report.info.url)
    assert set(view.values("model")) == {"layers.0.w", "norm.w"}
    optimizer = view.values("optimizer")
    assert set(optimizer["state"]) == set(optimizer["group_of"]) == {"layers.0.w", "norm.w"}
    assert sorted(options["lr"] for options in optimizer["groups"].values()) == [0.1, 0.2]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_missing_or_damaged_piece_is_left_and_said(tmp_path: Path) -> None:
    dcp.save(
        {"a": torch.ones(100), "b": torch.ones(100)},
        checkpoint_id=str(tmp_path / "d"),
        no_dist=True,
    )
    file = next((tmp_path / "d").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-400])
    report = import_checkpoint(tmp_path / "d", tmp_path / "root")
    assert len(report.left) == 1 and "shorter than its metadata say" in report.left[0]
    assert report.components[0].tensors == 1
    (tmp_path / "d" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(InvalidState, match="no metadata"):
        import_checkpoint(tmp_path / "d", tmp_path / "root2")


def test_deepspeed_universal_and_what_else_it_writes(tmp_path: Path) -> None:
    zero = tmp_path / "u" / "global_step20" / "zero"
    for name, shape in (("a.weight", (2, 3)), ("a.bias", (2,))):
        (zero / name).mkdir(parents=True)
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save({"param": torch.ones(shape), "cat_dim": 0}, zero / name / f"{key}.pt")
    (tmp_path / "u" / "latest_universal").write_text("global_step20")
    report = import_checkpoint(tmp_path / "u", tmp_path / "root")
    assert (report.format, report.step) == ("deepspeed-universal", 20)
    assert {c.key: c.tensors for c in report.components} == {"model": 2, "optimizer": 4}
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    with pytest.raises(InvalidState, match="ds_to_universal"):
        import_checkpoint(tmp_path / "z", tmp_path / "root2")


# ---------------------------------------------------------------- nothing is executed


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize(
    "name",
    [
        "state.pt",
        "optimizer.pt",
        "scheduler.pt",
        "scaler.pt",
        "rng_state.pth",
        "pytorch_model.bin",
        "optimizer.bin",
        "random_states_0.pkl",
        "custom_checkpoint_0.pkl",
        "dataset_state.pt",
        "training_args.bin",
        "last.ckpt",
    ],
)
@pytest.mark.parametrize("form", ["zip", "legacy", "bare"])
def test_a_crafted_pickle_never_runs(tmp_path: Path, name: str, form: str) -> None:
    marker = tmp_path / "executed"
    folder = tmp_path / "f"
    folder.mkdir()
    if form == "bare":
        (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
    else:
        torch.save({"x": Bomb(marker)}, folder / name, _use_new_zipfile_serialization=form == "zip")
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    if name != "pytorch_model.bin":
        save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    for kind in ("auto", "hf-trainer", "accelerate", "legacy"):
        try:
            report = import_checkpoint(folder, tmp_path / f"root-{kind}", format=kind)
        except InvalidState as error:
            assert name == "pytorch_model.bin" or "executed" in str(error)
        else:
            assert report.info is None or all(c.key != "x" for c in report.components)
            known = {"auto": name not in ("state.pt", "last.ckpt")}.get(kind, False)
            assert not known or any(name in text for text in report.left), report
    try:
        import_checkpoint(folder / name, tmp_path / "single")
    except InvalidState as error:
        assert "executed" in str(error)
    assert not marker.exists()


def test_crafted_metadata_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps({"x": Bomb(tmp_path / "executed")}))
    with pytest.raises(InvalidState, match=r"posix\.mkdir, which is not read"):
        import_checkpoint(folder, tmp_path / "root")
    assert not (tmp_path / "executed").exists()


def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "../secret.safetensors"}}'
    )
    with pytest.raises(InvalidState, match="not beside it"):
        import_checkpoint(folder, tmp_path / "root")


def test_what_is_nothing_that_is_known(tmp_path: Path) -> None:
    (tmp_path / "e").mkdir()
    with pytest.raises(InvalidState, match="nothing that an import knows"):
        import_checkpoint(tmp_path / "e", tmp_path / "root")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(InvalidState, match="no safetensors file"):
        import_checkpoint(tmp_path / "model.safetensors", tmp_path / "root")


def test_what_was_read_of_shards_is_not_left_and_what_was_not_is(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    parts = {"pytorch_model-00001-of-00002.bin": "a", "pytorch_model-00002-of-00002.bin": "b"}
    for file, name in parts.items():
        torch.save({name: torch.ones(2)}, folder / file)
    weight_map = {name: file for file, name in parts.items()}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save({"c": torch.ones(2)}, folder / "adapter_model.bin")
    (folder / "modeling.py").write_text("raise SystemExit")
    report = import_checkpoint(folder, tmp_path / "root")
    assert (report.format, report.components[0].tensors) == ("hf", 2)
    assert report.left == [
        "adapter_model.bin: more weights; those of pytorch_model.bin.index.json were taken",
        "modeling.py: not known",
    ]


def test_objects_of_other_classes_are_left_and_the_rest_is_read(tmp_path: Path) -> None:
    model, _ = trained()
    arguments = argparse.Namespace(lr=0.1, nested=argparse.Namespace(x=1))
    state = {"model": model.state_dict(), "epoch": 3, "args": arguments, "steps": Counter("aab")}
    torch.save(state, tmp_path / "s.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("s", "old"):
        report = import_checkpoint(tmp_path / f"{name}.pt", tmp_path / name)
        assert "values/args: an object of argparse.Namespace, which is not read" in report.left
        view = open_checkpoint(tmp_path / name / "checkpoint-0")
        assert view.values("values")["epoch"] == 3 and view.values("values")["args"] is None
        assert len(view.tensors()) == len(model.state_dict())


class Touches:
    """Executed, it leaves a file."""

    def __init__(self, path: Path, call: Any) -> None:
        self.path, self.call = path, call

    def __reduce__(self) -> Any:
        return self.call, (str(self.path), "w") if self.call is open else (str(self.path),)


@pytest.mark.parametrize("call", [os.mkdir, open, Path, shutil.rmtree, subprocess.call])
def test_no_call_of_a_pickle_is_made(tmp_path: Path, call: Any) -> None:
    evil, there = tmp_path / "evil", tmp_path / "there"
    there.mkdir()
    path = there if call is shutil.rmtree else evil
    state = {"model": {"w": torch.ones(2)}, "x": Touches(path, call)}
    torch.save(state, tmp_path / "s.pt")
    with suppress(InvalidState):  # of some modules torch reads nothing at all
        report = import_checkpoint(tmp_path / "s.pt", tmp_path / "root")
        assert [line for line in report.left if line.startswith("values/x: an object of ")]
    assert not evil.exists() and there.is_dir()
