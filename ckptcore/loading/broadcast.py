"""Reading once and passing on: what every rank needs of the same bytes is read by one of them and
handed to the rest.

For storage that is slow or billed by the request. The ranks take turns in windows of bounded size,
so that each reads its part of the bytes in parallel with the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..errors import CheckpointError
from ..format.digest import CHUNK_BYTES, content_hash
from ..ranks.communicator import Communicator
from ..storage.chunks import MakeMemory
from .reader import StoredFiles, TensorRead

WINDOW_BYTES = 64 << 20


@dataclass(slots=True)
class _Host:
    """A Target that keeps chunks in host memory until they have been passed on."""

    chunks: dict[int, memoryview] = field(default_factory=dict)
    pinned: MakeMemory | None = None

    def view(self, start: int, stop: int) -> memoryview:
        return self.chunks[start // CHUNK_BYTES]

    def put(self, start: int, data: memoryview) -> None:
        raise AssertionError("there is always a view")


def read_shared(
    comm: Communicator, files: StoredFiles, reads: Sequence[TensorRead], io_threads: int
) -> list[TensorRead]:
    """Do those of `reads` that are the same on every rank; the others are returned, to be read by
    each rank itself.

    What one rank raises, all raise: CheckpointCorrupt, StorageError.
    """
    wanted: dict[
        bytes, list[TensorRead]
    ] = {}  # several where a rank puts the same bytes into several places
    for read in reads:
        wanted.setdefault(_identity(read), []).append(read)

    with comm.round("shared reads") as r:
        found = r.gather(list(wanted))
        if r.leads:
            others = [set(names) for names in found[1:]]
            r.verdict = [name for name in found[0] if all(name in other for other in others)]
    shared = r.verdict
    windows = list(_windows([wanted[name][0] for name in shared]))
    for turn in range(0, len(windows), comm.world_size):
        mine = windows[turn + comm.rank] if turn + comm.rank < len(windows) else []
        staged = [replace(read, target=_host(read)) for read in mine]
        with comm.round("read"):
            files.read(staged, io_threads)
        failed: Exception | None = None
        try:
            _pass_on(comm, windows[turn : turn + comm.world_size], staged)
        except CheckpointError:
            raise  # everybody's
        except Exception as error:  # of the transport: a bare error of its own, on this rank alone
            failed = error
        with comm.round("pass on"):
            if failed is not None:
                raise failed
    taken = set(shared)
    return [read for name, same in wanted.items() for read in same[name in taken :]]


def _pass_on(
    comm: Communicator, windows: Sequence[list[TensorRead]], staged: Sequence[TensorRead]
) -> None:
    """Hand what each rank has read of its window to all of them."""
    for owner, window in enumerate(windows):
        for number, read in enumerate(window):
            held = staged[number].target if owner == comm.rank else _host(read)
            assert isinstance(held, _Host)
            for chunk, buffer in held.chunks.items():
                comm.share(buffer, owner)
                _deliver(read, chunk, buffer)


def _identity(read: TensorRead) -> bytes:
    entry = read.entry
    what = f"{read.component} {entry.file} {entry.start} {read.chunks} ".encode()
    return content_hash(what + entry.digests)


def _windows(reads: Sequence[TensorRead]) -> Iterator[list[TensorRead]]:
    """Parts of the reads, each part of at most WINDOW_BYTES."""
    window: list[TensorRead] = []
    size = 0
    per_read = WINDOW_BYTES // CHUNK_BYTES
    for read in reads:
        chunks = read.numbers
        for first in range(0, len(chunks), per_read):
            part = replace(read, chunks=chunks[first : first + per_read])
            nbytes = sum(read.entry.chunk(n)[1] for n in part.chunks or ())
            if window and size + nbytes > WINDOW_BYTES:
                yield window
                window, size = [], 0
            window.append(part)
            size += nbytes
    if window:
        yield window


def _host(read: TensorRead) -> _Host:
    return _Host({n: memoryview(bytearray(read.entry.chunk(n)[1])) for n in read.numbers})


def _deliver(read: TensorRead, chunk: int, buffer: memoryview) -> None:
    start = chunk * CHUNK_BYTES
    if read.target is not None:
        view = read.target.view(start, start + len(buffer))
        if view is None:
            read.target.put(start, buffer)
        else:
            view[:] = buffer
