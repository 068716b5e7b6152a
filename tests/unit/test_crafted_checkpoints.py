"""B20 and crafted files: nothing runs, nothing outside the checkpoint is touched, and the error is
ours."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from ckptcore import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointManager,
    RNGState,
    UnsafePath,
    open_checkpoint,
)
from ckptcore.format.digest import content_digest
from ckptcore.format.manifest import Index
from ckptcore.format.values import encode


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "root") as ckpt:
        ckpt.save(
            1, {"m": {"a": torch.arange(4.0), "b": torch.arange(4.0), "n": 1}, "rng": RNGState()}
        )
    return tmp_path / "root" / "checkpoint-1"


def resign(folder: Path, change) -> None:
    """Change the manifest; its own digest fits again."""
    file = folder / "checkpoint_manifest.json"
    document = json.loads(file.read_bytes())
    del document["digest"]
    change(document)
    body = json.dumps(document, indent=1, sort_keys=True).removesuffix("\n}").encode()
    file.write_bytes(body + b',\n "digest": "%s"\n}\n' % content_digest(body).encode())


def reindex(folder: Path, change) -> None:
    """Change the index; all digests fit again."""
    file = folder / "index.rank00000.msgpack"
    index = Index.decode(file.read_bytes())
    change(index)
    data = index.encode()
    file.write_bytes(data)

    def update(document) -> None:
        document["files"][file.name] = [len(data), content_digest(data), 0]
        for name, digest in index.file_digests().items():
            document["files"][name] = [index.files[name].size, digest, 0]

    resign(folder, update)


def live() -> dict:
    return {"m": {"a": torch.zeros(4), "b": torch.zeros(4), "n": 0}, "rng": RNGState()}


def ways_in(folder: Path):
    """Every way to read a checkpoint."""
    yield "load", lambda: CheckpointManager(folder.parent).load(live(), 1)
    yield (
        "transactional load",
        lambda: CheckpointManager(folder.parent).load(live(), 1, transactional=True),
    )
    yield "values", lambda: [open_checkpoint(folder).values(key) for key in ("m", "rng")]
    yield (
        "read",
        lambda: [
            open_checkpoint(folder).read(t.full_name) for t in open_checkpoint(folder).tensors()
        ],
    )


def refused(folder: Path, kind: type[CheckpointError] = CheckpointError) -> int:
    count = 0
    for name, way in ways_in(folder):
        try:
            way()
        except kind:
            count += 1
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
    assert kind is not CheckpointError or isinstance(open_checkpoint(folder).verify(), list)
    return count


@pytest.mark.parametrize(
    "file",
    [
        "m.safetensors",
        "rng.rank00000.safetensors",
        "index.rank00000.msgpack",
        "checkpoint_manifest.json",
    ],
)
def test_b20_a_pickle_in_place_of_a_file_never_runs(
    folder: Path, file: str, tmp_path: Path
) -> None:
    pwned = tmp_path / "pwned"
    data = pickle.dumps(Bomb(str(pwned)))
    (folder / file).write_bytes(data)
    assert refused(folder, CheckpointCorrupt) >= 3, (
        "all ways but that to the plain values read every file"
    )
    if file != "checkpoint_manifest.json":
        resign(
            folder,
            lambda document: document["files"].update({file: [len(data), content_digest(data), 0]}),
        )
        assert refused(folder) >= 2
    assert not pwned.exists()


@pytest.mark.parametrize("file", ["rng.pkl", "m.safetensors.pkl", "m.pt", "optimizer.bin"])
def test_b20_a_pickle_beside_the_files_is_ignored(folder: Path, file: str, tmp_path: Path) -> None:
    pwned = tmp_path / "pwned"
    (folder / file).write_bytes(pickle.dumps(Bomb(str(pwned))))
    state = live()
    CheckpointManager(folder.parent).load(state, 1)
    assert state["m"]["a"].tolist() == [0.0, 1.0, 2.0, 3.0]
    view = open_checkpoint(folder)
    assert view.foreign_files() == [file]
    assert view.verify() == []
    assert not pwned.exists()


def test_b20_a_pickle_as_a_value_stays_bytes(tmp_path: Path) -> None:
    pwned = tmp_path / "pwned"
    data = pickle.dumps(Bomb(str(pwned)))
    with CheckpointManager(tmp_path / "root") as ckpt:
        ckpt.save(1, {"v": {"blob": data}})
        assert ckpt.load({"v": {"blob": b""}}).values["v"]["blob"] == data
    assert not pwned.exists()


def test_b20_random_states_need_no_allow_lists(tmp_path: Path) -> None:
    random.seed(3), np.random.seed(4)
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, {"python": {"s": random.getstate()}, "numpy": {"s": np.random.get_state()}})
        expected = random.random(), np.random.rand()
        found = ckpt.load({"python": {"s": ()}, "numpy": {"s": ()}}).values
    random.setstate(found["python"]["s"]), np.random.set_state(found["numpy"]["s"])
    assert (random.random(), np.random.rand()) == expected


NAMES = [
    "../outside.safetensors",
    "/etc/passwd",
    "a/b.safetensors",
    "..",
    "s3://bucket/x",
    "checkpoint_manifest.json",
]


@pytest.mark.parametrize("name", NAMES)
def test_file_names_that_leave_are_refused_and_never_deleted(folder: Path, name: str) -> None:
    outside = folder.parent / "outside.safetensors"
    outside.write_bytes(b"mine")
    resign(
        folder, lambda document: document["files"].update({name: [4, content_digest(b"mine"), 0]})
    )
    with pytest.raises(UnsafePath):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError):
        CheckpointManager(folder.parent).delete(1)
    assert outside.read_bytes() == b"mine"


def test_links_that_leave_are_refused(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    (folder / "m.safetensors").rename(target)
    (folder / "m.safetensors").symlink_to(target)
    with pytest.raises(UnsafePath, match="symbolic link"):
        CheckpointManager(folder.parent).load(live(), 1)
    assert [p.file for p in open_checkpoint(folder).verify()] == ["m.safetensors"]


def entry(index: Index, name: str):
    return next(e for e in index.components["m"].tensors if e.name == name)


def alias(name: str, number: int):
    def change(index: Index) -> None:
        e = entry(index, name)
        index.components["m"].tensors[e.number] = type(e)(
            e.number, e.name, e.dtype, e.shape, None, e.shape, None, None, 0, b"", number
        )

    return change


def two_aliases(index: Index) -> None:
    alias("a", 1)(index)
    alias("b", 0)(index)


def other_shape(index: Index) -> None:
    alias("b", 0)(index)
    e = entry(index, "b")
    e.shape = e.local_shape = (400,)


CHANGES = {
    "alias of nothing": alias("b", 7),
    "aliases of each other": two_aliases,
    "alias of another shape": other_shape,
    "tree of nothing": lambda index: setattr(index.components["m"], "tree", b"\xc1"),
    "no tree": lambda index: setattr(index.components["m"], "tree", None),
    "tensor that is not there": lambda index: index.components["m"].tensors.pop(),
    "component that is not there": lambda index: index.components.pop("m"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_indexes_that_do_not_fit_are_refused(folder: Path, change) -> None:
    assert refused(folder) == 0
    reindex(folder, lambda index: None)
    assert refused(folder) == 0
    reindex(folder, change)
    state = live()
    with pytest.raises(CheckpointError):
        CheckpointManager(folder.parent).load(state, 1, transactional=True)
    assert state["m"]["a"].tolist() == [0.0] * 4
    refused(folder)


def test_a_tree_that_says_other_than_its_component_is_refused(folder: Path) -> None:
    reindex(folder, lambda index: setattr(index.components["m"], "tree", encode([1, 2])))
    with pytest.raises(CheckpointError):
        CheckpointManager(folder.parent).load(live(), 1)


def test_a_world_of_many_ranks_costs_little(folder: Path) -> None:
    import tracemalloc

    def change(document) -> None:
        document["world_size"] = 100_000
        document["components"]["rng"]["pattern"] = "PER_RANK"

    resign(folder, change)
    tracemalloc.start()
    try:
        open_checkpoint(folder)
    except CheckpointError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 * 1024 * 1024


@pytest.mark.parametrize("what", ["digest", "size"])
def test_an_index_of_other_files_than_those_of_the_manifest(folder: Path, what: str) -> None:
    """As where the index of another save of the same state came into the folder with its entry of
    the manifest."""

    def change(document) -> None:
        size, digest, writer = document["files"]["m.safetensors"]
        changed = [size, "0" * 32, writer] if what == "digest" else [size + 1, digest, writer]
        document["files"]["m.safetensors"] = changed

    resign(folder, change)
    if what == "size":
        with (folder / "m.safetensors").open("ab") as file:
            file.write(b"x")
    view = open_checkpoint(folder)
    with pytest.raises(CheckpointCorrupt, match=r"disagree about m\.safetensors"):
        view.read("m/a")
    assert [problem.file for problem in view.verify()] != []


def test_a_tensor_file_that_is_cut_after_its_index_was_read(folder: Path) -> None:
    view = open_checkpoint(folder)
    view.tensors()
    size = (folder / "m.safetensors").stat().st_size
    with (folder / "m.safetensors").open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(CheckpointCorrupt, match=f"has {size - 1} bytes") as caught:
        view.read("m/b")
    assert (caught.value.file, caught.value.kind) == ("m.safetensors", "size")
    assert (caught.value.expected, caught.value.actual) == (size, size - 1)
