"""How a checkpoint comes to be under a root, in both kinds of storage: begun, written, committed; or
given up, taken up again, taken back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptcore import CheckpointExists, CheckpointManager, open_storage
from ckptcore.catalog.catalog import Catalog, Target
from ckptcore.catalog.folder import Attempt, read_manifest
from ckptcore.catalog.transaction import Transaction, open_transaction


class Source:
    """A checkpoint whose files are written again, by hand."""

    def __init__(self, folder: Path, marked: Any) -> None:
        with CheckpointManager(folder, run_id="run", io_threads=1) as ckpt:
            ckpt.save(1, marked.state(1))
        self.storage = open_storage(folder)
        self.manifest = read_manifest(self.storage, "checkpoint-1")

    def write(self, into: Transaction, *files: str) -> None:
        for name in files or self.manifest.files:
            data = self.storage.read(f"checkpoint-1/{name}")
            writer = into.create(name, len(data))
            writer.write_at(0, [memoryview(data)])
            writer.close()

    def begun(self, root: Any, attempt: str = "", **how: Any) -> Transaction:
        attempt = attempt or str(Attempt.new("run"))
        target = Target("checkpoint-1", "run", 1, how.pop("overwrite", False))
        made = open_transaction(root, target, attempt, **how)
        made.begin()
        return made


@pytest.fixture
def source(tmp_path: Path, marked: Any) -> Source:
    return Source(tmp_path / "source", marked)


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, make_root: Callable[[str], Any]) -> Any:
    root = make_root(request.param)
    root.make_folder("")
    return root


def statuses(root: Any) -> list[tuple[str, str]]:
    return [(info.name, info.status) for info in Catalog(root).scan()]


def test_it_exists_from_the_commit_on(root: Any, source: Source) -> None:
    made = source.begun(root)
    source.write(made)
    assert [status for _, status in statuses(root)] == ["partial"]
    made.commit(source.manifest.encode())
    made.remove_replaced()
    assert statuses(root) == [("checkpoint-1", "committed")]
    assert {entry.name for entry in root.list()} == {"checkpoint-1"}


def test_nothing_of_one_that_is_given_up_stays(root: Any, source: Source) -> None:
    made = source.begun(root)
    source.write(made)
    made.abort()
    made.abort()
    assert statuses(root) == []


def test_what_is_committed_gives_way_when_it_is_asked_to(root: Any, source: Source) -> None:
    first = source.begun(root)
    source.write(first)
    first.commit(source.manifest.encode())
    with pytest.raises(CheckpointExists, match="pass overwrite=True"):
        source.begun(root)
    assert statuses(root) == [("checkpoint-1", "committed")]
    second = source.begun(root, overwrite=True)
    source.write(second)
    second.commit(source.manifest.encode())
    second.remove_replaced()
    assert statuses(root) == [("checkpoint-1", "committed")]


def test_an_attempt_is_seen_where_it_was_begun(root: Any, source: Source, tmp_path: Path) -> None:
    made = source.begun(root)
    assert made.is_visible()
    elsewhere = open_storage(tmp_path / "another")
    assert not open_transaction(elsewhere, made.target, made.attempt).is_visible()


def test_what_an_interrupted_attempt_left_is_taken_up(root: Any, source: Source) -> None:
    name, *_ = source.manifest.files
    source.write(source.begun(root, resume=True), name)
    again = source.begun(root, resume=True)
    left = {entry.name: entry.size for entry in root.list(again.folder)}
    assert left[name] == source.manifest.files[name].size
    source.write(again, *(source.manifest.files.keys() - {name}))
    again.commit(source.manifest.encode())
    assert statuses(root) == [("checkpoint-1", "committed")]


def test_one_that_is_taken_back_is_no_checkpoint(root: Any, source: Source) -> None:
    made = source.begun(root, source.manifest.attempt_id)
    source.write(made)
    made.commit(source.manifest.encode())
    made.take_back()
    assert statuses(root) == []
