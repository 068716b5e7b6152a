"""A job of four ranks on two nodes, each of which has a disk of its own; and state in which every
value tells which save, rank, group and node it is from."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptcore import CheckpointManager, CheckpointWarning, Shard, SharingPattern, StateComponent
from ckptcore.testing.ranks import run_ranks

NODES = [[0, 1], [2, 3]]
GROUPS = {"dp": [[0, 2], [1, 3]]}


class Job:
    """Two nodes with their disks, `roots`; programs run on all ranks of a job with fresh
    communicators."""

    nodes = NODES

    def __init__(self, folder: Path) -> None:
        self.roots: list[Any] = [folder / "disk0", folder / "disk1"]

    @staticmethod
    def state(mark: int, rank: int) -> list[StateComponent]:
        """All six patterns. What another rank than 0 has of global state is not to be found
        anywhere after a save."""
        node, group = rank // 2, rank % 2
        table = torch.arange(16.0).reshape(4, 4) + mark
        values = torch.arange(5.0) + mark if rank == 0 else torch.full((5,), -100.0 - rank)
        return [
            StateComponent(
                "global",
                {"w": values, "mark": mark if rank == 0 else -rank, "tie": values},
                SharingPattern.GLOBAL,
            ),
            StateComponent(
                "same",
                {**{f"w{n}": torch.full((3,), mark + n / 4) for n in range(4)}, "mark": mark},
                SharingPattern.REPLICATED,
            ),
            StateComponent(
                "own",
                {"x": torch.tensor([100.0 * mark + rank]), "seen": [mark, rank]},
                SharingPattern.PER_RANK,
            ),
            StateComponent(
                "group", {"x": torch.tensor([10.0 * mark + group])}, SharingPattern.PER_GROUP, "dp"
            ),
            StateComponent(
                "node", {"x": torch.tensor([10.0 * mark + node])}, SharingPattern.PER_NODE
            ),
            StateComponent(
                "table",
                {
                    "rows": Shard(table[rank : rank + 1].clone(), (4, 4), (rank, 0)),
                    "all": table.sum(0),
                    f"key{rank}": torch.tensor([mark, rank]),
                    "mark": mark,
                },
                SharingPattern.SHARDED,
            ),
        ]

    @staticmethod
    def plain(states: list[StateComponent], values: dict[str, Any] | None = None) -> dict[str, Any]:
        """A state, or what `load` left in it, in a form that can be compared."""

        def form(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: form(item) for key, item in value.items()}
            tensor = value.tensor if isinstance(value, Shard) else value
            return tensor.tolist() if isinstance(tensor, torch.Tensor) else tensor

        return {c.key: form((values or {}).get(c.key, c.stateful)) for c in states}

    def expected(self, mark: int, rank: int) -> dict[str, Any]:
        found = self.plain(self.state(mark, rank))
        return found | {"global": self.plain(self.state(mark, 0))["global"]}

    def manager(self, comm: Any, **how: Any) -> CheckpointManager:
        node = next(
            number for number, ranks in enumerate(comm.nodes or self.nodes) if comm.rank in ranks
        )
        root = how.pop("root", self.roots[node])
        settings = {
            "storage_mode": "node",
            "process_groups": GROUPS if comm.world_size == 4 else None,
            "io_threads": 1,
            "run_id": "run",
            **how,
        }
        return CheckpointManager(root, comm=comm, **settings)

    def restored(
        self, manager: CheckpointManager, load: str = "restore", *where: Any
    ) -> int | None:
        """The step that a load gave, all of it; None for a fresh start; AssertionError for a
        mix."""
        rank = manager.comm.rank
        live = self.state(-1, rank)
        report = getattr(manager, load)(live, *where)
        if report.fresh:
            assert self.plain(live) == self.plain(self.state(-1, rank))
            return None
        values = {key: value for key, value in report.values.items() if key != "table"}
        found, expected = (
            self.plain(live, report.values),
            self.expected(report.values["own"]["seen"][0], rank),
        )
        assert values.keys() <= found.keys()
        assert found == expected
        return report.values["own"]["seen"][0]

    def run(self, program: Callable[..., Any], *, errors: bool = False, **how: Any) -> list[Any]:
        """What `program(comm)` returned by rank; errors: or raised, each rank living on until all
        have their verdict."""

        def caught(comm: Any) -> Any:
            with comm.round("nodes", joining=True):
                pass
            try:
                return program(comm)
            except Exception as error:
                if not errors:
                    raise
                return error
            finally:
                with comm.round("every rank has its verdict", joining=True):
                    pass

        return run_ranks(sum(map(len, self.nodes)), caught, nodes=self.nodes, **how)

    def save(self, *steps: int, **how: Any) -> None:
        def program(comm: Any) -> None:
            with self.manager(comm, **how) as ckpt:
                for step in steps:
                    ckpt.save(step, self.state(step, comm.rank))

        self.run(program)

    def restores(self, **how: Any) -> int | None:
        """What a fresh job restores, the same on all ranks; its warnings are in `said`."""

        def program(comm: Any) -> int | None:
            with self.manager(comm, **how) as ckpt:
                return self.restored(ckpt)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CheckpointWarning)
            found = self.run(program)
        self.said = [str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)]
        assert len(set(found)) == 1
        return found[0]

    def names(self) -> list[list[str]]:
        """What lies in the roots."""
        return [sorted(item.name for item in root.iterdir()) for root in self.roots]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is some: what is tested is the order of operations, not the disk."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shm, prefix="ckptcore-test-") as made:
        yield Path(made)


@pytest.fixture
def job(folder: Path) -> Job:
    return Job(folder)


@pytest.fixture
def on_all() -> Callable[..., Any]:
    """on_all(results, kind): every rank raised exactly `kind`, with the same message; rank 0's
    error."""

    def check(results: list[Any], kind: type[BaseException]) -> Any:
        assert [type(result) for result in results] == [kind] * len(results), results
        # On real nodes both disks have the same name.
        assert len({str(result).replace("disk1", "disk0") for result in results}) == 1, results
        return results[0]

    return check
