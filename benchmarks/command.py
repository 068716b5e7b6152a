"""`ckpt` where there is much to look at: `python -m benchmarks command [--checkpoints 1000]`.

A root of many checkpoints, on the disk and on an S3 server whose requests are counted; a
checkpoint of 4,096 ranks; two checkpoints of 2 GiB that hardly differ.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ckptcore import CheckpointManager, open_storage, scan_root
from ckptcore.format.manifest import CheckpointManifest

from .child import cost_of, reads_below
from .frame import Check, Report, Row
from .ground import GIB, MIB, size_text
from .plan import example_metadata
from .remote import BUCKET, served

__all__ = ["run"]

MANIFEST = "checkpoint_manifest.json"
RANKS = 4096


def run(
    folder: Path,
    *,
    checkpoints: int = 1000,
    size: int = 2 * GIB,
    rounds: int = 5,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    progress(f"{checkpoints:,} checkpoints")
    many = _many(folder / "many", checkpoints)
    rows = [_timed(f"ls, {checkpoints:,} checkpoints", rounds, "ls", str(many))]
    with served() as options:
        rows.append(_listed_on_s3(many, options, checkpoints))
    progress(f"{RANKS:,} ranks")
    wide = _wide(folder / "wide")
    row = _timed(f"inspect, {RANKS:,} ranks", rounds, "inspect", str(wide))
    row.checks = [Check("s wall", 0.3, row.median or 0.0, at_least=False)]
    rows += [row, _timed(f"inspect --ranks, {RANKS:,}", rounds, "inspect", str(wide), "--ranks")]
    progress(f"two checkpoints of {size_text(size)}")
    rows += _compared(_two(folder / "two", size), rounds)
    title = "`ckpt` on much: many checkpoints, many ranks, many bytes"
    return Report("command", title, rows, {"checkpoints": checkpoints, "size": size})


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "ckpt_tools", *words]


def _timed(name: str, rounds: int, *words: str) -> Row:
    costs = sorted((cost_of(_command(*words)) for _ in range(rounds)), key=lambda c: c.seconds)
    row = Row(name, costs[rounds // 2].seconds, costs[0].seconds, costs[-1].seconds, kind="ours")
    row.extra["CPU"] = f"{sorted(cost.cpu_seconds for cost in costs)[rounds // 2]:.2f} s"
    row.extra["peak memory"] = size_text(max(cost.peak_bytes for cost in costs))
    return row


def _many(root: Path, count: int) -> Path:
    """One that is saved, and links to its files under other steps."""
    with CheckpointManager(root) as manager:
        manager.save(1, {"model": {"w": torch.ones(4)}}, metrics={"loss": 1.0})
    first = root / "checkpoint-1"
    manifest = CheckpointManifest.decode((first / MANIFEST).read_bytes())
    for step in range(2, count + 1):
        folder = root / f"checkpoint-{step}"
        folder.mkdir()
        for path in first.iterdir():
            if path.name != MANIFEST:
                os.link(path, folder / path.name)
        another = replace(manifest, step=step, sequence=step, metrics={"loss": 1 / step})
        (folder / MANIFEST).write_bytes(another.encode())
    return root


def _listed_on_s3(root: Path, options: dict[str, Any], count: int) -> Row:
    """The command's seconds, and the requests of the listing that it makes."""
    url = f"s3://{BUCKET}/many"
    storage: Any = open_storage(url, options)
    for folder in root.iterdir():
        for path in folder.iterdir():
            storage.write(f"{folder.name}/{path.name}", path.read_bytes())
    words = [f"--storage-option={key}={json.dumps(value)}" for key, value in options.items()]
    row = _timed(f"ls on S3, {count:,} checkpoints", 3, "ls", url, *words)
    before = storage.requests
    assert len(scan_root(storage)) == count
    asked = storage.requests - before
    row.extra["requests"] = f"{asked:,}"
    row.checks = [Check("requests a checkpoint", 1.1, asked / count, at_least=False)]
    return row


def _wide(folder: Path) -> Path:
    """What 4,096 ranks would have written, but for the tensors' bytes."""
    folder.mkdir(parents=True)
    manifest, first, other = example_metadata(RANKS)
    for name, record in CheckpointManifest.decode(manifest).files.items():
        with open(folder / name, "wb") as file:
            if name.endswith(".msgpack"):
                file.write(first if record.writer == 0 else other)
            else:
                file.truncate(record.size)
    (folder / MANIFEST).write_bytes(manifest)
    return folder


def _two(root: Path, size: int) -> Path:
    count = max(size // (16 * MIB), 2)
    tensors = {f"layers.{n}.weight": torch.randn(2048, 2048) for n in range(count)}
    with CheckpointManager(root) as manager:
        manager.save(1, {"model": tensors})
        tensors["layers.1.weight"][7, 7] = 1.0
        manager.save(2, {"model": tensors})
    return root


def _compared(root: Path, rounds: int) -> list[Row]:
    rows = [_timed("diff", rounds, "diff", str(root))]
    both = [root / "checkpoint-1", root / "checkpoint-2"]
    reads = [reads_below(_command("diff", *map(str, both)), folder) for folder in both]
    if None in reads:
        return [*rows, Row("bytes read", None, problem="not measured: strace is not available")]
    total = sum(sum(found.by_file.values()) for found in reads if found is not None) / 1e6
    row = Row("bytes read by diff", total, unit="MB", kind="note")
    row.checks = [Check("MB read", 10.0, total, at_least=False)]
    return [*rows, row]
