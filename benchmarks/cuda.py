"""Durable saves of a GPU's tensors, and loads onto it: `python -m benchmarks save --device cuda`,
`load --device cuda`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from .frame import (
    PEER_ERRORS,
    Check,
    Contender,
    Kind,
    Report,
    best_limit,
    measure,
    rows_of,
    times_faster,
)
from .ground import (
    MIB,
    clean_folder,
    drop_tree,
    make_state,
    memory_of,
    read_tree,
    settle,
    size_text,
)
from .memory import peak_added
from .savers import (
    SAVERS,
    Saver,
    State,
    cores,
    dcp_load,
    in_threads,
    missing_package,
    ours_load,
    ours_save,
    raw_save,
)
from .training import check_device, wait_for

__all__ = ["run_load", "run_save"]

OURS_SAVE = "ckptcore save"
OURS_LOAD = "ckptcore load, verified"
SAFETENSORS = "safetensors load_file"
TENSORS = 192
PIECE = 4 * MIB
THREADS = min(8, cores())


def run_save(
    folder: Path,
    *,
    size: int,
    rounds: int = 3,
    settle_seconds: float = 1.0,
    device: str = "cuda",
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Time all savers on a state of the device. The limit writes the same bytes from host memory
    that has them already."""
    check_device(device)
    progress("making the state")
    host = make_state(size, TENSORS)
    state = {name: tensor.to(device) for name, tensor in host.items()}
    savers = [s for s in SAVERS if s.kind != "note"]
    if THREADS > 2:
        savers.insert(2, Saver(f"raw write+fsync, {THREADS} threads", raw_save(THREADS), "limit"))
    savers = [_from(saver, host) if saver.kind == "limit" else saver for saver in savers]
    samples = measure(
        [_save_contender(saver, state, folder / "save", settle_seconds) for saver in savers],
        rounds,
        progress=progress,
        strict=device == "cpu",
    )
    rows = rows_of(samples)
    for row in rows:
        if row.median:
            row.extra["GB/s"] = f"{size / row.median / 1e9:.2f}"
        if row.name == OURS_SAVE:
            progress("memory of our save")
            if (faster := times_faster(samples, OURS_SAVE, "dcp.save, default")) is not None:
                row.extra["x dcp.save"] = f"{faster:.2f}"
            added = _memory_added(state, folder / "save-memory") if row.problem is None else None
            row.checks.append(Check("host memory added", 96.0, added, at_least=False, unit=" MiB"))
    return Report(
        "save-cuda",
        f"Durable save of {size_text(size)} in {TENSORS} float32 tensors on {device}",
        rows,
        {"size": size, "rounds": rounds, "device": device},
        [
            f"{rounds} interleaved rounds after one that is not counted; limit: the best of the "
            "raw writes, from host memory "
            "that has the bytes already."
        ],
    )


def _from(saver: Saver, host: State) -> Saver:
    return replace(saver, save=lambda _, folder: saver.save(host, folder))


def _save_contender(saver: Saver, state: State, folder: Path, rest: float) -> Contender:
    def prepare() -> None:
        clean_folder(folder, rest)
        _wait(state)

    def save() -> None:
        saver.save(state, folder)
        _wait(state)

    return Contender(
        saver.name,
        save,
        saver.kind,
        prepare=prepare,
        finish=partial(shutil.rmtree, folder),
        missing=saver.missing,
    )


def _memory_added(state: State, folder: Path) -> float | None:
    """MiB that one save adds to this process at its highest; other savers have filled its pools
    before."""
    folder.mkdir()
    try:
        return peak_added(lambda: ours_save(state, folder)) / MIB
    except OSError:
        return None
    finally:
        shutil.rmtree(folder)


@dataclass(frozen=True)
class _Loader:
    """`load(live, folder)` gives tensors on the device: the live ones, filled, or new ones."""

    name: str
    load: Callable[[State, Path], Mapping[str, torch.Tensor]]
    saved_by: str
    kind: Kind = "peer"
    needs: str | None = None
    cold: bool = False  # its files are taken out of the page cache before each load


