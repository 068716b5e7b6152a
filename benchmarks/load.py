"""Loads into live CPU tensors, page cache warm: `python -m benchmarks load [--size 1GiB]`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from .frame import PEER_ERRORS, Check, Contender, Report, best_limit, measure, rows_of, times_faster
from .ground import GIB, make_state, read_tree, settle, size_text
from .savers import LOADERS, SAVERS, Loader, State

__all__ = ["run"]

OURS = "ckptcore load, verified"


def run(
    folder: Path,
    *,
    size: int = GIB,
    rounds: int = 7,
    settle_seconds: float = 0.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Time all loaders; each loads what its own saver wrote, and every round is checked to have
    loaded it."""
    import torch

    progress("making the state")
    truth = make_state(size)
    live = {name: torch.zeros_like(tensor).fill_(7) for name, tensor in truth.items()}
    places, problems = _write_all(truth, folder, progress)
    contenders = [
        _contender(loader, truth, live, places, problems, settle_seconds) for loader in LOADERS
    ]
    samples = measure(contenders, rounds, progress=progress)
    for place in places.values():
        shutil.rmtree(place)
    rows = rows_of(samples)
    limit = best_limit(samples)
    for row in rows:
        if row.median:
            row.extra["GB/s"] = f"{size / row.median / 1e9:.2f}"
        if row.name == OURS:
            mine = samples[OURS].median
            row.checks.append(
                Check("of raw preadv", 0.8, limit / mine if limit and mine else None, unit="x")
            )
            row.checks.append(
                Check("dcp.load", 4.0, times_faster(samples, OURS, "dcp.load"), unit="x")
            )
    return Report(
        "load",
        f"Load of {size_text(size)} into 64 live float32 CPU tensors, page cache warm",
        rows,
        {"size": size, "rounds": rounds, "settle": settle_seconds},
        [
            f"{rounds} interleaved rounds after one that is not counted; before each round the "
            "live tensors are "
            "overwritten and the contender's files are read once; after it the live tensors are "
            "compared with the truth.",
            "'+ copy': the loader makes new tensors, which are then copied into the live ones.",
        ],
    )


def _write_all(
    truth: State, folder: Path, progress: Callable[[str], None]
) -> tuple[dict[str, Path], dict[str, str]]:
    places: dict[str, Path] = {}
    problems: dict[str, str] = {}
    savers = {saver.name: saver for saver in SAVERS}
    for number, name in enumerate(dict.fromkeys(loader.saved_by for loader in LOADERS)):
        saver = savers[name]
        if saver.missing:
            problems[name] = saver.missing
            continue
        progress(f"writing with {name}")
        places[name] = folder / f"load-{number}"
        places[name].mkdir()
        try:
            saver.save(truth, places[name])
        except PEER_ERRORS as error:
            if saver.kind != "peer":
                raise
            problems[name] = f"its save failed: {type(error).__name__}: {error}"
    return places, problems


def _contender(
    loader: Loader,
    truth: State,
    live: State,
    places: dict[str, Path],
    problems: dict[str, str],
    settle_seconds: float,
) -> Contender:
    def prepare() -> None:
        for tensor in live.values():
            tensor.fill_(7)
        settle(settle_seconds)
        read_tree(places[loader.saved_by])

    def finish() -> None:
        wrong = [name for name, tensor in live.items() if not bool((tensor == truth[name]).all())]
        if wrong:
            raise AssertionError(f"{len(wrong)} tensors were not loaded, the first is {wrong[0]}")

    return Contender(
        loader.name,
        lambda: loader.load(live, places[loader.saved_by]),
        loader.kind,
        prepare=prepare,
        finish=finish,
        missing=loader.missing or problems.get(loader.saved_by),
    )
