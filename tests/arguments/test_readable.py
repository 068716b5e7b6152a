"""What is committed can be read: whatever is wrong with a call, nothing unreadable is published,
and nothing good is lost."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptcore import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointManager,
    InvalidState,
    SharingPattern,
    StateComponent,
    UnsupportedValue,
    copy_checkpoint,
    open_checkpoint,
    register_codec,
    scan_root,
)
from ckptcore.format.manifest import CheckpointManifest, check_readable
from ckptcore.saving import plan
from ckptcore.testing.ranks import run_ranks


class Broken:
    """A value whose codec cannot decode what it has encoded."""


def refuses(payload: Any) -> Any:
    raise KeyError("lost")


register_codec(Broken, lambda _: [1], refuses, name="tests.Broken")


def state(value: float = 1.0) -> dict:
    return {"m": {"a": torch.tensor([value])}}


def changed(**facts: Any) -> list[StateComponent]:
    """A component that was valid when it was made."""
    component = StateComponent("m", {"a": torch.zeros(1)})
    for name, value in facts.items():
        setattr(component, name, value)
    return [component]


nested: dict = {}
for _ in range(400):
    nested = {"a": nested}

WRONG: dict[str, dict[str, Any]] = {
    "hash int": {"training_args_hash": 123},
    "hash dict": {"training_args_hash": {"lr": 1}},
    "hash bytes": {"training_args_hash": b"a"},
    "hash surrogate": {"training_args_hash": "\udc00"},
    "step": {"step": 2**62},
    "step of 5000 digits": {"step": 10**5000},
    "metrics text": {"metrics": {"loss": "0.3"}},
    "metrics bytes": {"metrics": {"loss": b"0.3"}},
    "metrics name": {"metrics": {1: 0.3}},
    "metrics list": {"metrics": [("loss", 0.3)]},
    "metrics surrogate": {"metrics": {"\ud800": 0.3}},
    "metadata deep": {"metadata": nested},
    "metadata digits": {"metadata": {"x": 10**4200}},
    "metadata list": {"metadata": [("a", 1)]},
    "metadata twice": {"metadata": {1: 1, "1": 2}},
    "overwrite": {"overwrite": 1},
    "overwrite text": {"overwrite": "yes"},
    "required": {"state": changed(required=1)},
    "required None": {"state": changed(required=None)},
    "component metadata": {"state": changed(metadata=["a"])},
    "component metadata nan": {"state": changed(metadata={"a": float("nan")})},
}


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}/run"


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_never_costs_the_good_checkpoint(name: str, root: str) -> None:
    with CheckpointManager(root) as ckpt:
        ckpt.save(1, state(1.0))
        call = {"step": 1, "state": state(2.0), "overwrite": True, **WRONG[name]}
        with pytest.raises(InvalidState):
            ckpt.save(**call)
        with pytest.raises(InvalidState):
            ckpt.save_async(**call)
        assert ckpt.failed_steps == ()
    assert [(i.name, i.status) for i in scan_root(root)] == [("checkpoint-1", "committed")]
    live = state(0.0)
    assert CheckpointManager(root).restore(live).step == 1
    assert live["m"]["a"].item() == 1.0


def test_values_that_their_own_codec_cannot_decode_are_not_saved(root: str) -> None:
    with CheckpointManager(root) as ckpt:
        ckpt.save(1, state(1.0))
        with pytest.raises(UnsupportedValue, match=r"tests\.Broken") as caught:
            ckpt.save(1, {"m": {"a": torch.zeros(1), "b": Broken()}}, overwrite=True)
        assert caught.value.component == "m"
        assert ckpt.verify() == []
    assert open_checkpoint(root + "/checkpoint-1").read("m/a").tolist() == [1.0]


@pytest.mark.parametrize("mode", ["shared", "node"])
def test_no_path_publishes_a_manifest_that_it_has_not_decoded(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes to be in a manifest that no reader takes: here the number of tensors."""

    def program(comm: Any) -> Any:
        folder = tmp_path if mode == "shared" else tmp_path / str(comm.rank)
        with CheckpointManager(folder, comm=comm, storage_mode=mode) as ckpt:
            ckpt.save(1, state(1.0))
            with comm.round("go on"):
                monkeypatch.setattr(plan, "ComponentManifest", lying)
            try:
                ckpt.save(1, state(2.0), overwrite=True)
            except CheckpointError as error:
                failed = error
            live = state(0.0)
            return type(failed), str(failed), ckpt.restore(live).step, live["m"]["a"].item()

    made = plan.ComponentManifest

    def lying(*args: Any, **facts: Any) -> Any:
        return made(*args, **{**facts, "tensors": -1})

    for kind, message, step, value in run_ranks(
        2, program, nodes=[[0], [1]] if mode == "node" else None
    ):
        assert (kind, step, value) == (InvalidState, 1, 1.0)
        assert "not published" in message


def test_an_index_is_decoded_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, state(1.0))
        made = plan.TensorEntry
        monkeypatch.setattr(plan, "TensorEntry", lambda number, *rest: made(-1, *rest))
        with pytest.raises(InvalidState, match=r"index\.rank00000"):
            ckpt.save(1, state(2.0), overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]
    assert open_checkpoint(tmp_path / "checkpoint-1").read("m/a").tolist() == [1.0]


def test_a_copy_publishes_nothing_that_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path / "a") as ckpt:
        ckpt.save(1, state(1.0))
    whole = CheckpointManifest.decode
    calls: list[int] = []

    def decode(data: bytes, path: str = "") -> CheckpointManifest:
        if not path:  # what is read for no place is read to be published
            calls.append(len(data))
            raise CheckpointCorrupt("not this one")
        return whole(data, path)

    monkeypatch.setattr(CheckpointManifest, "decode", decode)
    with pytest.raises(InvalidState, match="not this one"):
        copy_checkpoint(tmp_path / "a" / "checkpoint-1", tmp_path / "b" / "checkpoint-1")
    assert len(calls) == 1
    assert not (tmp_path / "b" / "checkpoint-1").exists()


def test_too_large_a_manifest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = CheckpointManifest("id", 1, "run", "attempt", 1, "now")
    check_readable(manifest.encode())
    monkeypatch.setattr("ckptcore.format.manifest.SIZE_LIMIT", 100)
    with pytest.raises(InvalidState, match="readers take 100"):
        check_readable(manifest.encode())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "name", ["hash int", "step", "metrics text", "overwrite", "required", "component metadata"]
)
def test_a_wrong_argument_on_one_rank_is_an_error_on_all(
    name: str, rank: int, tmp_path: Path
) -> None:
    def program(comm: Any) -> str:
        with CheckpointManager(tmp_path, comm=comm) as ckpt:
            call = {
                "step": 1,
                "state": changed(sharing_pattern=SharingPattern.GLOBAL),
                "overwrite": True,
            }
            if comm.rank == rank:
                call |= WRONG[name]
            with pytest.raises(InvalidState) as caught:
                ckpt.save(**call)
            return str(caught.value)

    texts = run_ranks(2, program, deadline=20.0)
    assert texts[0] == texts[1]
    assert f"rank {rank}" in texts[0]
    assert not list(tmp_path.iterdir())
