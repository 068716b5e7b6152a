"""What the tests of saves in the background share: a state with every kind of leaf, two loads to
compare, scripts to run."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckptcore import ModelState, OptimizerState, RNGState, Shard

KINDS = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


class Tied(nn.Module):
    """Embedding and head are one parameter; buffers of all sorts, one of them a 0-d counter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.norm = nn.BatchNorm1d(16)
        self.half = nn.Linear(16, 9).to(torch.bfloat16)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.tensor(0))


class Holder:
    """Any nested state; what is loaded takes its place, as an object of the user's would do it."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


class Everything:
    """Live state with every kind of leaf. `at(step)` changes all of it in place to what belongs to
    that step alone.

    items: length of its large leaves. salt: makes the state another one, for ranks that differ.
    """

    def __init__(self, step: int, *, items: int = 3000, salt: int = 0) -> None:
        self.salt = salt
        self.model = Tied()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.tensors = self._tensors(items)
        self.arrays = {
            "small": np.zeros(7),
            "large": np.zeros(items),
            "turned": np.zeros((items // 10, 10)).T,
            "0-d": np.array(0.0),
            "strided": np.zeros((items, 2), np.int32)[:, 1],
            "scalars": np.zeros(5, np.uint16),
        }
        self.hidden = np.zeros(items)
        self.values: dict[str, Any] = {
            "step": 0,
            "nested": [0, {"deep": [0, set()]}],
            "bytes": bytearray(6),
            "queue": deque(maxlen=3),
            "history": [],
        }
        self.at(step)

    def _tensors(self, items: int) -> dict[str, torch.Tensor]:
        made = {f"{dtype}".removeprefix("torch."): torch.zeros(11, dtype=dtype) for dtype in KINDS}
        whole, pairs = torch.zeros(items // 6, 6), torch.zeros(items // 4, 4, dtype=torch.complex64)
        self.roots = [whole, pairs, *made.values()]
        self.roots += [torch.zeros(items), torch.zeros(3), torch.tensor(0), torch.tensor(0.0)]
        large, row, count, scale = self.roots[-4:]
        self.roots.append(torch.zeros(items // 2, dtype=torch.complex128))
        return made | {
            "large": large,
            "count": count,
            "scale": scale,
            "whole": whole,
            "turned": whole.t(),
            "column": whole[:, 2],
            "every third": whole[::3],
            "part": whole[1:],
            "same part": whole[1:],
            "expanded": row.expand(5, 3),
            "window": large.as_strided((40, 8), (3, 1)),
            "conjugate": pairs.conj(),
            "negative": pairs.conj().imag,
            "deep conjugate": self.roots[-1].conj(),
            "empty": torch.empty(0, 4),
            "nothing": torch.empty(0),
        }

    def at(self, step: int) -> Everything:
        """Change everything in place."""
        self.step = step
        draw = torch.Generator().manual_seed(step * 1009 + self.salt)
        live = [*self.model.parameters(), *self.model.buffers(), *self.roots]
        live += [t for state in self.optimizer.state.values() for t in state.values()]
        with torch.no_grad():
            for tensor in live:
                tensor.copy_(torch.rand(tensor.shape, generator=draw).mul(100).to(tensor.dtype))
        for group in self.optimizer.param_groups:
            group["lr"] = step / 64
        for number, array in enumerate((*self.arrays.values(), self.hidden)):
            array[...] = np.random.default_rng((step, number, self.salt)).integers(
                0, 60_000, array.shape
            )
        values = self.values
        deep = values["nested"][1]["deep"]
        values["step"] = values["nested"][0] = deep[0] = step
        deep[1].clear()
        deep[1].update((step, f"{self.salt}"))
        values["bytes"][:] = bytes([step % 251] * 6)
        values["queue"].clear()
        values["queue"].extend((step, -step))
        values["history"][:] = [step, float(step), f"step {step}", b"%d" % step]
        values["history"].extend(range(step % 5))
        random.seed(step + self.salt)
        np.random.seed(step + self.salt)
        torch.manual_seed(step + self.salt)
        return self

    def seen(self) -> dict[str, Any]:
        """The plain part, in its own types. An array that cannot be written to changes through what
        it is a view of."""
        read_only, backwards = self.hidden[:], self.hidden[::-1]
        read_only.flags.writeable = False
        return {
            **self.values,
            "arrays": self.arrays,
            "read-only": read_only,
            "backwards": backwards,
            "tensors": self.tensors,
        }

    def components(self) -> dict[str, Any]:
        self.holder = Holder(self.seen())
        return {
            "model": ModelState(self.model),
            "optimizer": OptimizerState(self.optimizer, self.model),
            "rng": RNGState(),
            "all": self.holder,
        }


@pytest.fixture
def everything() -> type[Everything]:
    return Everything


@pytest.fixture
def holder() -> type[Holder]:
    return Holder


def _streams() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()]


@pytest.fixture
def check_step(same: Callable[..., None]) -> Callable[..., None]:
    """check_step(manager, step, ...): what its checkpoint of `step` holds is the state of that
    step, to the last bit.

    declared: makes the state that the manager takes of the components by key (and leaves out the
    random streams).
    """

    def check(
        manager: Any, step: int, *, declared: Callable[..., Any] | None = None, **how: Any
    ) -> None:
        expected = Everything(step, **how)
        expected_streams = _streams()
        found = Everything(step + 50_000, **how)
        state = found.components()
        report = manager.load(state if declared is None else declared(state), step)
        assert report.step == step
        if declared is None:
            same(_streams(), expected_streams, "rng")
        same(dict(found.model.state_dict()), dict(expected.model.state_dict()), "model")
        assert found.model.head.weight is found.model.embedding.weight
        same(found.optimizer.state_dict(), expected.optimizer.state_dict(), "optimizer")
        same(found.holder.state, expected.seen(), "all")

    return check


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging cuts even small tensors into pieces for several threads."""
    monkeypatch.setattr("ckptcore.saving.staging.PIECE_BYTES", 4096)
    monkeypatch.setattr("ckptcore.saving.staging.SMALL_BYTES", 1024)


class ShardedPart:
    """Rank's part of a logical state: a row block of each of two matrices, and a plain tensor that
    all ranks hold."""

    def __init__(self, rank: int, size: int, step: int) -> None:
        self.rank, self.size = rank, size
        self.parts = [torch.zeros(4, 5), torch.zeros(2, 300)]
        self.shared = torch.zeros(64)
        self.at(step)

    def at(self, step: int) -> None:
        for number, part in enumerate(self.parts):
            full = torch.arange(part.numel() * self.size, dtype=torch.float32).view(
                -1, part.shape[1]
            )
            rows = slice(self.rank * len(part), (self.rank + 1) * len(part))
            part.copy_(full[rows] + step * 1000 + number)
        self.shared.copy_(torch.arange(64) + step)

    def state_dict(self) -> dict[str, Any]:
        shards = {
            f"w{n}": Shard(part, (len(part) * self.size, part.shape[1]), (self.rank * len(part), 0))
            for n, part in enumerate(self.parts)
        }
        return {**shards, "shared": self.shared}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shared.copy_(state_dict["shared"])  # slices are filled in place

    def plain(self) -> list[Any]:
        return [*(part.tolist() for part in self.parts), self.shared.tolist()]


@pytest.fixture
def sharded_part() -> type[ShardedPart]:
    return ShardedPart
