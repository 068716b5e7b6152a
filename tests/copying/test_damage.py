"""A damaged source is refused, with what is wrong, and nothing is published."""

from __future__ import annotations

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
    CheckpointManager,
    CheckpointNotFound,
    CheckpointView,
    Storage,
    open_storage,
)
from ckptcore.copying import copy_between
from ckptcore.testing import FaultStorage


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
    path = folder / data.draw(st.sampled_from(sorted(p.name for p in folder.iterdir())), label="file")
    content = bytearray(path.read_bytes())
    how = data.draw(st.sampled_from(["flip", "cut", "grow", "lose"]), label="how")
    if how == "flip":
        content[data.draw(st.integers(0, len(content) - 1), label="at")] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del content[data.draw(st.integers(0, len(content) - 1), label="to") :]
    elif how == "grow":
        content += b"x"
    path.unlink() if how == "lose" else path.write_bytes(content)
    target = make_root(kind)
    manifest = path.name == "checkpoint_manifest.json"
    with pytest.raises(CheckpointNotFound if manifest and how == "lose" else CheckpointCorrupt) as caught:
        copies.make(target, open_storage(source), threads=2)
    if not (manifest and how == "lose"):
        assert (caught.value.file, caught.value.path) == (path.name, str(folder))
        assert path.name in str(caught.value)
        if how == "flip" and caught.value.kind == "digest":
            assert caught.value.expected != caught.value.actual
            assert str(caught.value.expected) in str(caught.value) and str(caught.value.actual) in str(caught.value)
        assert caught.value.kind in {"flip": ("digest", "header", "format"), "lose": ("missing",)}.get(
            how, ("size", "format")
        )
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
def test_bytes_that_change_on_their_way_in(make_root: Callable[[str], Storage], copies: Any, kind: str) -> None:
    """A write that claims to be whole and is not: `overwrite` finds it afterwards, as `verify` does."""
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


@given(
    values=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
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
