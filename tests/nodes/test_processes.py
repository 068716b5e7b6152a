"""The same on real processes: two nodes by their environment, a store, and a process that dies
while it publishes."""

from __future__ import annotations

import json
from pathlib import Path


def test_a_node_that_dies_while_it_publishes_never_mixes_two_steps(folder, run_script):
    done = run_script(Path(__file__).with_name("two_nodes.py"), folder, timeout=100)
    assert done.returncode == 0, done.stderr
    first, second, killed = json.loads(done.stdout)
    assert first["2"] == f"exit {killed}"
    assert [first[rank] for rank in "013"] == [[[4, 5], "RankLost", [2]]] * 3
    for rank in range(4):
        found, again, said = second[str(rank)]
        own = [5500.0 + rank]
        assert found == [5, [55.0, 56.0, 57.0, 58.0], 55, 55, own]
        assert again == [6, [6.0, 7.0, 8.0, 9.0], 6, 6, [600.0 + rank]]
        assert len(said) == (rank == 0)
    assert "checkpoint-6: not on node 1 (ranks 2, 3)" in second["0"][2][0]
    for disk in ("disk0", "disk1"):
        assert sorted(item.name for item in (folder / disk).iterdir()) == [
            "checkpoint-4",
            "checkpoint-5",
            "checkpoint-6",
        ]
