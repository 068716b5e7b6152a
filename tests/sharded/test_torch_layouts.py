"""The layout formula against torch: the same boxes, and DTensors that hold exactly the items of
their boxes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptcore.format.layout import Mesh, MeshLayout, volume

KINDS = {"plain": 500, "fsdp": 24, "tp": 16, "hsdp": 24, "fsdp over tp": 144}


@pytest.fixture(scope="module")
def found(
    scripts: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    program = Path(__file__).with_name("fake_ranks.py")
    done = scripts.run(tmp_path_factory.mktemp("ranks"), program, [], timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_are_those_of_torch(found: dict[str, list[dict[str, Any]]], kind: str) -> None:
    rows = found[kind]
    assert len(rows) >= KINDS[kind]
    for row in rows:
        layout = MeshLayout(Mesh(tuple(row["mesh"]), tuple(row["ranks"])), tuple(row["placements"]))
        at = layout.mesh.coordinates(row["rank"])
        offset, size = layout.box_at(tuple(row["shape"]), at)
        assert [list(offset), list(size)] == row["box"], row
        assert volume(size) == volume(row["local"]), row
        if volume(size):  # where a part is empty, its offset says nothing
            assert row["box"] == row["torch"], row
            assert list(size) == row["local"], row


@pytest.mark.parametrize("kind", KINDS)
def test_dtensors_hold_the_items_of_their_boxes(
    found: dict[str, list[dict[str, Any]]], kind: str
) -> None:
    wrong = [row for row in found[kind] if not row["holds"]]
    assert wrong == []


def test_every_kind_of_placement_was_seen(found: dict[str, list[dict[str, Any]]]) -> None:
    seen = {kind: {p for row in rows for p in row["placements"]} for kind, rows in found.items()}
    assert seen["plain"] == {"R", "S0", "S1", "S2"}
    assert seen["fsdp over tp"] >= {"R", "S0", "s0", "S1"}
    assert seen["hsdp"] == {"R", "S0"}
    twice = [row for row in found["plain"] if row["placements"].count("S0") > 1]
    empty = [row for row in found["plain"] if volume(row["box"][1]) == 0 < volume(row["shape"])]
    assert len(twice) >= 20 and len(empty) >= 20
