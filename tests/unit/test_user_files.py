"""Files that are given to a save: they are verified, copied and deleted with the checkpoint, and
what an interrupted save leaves of them goes too."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckptcore import (
    CheckpointCoordinator,
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointManager,
    InvalidState,
    KeepLast,
    SingleProcess,
    Tier,
    UnknownName,
    copy_checkpoint,
    delete_checkpoint,
    find_leftovers,
    hf_files,
    open_checkpoint,
    open_storage,
    scan_root,
    sweep_root,
)
from ckptcore.catalog.folder import attempts_among
from ckptcore.format.manifest import CheckpointManifest
from ckptcore.testing import FaultStorage, Killed
from ckptcore.testing.ranks import run_ranks

FILES: dict[str, Any] = {"config.json": b'{"a": 1}', "vocab.txt": b"x\ny\n", "empty": b""}


def state(n: int = 1) -> dict[str, Any]:
    return {"model": {"w": torch.full((3,), float(n))}}


def test_they_are_part_of_the_checkpoint(tmp_path: Path) -> None:
    vocabulary = tmp_path / "words"
    vocabulary.write_bytes(b"x\ny\n")
    root = tmp_path / "root"
    with CheckpointManager(root) as ckpt:
        content = bytearray(b'{"a": 1}')
        files = {"config.json": content, "vocab.txt": vocabulary, "empty": memoryview(b"")}
        handle = ckpt.save_async(1, state(), files=files)
        content[:] = b"no longer"
        vocabulary.write_bytes(b"another")
        info = handle.result()
        assert info is not None and info.files == sorted(FILES)
        assert {n: Path(info, n).read_bytes() for n in FILES} == FILES
        with open_checkpoint(info) as view:
            assert view.read_file("config.json") == FILES["config.json"]
            assert view.verify() == [] and view.foreign_files() == []
        assert sorted(e.name for e in Path(info).iterdir()) == [
            "checkpoint_manifest.json",
            "config.json",
            "empty",
            "index.rank00000.msgpack",
            "model.safetensors",
            "vocab.txt",
        ]
        assert ckpt.save(2, state()).files == []
        Path(info, "vocab.txt").write_bytes(b"x\nz\n")
        (problem,) = ckpt.verify(1)
        assert (problem.file, problem.kind) == ("vocab.txt", "digest")
        Path(info, "vocab.txt").unlink()
        assert [i.status for i in scan_root(root)] == ["damaged", "committed"]


def test_a_manifest_without_them_is_as_before(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        plain = ckpt.save(1, state())
        given = ckpt.save(2, state(), files={"a": b"1"})
    assert "user_files" not in json.loads(Path(plain, "checkpoint_manifest.json").read_bytes())
    document = json.loads(Path(given, "checkpoint_manifest.json").read_bytes())
    assert document["user_files"] == ["a"] and document["files"]["a"][0] == 1
    encoded = CheckpointManifest.decode(Path(given, "checkpoint_manifest.json").read_bytes())
    encoded.user_files = ["not listed"]
    with pytest.raises(CheckpointCorrupt, match="user files are not listed"):
        CheckpointManifest.decode(encoded.encode())


def test_they_go_with_the_checkpoint_and_others_stay(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=KeepLast(1)) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(), files=FILES)
        assert sorted(e.name for e in tmp_path.iterdir()) == ["checkpoint-3"]
        (tmp_path / "checkpoint-3" / "mine.txt").write_text("a note")
        ckpt.save(4, state(), files=FILES)
        assert [e.name for e in (tmp_path / "checkpoint-3").iterdir()] == ["mine.txt"]
        reason = scan_root(tmp_path)[0].reason or ""
        assert "somebody else's files are in its folder (mine.txt)" in reason
        ckpt.save(4, state(2), files={"config.json": b"new"}, exists="replace")
        assert Path(ckpt.list()[0], "config.json").read_bytes() == b"new"
        assert not (tmp_path / "checkpoint-4" / "vocab.txt").exists()
    delete_checkpoint(tmp_path / "checkpoint-4")
    assert [e.name for e in tmp_path.iterdir()] == ["checkpoint-3"]


def test_they_are_copied_and_uploaded(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "fast", tiers=[Tier(tmp_path / "slow")]) as ckpt:
        ckpt.save(1, state(), files=FILES)
        ckpt.wait()
    for target in (
        tmp_path / "slow/checkpoint-1",
        tmp_path / "copy",
        f"memory://{secrets.token_hex(4)}/c",
    ):
        if "slow" not in str(target):
            copy_checkpoint(tmp_path / "fast/checkpoint-1", target)
        with open_checkpoint(target) as view:
            assert {name: view.read_file(name) for name in FILES} == FILES
            assert view.verify() == [] and view.manifest.user_files == sorted(FILES)


def test_a_file_that_cannot_be_read_as_it_is_is_refused_by_name(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        ckpt.save(1, state(), files=FILES)
        bare = ckpt.save(2, state())
    with open_checkpoint(tmp_path / "checkpoint-1") as view:
        with pytest.raises(UnknownName) as caught:
            view.read_file("vocab.json")
        assert (caught.value.key, caught.value.available) == ("'vocab.json'", sorted(FILES))
        assert str(caught.value) == (
            f"{view.url} has no file 'vocab.json'; the save was given config.json, empty, vocab.txt"
        )
        with pytest.raises(InvalidState, match=r"model.safetensors is a file of tensors; read"):
            view.read_file("model.safetensors")
    with open_checkpoint(bare) as view, pytest.raises(UnknownName, match="was given no files"):
        view.read_file(None)  # type: ignore[arg-type]


def test_one_checkpoint_by_its_path(tmp_path: Path) -> None:
    CheckpointCoordinator(state(), comm=SingleProcess()).save_checkpoint(
        tmp_path / "mine", files={"a": b"1"}
    )
    assert (tmp_path / "mine" / "a").read_bytes() == b"1"


@pytest.mark.parametrize("mode", ["shared", "node"])
def test_those_of_the_lowest_rank_count(tmp_path: Path, mode: Any) -> None:
    def program(comm: Any) -> None:
        root = tmp_path / (f"node{comm.rank // 2}" if mode == "node" else "root")
        with CheckpointManager(root, comm=comm, storage_mode=mode) as ckpt:
            files = {"rank": str(comm.rank).encode()} if comm.rank % 2 == 0 else None
            ckpt.save(1, state(), files=files)
            with pytest.raises(InvalidState, match="'a' is to be"):
                ckpt.save(2, state(), files={"a": "/not/there"} if comm.rank == 1 else None)

    run_ranks(4, program, nodes=[[0, 1], [2, 3]] if mode == "node" else None)
    found = {p.parent.parent.name: p.read_text() for p in tmp_path.glob("*/checkpoint-1/rank")}
    assert found == ({"node0": "0", "node1": "2"} if mode == "node" else {"root": "0"})


def fresh_storage(kind: str, tmp_path: Path, number: int) -> Any:
    if kind == "renames":
        return open_storage(tmp_path / str(number))
    return open_storage(f"memory://{secrets.token_hex(6)}/{number}")


@pytest.mark.parametrize("kind", ["renames", "in place"])
@pytest.mark.filterwarnings("ignore")
def test_whatever_an_interrupted_save_leaves_goes(tmp_path: Path, kind: str) -> None:
    def save(storage: Any, step: int, **more: Any) -> None:
        CheckpointManager(storage, io_threads=1, run_id="r").save(step, state(step), **more)

    counting = FaultStorage(fresh_storage(kind, tmp_path, 0))
    save(counting, 1, files=FILES)
    for at in range(1, counting.count() + 1):
        storage = fresh_storage(kind, tmp_path, at)
        faults = FaultStorage(storage)
        faults.kill(at=at, how="raise")
        with pytest.raises(Killed):
            save(faults, 1, files=FILES)
        save(storage, 2, files=FILES)
        sweep_root(storage.url)
        left = {e.name: {f.name for f in storage.list(e.name)} for e in storage.list()}
        whole = left.pop("checkpoint-2")
        assert whole >= set(FILES) and find_leftovers(storage.url) == []
        assert left.keys() <= {"checkpoint-1"}, (at, left)
        if left:
            assert not scan_root(storage.url)[0].reason
        save(storage, 1, exists="replace")
        assert not {f.name for f in storage.list("checkpoint-1")} & set(FILES)


@pytest.mark.filterwarnings("ignore")
def test_an_interrupted_copy_is_taken_up(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "root") as ckpt:
        info = ckpt.save(1, state(), files=FILES)
    from ckptcore.copy.checkpoint import copy_between

    source = open_storage(info)
    counting = FaultStorage(open_storage(tmp_path / "0"))
    copy_between(source, "", counting, "c", threads=1)
    for kind in ("renames", "in place"):
        for at in range(1, counting.count() + 1, 2):
            target = fresh_storage(kind, tmp_path, at)
            faults = FaultStorage(target)
            faults.kill(at=at, how="raise")
            try:
                copy_between(source, "", faults, "c", threads=1)
            except Killed:
                pass
            copy_between(source, "", target, "c", threads=1, overwrite=True)
            with open_checkpoint(f"{target.url}/c") as view:
                assert view.verify() == []
            assert not attempts_among(target.entries("c"))
            assert [e.name for e in target.list()] == ["c"]


def test_a_file_that_an_attempt_did_not_name_is_not_touched(tmp_path: Path) -> None:
    storage = open_storage(f"memory://{secrets.token_hex(6)}/r")
    faults = FaultStorage(storage)
    faults.kill(kind="create", path="*manifest.json", how="raise")
    with pytest.raises(Killed):
        CheckpointManager(faults, run_id="r").save(1, state(), files={"a": b"1"})
    storage.write("checkpoint-1/note", b"mine")
    with pytest.raises(CheckpointExists, match="holds 'note'"):
        CheckpointManager(storage, run_id="r").save(1, state())
    sweep_root(storage.url)
    assert [e.name for e in storage.list("checkpoint-1")] == ["note"]


WRONG = [3, "a", [("a", b"1")], {3: b"1"}, {"a": 3}, {"a": None}, {"": b""}, {"a/b": b""}]
WRONG += [{"..": b""}, {"checkpoint_manifest.json": b""}, {"model.safetensors": b""}]
WRONG += [{"index.rank00000.msgpack": b""}, {"checkpoint.pinned": b""}, {"a": ""}, {"a:b": b""}]
WRONG += [{"config.json": "{}"}, {"a": "/not/there"}, {"a": b"", "A": b""}, {"\ud800": b""}]


@pytest.mark.parametrize("bad", WRONG, ids=repr)
def test_wrong_files_are_refused_before_anything_is_written(tmp_path: Path, bad: Any) -> None:
    with CheckpointManager(tmp_path) as ckpt:
        for save in (ckpt.save, ckpt.save_async):
            with pytest.raises(InvalidState, match="files"):
                save(1, state(), files=bad)
    assert [*tmp_path.iterdir()] == []


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=9)


@given(st.dictionaries(names, st.binary(max_size=20), max_size=4))
def test_any_names_and_contents(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    with CheckpointManager(tmp_path_factory.mktemp("root"), keep=KeepLast(1)) as ckpt:
        try:
            info = ckpt.save(1, state(), files=files)
        except InvalidState:
            return
        with open_checkpoint(info) as view:
            assert {name: view.read_file(name) for name in info.files} == files
        ckpt.save(2, state())
        assert not Path(info).exists()


class Config:
    def __init__(self, **values: Any) -> None:
        self.__dict__ |= values

    def save_pretrained(self, folder: str) -> None:
        name = "adapter_config.json" if "inference_mode" in vars(self) else "config.json"
        Path(folder, name).write_text(json.dumps(vars(self), sort_keys=True))


def test_files_of_a_model(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: str) -> None:
            Path(folder, "tokenizer.json").write_text("{}")

    model: Any = nn.Linear(1, 1)
    model.config, model.dtype = Config(size=3), torch.bfloat16
    files = hf_files(torch.nn.DataParallel(model), Tokenizer())
    assert {name: json.loads(data) for name, data in files.items()} == {
        "config.json": {"architectures": ["Linear"], "dtype": "bfloat16", "size": 3},
        "tokenizer.json": {},
    }
    assert vars(model.config) == {"size": 3}
    model.peft_config = {"default": Config(inference_mode=False)}
    assert json.loads(hf_files(model)["adapter_config.json"]) == {"inference_mode": True}
    for bad in (3, None, {"a": 1}, nn.Linear(1, 1)):
        with pytest.raises(InvalidState):
            hf_files(bad)  # type: ignore[arg-type]
    for bad in (3, model, "tokenizer"):
        with pytest.raises(InvalidState, match="takes a model and tokenizers"):
            hf_files(model, bad)
