"""The state of one component without a template: as it was saved, in torch tensors, and only what
was asked for is read."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckptcore import (
    CheckpointCorrupt,
    CheckpointManager,
    CheckpointNotFound,
    InvalidState,
    Shard,
    SharingPattern,
    StateComponent,
    UnknownName,
    load_state,
)
from ckptcore.loading import placement
from ckptcore.loading.reader import StoredFiles
from ckptcore.testing.ranks import run_ranks


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


@pytest.fixture
def saved(tmp_path: Path) -> tuple[str, Tied]:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.norm(model.embedding(torch.arange(6)))).sum().backward()
    optimizer.step()
    values = {
        "epoch": 3,
        "names": ["a", ("b", 2)],
        "array": np.arange(4.0),
        "half": torch.full((3,), 0.5, dtype=torch.bfloat16),
        "few bits": torch.ones(4).to(torch.float8_e4m3fn),
        "list": [torch.arange(3), {"deep": torch.ones(2)}],
    }
    with CheckpointManager(tmp_path) as ckpt:
        url = ckpt.save(7, {"model": model, "optimizer": optimizer, "values": values}).url
    return url, model


def test_a_model_comes_back_as_its_state_dict(saved: tuple[str, Tied]) -> None:
    url, model = saved
    state = load_state(url)
    expected = model.state_dict()
    assert type(state) is OrderedDict and state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert state["head.weight"] is state["embedding.weight"]
    assert not any(tensor.requires_grad for tensor in state.values())
    assert state._metadata["norm"] == {"version": 2}
    with torch.device("meta"):
        other = Tied()
    other.load_state_dict(state, assign=True)
    assert torch.equal(other.norm.running_var, model.norm.running_var)


def test_values_come_back_as_they_were_saved(saved: tuple[str, Tied]) -> None:
    state = load_state(saved[0], "values")
    assert state["epoch"] == 3 and state["names"] == ["a", ("b", 2)]
    assert isinstance(state["array"], np.ndarray) and state["array"].tolist() == [0, 1, 2, 3]
    assert state["half"].dtype == torch.bfloat16 and state["half"].tolist() == [0.5] * 3
    assert state["list"][0].tolist() == [0, 1, 2] and state["list"][1]["deep"].tolist() == [1, 1]


def test_another_dtype_is_for_floating_point_tensors(saved: tuple[str, Tied]) -> None:
    url, model = saved
    state = load_state(url, dtype="bfloat16")
    assert torch.equal(state["head.weight"], model.head.weight.detach().bfloat16())
    assert state["head.weight"] is state["embedding.weight"]
    assert state["norm.num_batches_tracked"].dtype == torch.int64
    values = load_state(url, "values", dtype=torch.float64)
    assert values["half"].dtype == torch.float64 and values["half"].tolist() == [0.5] * 3
    assert values["few bits"].dtype == torch.float8_e4m3fn
    assert values["array"].dtype == np.float64


def test_conversion_in_bounded_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "CONVERTED_BYTES", 256)
    tensors = {"a": torch.randn(5, 7, 3), "b": torch.randn(3), "c": torch.randn(2, 100)}
    tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(2.0)}
    with CheckpointManager(tmp_path) as ckpt:
        url = ckpt.save(1, {"model": tensors}).url
    state = load_state(url, dtype=torch.float16)
    assert all(torch.equal(state[name], tensors[name].half()) for name in tensors)


def test_part_of_a_component(saved: tuple[str, Tied], monkeypatch: pytest.MonkeyPatch) -> None:
    url = saved[0]
    read: list[str] = []
    plain = StoredFiles.read

    def counted(self: StoredFiles, reads: Any, *args: Any) -> None:
        read.extend(each.name for each in reads)
        plain(self, reads, *args)

    monkeypatch.setattr(StoredFiles, "read", counted)
    state = load_state(url, keys=["norm.running_*"])
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        "norm.running_mean": (4,),
        "norm.running_var": (4,),
    }
    assert sorted(read) == ["model/norm.running_mean", "model/norm.running_var"]
    read.clear()
    load_state(url)
    assert len(read) == len(Tied().state_dict()) - 1  # what is tied is read once
    assert load_state(url, keys=lambda name: name == "norm.weight").keys() == {"norm.weight"}
    moments = load_state(url, "optimizer", keys="state/norm.weight")
    assert moments["state"]["norm.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert moments.keys() == {"state"}


def test_what_is_not_there(saved: tuple[str, Tied], tmp_path: Path) -> None:
    url = saved[0]
    with pytest.raises(UnknownName, match="no component 'modle'; it has model, optimizer, values"):
        load_state(url, "modle")
    with pytest.raises(
        UnknownName, match=r"nothing that 'norm\.wieght' asks for; did you mean"
    ) as e:
        load_state(url, keys=["head.weight", "norm.wieght"])
    assert e.value.key == "norm.wieght" and "norm.weight" in (e.value.available or [])
    with pytest.raises(UnknownName, match="nothing that the function given as keys asks for"):
        load_state(url, keys=lambda name: False)
    with pytest.raises(UnknownName, match="copies 0 to 0, and no 1"):
        load_state(url, copy=1)
    with pytest.raises(CheckpointNotFound):
        load_state(tmp_path / "nothing")


def test_damage_is_found(saved: tuple[str, Tied]) -> None:
    url = saved[0]
    file = Path(url) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors: tensor 'model/"):
        load_state(url, dtype="float16")
    assert load_state(url, "values")["epoch"] == 3


def test_meta_reads_no_tensor(saved: tuple[str, Tied]) -> None:
    url, _ = saved
    (Path(url) / "model.safetensors").unlink()
    state = load_state(url, device="meta", dtype="float16")
    assert all(tensor.is_meta for tensor in state.values())
    assert state["head.weight"].shape == (6, 4) and state["head.weight"].dtype == torch.float16


def test_sharded_state_comes_whole(tmp_path: Path) -> None:
    whole = torch.arange(40.0).reshape(8, 5)

    def program(comm: Any) -> None:
        mine = Shard(whole[comm.rank * 2 : comm.rank * 2 + 2], (8, 5), (comm.rank * 2, 0))
        state = [
            StateComponent("model", {"w": mine, "step": 3}, SharingPattern.SHARDED),
            StateComponent("rng", {"of": torch.tensor([comm.rank])}, SharingPattern.PER_RANK),
        ]
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            ckpt.save(1, state)

    run_ranks(4, program)
    url = f"{tmp_path}/checkpoint-1"
    state = load_state(url)
    assert state["step"] == 3 and torch.equal(state["w"], whole)
    assert torch.equal(load_state(url, dtype="bfloat16")["w"], whole.bfloat16())
    assert [load_state(url, "rng", copy=n)["of"].item() for n in range(4)] == [0, 1, 2, 3]


def test_from_a_url_and_from_what_a_save_gives() -> None:
    with CheckpointManager("memory://load-state/run") as ckpt:
        info = ckpt.save(1, {"model": {"w": torch.ones(3)}})
    assert load_state(info)["w"].tolist() == [1.0] * 3
    assert load_state("memory://load-state/run/checkpoint-1")["w"].tolist() == [1.0] * 3


WRONG = {
    "keys": [[], "", 3, [3], [""], {"a": "b"}, b"a"],
    "device": [3, "", "nowhere", "cuda:9999"],
    "dtype": [3, "", "int8", "nothing", torch.int64, torch.complex64, "nn"],
    "copy": [-1, True, "0", 1.0],
    "io_threads": [0, -1, "2", True],
    "storage_options": [3, [], {3: 4}],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_by_name(saved: tuple[str, Tied], name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(InvalidState, match=name):
            load_state(saved[0], **{name: value})


def test_a_function_that_does_not_answer(saved: tuple[str, Tied]) -> None:
    with pytest.raises(InvalidState, match=r"must give True or False; for '.*' it gives 'x'"):
        load_state(saved[0], keys=lambda name: "x")  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidState, match=r"fails for '.*' \(ZeroDivisionError"):
        load_state(saved[0], keys=lambda name: bool(1 / 0))


tensors = st.builds(
    lambda shape, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)),
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(0, 99),
)
names = st.text("abc./", min_size=1, max_size=3)
states = st.recursive(
    st.dictionaries(names, tensors | st.integers() | st.none(), min_size=1, max_size=4),
    lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3),
    max_leaves=6,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b and type(a) is type(b))


@given(states)
def test_whatever_was_saved(tmp_path_factory: pytest.TempPathFactory, state: dict) -> None:
    with CheckpointManager(tmp_path_factory.mktemp("root")) as ckpt:
        url = ckpt.save(1, {"model": state}).url
    assert same(load_state(url), state)
