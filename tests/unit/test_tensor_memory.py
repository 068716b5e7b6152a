"""Tensors and arrays of any memory layout are saved with their values and restored into any memory
layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ckptcore import CheckpointManager
from ckptcore.format.digest import CHUNK_BYTES

BASE = torch.arange(24.0).reshape(2, 3, 4)
LARGE = torch.arange(3 * CHUNK_BYTES // 8 + 5, dtype=torch.float32)
LAYOUTS = {
    "contiguous": lambda: BASE.clone(),
    "transposed": lambda: BASE.clone().transpose(0, 2),
    "every second": lambda: BASE.clone()[:, ::2, 1::2],
    "channels last": lambda: (
        torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ),
    "channels last 3d": lambda: (
        torch.arange(48.0).reshape(1, 3, 2, 2, 4).to(memory_format=torch.channels_last_3d)
    ),
    "0-d": lambda: torch.tensor(2.5),
    "0-d in the middle": lambda: BASE.clone()[1, 2, 3],
    "empty": lambda: torch.empty(0),
    "empty of rank 3": lambda: torch.empty(2, 0, 3),
    "one item": lambda: torch.ones(1, 1, 1).transpose(0, 2),
    "diagonal": lambda: torch.arange(25.0).reshape(5, 5).diagonal(),
    "offset": lambda: torch.arange(10.0)[3:7],
    "needs grad": lambda: torch.nn.Parameter(BASE.clone()),
    "inside a graph": lambda: (torch.ones(3, requires_grad=True) * 2)[::2],
    "conjugated": lambda: torch.complex(torch.arange(4.0), torch.arange(4.0) + 1).conj(),
    "conjugated part": lambda: (
        torch.complex(torch.arange(6.0), torch.ones(6)).reshape(2, 3).conj()[:, 1:].t()
    ),
    "conjugated, wide": lambda: torch.complex(
        torch.arange(4.0).double(), torch.ones(4).double()
    ).conj(),
    "negated": lambda: torch.complex(torch.arange(4.0), torch.arange(4.0) + 1).conj().imag,
    "wide complex, strided": lambda: torch.arange(8.0).to(torch.complex128).reshape(2, 4)[:, ::2],
    "half complex, strided": lambda: torch.arange(8.0).to(torch.complex32).reshape(2, 4).t(),
    "large": lambda: LARGE.clone(),
    "large, transposed": lambda: torch.arange(2.0 * 1031 * 1033).reshape(1031, -1).t(),
    "large, strided": lambda: torch.arange(2.0 * 1500 * 1033).reshape(1500, -1)[::2, ::2],
    "large, channels last": lambda: (
        torch.arange(3.0 * 601 * 701).reshape(1, 3, 601, 701).to(memory_format=torch.channels_last)
    ),
    "large bytes, strided": lambda: torch.arange(2 * CHUNK_BYTES + 22).to(torch.uint8)[::2],
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_saved_and_restored_in_its_own_layout(make, tmp_path: Path, bits) -> None:
    saved, live = make(), make()
    with torch.no_grad():
        live.fill_(0)
    address, stride = live.data_ptr(), live.stride()
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": {"t": saved}})
        report = ckpt.load({"c": {"t": live}})
    assert bits(live) == bits(saved) == bits(make())
    assert report.values["c"]["t"] is live
    assert (live.data_ptr(), live.stride()) == (address, stride)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("transactional", [False, True])
def test_layouts_need_not_be_equal(make, transactional: bool, tmp_path: Path, bits) -> None:
    saved = make()
    plain = torch.zeros(saved.shape, dtype=saved.dtype)
    other = torch.zeros(saved.shape[::-1], dtype=saved.dtype).permute(
        tuple(range(saved.ndim))[::-1]
    )
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": {"t": saved, "u": saved}})
        ckpt.load({"c": {"t": plain, "u": other}}, transactional=transactional)
    assert bits(plain) == bits(saved)
    assert bits(other) == bits(saved)


def test_many_unaligned_tensors_that_are_not_contiguous(tmp_path: Path, bits) -> None:
    # They share one scratch buffer, in which items of 8 bytes follow odd numbers of bytes.
    def make(seed: int) -> dict:
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for number, dtype in enumerate(
            [torch.uint8, torch.complex128, torch.bool, torch.float64, torch.int16] * 8
        ):
            raw = torch.randint(0, 2, (6, 5 + number), generator=generator).to(dtype)
            made[f"t{number}"] = raw[::2, 1::2]
        return made

    saved, live = make(1), make(2)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": saved})
        ckpt.load({"c": live})
    for name in saved:
        assert bits(live[name]) == bits(saved[name]), name


@pytest.mark.parametrize("live", ["plain", "expanded"])
@pytest.mark.parametrize("transactional", [False, True])
def test_expanded_tensors(live: str, transactional: bool, tmp_path: Path) -> None:
    saved = torch.tensor([[1.0], [2.0]]).expand(2, 3)
    target = torch.zeros(2, 3) if live == "plain" else torch.zeros(2, 1).expand(2, 3)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": {"t": saved}})
        ckpt.load({"c": {"t": target}}, transactional=transactional)
    assert target.tolist() == [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]


def test_sliding_windows_are_saved_by_value(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": {"t": torch.arange(5.0).unfold(0, 3, 1)}})
        live = torch.zeros(3, 3)
        ckpt.load({"c": {"t": live}})
    assert live.tolist() == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]


ARRAYS = {
    "plain": lambda n: np.arange(n * 6.0).reshape(n, 6),
    "transposed": lambda n: np.arange(n * 6.0).reshape(n, 6).T,
    "reversed": lambda n: np.arange(n * 6.0).reshape(n, 6)[::-1, ::-2],
    "every second": lambda n: np.arange(n * 6.0).reshape(n, 6)[::2, 1::2],
    "integers": lambda n: np.arange(n * 6, dtype=np.uint16),
}


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS.keys())
@pytest.mark.parametrize("count", [2, 3000], ids=["small", "large"])
@pytest.mark.parametrize("target", ["same layout", "plain", "read-only"])
@pytest.mark.parametrize("transactional", [False, True])
def test_numpy_arrays_of_any_layout(
    make, count: int, target: str, transactional: bool, tmp_path: Path, same
) -> None:
    saved, live = make(count), make(count)
    live[:] = 0
    if target == "plain":
        live = np.zeros(saved.shape, saved.dtype)
    elif target == "read-only":
        live.flags.writeable = False
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": {"a": saved, "n": 1}})
        found = ckpt.load({"c": {"a": live, "n": 0}}, transactional=transactional).values["c"]
    same(found, {"a": make(count), "n": 1})
    assert np.all(live == 0) or target != "read-only", "a read-only array must not be written to"


@pytest.mark.parametrize("target", ["same layout", "plain", "read-only"])
def test_numpy_arrays_reach_a_stateful(target: str, tmp_path: Path, same) -> None:
    class Table:
        def __init__(self, values: np.ndarray) -> None:
            self.values = values

        def state_dict(self) -> dict:
            return {"values": self.values}

        def load_state_dict(self, state: dict) -> None:
            self.values = state["values"]

    saved = Table(np.arange(4000.0)[::-1])
    live = Table(np.zeros(4000)[::-1] if target == "same layout" else np.zeros(4000))
    if target == "read-only":
        live.values.flags.writeable = False
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"table": saved})
        ckpt.load({"table": live})
    same(live.values, np.arange(4000.0)[::-1])


def test_read_only_arrays_are_saved(tmp_path: Path, same) -> None:
    frozen = np.arange(3000)
    frozen.flags.writeable = False
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"c": {"a": frozen}})
        live = np.zeros(3000, np.int64)
        ckpt.load({"c": {"a": live}})
    same(live, np.arange(3000))
