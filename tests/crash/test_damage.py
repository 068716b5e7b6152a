"""Damage to any byte of any file is found and named, and a restore falls back to the checkpoint
before."""

import json
import os
import shutil
from contextlib import contextmanager

import pytest

from ckptcore import (
    CheckpointCorrupt,
    CheckpointManager,
    CheckpointNotFound,
    CheckpointWarning,
    NoUsableCheckpoint,
    open_checkpoint,
)
from ckptcore.format.manifest import MANIFEST_NAME


def places(data, file, count, rng):
    """Byte offsets spread over a file: its ends, its header where it has one, and everything
    between."""
    size = len(data)
    if size <= count:
        return list(range(size))
    head = 8 + int.from_bytes(data[:8], "little") if file.endswith(".safetensors") else 0
    chosen = {0, 1, 7, 8, size // 2, size - 2, size - 1}
    if head:
        chosen |= {head - 1, head, head + 1, *rng.sample(range(head), count // 4)}
    # One in each of equal stretches, so that no tensor is left out.
    for n in rng.sample(range(count), count):
        if len(chosen) < count:
            chosen.add(head + int((n + rng.random()) * (size - head) / count))
    return sorted(chosen)


@contextmanager
def flipped(path, offset, bit):
    with path.open("r+b", buffering=0) as file:
        was = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([was[0] ^ (1 << bit)]), offset)
        try:
            yield
        finally:
            os.pwrite(file.fileno(), was, offset)


@contextmanager
def repaired(path):
    """The bytes of a file, which are put back afterwards whatever was done to it."""
    data = path.read_bytes()
    try:
        yield data
    finally:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.write_bytes(data)


def problems(ground):
    """(file, tensor) of everything that verify finds in step 2, also where it is the manifest
    itself."""
    try:
        return {(p.file, p.tensor) for p in ground.manager().verify(2)}
    except CheckpointCorrupt as error:
        return {(error.file, error.tensor)}


def load_error(ground):
    with pytest.raises(CheckpointCorrupt) as caught:
        ground.manager().load(ground.training.state(), 2)
    assert caught.value.file in str(caught.value)
    assert "checkpoint-2" in str(caught.value)
    return caught.value


def check_named(ground, file, tensor=None, kinds=None):
    """verify and load name the file, and the tensor."""
    assert problems(ground) == {(file, tensor)}
    error = load_error(ground)
    assert (error.file, error.tensor) == (file, tensor)
    assert kinds is None or error.kind in kinds


def check_damage(ground, file, kinds=None):
    """verify and load name the file, restore falls back with one warning that names step and
    file."""
    check_named(ground, file, None, kinds)
    check_falls_back(ground, file)


def check_falls_back(ground, file):
    report, told = ground.restored()
    assert (report.step, report.fresh) == (1, False)
    assert list(report.skipped) == ["checkpoint-2"]
    assert ground.training.snapshot() == ground.at[1]
    assert len(told) == 1
    assert "checkpoint-2" in told[0]
    assert file in told[0]


@pytest.mark.parametrize(
    ("count", "every"),
    [(40, 8), pytest.param(2000, 1, marks=[pytest.mark.stress, pytest.mark.timeout(1800)])],
)
def test_b05_every_flipped_bit_is_found(ground, rng, tensor_in, count, every):
    """verify and load at each flip, and a restore at each `every`-th: a restore reads a whole
    checkpoint more."""
    flips, restores, failed = 0, 0, {}
    for name in ground.files:
        path = ground.folder / name
        data = path.read_bytes()
        for offset in places(data, name, count, rng):
            flips += 1
            with flipped(path, offset, rng.randrange(8)):
                try:
                    check_named(ground, name, tensor_in(data, name, offset))
                    if flips % every == 0:
                        restores += 1
                        check_falls_back(ground, name)
                except (Exception, pytest.fail.Exception) as error:
                    failed.setdefault(f"{name}: {type(error).__name__}: {error}"[:300], []).append(
                        offset
                    )
    print(f"\nflipped bits: {flips} in {len(ground.files)} files, {restores} restores past one")
    assert failed == {}
    assert flips >= min(count * len(ground.files), 600)
    ground.check_good()


def test_b05_truncated_and_extended_files(ground):
    for name in ground.files:
        with repaired(ground.folder / name) as data:
            for new in (
                data[:-1],
                data + b"\0",
                data + data[-1:],
                data[: len(data) // 2],
                b"",
                b"\0" + data,
            ):
                (ground.folder / name).write_bytes(new)
                check_damage(ground, name, kinds=("size", "format", "digest"))
    ground.check_good()


def test_b05_zeroed_blocks(ground, tensor_in):
    for name in ground.files:
        with repaired(ground.folder / name) as data:
            size = len(data)
            for start, stop in ((0, 512), (size - 16, size), (size // 2, size // 2 + 100)):
                new = data[:start] + bytes(min(stop, size) - start) + data[stop:]
                hit = {
                    tensor_in(data, name, at) for at in range(start, min(stop, size)) if data[at]
                }
                if not hit:
                    continue
                (ground.folder / name).write_bytes(new)
                assert problems(ground) == {(name, tensor) for tensor in hit}
                error = load_error(ground)
                assert error.file == name
                assert error.tensor in hit
                check_falls_back(ground, name)
    ground.check_good()


def test_b05_deleted_files(ground):
    for name in ground.files:
        if name != MANIFEST_NAME:
            with repaired(ground.folder / name):
                (ground.folder / name).unlink()
                check_damage(ground, name, kinds=("missing",))
    ground.check_good()


def test_b05_a_deleted_manifest(ground):
    with repaired(ground.folder / MANIFEST_NAME):
        (ground.folder / MANIFEST_NAME).unlink()
        for call in (
            lambda: ground.manager().verify(2),
            lambda: ground.manager().load(ground.training.state(), 2),
        ):
            with pytest.raises(CheckpointNotFound) as caught:
                call()
            assert MANIFEST_NAME in str(caught.value)
            assert "checkpoint-2" in str(caught.value)
        check_falls_back(ground, MANIFEST_NAME)
    ground.check_good()


def test_b05_swapped_files_of_equal_size(ground):
    names = [
        n
        for n in ground.files
        if n.startswith("model-") and (ground.folder / n).stat().st_size < 100_000
    ]
    first, second = (ground.folder / name for name in names)
    assert first.stat().st_size == second.stat().st_size
    with repaired(first) as one, repaired(second) as two:
        first.write_bytes(two)
        second.write_bytes(one)
        assert {file for file, _ in problems(ground)} == {first.name, second.name}
        error = load_error(ground)
        assert error.file in names
        check_falls_back(ground, error.file)
    ground.check_good()


def test_b05_the_same_file_of_another_step(ground):
    """Right format, right size, valid in itself, and of the wrong checkpoint."""
    tried = 0
    for name in ground.files:
        path, other = ground.folder / name, ground.root / "checkpoint-1" / name
        if name == MANIFEST_NAME or path.read_bytes() == other.read_bytes():
            continue
        tried += 1
        with repaired(path):
            shutil.copyfile(other, path)
            assert {file for file, _ in problems(ground)} == {name}
            assert load_error(ground).file == name
            check_falls_back(ground, name)
    assert tried >= 5
    ground.check_good()


def test_b05_the_manifest_of_another_step(ground):
    """Valid in itself, but the files beside it are not its own."""
    with repaired(ground.folder / MANIFEST_NAME):
        shutil.copyfile(ground.root / "checkpoint-1" / MANIFEST_NAME, ground.folder / MANIFEST_NAME)
        report, told = ground.restored()
        assert (report.step, ground.training.snapshot() == ground.at[1], len(told)) == (1, True, 1)
        assert report.path.endswith("checkpoint-1")
    ground.check_good()


def test_b05_a_manifest_without_its_digests(ground):
    """A reader that is asked to verify must not pass because there is nothing to verify with."""
    path = ground.folder / MANIFEST_NAME
    with repaired(path) as data:
        document = json.loads(data)
        document.pop("digest")
        path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
        check_damage(ground, MANIFEST_NAME)
        for name in document["files"]:
            document["files"][name][1] = ""
        path.write_text(
            json.dumps({**document, "digest": "0" * 32}, indent=1, sort_keys=True) + "\n"
        )
        check_damage(ground, MANIFEST_NAME)
    ground.check_good()


def tree(root):
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_b06_only_unusable_checkpoints_are_an_error(ground):
    """Never a quiet start at step 0 where something was saved; and nothing is touched."""
    for folder in ("checkpoint-1", "checkpoint-2"):
        (ground.root / folder / MANIFEST_NAME).unlink()
    before, live = tree(ground.root), ground.training.snapshot()
    with pytest.raises(NoUsableCheckpoint) as caught:
        ground.manager().restore(ground.training.state(), "auto")
    assert sorted(caught.value.reasons) == ["checkpoint-1", "checkpoint-2"]
    assert all(MANIFEST_NAME in reason for reason in caught.value.reasons.values())
    assert "checkpoint-1" in str(caught.value)
    assert "checkpoint-2" in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)
    assert tree(ground.root) == before
    assert ground.training.snapshot() == live


def test_b06_a_fresh_start_past_unusable_ones_on_demand(ground):
    for folder in ("checkpoint-1", "checkpoint-2"):
        path = ground.root / folder / "optimizer.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    before = tree(ground.root)
    with pytest.warns(CheckpointWarning) as caught:
        report = ground.manager().restore(ground.training.state(), "auto", fresh_ok=True)
    assert len(caught) == 1
    assert all(word in str(caught[0].message) for word in ("fresh", "checkpoint-1", "checkpoint-2"))
    assert (report.fresh, sorted(report.skipped)) == (True, ["checkpoint-1", "checkpoint-2"])
    assert tree(ground.root) == before


def test_b06_discovery_needs_no_pointer(ground):
    for name in ("latest", "latest.txt", "last.ckpt"):
        (ground.root / name).write_text("checkpoint-1")
    os.utime(ground.root / "checkpoint-1", (4e9, 4e9))
    ground.check_good()
    assert [info.step for info in ground.manager().list()] == [1, 2]
    assert ground.manager().latest().step == 2


def test_b06_an_empty_root_starts_fresh(tmp_path, ground):
    for root in (tmp_path / "not there", tmp_path):
        live = ground.training.snapshot()
        report = CheckpointManager(root).restore(ground.training.state(), "auto")
        assert (report.fresh, report.step, report.skipped) == (True, None, {})
        assert ground.training.snapshot() == live
    assert list(tmp_path.iterdir()) == []


def test_b01_torn_folders_are_skipped_with_one_warning_and_replaced(ground):
    """What other tools and interrupted copies leave: the highest steps with missing or empty
    files."""
    for step in (3, 4):
        shutil.copytree(ground.folder, ground.root / f"checkpoint-{step}")
    (ground.root / "checkpoint-3" / MANIFEST_NAME).unlink()
    (ground.root / "checkpoint-4" / MANIFEST_NAME).write_bytes(b"")
    manager = ground.manager()
    with pytest.warns(CheckpointWarning) as caught:
        report = manager.restore(ground.training.state(), "auto")
    assert (report.step, ground.training.snapshot() == ground.at[2], len(caught)) == (2, True, 1)
    assert "checkpoint-3" in str(caught[0].message)
    assert "checkpoint-4" in str(caught[0].message)
    assert sorted(report.skipped) == ["checkpoint-3", "checkpoint-4"]
    # Nothing is deleted on the quiet.
    assert {path.name for path in ground.root.iterdir()} == {
        f"checkpoint-{step}" for step in (1, 2, 3, 4)
    }
    ground.training.train()
    manager.save(3, ground.training.state())
    assert [info.step for info in manager.list()] == [1, 2, 3]
    assert manager.verify(3) == []
    assert open_checkpoint(ground.root / "checkpoint-3").foreign_files() == []
