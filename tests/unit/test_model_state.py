"""B42: keys are those of the bare module, however it is wrapped, and only real wrappers are looked
through."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptcore import (
    CheckpointManager,
    InvalidState,
    LoadFailed,
    ModelState,
    StateMismatch,
    open_checkpoint,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)  # a child that has the name of a wrapper's, and is none
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)


KEYS = {
    "module.weight",
    "module.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
    "steps",
}


def block(seed: int) -> Block:
    torch.manual_seed(seed)
    made = Block()
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.copy_(torch.randint(0, 100, tensor.shape))
    return made


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPS = {
    "plain": lambda m: m,
    "compiled": torch.compile,
    "ddp": nn.parallel.DistributedDataParallel,
    "ddp of compiled": lambda m: nn.parallel.DistributedDataParallel(torch.compile(m)),
    "compiled ddp": lambda m: torch.compile(nn.parallel.DistributedDataParallel(m)),
}


def wrapped(how: str, module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return WRAPS[how](module)


@pytest.mark.parametrize(("saver", "loader"), list(itertools.product(WRAPS, WRAPS)))
def test_b42_each_loads_into_each(saver: str, loader: str, tmp_path: Path, same) -> None:
    source, target = block(1), block(2)
    expected = {k: v.clone() for k, v in source.state_dict().items()}
    addresses = {k: v.data_ptr() for k, v in target.state_dict().items()}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": wrapped(saver, source)})
        ckpt.load({"model": wrapped(loader, target)})
    assert {t.name for t in open_checkpoint(tmp_path / "checkpoint-1").tensors()} == KEYS
    same(dict(target.state_dict()), expected)
    assert {k: v.data_ptr() for k, v in target.state_dict().items()} == addresses
    assert all(p.requires_grad for p in target.parameters())


@pytest.mark.parametrize("how", WRAPS)
def test_b42_wrapped_parts_inside_a_model(how: str) -> None:
    outer = nn.Sequential(nn.Linear(2, 2), wrapped(how, block(1)))
    keys = set(ModelState(outer).state_dict())
    assert keys == {"0.weight", "0.bias", *(f"1.{key}" for key in KEYS)}
    assert set(ModelState(wrapped(how, outer)).state_dict()) == keys


def test_b42_a_foreign_class_of_the_same_name_is_no_wrapper() -> None:
    class DataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert set(ModelState(DataParallel()).state_dict()) == {"module.weight", "module.bias"}


def test_b42_a_subclass_of_a_wrapper_is_a_wrapper() -> None:
    class MyDDP(nn.parallel.DistributedDataParallel):
        pass

    assert set(ModelState(MyDDP(nn.Linear(1, 1))).state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("strict", [True, False])
def test_b42_nothing_in_common_is_refused(strict: bool, tmp_path: Path) -> None:
    live = block(2)
    before = {k: v.clone() for k, v in live.state_dict().items()}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": {f"x.{k}": v for k, v in block(1).state_dict().items()}})
        with pytest.raises(StateMismatch, match=r"nothing in component 'model'") as caught:
            ckpt.load({"model": live}, strict=strict)
    assert set(caught.value.missing) == {f"model/{k}" for k in KEYS}
    assert set(caught.value.unexpected) == {f"model/x.{k}" for k in KEYS}
    for name, tensor in live.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_two_keys_that_become_one_are_refused() -> None:
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    ddp.register_buffer("weight", torch.zeros(1))
    with pytest.raises(InvalidState, match="'weight'"):
        ModelState(ddp).state_dict()


def test_extra_state_travels(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> dict:
            return {"count": self.count, "scale": torch.tensor([float(self.count)])}

        def set_extra_state(self, state: dict) -> None:
            self.count = state["count"]
            assert state["scale"].item() == self.count

    source, target = Counting(1, 1), Counting(1, 1)
    source.count = 7
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": source})
        ckpt.load({"model": target})
    assert target.count == 7
    assert torch.equal(target.weight, source.weight)


def test_buffers_that_are_not_persistent_stay(tmp_path: Path) -> None:
    source, target = block(1), block(2)
    target.cache += 5
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": source})
        ckpt.load({"model": target})
    assert target.cache.tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("strict", [True, False])
def test_a_module_without_parameters_matches_only_itself(strict: bool, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": nn.ReLU()})
        ckpt.load({"model": nn.ReLU()}, strict=strict)
        ckpt.save(2, {"model": nn.Linear(1, 1)})
        with pytest.raises(StateMismatch):
            ckpt.load({"model": nn.ReLU()}, strict=strict)
        with pytest.raises(StateMismatch):
            ckpt.load({"model": nn.Linear(1, 1)}, step=1, strict=strict)


def test_a_bug_in_a_modules_own_loading_is_not_taken_for_a_bad_checkpoint(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"m": nn.Linear(2, 2)})

        class Wrong(nn.Linear):
            def load_state_dict(self, state_dict, strict=True, assign=False):
                raise KeyError("mine")

        with pytest.raises(
            LoadFailed, match=r"component 'm' on rank 0 .* KeyError: 'mine'; overwritten"
        ) as caught:
            ckpt.load({"m": Wrong(2, 2)})
    assert isinstance(caught.value.__cause__, KeyError)
    assert (caught.value.component, caught.value.rank, caught.value.overwritten) == ("m", 0, ["m"])


def test_a_value_where_the_module_has_a_tensor_is_a_mismatch(tmp_path: Path) -> None:
    live = nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"m": {"weight": [1.0, 2.0], "bias": torch.ones(2)}})
        with pytest.raises(
            StateMismatch, match=r"'m/weight' was saved as a value of type list, .* a tensor$"
        ) as caught:
            ckpt.load({"m": live})
    assert caught.value.mismatched == {"m/weight": ("a value of type list", "a tensor")}
    assert all(torch.equal(live.state_dict()[name], tensor) for name, tensor in before.items())
