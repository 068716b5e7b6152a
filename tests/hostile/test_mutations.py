"""Random damage to every file of a checkpoint that four ranks wrote: found and named, or harmless;
never a wrong value."""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptcore import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointManager,
    CheckpointNotFound,
    CheckpointWarning,
    NoUsableCheckpoint,
    Shard,
    SharingPattern,
    StateComponent,
    open_checkpoint,
)
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.saving.plan import plan_component
from ckptcore.testing.ranks import run_ranks

WORLD = 4
GROUPS = {"dp": [[0, 2], [1, 3]]}
P = SharingPattern


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    return {
        "layer.0.weight": numbers(step, 24, 32),
        "layer.0.bias": numbers(step + 1, 32).to(torch.bfloat16),
        "layer.1.weight": numbers(step + 2, 24, 32),
        "count": torch.tensor(step),
        "empty": torch.zeros(0, 3),
    }


def values_of(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "big": 3**100 + step,
        "pair": (step, ["x", {"y": None}]),
        "seen": {step, 1},
        "rate": 0.1 * step,
        "order": np.arange(step, step + 50),
        "raw": bytes([step]) * 40,
        "log": [f"line {n}" for n in range(step, step + 20)],
    }


def cut_of(step: int) -> dict[str, torch.Tensor]:
    return {"embedding": numbers(step + 3, 16, 20), "head": numbers(step + 4, 9)}


