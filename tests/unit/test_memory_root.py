"""B26: a URL stays a URL; nothing appears on the local disk."""

from __future__ import annotations

import uuid
from pathlib import Path

import fsspec
import pytest
import torch

from ckptcore import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointManager,
    CheckpointWarning,
    InvalidState,
    KeepLast,
    StorageError,
    UnsupportedValue,
    open_checkpoint,
    scan_root,
)


def state(value: float = 0.0) -> dict:
    return {"m": {"a": torch.full((3,), float(value)), "n": value}}


@pytest.fixture(params=["memory://{}/run", "memory://{}/run/", "memory://{}//run", "memory:///{}"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    yield request.param.format(f"bucket-{uuid.uuid4().hex}")
    assert list(tmp_path.iterdir()) == []


def test_b26_a_whole_run(root: str) -> None:
    with CheckpointManager(root) as ckpt:
        for step in (1, 2, 3):
            info = ckpt.save(step, state(step))
            assert info.url.startswith("memory://")
        assert [info.step for info in ckpt.list()] == [1, 2, 3]
    live = state()
    with CheckpointManager(root, keep=KeepLast(1)) as ckpt:
        assert ckpt.restore(live, "latest").step == 3
        assert live["m"]["a"].tolist() == [3.0] * 3
        ckpt.save(4, state(4))
        assert [info.step for info in ckpt.list()] == [4]
        assert ckpt.verify() == []
        assert ckpt.load(live, f"{root.rstrip('/')}/checkpoint-4").step == 4
    assert [info.name for info in scan_root(root)] == ["checkpoint-4"]
    view = open_checkpoint(f"{root.rstrip('/')}/checkpoint-4")
    assert view.read("m/a").tolist() == [4.0] * 3
    with CheckpointManager(root) as ckpt:
        ckpt.delete(4)
        assert ckpt.restore(live).fresh


@pytest.fixture
def url() -> str:
    return f"memory://bucket-{uuid.uuid4().hex}"


def objects(url: str) -> dict[str, bytes]:
    fs, path = fsspec.core.url_to_fs(url)
    return {name: fs.cat_file(name) for name in fs.find(path)} if fs.exists(path) else {}


def test_overwriting(url: str) -> None:
    with CheckpointManager(url) as ckpt:
        ckpt.save(1, {**state(1), "gone": {"x": torch.ones(1)}})
        before = objects(url)
        with pytest.raises(CheckpointExists):
            ckpt.save(1, state(2))
        assert objects(url) == before
        ckpt.save(1, state(2), overwrite=True)
        live = state()
        ckpt.load(live)
        assert live["m"]["a"].tolist() == [2.0] * 3
    assert sorted(name.rsplit("/", 1)[-1] for name in objects(url)) == [
        "checkpoint_manifest.json",
        "index.rank00000.msgpack",
        "m.safetensors",
    ]


def test_a_save_that_is_refused_leaves_the_one_it_would_replace(url: str) -> None:
    # The old checkpoint may go only when the new one is sure to be written.
    with CheckpointManager(url) as ckpt:
        ckpt.save(1, state(1))
        before = objects(url)
        with pytest.raises(UnsupportedValue):
            ckpt.save(1, {"m": {"bad": object()}}, overwrite=True)
        assert objects(url) == before
        with pytest.raises(InvalidState):
            ckpt.save(1, state(2), overwrite=True, metadata={"bad": object()})
        assert objects(url) == before


def test_a_save_that_fails_leaves_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointManager(url) as ckpt:
        ckpt.save(1, state(1))
        before = objects(url)
        with pytest.raises(UnsupportedValue):
            ckpt.save(2, {"m": {"a": torch.ones(3), "bad": object()}})
        real = ckpt.storage.create

        def refuse(path: str, size: int):
            if path.endswith(".msgpack"):
                raise StorageError("refused", path=path, errno=13)
            return real(path, size)

        monkeypatch.setattr(ckpt.storage, "create", refuse)
        with pytest.raises(StorageError, match="refused"):
            ckpt.save(2, state(2))
        assert objects(url) == before


@pytest.mark.parametrize(
    "file", ["m.safetensors", "index.rank00000.msgpack", "checkpoint_manifest.json"]
)
def test_damage_is_found(url: str, file: str) -> None:
    with CheckpointManager(url) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2))
    fs, path = fsspec.core.url_to_fs(f"{url}/checkpoint-2/{file}")
    data = bytearray(fs.cat_file(path))
    data[-1] ^= 1
    fs.pipe_file(path, bytes(data))
    with pytest.raises(CheckpointCorrupt) as caught:
        CheckpointManager(url).load(state(), 2)
    assert caught.value.file == file
    live = state()
    with pytest.warns(CheckpointWarning, match="checkpoint-2"):
        assert CheckpointManager(url).restore(live).step == 1
    assert live["m"]["a"].tolist() == [1.0] * 3


def test_tensors_that_are_not_contiguous(url: str, bits) -> None:
    saved = torch.arange(4_000_000.0).reshape(2000, 2000).t()
    live = torch.zeros(2000, 2000)
    with CheckpointManager(url) as ckpt:
        ckpt.save(1, {"m": {"a": saved, "b": torch.ones(3, dtype=torch.bool)}})
        ckpt.load({"m": {"a": live, "b": torch.zeros(3, dtype=torch.bool)}})
    assert bits(live) == bits(saved)


@pytest.mark.parametrize("bad", ["nothing://a/b", "memoryy://a"])
def test_unknown_schemes(bad: str) -> None:
    with pytest.raises(StorageError, match="no filesystem"):
        CheckpointManager(bad)


@pytest.mark.parametrize(
    "make", [lambda p: f"file://{p}", str, lambda p: p, lambda p: f"{p}/", lambda p: f"local://{p}"]
)
def test_local_roots_of_any_spelling(make, tmp_path: Path) -> None:
    with CheckpointManager(make(tmp_path / "root")) as ckpt:
        ckpt.save(1, state(1))
        assert ckpt.root == str(tmp_path / "root")
    assert [p.name for p in (tmp_path / "root").iterdir()] == ["checkpoint-1"]
