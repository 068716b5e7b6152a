"""What cannot be stored is refused with component, key and type, before a byte is written."""

from __future__ import annotations

import datetime as dt
import threading
from collections import OrderedDict, defaultdict, namedtuple
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptcore import (
    CheckpointManager,
    CheckpointNotFound,
    InvalidState,
    UnsupportedValue,
    preflight,
)
from ckptcore.format.values import encode

Point = namedtuple("Point", "x y")


class MyInt(int):
    pass


class MyStr(str):
    __slots__ = ()


class OddZone(dt.tzinfo):
    def utcoffset(self, _):
        return dt.timedelta(0)


REFUSED = {
    "object": object(),
    "function": print,
    "lambda": lambda: 0,
    "class": Path,
    "module": np,
    "lock": threading.Lock(),
    "generator": (i for i in ()),
    "namedtuple": Point(1, 2),
    "int subclass": MyInt(3),
    "str subclass": MyStr("a"),
    "dict subclass": defaultdict(lambda: 0),
    "exception": ValueError("a"),
    "memoryview": memoryview(b"a"),
    "object array": np.array([object()]),
    "record array": np.zeros(2, "i4,f4"),
    "named record": np.zeros(2, "i4,f4")[0],
    "matrix": np.zeros((1, 2)).view(np.matrix),
    "masked array": np.ma.masked_array([1, 2], [0, 1]),
    "odd time zone": dt.datetime(2020, 1, 1, tzinfo=OddZone()),
    "random generator": np.random.default_rng(0),
    "torch generator": torch.Generator(),
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED.keys())
def test_unknown_types_are_refused_by_name(value, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "root") as ckpt, pytest.raises(UnsupportedValue) as caught:
        ckpt.save(1, {"good": {"w": torch.ones(2)}, "bad": {"a": [0, {"b/c": value}]}})
    error = caught.value
    assert (error.component, error.key) == ("bad", "a/1/b~1c")
    assert error.type_name == f"{type(value).__module__}.{type(value).__qualname__}"
    assert "'bad'" in str(error)
    assert "a/1/b~1c" in str(error)
    assert not (tmp_path / "root").exists() or list((tmp_path / "root").iterdir()) == []


def test_memory_mapped_arrays_are_refused_or_whole(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "data.bin", np.int32, "w+", shape=(3,))
    mapped[:] = [1, 2, 3]
    with CheckpointManager(tmp_path / "root") as ckpt:
        try:
            ckpt.save(1, {"data": {"m": mapped}})
        except UnsupportedValue:
            return
        report = ckpt.load({"data": {"m": np.zeros(3, np.int32)}})
    assert report.values["data"]["m"].tolist() == [1, 2, 3]


def test_the_message_says_what_to_do() -> None:
    with pytest.raises(
        UnsupportedValue, match=r"component 'opt', key 'k': .*builtins\.object.*register_codec"
    ):
        encode({"k": object()}, component="opt")


def _list() -> list:
    cycle: list = []
    cycle.append(cycle)
    return cycle


def _dict() -> dict:
    cycle: dict = {}
    cycle["again"] = cycle
    return cycle


def _numbered() -> dict:
    cycle: dict = {}
    cycle[0] = cycle
    return cycle


def _ordered() -> OrderedDict:
    cycle: OrderedDict = OrderedDict()
    cycle["again"] = (cycle,)
    return cycle


@pytest.mark.parametrize("make", [_list, _dict, _numbered, _ordered])
def test_cycles_are_refused(make) -> None:
    with pytest.raises(UnsupportedValue, match="nested deeper than 64 levels") as caught:
        encode({"top": make()}, component="c")
    assert caught.value.component == "c"
    assert caught.value.key.startswith("top/")


@pytest.mark.parametrize(
    "wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: frozenset([v])]
)
def test_deep_nesting_is_refused(wrap) -> None:
    value = wrap(1)
    for _ in range(300):
        value = wrap(value)
    with pytest.raises(UnsupportedValue):
        encode(value)


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}])
def test_deep_nesting_is_refused_by_every_call(tmp_path, wrap) -> None:
    """Deeper than Python's own limit, and without anything that it contains again."""
    value = wrap(1)
    for _ in range(3000):
        value = wrap(value)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"log": {"v": 1}})
        for call in (partial(ckpt.save, 2), partial(ckpt.save_async, 2), ckpt.load, ckpt.restore):
            with pytest.raises(UnsupportedValue, match=r"'log'.*nested deeper than 64") as caught:
                call({"log": {"v": value}})
            assert caught.value.component == "log"
        (refusal,) = preflight({"log": {"v": value}}).refusals
        assert refusal.component == "log" and "nested deeper than 64 levels" in refusal.message
        assert [info.step for info in ckpt.list()] == [1]


def test_deep_nesting_is_refused_however_deep_the_caller_is() -> None:
    def deeper(levels: int) -> None:
        if levels:
            deeper(levels - 1)
        else:
            encode(_ordered())

    with pytest.raises(UnsupportedValue):
        deeper(300)


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (lambda: torch.ones(3, 3).to_sparse(), "layout"),
        (lambda: torch.ones(3, 3).to_sparse_csr(), "layout"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "qint8"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (lambda: torch.nn.LazyLinear(3).weight, ""),
    ],
    ids=["sparse", "csr", "meta", "quantized", "nested", "uninitialized"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_without_plain_bytes_are_refused(tensor, what: str, tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path / "root") as ckpt,
        pytest.raises(UnsupportedValue, match=what) as caught,
    ):
        ckpt.save(1, {"net": {"deep": {"t": tensor()}}})
    assert (caught.value.component, caught.value.key) == ("net", "deep/t")
    assert not (tmp_path / "root").exists() or list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize(
    "value", [object(), len, iter([1])], ids=["object", "function", "iterator"]
)
def test_a_component_that_nothing_could_hold_is_refused_as_such(value, tmp_path: Path) -> None:
    """The advice to put it into a dict would only lead to the next refusal."""
    with (
        CheckpointManager(tmp_path / "root") as ckpt,
        pytest.raises(
            UnsupportedValue, match=r"^component 'a': a value of type builtins."
        ) as caught,
    ):
        ckpt.save(1, {"a": value})
    assert (caught.value.component, caught.value.key) == ("a", "")
    assert not (tmp_path / "root").exists()


def test_a_word_that_is_no_step_is_told_from_a_path(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with CheckpointManager(tmp_path / "root") as ckpt:
        ckpt.save(1, {"model": model})
        word = "has no entry 'lates': give a number, 'latest', 'best' or the name that a save"
        with pytest.raises(CheckpointNotFound, match=word):
            ckpt.load({"model": model}, "lates")
        with pytest.raises(InvalidState, match=r"step is empty \(''\): is a variable not set\?$"):
            ckpt.load({"model": model}, "")