def run_load(
    folder: Path,
    *,
    size: int,
    rounds: int = 5,
    settle_seconds: float = 0.0,
    device: str = "cuda",
    cold: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Time loads onto the device, page cache warm; what was loaded is compared in every round.

    cold: time ours, safetensors and dcp from the disk too.
    """
    check_device(device)
    progress("making the state")
    host = make_state(size, TENSORS)
    truth = {name: tensor.to(device) for name, tensor in host.items()}
    live = {name: torch.empty_like(tensor) for name, tensor in truth.items()}
    block = _host_block(size, device)
    loaders = [
        *(
            _Loader(
                f"raw preadv + copy to the device, {n} thread{'s' * (n > 1)}",
                _raw(host, block, n),
                "raw write+fsync, 1 thread",
                "limit",
            )
            for n in sorted({1, THREADS})
        ),
        _Loader(OURS_LOAD, _filling(ours_load), OURS_SAVE, "ours"),
        _Loader(
            SAFETENSORS, _safetensors(device), "safetensors save_file + fsync", needs="safetensors"
        ),
        _Loader("torch.load(mmap)", _torch_load(device), "torch.save + fsync"),
        _Loader("dcp.load", _filling(dcp_load), "dcp.save, default"),
    ]
    if cold:
        names = (OURS_LOAD, SAFETENSORS, "dcp.load")
        loaders += [
            replace(each, name=f"{each.name}, from the disk", cold=True)
            for each in loaders
            if each.name in names
        ]
    places, problems = _write_all({loader.saved_by for loader in loaders}, host, folder, progress)
    contenders = [
        _load_contender(each, truth, live, places, problems, settle_seconds) for each in loaders
    ]
    samples = measure(contenders, rounds, progress=progress, strict=device == "cpu")
    for place in places.values():
        shutil.rmtree(place)
    rows = rows_of(samples)
    limit = best_limit(samples)
    for row in rows:
        if row.median:
            row.extra["GB/s"] = f"{size / row.median / 1e9:.2f}"
        if row.name == OURS_LOAD:
            faster = times_faster(samples, OURS_LOAD, SAFETENSORS)
            row.checks.append(Check("safetensors load_file", 1.0, faster, unit="x"))
    return Report(
        "load-cuda",
        f"Load of {size_text(size)} in {TENSORS} float32 tensors onto {device}, page cache warm"
        + ", and from the disk" * cold,
        rows,
        {"size": size, "rounds": rounds, "device": device, "limit": limit},
        [
            f"{rounds} interleaved rounds after one that is not counted. ckptcore and dcp fill "
            "live tensors; safetensors and "
            "torch.load make new ones. limit: read whole into pinned memory, then copied."
        ],
    )


def _wait(state: State) -> None:
    wait_for(next(iter(state.values())).device.type)


def _write_all(
    names: set[str], host: State, folder: Path, progress: Callable[[str], None]
) -> tuple[dict[str, Path], dict[str, str]]:
    places: dict[str, Path] = {}
    problems: dict[str, str] = {}
    for number, saver in enumerate(s for s in SAVERS if s.name in names):
        if saver.missing:
            problems[saver.name] = saver.missing
            continue
        progress(f"writing with {saver.name}")
        places[saver.name] = folder / f"load-cuda-{number}"
        places[saver.name].mkdir()
        try:
            saver.save(host, places[saver.name])
        except PEER_ERRORS as error:
            problems[saver.name] = f"its save failed: {type(error).__name__}: {error}"
    return places, problems


def _load_contender(
    loader: _Loader,
    truth: State,
    live: State,
    places: dict[str, Path],
    problems: dict[str, str],
    rest: float,
) -> Contender:
    loaded: dict[str, torch.Tensor] = {}

    def prepare() -> None:
        for tensor in live.values():
            tensor.fill_(7)
        settle(rest)
        (drop_tree if loader.cold else read_tree)(places[loader.saved_by])
        _wait(live)

    def load() -> None:
        loaded.update(loader.load(live, places[loader.saved_by]))
        _wait(live)

    def finish() -> None:
        wrong = [
            name
            for name, tensor in truth.items()
            if name not in loaded or not torch.equal(loaded[name], tensor)
        ]
        loaded.clear()
        if wrong:
            raise AssertionError(f"{len(wrong)} tensors were not loaded, the first is {wrong[0]}")

    missing = missing_package(loader.needs) or problems.get(loader.saved_by)
    return Contender(
        loader.name, load, loader.kind, prepare=prepare, finish=finish, missing=missing
    )


def _filling(load: Callable[[State, Path], None]) -> Callable[[State, Path], State]:
    def filled(live: State, folder: Path) -> State:
        load(live, folder)
        return live

    return filled


def _safetensors(device: str) -> Callable[[State, Path], State]:
    def load(_: State, folder: Path) -> State:
        from safetensors.torch import load_file

        found: State = load_file(folder / "model.safetensors", device=device)
        return found

    return load


def _torch_load(device: str) -> Callable[[State, Path], State]:
    def load(_: State, folder: Path) -> State:
        found: State = torch.load(
            folder / "state.pt", mmap=True, map_location=device, weights_only=True
        )
        return found

    return load


def _host_block(size: int, device: str) -> torch.Tensor:
    """Host memory for all of the state, touched, and pinned for a GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device != "cpu").fill_(1)


def _raw(host: State, block: torch.Tensor, threads: int) -> Callable[[State, Path], State]:
    """preadv by `threads` threads into pinned memory, then to the device."""
    from .savers import HEADER

    whole = memory_of(block)

    def load(live: State, folder: Path) -> State:
        total = sum(tensor.nbytes for tensor in host.values())
        fd = os.open(folder / "raw.bin", os.O_RDONLY)

        def work(number: int) -> None:
            for at in range(number * PIECE, total, threads * PIECE):
                piece = whole[at : min(at + PIECE, total)]
                done = 0
                while done < len(piece):
                    got = os.preadv(fd, [piece[done:]], HEADER + at + done)
                    if got == 0:
                        raise OSError("the raw file ends too early")
                    done += got

        try:
            in_threads(threads, work)
        finally:
            os.close(fd)
        at = 0
        for tensor in live.values():
            source = block[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor.copy_(source, non_blocking=True)
            at += tensor.nbytes
        return live

    return load