def sliced(full: torch.Tensor, rank: int) -> Shard:
    rows = -(-len(full) // WORLD)
    start = min(rank * rows, len(full))
    return Shard(
        full[start : start + rows].clone(), tuple(full.shape), (start, *[0] * (full.ndim - 1))
    )


def own_of(step: int, rank: int) -> dict[str, Any]:
    return {"rng": numbers(100 * step + rank, 30), "rank": rank}


def state_of(step: int, rank: int) -> list[StateComponent]:
    moments = {
        "state": {n: {"m": numbers(step + n, 20, 10), "t": step} for n in range(3)},
        "groups": [{"lr": 0.1 / step}],
    }
    return [
        StateComponent("model", tensors_of(step), P.REPLICATED),
        StateComponent("optimizer", moments, P.REPLICATED),
        StateComponent(
            "cut", {name: sliced(full, rank) for name, full in cut_of(step).items()}, P.SHARDED
        ),
        StateComponent("own", own_of(step, rank), P.PER_RANK),
        StateComponent("loader", {"at": numbers(7 * step + rank % 2, 12)}, P.PER_GROUP, "dp"),
        StateComponent("progress", values_of(step), P.GLOBAL),
    ]


class Live:
    """The state of one process that takes the place of rank `rank`, whose tensors are used again
    for each load."""

    def __init__(self) -> None:
        self.rank = 0
        self.state: dict[str, Any] = {
            "model": {name: torch.zeros_like(tensor) for name, tensor in tensors_of(1).items()},
            "optimizer": {
                "state": {n: {"m": torch.zeros(20, 10), "t": 0} for n in range(3)},
                "groups": [{"lr": 0.0}],
            },
            "cut": {
                name: Shard(torch.zeros_like(t), tuple(t.shape), (0,) * t.ndim)
                for name, t in cut_of(1).items()
            },
            "own": {"rng": torch.zeros(30), "rank": -1},
            "loader": {"at": torch.zeros(12)},
            "progress": values_of(0),
        }

    def components(self) -> list[StateComponent]:
        patterns = {"cut": P.SHARDED, "own": P.PER_RANK}
        here: dict[str, Any] = {
            "on_resize": lambda new, size, old: self.rank if old == WORLD else self.rank % 2
        }
        return [
            StateComponent(
                key, value, patterns.get(key, P.GLOBAL), **(here if key == "own" else {})
            )
            for key, value in self.state.items()
            if key != "loader"
        ] + [StateComponent("loader", self.state["loader"], P.PER_GROUP, "dp", **here)]

    def poison(self) -> None:
        for part in ("model", "loader"):
            for tensor in self.state[part].values():
                tensor.fill_(77)
        for shard in self.state["cut"].values():
            shard.tensor.fill_(77)
        for moment in self.state["optimizer"]["state"].values():
            moment["m"].fill_(77)
        self.state["own"]["rng"].fill_(77)

    def expected(self, step: int) -> dict[str, Any]:
        whole = {c.key: c.stateful for c in state_of(step, self.rank)}
        return {key: getattr(part, "value", part) for key, part in whole.items()} | {
            "cut": cut_of(step)
        }


def in_bits(value: Any) -> Any:
    """The value with every tensor and array as its dtype, shape and bytes; comparable with ==."""
    if isinstance(value, Shard):
        value = value.tensor
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().view(torch.uint8) if value.ndim else value[None].view(torch.uint8)
        return (str(value.dtype), tuple(value.shape), raw.numpy().tobytes())
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, dict):
        return {key: in_bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(in_bits(item) for item in value)
    return value


def kind_of_file(name: str) -> str:
    if name == MANIFEST_NAME:
        return "manifest"
    for tail, kind in (
        (".msgpack", "index"),
        (".index.json", "index.json"),
        (".safetensors", "tensors"),
    ):
        if name.endswith(tail):
            return kind
    raise AssertionError(name)


# How a file is damaged: (rng, its bytes, the bytes of the same file of step 1 or None) -> bytes.


def block(rng: random.Random, size: int) -> slice:
    length = min(size, rng.choice([2, 8, 64, 512, 4096]))
    start = rng.randrange(size - length + 1)
    return slice(start, start + length)


def bit(rng, data, _):
    new = bytearray(data)
    new[rng.randrange(len(new))] ^= 1 << rng.randrange(8)
    return new


def byte(rng, data, _):
    new = bytearray(data)
    new[rng.randrange(len(new))] = rng.randrange(256)
    return new


def random_block(rng, data, _):
    new, at = bytearray(data), block(rng, len(data))
    new[at] = rng.randbytes(at.stop - at.start)
    return new


def zero_block(rng, data, _):
    new, at = bytearray(data), block(rng, len(data))
    new[at] = bytes(at.stop - at.start)
    return new


def truncation(rng, data, _):
    return data[: rng.choice([0, 1, len(data) - 1, rng.randrange(len(data))])]


def longer(rng, data, _):
    return data + rng.randbytes(rng.choice([1, 8, 4096]))


def splice_of_step_1(rng, data, other):
    if other is None:
        return data
    at = slice(rng.randrange(len(data)), None) if rng.random() < 0.3 else block(rng, len(data))
    return data[: at.start] + other[at] + (data[at.stop :] if at.stop else b"")


def duplicate_block(rng, data, _):
    """A block twice, the rest behind it."""
    at = block(rng, len(data))
    return data[: at.stop] + data[at] + data[at.stop :]


def block_over_another(rng, data, _):
    at = block(rng, len(data))
    to = rng.randrange(len(data) - (at.stop - at.start) + 1)
    return data[:to] + data[at] + data[to + at.stop - at.start :]


def lost_block(rng, data, _):
    at = block(rng, len(data))
    return data[: at.start] + data[at.stop :]


CONTENTS = [
    bit,
    byte,
    random_block,
    zero_block,
    truncation,
    longer,
    splice_of_step_1,
    duplicate_block,
    block_over_another,
    lost_block,
]
WHOLE = ["swap", "file_of_step_1", "deletion"]


@dataclass
class Ground:
    root: Path
    live: Live
    files: dict[str, bytes]
    before: dict[str, bytes]
    table: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    @property
    def folder(self) -> Path:
        return self.root / "checkpoint-2"

    def damage(self, rng: random.Random) -> tuple[str, dict[str, bytes | None]]:
        """The kind, and the new bytes by file name (None: deleted). At least one file differs."""
        while True:
            kind: Any = rng.choice(CONTENTS + WHOLE)
            # By kind of file first: there is one manifest and there are many tensor files.
            wanted = rng.choice(sorted({kind_of_file(name) for name in self.files}))
            name = rng.choice(sorted(n for n in self.files if kind_of_file(n) == wanted))
            new: dict[str, bytes | None]
            if kind == "swap":
                other = rng.choice(sorted(self.files.keys() - {name}))
                new = {name: self.files[other], other: self.files[name]}
            elif kind == "deletion":
                new = {name: None}
            elif kind == "file_of_step_1":
                new = {name: self.before.get(name, self.files[name])}
            else:
                new = {name: bytes(kind(rng, self.files[name], self.before.get(name)))}
            new = {n: data for n, data in new.items() if data != self.files[n]}
            if new:
                return getattr(kind, "__name__", kind), new

    @contextmanager
    def damaged(self, new: dict[str, bytes | None]):
        try:
            for name, data in new.items():
                path = self.folder / name
                path.unlink() if data is None else path.write_bytes(data)
            yield
        finally:
            for name in new:
                (self.folder / name).write_bytes(self.files[name])

    def check_values(self, report: Any, step: int) -> None:
        expected = self.live.expected(step)
        found = {key: in_bits(report.values[key]) for key in expected}
        assert found == {key: in_bits(value) for key, value in expected.items()}, "WRONG VALUES"
        live = {key: in_bits(self.live.state[key]) for key in ("model", "cut", "loader")}
        assert live == {key: in_bits(expected[key]) for key in live}, "WRONG VALUES in live tensors"

    def load(self, **how: Any) -> str:
        self.live.poison()
        manager = CheckpointManager(self.root, io_threads=1, process_groups={"dp": [[0]]})
        report = manager.load(self.live.components(), str(self.folder), **how)
        assert report.step == 2
        self.check_values(report, 2)
        return "as saved"

    def transactional(self) -> str:
        return self.load(transactional=True)

    def restore(self) -> str:
        self.live.poison()
        manager = CheckpointManager(self.root, io_threads=1, process_groups={"dp": [[0]]})
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", CheckpointWarning)
            report = manager.restore(self.live.components())
        self.check_values(report, report.step)
        if report.step == 2:
            assert not told
            return "as saved"
        assert [str(self.folder.name) in str(w.message) for w in told] == [True]
        raise CheckpointCorrupt(str(told[0].message))

    def view(self) -> str:
        """Without torch: tensors of all ranks, and values."""
        view = open_checkpoint(self.folder)
        for rank in range(WORLD):
            found, expected = view.values("own", rank), own_of(2, rank)
            assert found["rank"] == rank, "WRONG VALUES"
            label = f"own.rank{rank:05d}/{found['rng'].name}"
            assert view.read(label).tobytes() == expected["rng"].numpy().tobytes(), "WRONG VALUES"
        for name, full in cut_of(2).items():
            assert view.read(f"cut/{name}").tobytes() == full.numpy().tobytes(), "WRONG VALUES"
        assert in_bits(view.values("progress")) | {"order": 0} == in_bits(values_of(2)) | {
            "order": 0
        }, "WRONG VALUES"
        return "as saved"

    def verified(self, new: dict[str, bytes | None]) -> None:
        """Whatever a load needs, verify finds every file that is not what it was."""
        try:
            found = {problem.file for problem in open_checkpoint(self.folder).verify(io_threads=1)}
        except (CheckpointCorrupt, CheckpointNotFound) as error:
            assert MANIFEST_NAME in new and MANIFEST_NAME in str(error)
            return
        assert found >= new.keys() - {MANIFEST_NAME}, f"verify finds {found}"
        assert found, "verify finds nothing"

    def attempt(self, rng: random.Random, verify: bool) -> None:
        kind, new = self.damage(rng)
        ways: list[Callable[[], str]] = [
            self.load,
            self.load,
            self.transactional,
            self.restore,
            self.view,
        ]
        way = rng.choice(ways)
        self.live.rank = rng.randrange(WORLD)
        with self.damaged(new):
            try:
                outcome = way()
            except CheckpointError as error:
                assert isinstance(error, CheckpointCorrupt | CheckpointNotFound), type(error)
                assert not isinstance(error, NoUsableCheckpoint)
                assert any(name in str(error) for name in new) or self.names_another(new, error), (
                    str(error)
                )
                outcome = "named"
            if verify or outcome == "as saved":
                self.verified(new)
        self.table[kind, kind_of_file(min(new)), outcome] += 1

    def names_another(self, new: dict[str, bytes | None], error: CheckpointError) -> bool:
        """A manifest of the other step is valid in itself: then it is the files beside it that are
        not its own."""
        return MANIFEST_NAME in new and any(name in str(error) for name in self.files)

    def drawn(self) -> str:
        files = sorted({file for _, file, _ in self.table})
        kinds = sorted({kind for kind, _, _ in self.table})
        lines = [f"{'named / harmless':20}" + "".join(f"{file:>16}" for file in files)]
        for kind in kinds:
            cells = [
                f"{self.table[kind, f, 'named']} / {self.table[kind, f, 'as saved']}" for f in files
            ]
            lines.append(f"{kind:20}" + "".join(f"{cell:>16}" for cell in cells))
        return "\n".join(lines)


@pytest.fixture
def ground(quick_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    monkeypatch.setitem(plan_component.__kwdefaults__, "max_file_bytes", 4_000)
    monkeypatch.setattr(
        "ckptcore.saving.plan.MIN_SHARE_BYTES", 1_000
    )  # so that the ranks share the writing
    root = quick_folder / "run"

    def program(comm: Any) -> None:
        with CheckpointManager(
            root, comm=comm, process_groups=GROUPS, run_id="run", io_threads=1
        ) as manager:
            for step in (1, 2):
                manager.save(step, state_of(step, comm.rank))

    run_ranks(WORLD, program)
    contents = [
        {p.name: p.read_bytes() for p in (root / f"checkpoint-{n}").iterdir()} for n in (1, 2)
    ]
    return Ground(root, Live(), contents[1], contents[0])


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=[pytest.mark.stress, pytest.mark.timeout(600)])]
)
def test_b05_random_damage_is_named_or_harmless(ground: Ground, count: int) -> None:
    kinds = Counter(kind_of_file(name) for name in ground.files)
    assert (
        kinds["index"] == WORLD
        and kinds["tensors"] >= 10
        and kinds["index.json"] >= 1
        and kinds["manifest"] == 1
    )
    for rank in range(WORLD):
        ground.live.rank = rank
        assert {
            way() for way in (ground.load, ground.transactional, ground.restore, ground.view)
        } == {"as saved"}
    rng = random.Random(20261127)
    failed: dict[str, int] = {}
    start = time.monotonic()
    for number in range(count):
        state = rng.getstate()
        try:
            ground.attempt(rng, verify=number % 20 == 0)
        except (Exception, pytest.fail.Exception) as error:
            again = random.Random()
            again.setstate(state)
            kind, new = ground.damage(again)
            failed.setdefault(
                f"{kind} of {sorted(new)}: {type(error).__name__}: {error}"[:600], number
            )
    named = sum(n for (_, _, outcome), n in ground.table.items() if outcome == "named")
    print(
        f"\n{count} random changes to {len(ground.files)} files ({dict(kinds)}) in "
        f"{time.monotonic() - start:.0f} s: "
        f"{named} named, {sum(ground.table.values()) - named} harmless, 0 wrong "
        f"values\n{ground.drawn()}"
    )
    assert not failed, f"{len(failed)} failures, such as {list(failed.items())[:3]}"
    assert sum(ground.table.values()) == count and named > 0.7 * count
    assert {way() for way in (ground.load, ground.restore, ground.view)} == {"as saved"}
