"""The ground that benchmarks run on: a folder on a real disk, the state to save, the machine's
state between rounds.

Used by `python -m benchmarks save` and its like.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "GIB",
    "MIB",
    "clean_folder",
    "drop_tree",
    "fsync_tree",
    "make_state",
    "memory_of",
    "settle",
    "work_folder",
]

MIB = 1 << 20
GIB = 1 << 30
IN_MEMORY = ("tmpfs", "ramfs")


@contextmanager
def work_folder(parent: Path | None) -> Iterator[Path]:
    """A new folder on a disk, removed at the end. Default parent: the temp folder, or the current
    one where the temp folder lies in memory. Raises ValueError when `parent` lies in memory: its
    figures would mean nothing."""
    if parent is None:
        candidates = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
        parent = next(
            (p for p in candidates if p.is_dir() and filesystem_of(p) not in IN_MEMORY), None
        )
        if parent is None:
            raise ValueError("no folder on a disk was found; name one with --dir")
    elif filesystem_of(parent) in IN_MEMORY:
        raise ValueError(
            f"{parent} lies in memory ({filesystem_of(parent)}); --dir must be on a disk"
        )
    folder = Path(tempfile.mkdtemp(prefix="ckptcore-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def filesystem_of(path: Path) -> str:
    """Type of the filesystem that holds `path`, 'unknown' where the system does not say."""
    real, best, kind = str(path.resolve()), "", "unknown"
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    for line in mounts:
        _, point, this, *_ = line.split()
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, this
    return kind


def make_state(size: int, tensors: int = 64, seed: int = 0) -> dict[str, torch.Tensor]:
    """`size` bytes of random float32 in equal tensors on the CPU, every page touched."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows, columns = _shape(size // tensors // 4)
    block = torch.empty(rows, columns).uniform_(-1, 1, generator=generator)
    # Different in every tensor, without a random number for each: rolls of one block.
    return {f"layers.{n:03d}.weight": block.roll(n * 7919 + n).contiguous() for n in range(tensors)}


def _shape(elements: int) -> tuple[int, int]:
    columns = next((c for c in (1024, 64, 1) if elements % c == 0), 1)
    return max(1, elements // columns), columns


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not a copy."""
    import torch

    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


def clean_folder(folder: Path, settle_seconds: float) -> None:
    """Empty `folder`, write back what is pending, and let the machine return to rest."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settle(settle_seconds)


def settle(seconds: float) -> None:
    """Write back what is pending and wait, so that every round starts from the same state of the
    machine.

    Virtual machines may hand memory that was freed back to their host a second or two later;
    whoever needs fresh pages next (a page cache, a new tensor) pays for getting them again. Without
    the pause a round would meet warm or cold memory by chance, which is worth a factor of five. A
    training run saves minutes apart: it meets the cold one.
    """
    os.sync()
    time.sleep(seconds)


def fsync_tree(folder: Path) -> None:
    """fsync every file below `folder`, and the folders."""
    for place, _, names in os.walk(folder):
        for name in [*names, "."]:
            fd = os.open(os.path.join(place, name), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def read_tree(folder: Path) -> int:
    """Read all files below `folder`, so that they are in the page cache; returns the bytes read."""
    buffer, total = bytearray(4 * MIB), 0
    for place, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(place, name), "rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    total += count
    return total


def drop_tree(folder: Path) -> int:
    """Take all files below `folder` out of the page cache; returns how many there are."""
    found = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
    for name in found:
        fd = os.open(name, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return len(found)


def parse_size(text: str) -> int:
    """'1GiB', '512MiB', '64KiB' or a number of bytes."""
    units = {"kib": 1 << 10, "mib": MIB, "gib": GIB, "b": 1, "": 1}
    digits = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(digits) :].strip().lower()
    if unit not in units:
        raise ValueError(f"{text!r} is not a size; write for example 1GiB, 512MiB or 4096")
    try:
        return int(float(digits) * units[unit])
    except ValueError:
        raise ValueError(
            f"{text!r} is not a size; write for example 1GiB, 512MiB or 4096"
        ) from None


def size_text(size: float) -> str:
    """The shortest exact-looking name of a number of bytes."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:.0f} B"
