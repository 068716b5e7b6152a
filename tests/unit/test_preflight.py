"""All that a save would refuse is said at once, before anything is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptcore import (
    CheckpointError,
    CheckpointManager,
    OptimizerState,
    Shard,
    StateComponent,
    preflight,
)


class Strange:
    pass


class Wrapper(torch.Tensor):
    """Has inner tensors, and nobody has registered it."""

    def __tensor_flatten__(self) -> Any:
        return [], None

    @classmethod
    def __tensor_unflatten__(cls, *_: Any) -> Any:
        raise NotImplementedError


class Failing:
    def state_dict(self) -> Any:
        raise RuntimeError("no state today")

    def load_state_dict(self, state: Any) -> None: ...


def wrapper() -> Any:
    return torch.zeros(2).as_subclass(Wrapper)


def test_a_state_that_a_save_takes_has_no_refusals() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    report = preflight({"model": model, "optimizer": optimizer, "n": {"epoch": 3}})
    assert report.ok and not report.notes
    assert (report.tensors, report.size_bytes) == (8, 3 * 20 * 4 + 2 * 4)
    assert str(report) == "a save takes it: 8 tensors, 248 bytes"


def test_everything_is_found_at_once_with_what_to_do() -> None:
    model = nn.Linear(2, 2)
    foreign = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    report = preflight(
        {
            "model": model,
            "bad/key": {"a": 1},
            "epoch": 7,
            "optimizer": OptimizerState(torch.optim.SGD(model.parameters()), model),
            "foreign": foreign,
            "failing": Failing(),
            "deep": {
                "fine": [1, 2, 3],
                "list": [1, {"x": Strange()}, *range(100), Strange()],
                "w": wrapper(),
                "meta": torch.empty(2, device="meta"),
                "sparse": torch.eye(2).to_sparse(),
            },
            "slice": StateComponent("slice", {"s": Shard(torch.ones(2), (4,), (0,))}, "REPLICATED"),
        }
    )
    found = {(each.component, each.key): each.message for each in report.refusals}
    assert found.keys() == {
        ("bad/key", None),
        ("epoch", None),
        ("foreign", None),
        ("failing", None),
        ("deep", "list/1/x"),
        ("deep", "list/102"),
        ("deep", "w"),
        ("deep", "meta"),
        ("deep", "sparse"),
        ("slice", "s"),
    }
    for key, advice in {
        ("bad/key", None): "without '/'",
        ("epoch", None): "put it into a dict",
        ("foreign", None): "wrap it as OptimizerState",
        ("failing", None): "RuntimeError: no state today",
        ("deep", "list/1/x"): "register_codec",
        ("deep", "w"): "register_tensor_class",
        ("deep", "sparse"): "convert it to dense",
        ("slice", "s"): "declare the component SHARDED",
    }.items():
        assert advice in found[key], (key, found[key])
    kinds = {each.key: each.type_name for each in report.refusals}
    assert kinds["list/102"] == f"{__name__}.Strange" and kinds["w"] == f"{__name__}.Wrapper"
    assert str(report).count("\nrefused: ") == 10


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"w": wrapper()}},
        {"a": {1: Strange()}},
        {"a": [[[torch.empty(1, device="meta")]]]},
        {"a": 1},
        {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
        [StateComponent("a", {"n": 1}), StateComponent("a", {"n": 2})],
        {},
        7,
    ],
    ids=["class", "object", "meta", "number", "quantized", "twice", "empty", "no-state"],
)
def test_what_it_refuses_a_save_refuses_in_the_same_words(tmp_path: Path, state: Any) -> None:
    report = preflight(state)
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.save(1, state)
    (refusal,) = report.refusals
    assert refusal.message in str(error.value)
    assert not [*tmp_path.glob("checkpoint-*")]


def test_what_contains_itself_is_refused_once() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    (refusal,) = preflight({"a": endless}).refusals
    assert "contains itself" in refusal.message


def test_memory_that_is_shared_in_part_is_a_note() -> None:
    whole = torch.zeros(8)
    report = preflight(
        {"a": {"whole": whole, "same": whole, "part": whole[4:]}, "b": {"one": whole}}
    )
    assert report.ok and report.size_bytes == 48
    assert len(report.notes) == 1 and "'a/part'" in report.notes[0]


def test_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"model": nn.Linear(4, 4), "x": {"t": torch.ones(3)}}
    for name in ("numpy", "tolist", "copy_", "clone", "item"):
        monkeypatch.setattr(torch.Tensor, name, None)
    assert preflight(state).ok
