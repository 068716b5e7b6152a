"""Damaged and uncommitted checkpoints: case B18, `ckpt verify`, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Ckpt

MANIFEST = "checkpoint_manifest.json"
INDEX = "index.rank00000.msgpack"
SHARD = "model.safetensors"


def cut(name: str, keep: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(keep(path.read_bytes()))

    return damage


DAMAGES: dict[str, tuple[str, str, str, Callable[[Path], object]]] = {
    "missing manifest": (
        MANIFEST,
        "uncommitted",
        "missing",
        lambda folder: (folder / MANIFEST).unlink(),
    ),
    "shard one byte short": (SHARD, "damaged", "size", cut(SHARD, lambda data: data[:-1])),
    "shard one byte long": (SHARD, "damaged", "size", cut(SHARD, lambda data: data + b"\0")),
    "shard of no bytes": (SHARD, "damaged", "size", cut(SHARD, lambda data: b"")),
    "half a manifest": (
        MANIFEST,
        "damaged",
        "format",
        cut(MANIFEST, lambda data: data[: len(data) // 2]),
    ),
    "missing index": (INDEX, "damaged", "missing", lambda folder: (folder / INDEX).unlink()),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize(
    "command", [["inspect"], ["inspect", "--verify"], ["verify"]], ids=" ".join
)
def test_b18_damage_is_named_with_the_way_back(
    ckpt: Ckpt, root: Path, name: str, command: list[str]
) -> None:
    file, status, kind, damage = DAMAGES[name]
    folder = root / "checkpoint-30"
    size = (folder / file).stat().st_size
    damage(folder)

    done = ckpt(*command, folder)
    assert done.code == 1
    assert status in done.out and file in done.out
    assert (
        "nearest older usable step: 20 of run run-a" in done.out
        and str(root / "checkpoint-20") in done.out
    )
    assert done.err == f"ckpt: checkpoint-30 is {status}\n"

    told = ckpt(*command, folder, "--json")
    assert told.code == 1 and told.err == ""
    document = told.document["checkpoints"][0] if command == ["verify"] else told.document
    assert document["checkpoint"]["status"] == status
    assert document["checkpoint"]["step"] == 30
    problem = next(p for p in document["problems"] if p["file"] == file)
    assert problem["kind"] == kind and problem["message"]
    if kind == "size":
        assert problem["expected_size"] == size
        assert problem["actual_size"] == (folder / file).stat().st_size
        assert len(problem["expected_digest"]) == 32
        assert f"has {problem['actual_size']} bytes, {size} were saved" in done.out
    fallback = document["fallback"]
    assert (fallback["step"], fallback["name"], fallback["run_id"]) == (
        20,
        "checkpoint-20",
        "run-a",
    )
    assert fallback["verified"] is (command != ["inspect"])


def test_a_changed_byte_names_file_tensor_and_digests(ckpt: Ckpt, root: Path) -> None:
    folder = root / "checkpoint-30"
    damage_last_byte(folder / SHARD)
    done = ckpt("verify", folder, "--json")
    assert done.code == 1
    document = done.document
    assert document["ok"] is False
    (check,) = document["checkpoints"]
    assert check["ok"] is False and check["checkpoint"]["status"] == "damaged"
    (problem,) = check["problems"]
    assert problem["file"] == SHARD and problem["kind"] == "digest"
    assert problem["tensor"] in ("model/layer.weight", "model/layer.bias", "model/tied.weight")
    assert problem["expected"] != problem["actual"]
    assert problem["actual_size"] == problem["expected_size"] == (folder / SHARD).stat().st_size
    text = ckpt("verify", folder).out
    assert f"{SHARD}: tensor '{problem['tensor']}' is damaged" in text
    assert f"have digest {problem['actual']}, {problem['expected']} was saved" in text


def damage_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_index_is_a_problem_and_no_crash(ckpt: Ckpt, root: Path) -> None:
    damage_last_byte(root / "checkpoint-30" / INDEX)
    done = ckpt("inspect", root / "checkpoint-30", "--tensors", "--values", "train", "--json")
    assert done.code == 1
    (problem,) = done.document["problems"]
    assert problem["file"] == INDEX and problem["kind"] == "digest"
    assert problem["expected_digest"] != problem["actual_digest"]
    assert done.document["tensors"] is None and done.document["values"] is None


def test_the_way_back_is_verified_too(ckpt: Ckpt, root: Path) -> None:
    for step in (30, 20):
        damage_last_byte(root / f"checkpoint-{step}" / SHARD)
    (check,) = ckpt("verify", root / "checkpoint-30", "--json").document["checkpoints"]
    assert check["fallback"]["step"] == 10 and check["fallback"]["verified"] is True
    damage_last_byte(root / "checkpoint-10" / SHARD)
    (check,) = ckpt("verify", root / "checkpoint-30", "--json").document["checkpoints"]
    assert check["fallback"] is None
    assert "no older usable checkpoint" in ckpt("verify", root / "checkpoint-30").out


def test_verify_of_a_root_takes_the_newest_and_all_on_request(ckpt: Ckpt, root: Path) -> None:
    done = ckpt("verify", root, "--json")
    assert done.code == 0 and done.document["ok"] is True
    assert [c["checkpoint"]["step"] for c in done.document["checkpoints"]] == [30]

    damage_last_byte(root / "checkpoint-10" / SHARD)
    (root / "checkpoint-40.partial-x").mkdir()
    assert ckpt("verify", root).code == 0
    done = ckpt("verify", root, "--all", "--json")
    assert done.code == 1
    assert [(c["checkpoint"]["step"], c["ok"]) for c in done.document["checkpoints"]] == [
        (10, False),
        (20, True),
        (30, True),
    ]
    assert [entry["name"] for entry in done.document["skipped"]] == ["checkpoint-40.partial-x"]

    text = ckpt("verify", root, "--all")
    assert text.err == "ckpt: checkpoint-10 is damaged\n"
    assert "checkpoint-20  ok" in text.out and "checkpoint-10  damaged" in text.out


def test_verify_of_a_root_does_not_pass_over_a_damaged_newest(ckpt: Ckpt, root: Path) -> None:
    cut(SHARD, lambda data: data[:-1])(root / "checkpoint-30")
    done = ckpt("verify", root)
    assert done.code == 1 and "checkpoint-30  damaged" in done.out


def test_verify_of_a_root_with_leftovers_only(ckpt: Ckpt, tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7.partial-x").mkdir()
    done = ckpt("verify", tmp_path, "--json")
    assert done.code == 1 and done.document["ok"] is False and done.document["checkpoints"] == []
    assert ckpt("inspect", tmp_path).code == 1
