"""Durable saves of CPU tensors: `python -m benchmarks save [--size 1GiB] [--memory-size 2GiB]`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from .frame import Check, Contender, Report, best_limit, measure, rows_of, times_faster
from .ground import GIB, MIB, clean_folder, make_state, size_text
from .memory import added_by_saves
from .savers import SAVERS, Saver, State

__all__ = ["run"]

OURS = "ckptcore save"
MEMORY_TARGET = 96.0


def run(
    folder: Path,
    *,
    size: int = GIB,
    rounds: int = 5,
    settle: float = 3.0,
    memory_size: int | None = 2 * GIB,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Time all savers and measure the memory that each adds (memory_size None: not)."""
    progress("making the state")
    state = make_state(size)
    samples = measure(
        [_contender(saver, state, folder / "save", settle) for saver in SAVERS],
        rounds,
        progress=progress,
    )
    del state
    added: dict[str, dict[str, int | str]] = {}
    if memory_size is not None:
        progress(f"memory of each saver with a state of {size_text(memory_size)}")
        added = added_by_saves(memory_size, folder)
    rows = rows_of(samples)
    limit = best_limit(samples)
    for row in rows:
        if row.median:
            row.extra["GB/s"] = f"{size / row.median / 1e9:.2f}"
        if memory_size is not None:
            row.extra["memory added"] = _memory_text(added.get(row.name, {}))
        if row.name == OURS:
            mine = samples[OURS].median
            row.checks.append(
                Check(
                    "of the limit's speed", 0.95, limit / mine if limit and mine else None, unit="x"
                )
            )
            row.checks.append(
                Check(
                    "dcp.save default",
                    2.0,
                    times_faster(samples, OURS, "dcp.save, default"),
                    unit="x",
                )
            )
            if memory_size is not None:
                grown = added.get(OURS, {}).get("added")
                value = grown / MIB if isinstance(grown, int) else None
                row.checks.append(
                    Check("memory added", MEMORY_TARGET, value, at_least=False, unit=" MiB")
                )
    notes = [
        f"{len(SAVERS)} contenders, {rounds} interleaved rounds after one that is not counted; "
        "every round starts "
        f"from an empty folder, after sync and {settle:g} s of rest; every save ends with fsync "
        "of files and folder.",
        "limit: the better of the two raw writes. raw O_DIRECT is no limit of the targets: it "
        "passes the page cache.",
    ]
    if memory_size is not None:
        notes.append(
            f"memory added: peak resident memory during one save of {size_text(memory_size)}, own "
            "process."
        )
    return Report(
        "save",
        f"Durable save of {size_text(size)} in 64 float32 CPU tensors",
        rows,
        {"size": size, "rounds": rounds, "settle": settle, "memory_size": memory_size},
        notes,
    )


def _contender(saver: Saver, state: State, folder: Path, settle: float) -> Contender:
    return Contender(
        saver.name,
        lambda: saver.save(state, folder),
        saver.kind,
        prepare=lambda: clean_folder(folder, settle),
        finish=lambda: shutil.rmtree(folder),
        missing=saver.missing,
    )


def _memory_text(found: dict[str, int | str]) -> str:
    if "added" in found:
        return f"{float(found['added']) / MIB:.0f} MiB"
    return "" if not found else "failed"
