"""Tensor names of any shape come back to their place, and stock readers find flat ones as they
are."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore import CheckpointManager, open_checkpoint

ODD = [
    "a/b",
    "a~1b",
    "a~b",
    "~",
    "/",
    "",
    "__metadata__",
    "ü",
    "\u2028",
    "a b",
    "\ud800",
    "0",
    'quote"',
    "a\\b",
    "\0",
    "a\nb",
]


def numbered(names) -> dict:
    return {name: torch.tensor([float(number)]) for number, name in enumerate(names, 1)}


def values(state: dict) -> dict:
    return {
        key: values(item) if isinstance(item, dict) else item.item() for key, item in state.items()
    }


def round_trip(root: Path, state: dict, live: dict) -> dict:
    with CheckpointManager(root) as ckpt:
        ckpt.save(1, {"c": state})
        return ckpt.load({"c": live}).values["c"]


def zeroed(state: dict) -> dict:
    return {
        key: zeroed(item) if isinstance(item, dict) else torch.zeros_like(item)
        for key, item in state.items()
    }


@pytest.mark.parametrize("nested", [False, True])
def test_odd_names(nested: bool, tmp_path: Path) -> None:
    state = numbered(ODD) if not nested else {"x": numbered(ODD), "y/": {"z~": numbered(ODD)}}
    live = zeroed(state)
    found = round_trip(tmp_path, state, live)
    assert values(found) == values(live) == values(state)
    stock = safetensors.torch.load_file(tmp_path / "checkpoint-1" / "c.safetensors")
    assert len(stock) == len(ODD) * (2 if nested else 1)


@pytest.mark.parametrize("name", ODD, ids=repr)
def test_each_odd_name_alone(name: str, tmp_path: Path) -> None:
    live = {name: torch.zeros(1)}
    found = round_trip(tmp_path, {name: torch.ones(1)}, live)
    assert found[name] is live[name]
    assert live[name].item() == 1
    stock = safetensors.torch.load_file(tmp_path / "checkpoint-1" / "c.safetensors")
    assert [t.item() for t in stock.values()] == [1.0]
    if name not in ("__metadata__", "\ud800"):
        assert list(stock) == [name], "flat names stay as they are"


def test_reserved_name_beside_its_replacement(tmp_path: Path) -> None:
    state = numbered(["__metadata__", "__metadata__~2", "__metadata__~02"])
    live = zeroed(state)
    round_trip(tmp_path, state, live)
    assert values(live) == values(state)


def test_keys_that_are_no_text(tmp_path: Path) -> None:
    state = {
        0: torch.tensor([1.0]),
        "0": torch.tensor([2.0]),
        (1, "a"): torch.tensor([3.0]),
        "(1, 'a')": torch.tensor([4.0]),
        None: torch.tensor([5.0]),
        "None": torch.tensor([6.0]),
        "0~2int": torch.tensor([7.0]),
        2.5: torch.tensor([8.0]),
    }
    live = zeroed(state)
    found = round_trip(tmp_path, {"s": state}, {"s": live})
    assert values(live) == values(state)
    assert [type(key) for key in found["s"]] == [type(key) for key in state]
    names = {t.name for t in open_checkpoint(tmp_path / "checkpoint-1").tensors()}
    assert len(names) == 8


def test_a_number_is_not_its_text(tmp_path: Path) -> None:
    live = {"s": {"0": torch.zeros(1)}}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": {"s": {0: torch.ones(1)}}})
        ckpt.load({"c": live})
    assert [(key, t.tolist()) for key, t in live["s"].items()] == [(0, [1.0])]


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    [n for n in ODD if n != "\ud800"]
)


@given(
    st.dictionaries(names, st.none() | st.dictionaries(names, st.none(), max_size=3), max_size=4)
)
@settings(max_examples=25)
def test_any_names(tmp_path_factory: pytest.TempPathFactory, shape: dict) -> None:
    count = iter(range(1, 100))
    state = {
        key: torch.tensor([float(next(count))])
        if inner is None
        else {name: torch.tensor([float(next(count))]) for name in inner}
        for key, inner in shape.items()
    }
    live = zeroed(state)
    round_trip(tmp_path_factory.mktemp("root"), state, live)
    assert values(live) == values(state)


def test_names_of_nested_state_are_paths(tmp_path: Path) -> None:
    state = {"a": {"b/c": torch.ones(1)}, "l": [torch.ones(1), (torch.ones(2),)], 3: torch.ones(3)}
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": state})
    tensors = open_checkpoint(tmp_path / "checkpoint-1").tensors()
    assert [t.name for t in tensors] == ["3", "a/b~1c", "l/0", "l/1/0"]
    assert tensors[1].path == ("a", "b/c")
    assert tensors[1].full_name == "c/a/b~1c"
    assert set(safetensors.torch.load_file(tmp_path / "checkpoint-1" / "c.safetensors")) == {
        t.name for t in tensors
    }


def test_ordered_state_dicts_have_the_names_of_their_keys(tmp_path: Path) -> None:
    # module.state_dict() is an OrderedDict: its tensors must be found by name, at any depth.
    flat = torch.nn.Linear(2, 3).state_dict()
    assert type(flat) is OrderedDict
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"model": flat, "ema": {"shadow": flat}})
    tensors = open_checkpoint(tmp_path / "checkpoint-1").tensors()
    names = {t.full_name for t in tensors}
    assert names == {"model/weight", "model/bias", "ema/shadow/weight", "ema/shadow/bias"}
    assert set(safetensors.torch.load_file(tmp_path / "checkpoint-1" / "model.safetensors")) == {
        "weight",
        "bias",
    }


def test_ordered_state_dicts_are_matched_by_key_not_by_place(tmp_path: Path) -> None:
    saved = OrderedDict(a=torch.tensor([1.0]), b=torch.tensor([2.0]))
    live = OrderedDict(b=torch.zeros(1), a=torch.zeros(1))
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": saved})
        ckpt.load({"c": live})
    assert (live["a"].item(), live["b"].item()) == (1.0, 2.0)


@pytest.mark.parametrize("transactional", [False, True])
def test_a_stateful_with_an_ordered_state_dict_is_matched_by_key(
    transactional: bool, tmp_path: Path
) -> None:
    class Holder:
        def __init__(self, order: str) -> None:
            self.module = torch.nn.Module()
            for name in order:
                self.module.register_buffer(name, torch.zeros(2))

        def state_dict(self):
            return self.module.state_dict()

        def load_state_dict(self, state) -> None:
            self.module.load_state_dict(state)

    saved, live = Holder("ab"), Holder("ba")
    saved.module.a += 1
    saved.module.b += 2
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"h": saved})
        ckpt.load({"h": live}, transactional=transactional)
    assert (live.module.a.tolist(), live.module.b.tolist()) == ([1.0, 1.0], [2.0, 2.0])
