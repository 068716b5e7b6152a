"""Real ranks over gloo: FSDP2, tensor parallel, HSDP, pipelines and plain processes read each
other's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckptcore import open_checkpoint

Saved = dict[str, Any]
UNEVEN = {"a", "b", "c", "emb.weight", "head.weight", "up.weight", "norm.bias", "never", "seen"}


def whole(results: dict[int, Any], when: str) -> dict[str, str]:
    """What the ranks hold together; ranks that hold the same name hold the same."""
    found: dict[str, str] = {}
    for rank, result in sorted(results.items()):
        assert "then" in result, (rank, result)
        for name, value in result[when].items():
            assert found.setdefault(name, value) == value, (rank, name)
    return dict(sorted(found.items()))


def compare(results: dict[int, Any], saved: Saved) -> None:
    for when in ("then", "later"):
        found = whole(results, when)
        assert list(found) == list(saved[when])
        assert [name for name in found if found[name] != saved[when][name]] == [], when
    assert {result["lr"] for result in results.values()} == {0.05}
    assert all(result["tied"] for result in results.values())


@pytest.fixture(scope="module")
def saved(gang, tmp_path_factory):
    """saved(kind, world): the root of a checkpoint that was saved in this layout, and what it must
    hold."""
    known: dict[Any, tuple[Path, Saved]] = {}

    def get(kind: str, world: int, **how: Any) -> tuple[Path, Saved]:
        if (kind, world) not in known:
            root = tmp_path_factory.mktemp("saved")
            results = gang.run("save", world, kind=kind, root=str(root), **how)
            found = {when: whole(results, when) for when in ("then", "later")}
            assert found["then"].keys() == found["later"].keys()
            known[kind, world] = root, {**results[0], **found}
            assert open_checkpoint(root / "checkpoint-3").verify() == []
        return known[kind, world]

    return get


@pytest.mark.parametrize("world", [4, 3, 2, 1])
def test_b40_uneven_fsdp_state_goes_to_any_number_of_ranks(
    gang, saved, tmp_path: Path, world: int
) -> None:
    root, expected = saved("fsdp", 4, real=True)
    assert set(expected["then"]) > UNEVEN
    assert expected["then"]["a"].startswith("[7, 3]") and expected["then"]["c: exp_avg"].startswith(
        "[2, 5]"
    )
    assert expected["then"]["head.weight"] == expected["then"]["emb.weight"]
    assert not {name for name in expected["then"] if name.startswith("never:")}
    compare(
        gang.run("load", world, kind="fsdp", root=str(root), again=str(tmp_path / "again")),
        expected,
    )
    if world < 4:  # and back
        compare(gang.run("load", 4, kind="fsdp", root=str(tmp_path / "again")), expected)


def test_b40_every_byte_is_stored_once(saved) -> None:
    root, expected = saved("fsdp", 4, real=True)
    assert expected["patterns"] == {"model": "SHARDED", "opt": "SHARDED"}
    view = open_checkpoint(root / "checkpoint-3")
    for key, size in expected["bytes"].items():
        assert size == sum(
            t.nbytes for t in view.tensors() if t.component == key and t.alias_of is None
        )
    aliases = [(t.name, t.alias_of) for t in view.tensors() if t.alias_of is not None]
    assert aliases == [("head.weight", "emb.weight")]


@pytest.mark.parametrize("how", [{"transactional": True}, {"broadcast": True}], ids=str)
def test_b40_other_ways_to_load(gang, saved, tmp_path: Path, how: dict[str, bool]) -> None:
    root, expected = saved("fsdp", 4, real=True)
    compare(gang.run("load", 3, kind="fsdp", root=str(root), how=how), expected)


LAYOUTS = [
    (("rows", 4), ("columns", 4)),
    (("columns", 2), ("rows", 3)),
    (("rows", 3), ("fsdp", 2)),
    (("fsdp over tp", 4), ("fsdp", 4)),
    (("fsdp", 3), ("fsdp over tp", 4)),
    (("fsdp over tp", 4), ("plain", 1)),
    (("hsdp", 4), ("fsdp", 4)),
    (("fsdp", 3), ("hsdp", 4)),
    (("hsdp", 4), ("columns", 3)),
    (("plain", 1), ("fsdp", 4)),
    (("fsdp", 4), ("plain", 1)),
    (("plain", 1), ("fsdp over tp", 4)),
    (("fsdp", 3), ("plain", 2)),
]


@pytest.mark.parametrize(("before", "after"), LAYOUTS, ids=str)
def test_one_layout_to_another(gang, saved, tmp_path: Path, before: Any, after: Any) -> None:
    root, expected = saved(*before, **({"real": True} if before == ("fsdp", 4) else {}))
    compare(gang.run("load", after[1], kind=after[0], root=str(root)), expected)


def test_replicas_share_the_writing(saved) -> None:
    root, _ = saved("hsdp", 4)
    view = open_checkpoint(root / "checkpoint-3")
    assert view.manifest.components["opt"].writers == [0, 1, 2, 3]
    data = {
        w: sum(
            r.size
            for n, r in view.manifest.files.items()
            if r.writer == w and n.endswith("safetensors")
        )
        for w in range(4)
    }
    assert min(data.values()) > max(data.values()) / 3


PIPES = [
    (("pipe", 4), ("pipe", 2)),
    (("pipe", 4), ("pipe", 1)),
    (("pipe of 2", 2), ("pipe", 4)),
    (("pipe of 2", 4), ("pipe of 2", 2)),
    (("pipe", 2), ("pipe of 2", 4)),
    (("pipe", 1), ("pipe of 2", 1)),
    (("pipe x fsdp", 4), ("pipe", 4)),
    (("pipe x fsdp", 4), ("pipe fsdp", 1)),
    (("pipe of 2", 2), ("pipe x fsdp", 4)),
]


@pytest.mark.parametrize(("before", "after"), PIPES, ids=str)
def test_b41_stages_with_global_names(gang, saved, tmp_path: Path, before: Any, after: Any) -> None:
    root, expected = saved(*before)
    assert {name for name in expected["then"] if ":" not in name} == {
        f"layers.{n}.{kind}" for n in range(8) for kind in ("weight", "bias")
    }
    compare(gang.run("load", after[1], kind=after[0], root=str(root)), expected)


def test_b41_a_trained_pipeline_becomes_one_model(gang, tmp_path: Path) -> None:
    results = gang.run("pipeline_run", 2, root=str(tmp_path))
    assert all("mine" in result for result in results.values()), results
    union = {**results[0]["mine"], **results[1]["mine"]}
    assert len(union) == 16 * 4
    assert (
        results[0]["whole"]
        == results[1]["whole"]
        == dict(sorted(union.items(), key=lambda i: list(results[0]["whole"]).index(i[0])))
    )
