"""Bytes of real text, cut into windows."""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from ..arguments import DataNotFound, InvalidArgument

_INSTALLED = {"site-packages", "dist-packages"}


def find_files(entries: Sequence[str] = ()) -> list[Path]:
    """The files that `entries` (files, folders, globs) name, each once, in an order that does not
    vary.

    A folder stands for all files below it but hidden ones. No entries: the sources of the Python
    standard library.
    """
    if not entries:
        library = Path(sysconfig.get_path("stdlib"))
        files = [f for f in _below(library, "*.py") if _INSTALLED.isdisjoint(f.parts)]
        if not files:
            hint = "name the text with --data"
            raise DataNotFound(f"no .py files in {library}; {hint}", path=str(library))
        return files
    found: dict[Path, None] = {}
    for entry in entries:
        matches = [entry] if Path(entry).exists() else sorted(glob.glob(entry, recursive=True))
        files = [file for match in map(Path, matches) for file in _below(match)]
        if not files:
            raise DataNotFound(f"data: {entry!r} names no file", path=entry)
        found |= dict.fromkeys(files)
    return list(found)


def _below(path: Path, pattern: str = "*") -> list[Path]:
    """A file itself; of a folder those in it that are not hidden."""
    if not path.is_dir():
        return [path]
    inside = {f.relative_to(path): f for f in path.rglob(pattern) if f.is_file()}
    shown = [name for name in inside if not any(part.startswith(".") for part in name.parts)]
    return [inside[name] for name in sorted(shown, key=Path.as_posix)]


def read_corpus(entries: Sequence[str] = (), max_bytes: int | None = None) -> Tensor:
    """All bytes of the files, one after another, as one uint8 tensor of at most `max_bytes`."""
    text = bytearray()
    for file in find_files(entries):
        with file.open("rb") as stream:
            text += stream.read(-1 if max_bytes is None else max_bytes - len(text))
        if max_bytes is not None and len(text) >= max_bytes:
            break
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def split_corpus(
    corpus: Tensor, block_size: int, validation: float = 0.05
) -> tuple[ByteWindows, ByteWindows]:
    """Training windows from the front, validation windows from the back; no byte is in both."""
    held_out = max(int(len(corpus) * validation), block_size + 1)
    if len(corpus) < held_out + block_size + 1:
        size, instead = f"{len(corpus)} bytes", "name more data or give a smaller block_size"
        reason = f"too short for one training and one validation window of {block_size} bytes"
        raise InvalidArgument("data", size, reason, instead)
    cut = len(corpus) - held_out
    return ByteWindows(corpus[:cut], block_size), ByteWindows(corpus[cut:], block_size)


class ByteWindows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Window i: bytes [i*n, i*n+n) as input and, one further on, as labels."""

    def __init__(self, corpus: Tensor, block_size: int) -> None:
        self.corpus = corpus
        self.block_size = block_size

    def __len__(self) -> int:
        return max(0, (len(self.corpus) - 1) // self.block_size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.block_size
        window = self.corpus[start : start + self.block_size + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}

    def fingerprint(self) -> dict[str, Any]:
        """What tells this data from other data."""
        digest = xxhash.xxh3_128_hexdigest(self.corpus.numpy().data)
        return {"bytes": len(self.corpus), "xxh3_128": digest, "block_size": self.block_size}
