"""`ckpt` on the disk of one node: it says that this is one node's part, and verifies it on its
own."""

from __future__ import annotations

import json

import pytest
from ckpt_tools.main import main


@pytest.fixture
def ckpt(capsys):
    def run(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return captured.out

    return run


@pytest.mark.parametrize("node", [0, 1])
def test_the_tools_know_the_part_of_one_node(job, ckpt, node):
    job.save(1, 2)
    root = job.roots[node]
    ranks = job.nodes[node]
    listed = json.loads(ckpt("ls", root, "--json"))
    found = [
        (entry["name"], entry["status"], entry["latest"], entry["node"])
        for entry in listed["checkpoints"]
    ]
    assert found == [
        ("checkpoint-1", "committed", False, node),
        ("checkpoint-2", "committed", True, node),
    ]
    assert f"committed (latest) (the part of node {node})" in ckpt("ls", root)
    shown = json.loads(ckpt("inspect", root / "checkpoint-2", "--json", "--tensors", "*"))
    assert (shown["checkpoint"]["storage_mode"], shown["checkpoint"]["node"]) == ("node", node)
    names = {tensor["full_name"] for tensor in shown["tensors"]}
    assert {
        "global/w",
        "same/w0",
        "table/rows",
        "group.dp-00000/x",
        f"node.node{node:05d}/x",
    } <= names
    assert {name for name in names if name.startswith("own.")} == {
        f"own.rank{rank:05d}/x" for rank in ranks
    }
    text = ckpt("inspect", root / "checkpoint-2")
    assert f"node: this is the part of node {node} of 2 (ranks {ranks[0]}-{ranks[1]})" in text
    assert "checkpoint-2  ok" in ckpt("verify", root)
    assert ckpt("verify", root, "--all").count("  ok  ") == 2


def test_a_whole_checkpoint_is_told_as_before(tmp_path, ckpt):
    from ckptcore import CheckpointManager

    CheckpointManager(tmp_path).save(1, {"a": {"x": 1}})
    assert "part of node" not in ckpt("ls", tmp_path) + ckpt("inspect", tmp_path)
    shown = json.loads(ckpt("inspect", tmp_path, "--json"))
    assert (shown["checkpoint"]["storage_mode"], shown["checkpoint"]["node"]) == ("shared", None)
