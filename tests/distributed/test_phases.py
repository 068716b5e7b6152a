"""The seconds of a save by phase and by rank: in the manifest, and where `ckpt` shows them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import ckptcore
from ckptcore import CheckpointManager, CheckpointManifest, SharingPattern, StateComponent
from ckptcore.errors import CheckpointCorrupt
from ckptcore.format.manifest import MANIFEST_NAME
from ckptcore.ranks.communicator import Communicator
from ckptcore.testing.ranks import run_ranks


class Slow:
    """Takes its time on rank 1."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        time.sleep(0.1 if self.rank == 1 else 0.0)
        return {"rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"rank": self.rank}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    def program(comm: Communicator) -> None:
        state = [StateComponent("slow", Slow(comm.rank), SharingPattern.PER_RANK)]
        with CheckpointManager(tmp_path / "root", comm=comm) as manager:
            manager.save_async(1, state).result(60)
            manager.restore(state)

    run_ranks(3, program)
    return tmp_path / "root"


def manifest_of(root: Path) -> CheckpointManifest:
    return ckptcore.open_checkpoint(root / "checkpoint-1").manifest


def test_a_manifest_has_the_seconds_of_every_rank(root: Path) -> None:
    found = manifest_of(root)
    by_rank = found.timings_by_rank
    assert by_rank.keys() == {"capture", "layouts", "plan", "stage", "validate", "write"}
    assert all(len(row) == 3 and min(s or 0 for s in row) >= 0 for row in by_rank.values())
    assert {phase: row[0] for phase, row in by_rank.items()} == found.timings
    assert (by_rank["capture"][1] or 0) >= 0.1


def test_ckpt_says_which_rank_was_late(root: Path, tmp_path: Path, capsys: Any) -> None:
    cli = pytest.importorskip("ckpt_tools.main")
    found = manifest_of(root)
    found.timings |= {"capture": 0.1}
    found.timings_by_rank |= {"capture": [0.1, 60.25, None]}
    (root / "checkpoint-1" / MANIFEST_NAME).write_bytes(found.encode())
    assert cli.main(["watch", str(root), "--timeout", "0", "--json"]) == 0
    event = json.loads(capsys.readouterr().out)
    assert event["slowest"]["capture"] == {"rank": 1, "seconds": 60.25}
    assert cli.main(["watch", str(root), "--timeout", "0"]) == 0
    assert "slowest: capture 60.2s on rank 1" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert cli.main(["report", str(root), "-o", str(page)]) == 0
    assert "Of all ranks, in seconds" in (text := page.read_text())
    assert text.index('<th scope="row">slowest') < text.index("60.2 on rank 1</td>")


def test_one_rank_says_it_once(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(1, {"x": {"a": 1}})
    assert manifest_of(tmp_path).timings_by_rank == {}
    assert b"timings_by_rank" not in (tmp_path / "checkpoint-1" / MANIFEST_NAME).read_bytes()


def test_a_node_has_those_of_its_ranks(tmp_path: Path) -> None:
    roots = {rank: tmp_path / str(rank // 2) for rank in range(4)}

    def program(comm: Communicator) -> None:
        state = [StateComponent("slow", Slow(comm.rank), SharingPattern.PER_RANK)]
        with CheckpointManager(roots[comm.rank], comm=comm, storage_mode="node") as manager:
            manager.save(1, state)

    run_ranks(4, program, nodes=[[0, 1], [2, 3]])
    first, second = (manifest_of(tmp_path / str(node)) for node in range(2))
    assert (first.timings_by_rank["capture"][1] or 0) >= 0.1
    assert all(len(row) == 2 for row in second.timings_by_rank.values())
    assert (first.node, second.node) == (0, 1) and first.checkpoint_id == second.checkpoint_id


def test_other_numbers_than_ranks_are_refused(root: Path) -> None:
    found = manifest_of(root)
    found.timings_by_rank["write"] = [1.0, None]
    with pytest.raises(CheckpointCorrupt, match="timings_by_rank has not one number for each rank"):
        CheckpointManifest.decode(found.encode())
    found.timings_by_rank["write"] = [1.0, None, 2.0]
    again = CheckpointManifest.decode(found.encode())
    assert again.timings_by_rank["write"] == [1.0, None, 2.0]
