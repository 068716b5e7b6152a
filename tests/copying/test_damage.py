"""A damaged source is refused, with what is wrong, and nothing is published."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptcore import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointManager,
    CheckpointNotFound,
    CheckpointView,
    Storage,
    open_storage,
)
from ckptcore.catalog.catalog import scan
from ckptcore.catalog.folder import pin_checkpoint, unpin_checkpoint
from ckptcore.copy.checkpoint import copy_between
from ckptcore.testing import FaultStorage, Killed


@given(data=st.data())
@settings(max_examples=40)
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_any_damage_anywhere(
    make_root: Callable[[str], Storage], copies: Any, quick_folder: Path, kind: str, data: Any
) -> None:
    source = quick_folder / "damaged"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(copies.sources / "a", source)
    folder = source / copies.name
    path = folder / data.draw(
        st.sampled_from(sorted(p.name for p in folder.iterdir())), label="file"
    )
    content = bytearray(path.read_bytes())
    how = data.draw(st.sampled_from(["flip", "cut", "grow", "lose"]), label="how")
    if how == "flip":
        content[data.draw(st.integers(0, len(content) - 1), label="at")] ^= 1 << data.draw(
            st.integers(0, 7)
        )
    elif how == "cut":
        del content[data.draw(st.integers(0, len(content) - 1), label="to") :]
    elif how == "grow":
        content += b"x"
    path.unlink() if how == "lose" else path.write_bytes(content)
    target = make_root(kind)
    manifest = path.name == "checkpoint_manifest.json"
    with pytest.raises(
        CheckpointNotFound if manifest and how == "lose" else CheckpointCorrupt
    ) as caught:
        copies.make(target, open_storage(source), threads=2)
    if not (manifest and how == "lose"):
        assert (caught.value.file, caught.value.path) == (path.name, str(folder))
        assert path.name in str(caught.value)
        if how == "flip" and caught.value.kind == "digest":
            assert caught.value.expected != caught.value.actual
            assert str(caught.value.expected) in str(caught.value) and str(
                caught.value.actual
            ) in str(caught.value)
        assert caught.value.kind in {
            "flip": ("digest", "header", "format"),
            "lose": ("missing",),
        }.get(how, ("size", "format"))
    assert left_in(target) == []
    copies.make(target)
    copies.check(target)


def left_in(target: Storage) -> list[str]:
    try:
        return [entry.name for entry in target.list() if target.list(entry.name)]
    except CheckpointError:
        return []  # no such root


@pytest.mark.parametrize("kind", ["local", "memory", "folder"])
def test_a_damaged_source_replaces_nothing(
    make_root: Callable[[str], Storage], copies: Any, quick_folder: Path, kind: str
) -> None:
    """Where the old checkpoint has to go first, the source is read before it does."""
    shutil.copytree(copies.sources / "a", quick_folder / "damaged")
    path = quick_folder / "damaged" / copies.name / "own.rank00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    target = make_root(kind)
    copies.make(target, "b")
    with pytest.raises(CheckpointCorrupt) as caught:
        copies.make(target, open_storage(quick_folder / "damaged"), overwrite=True)
    assert (caught.value.file, caught.value.kind) == ("own.rank00002.safetensors", "digest")
    copies.check(target, "b")


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_bytes_that_change_on_their_way_in(
    make_root: Callable[[str], Storage], copies: Any, kind: str
) -> None:
    """A write that claims to be whole and is not: `overwrite` finds it afterwards, as `verify`
    does."""
    target = make_root(kind)
    faults = FaultStorage(target)
    faults.short(2, keep=0.5, error=None, path="*.safetensors")
    try:
        copies.make(faults, threads=1)
    except CheckpointError:
        pass
    else:
        assert CheckpointView(target, copies.name).verify() != []
    copies.make(target, overwrite=True)
    copies.check(target)


@pytest.mark.parametrize("harm", ["flip", "lose"])
@pytest.mark.parametrize("kind", ["local", "memory", "folder", "s3"])
def test_a_pinned_copy_is_repaired_and_stays_pinned(
    make_root: Callable[[str], Storage],
    copies: Any,
    request: pytest.FixtureRequest,
    kind: str,
    harm: str,
) -> None:
    s3 = request.getfixturevalue("s3") if kind == "s3" else None
    target = make_root(kind) if s3 is None else open_storage(s3.new_root(), s3.options)
    copies.make(target)
    pin_checkpoint(target, copies.name)
    path = f"{copies.name}/own.rank00001.safetensors"
    data = bytearray(target.read(path))
    data[-1] ^= 1
    target.remove(path)
    if harm == "flip":
        target.write(path, bytes(data))
        assert copies.make(target).status == "committed"  # nobody has looked
        assert target.read(path) == bytes(data)
    else:
        with pytest.raises(CheckpointExists, match="pinned"):
            copies.make(target)
    assert copies.make(target, overwrite=True).status == "committed"
    assert [(info.status, info.pinned) for info in scan(target)] == [("committed", True)]
    with pytest.raises(CheckpointExists, match="pinned"):  # it is no other commit's turn
        copies.make(target, "b", overwrite=True)
    unpin_checkpoint(target, copies.name)
    copies.check(target, "a")


def test_a_repair_that_is_killed_does_not_lose_the_pin(
    make_root: Callable[[str], Storage], copies: Any
) -> None:
    """Where the new copy takes the place of the old one at once, the pin comes with it."""
    for k in itertools.count(1):
        target = make_root("local")
        copies.make(target)
        pin_checkpoint(target, copies.name)
        (Path(target.url) / copies.name / "own.rank00001.safetensors").write_bytes(b"x")
        faults = FaultStorage(target)
        faults.kill(k, how="raise", kind=("rename", "remove", "create", "sync_folder"))
        try:
            copies.make(faults, threads=1, overwrite=True)
            break
        except Killed:
            copies.make(target, overwrite=True)
        assert ("committed", True) in [(info.status, info.pinned) for info in scan(target)], (
            faults.log[-1]
        )
    assert k > 20


@given(
    values=st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
        max_leaves=10,
    ),
    sizes=st.lists(st.integers(0, 5000), max_size=4),
)
@settings(max_examples=30)
def test_any_state(
    make_root: Callable[[str], Storage], same: Callable[..., None], values: Any, sizes: list[int]
) -> None:
    import torch

    source, target, back = make_root("local"), make_root("memory"), make_root("local")
    tensors = {f"t{n}": torch.randn(size) for n, size in enumerate(sizes)}
    with CheckpointManager(source, io_threads=1) as ckpt:
        ckpt.save(1, {"values": {"v": values}, "tensors": tensors})
    copy_between(source, "checkpoint-1", target, "checkpoint-1", threads=2)
    copy_between(target, "checkpoint-1", back, "checkpoint-1", threads=1)
    for entry in source.list("checkpoint-1"):
        assert back.read(f"checkpoint-1/{entry.name}") == source.read(f"checkpoint-1/{entry.name}")
    view = CheckpointView(target, "checkpoint-1")
    same(view.values("values"), {"v": values})
    for name, tensor in tensors.items():
        assert view.read(f"tensors/{name}").tobytes() == tensor.numpy().tobytes()
