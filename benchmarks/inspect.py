"""`ckpt inspect` on a checkpoint of many small tensors: `python -m benchmarks inspect [--tensors
10000]`."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from .child import Cost, cost_of, imports_torch, reads_below
from .frame import Check, Contender, Report, Row, measure, rows_of
from .ground import MIB, size_text
from .savers import ours_save

__all__ = ["run"]

OURS = ("ckpt inspect", "ckpt inspect --tensors")  # the summary; and every tensor listed
BARE = "python -c pass"
ELEMENTS = 64  # float32 numbers in each tensor


def run(
    folder: Path,
    *,
    tensors: int = 10_000,
    rounds: int = 7,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Time the command as a user starts it, count what it reads, take its peak memory."""
    progress(f"saving {tensors:,} tensors")
    checkpoint = _make(folder / "inspect", tensors)
    commands = {
        BARE: [sys.executable, "-c", "pass"],
        "python, open_checkpoint().tensors()": [sys.executable, "-c", _LIBRARY, str(checkpoint)],
        OURS[0]: [sys.executable, "-m", "ckpt_tools.main", "inspect", str(checkpoint)],
        OURS[1]: [sys.executable, "-m", "ckpt_tools.main", "inspect", str(checkpoint), "--tensors"],
    }
    costs: dict[str, list[Cost]] = {name: [] for name in commands}

    def once(name: str) -> Callable[[], None]:
        return lambda: costs[name].append(cost_of(commands[name]))

    kinds = {BARE: "limit", **dict.fromkeys(OURS, "ours")}
    samples = measure(
        [Contender(n, once(n), kinds.get(n, "note")) for n in commands],  # type: ignore[arg-type]
        rounds,
        progress=progress,
    )
    for (
        name,
        sample,
    ) in samples.items():  # the launcher's own start is no part of the command's time
        sample.seconds = (
            [cost.seconds for cost in costs[name][1:]] if sample.problem is None else []
        )
    rows = rows_of(samples)
    for row in rows:
        if costs[row.name]:
            row.extra["peak memory"] = size_text(
                statistics.median(c.peak_bytes for c in costs[row.name])
            )
        if row.name in OURS and row.median is not None:
            row.checks.append(Check("s wall", 0.3, row.median, at_least=False))
            peak = max(cost.peak_bytes for cost in costs[row.name])
            row.checks.append(Check("resident", 200.0, peak / MIB, at_least=False, unit=" MiB"))
    progress("counting what is read")
    rows += _reading_rows(commands[OURS[1]], checkpoint)
    torch_imported = imports_torch(commands[OURS[1]])
    rows.append(
        Row(
            "torch imported (1: yes)",
            float(torch_imported),
            unit="",
            kind="note",
            checks=[Check("imports of torch", 0.0, float(torch_imported), at_least=False)],
        )
    )
    total = sum(path.stat().st_size for path in checkpoint.iterdir())
    return Report(
        "inspect",
        f"`ckpt inspect` on {tensors:,} tensors of {ELEMENTS * 4} bytes ({size_text(total)} on "
        "disk)",
        rows,
        {"tensors": tensors, "rounds": rounds},
        [
            "wall: from the start of the process to its end, files in the page cache; limit: a "
            "Python that does nothing.",
            "bytes read and imports: of `ckpt inspect --tensors`.",
        ],
    )


_LIBRARY = """
import sys
from ckptcore import open_checkpoint
with open_checkpoint(sys.argv[1]) as view:
    len(view.tensors())
"""


def _make(folder: Path, count: int) -> Path:
    import torch

    values = torch.arange(count * ELEMENTS, dtype=torch.float32).view(count, ELEMENTS)
    ours_save(
        {f"blocks.{n // 10}.layer{n % 10}.weight": values[n].clone() for n in range(count)}, folder
    )
    return next(path for path in folder.iterdir() if (path / "checkpoint_manifest.json").exists())


def _reading_rows(command: list[str], checkpoint: Path) -> list[Row]:
    reads = reads_below(command, checkpoint)
    if reads is None:
        return [Row("bytes read", None, problem="not measured: strace is not available")]
    payload = {path.name: _payload(path) for path in checkpoint.glob("*.safetensors")}
    tensor_files = sum(count for name, count in reads.by_file.items() if name in payload)
    headers = sum(
        path.stat().st_size - payload[path.name] for path in checkpoint.glob("*.safetensors")
    )
    # Whatever is read of a tensor file beyond its header's size must be tensor bytes.
    beyond = float(max(0, tensor_files - headers))
    rest = float(sum(reads.by_file.values()) - tensor_files)
    return [
        Row(f"manifest and indexes read ({reads.how})", rest, unit="B", kind="note"),
        Row(
            f"headers of tensor files read ({reads.how})",
            tensor_files - beyond,
            unit="B",
            kind="note",
        ),
        Row(
            f"tensor bytes read ({reads.how})",
            beyond,
            unit="B",
            kind="note",
            checks=[Check("tensor bytes read", 0.0, beyond, at_least=False)],
        ),
    ]


def _payload(path: Path) -> int:
    """Bytes of tensor data in a safetensors file: all after the 8 bytes of length and the
    header."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")
