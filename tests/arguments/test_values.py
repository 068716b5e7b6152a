"""Counters and namespaces as people have them, and what to do about values that cannot be
stored."""

from __future__ import annotations

from collections import defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckptcore import CheckpointManager, StateComponent, UnsupportedValue, open_checkpoint
from ckptcore.format.values import decode, encode

FACTORIES = [None, int, float, str, list, dict, set]


@given(
    factory=st.sampled_from(FACTORIES),
    items=st.dictionaries(
        st.one_of(st.text(), st.integers(), st.tuples(st.booleans())),
        st.one_of(st.integers(), st.lists(st.text())),
    ),
)
def test_defaultdicts_keep_items_order_and_factory(factory: Any, items: dict) -> None:
    found = decode(encode(defaultdict(factory, items)))
    assert type(found) is defaultdict
    assert found.default_factory is factory
    assert list(found.items()) == list(items.items())


@given(
    st.dictionaries(
        st.text(), st.one_of(st.none(), st.integers(), st.lists(st.floats(allow_nan=False)))
    )
)
def test_namespaces_keep_their_attributes(items: dict) -> None:
    found = decode(encode(SimpleNamespace(**items)))
    assert type(found) is SimpleNamespace
    assert vars(found) == items


def test_with_tensors_inside(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        by = defaultdict(list, {"a": torch.full((3,), value), "n": [value]})
        return {"m": {"by": by, "args": SimpleNamespace(w=torch.full((2,), value), lr=value)}}

    CheckpointManager(tmp_path).save(1, state(2.0))
    assert sorted(t.name for t in open_checkpoint(tmp_path / "checkpoint-1").tensors()) == [
        "args/w",
        "by/a",
    ]
    found = CheckpointManager(tmp_path).restore(state(0.0)).values["m"]
    assert type(found["by"]) is defaultdict and found["by"].default_factory is list
    assert found["by"]["a"].tolist() == [2.0] * 3 and found["by"]["n"] == [2.0]
    assert found["args"].w.tolist() == [2.0] * 2 and found["args"].lr == 2.0


def test_an_attribute_that_is_no_text_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    odd = SimpleNamespace()
    odd.__dict__[1] = 2
    with pytest.raises(UnsupportedValue, match="SimpleNamespace"):
        CheckpointManager(tmp_path).save(1, {"m": {"a": odd}})
    assert list(tmp_path.iterdir()) == []


Point = namedtuple("Point", "x y")


@dataclass
class Config:
    lr: float = 0.1


class Phase(Enum):
    WARM = 1


class Counts(dict):
    pass


HINTS: dict[str, tuple[Callable[[], Any], str]] = {
    "loader": (lambda: torch.utils.data.DataLoader([1]), "StatefulDataLoader"),
    "module": (lambda: nn.Linear(1, 1), "top level of the state"),
    "optimizer": (
        lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1),
        "top level of the state",
    ),
    "scheduler": (
        lambda: torch.optim.lr_scheduler.ConstantLR(
            torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
        ),
        "has a state_dict",
    ),
    "generator": (torch.Generator, "get_state"),
    "component": (lambda: StateComponent("a", 1), "item of the list"),
    "function": (lambda: lambda: 0, "is code"),
    "class": (lambda: nn.Linear, "is code"),
    "iterator": (lambda: (i for i in ()), "position"),
    "namedtuple": (lambda: Point(1, 2), r"register_codec\(Point, tuple"),
    "dataclass": (Config, r"register_codec\(Config, vars"),
    "enum": (lambda: Phase.WARM, r"register_codec\(Phase\)"),
    "defaultdict": (lambda: defaultdict(lambda: 0), "factory is int"),
    "dict subclass": (Counts, "store plain values"),
}


@pytest.mark.parametrize("name", HINTS)
def test_a_value_that_cannot_be_stored_says_what_to_do(name: str, tmp_path: Path) -> None:
    make, hint = HINTS[name]
    with pytest.raises(UnsupportedValue, match=hint) as caught:
        CheckpointManager(tmp_path).save(1, {"m": {"a": [make()]}})
    assert (caught.value.component, caught.value.key) == ("m", "a/0")
    assert list(tmp_path.iterdir()) == []
