"""The second save of a state of which little has changed: `python -m benchmarks reuse [--size
1GiB]`.

A module of which one hundredth trains. Ours with and without `reuse=True`, on a disk and on S3 over
loopback, the peers, and the limit: reading every byte once, to find out that it has not changed.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from ckptcore import CheckpointManager, KeepLast, SaveEvent
from ckptcore.format.digest import CHUNK_BYTES, chunk_digest
from ckptcore.storage.chunks import Workers

from .frame import Check, Contender, Report, best_limit, measure, rows_of, times_faster
from .ground import GIB, MIB, clean_folder, make_state, memory_of, size_text
from .ground import settle as rest
from .remote import BUCKET, served
from .savers import SAVERS, cores, missing_package

__all__ = ["run"]

OURS, FULL = "ckptcore save, reuse=True", "ckptcore save"
PEERS = ("dcp.save, default", "torch_checkpointing")


class Tuned(nn.Module):
    """`size` bytes, of which one tensor of a hundredth trains."""

    def __init__(self, size: int) -> None:
        super().__init__()
        state = make_state(size)
        base = {name.replace(".", "_"): nn.Parameter(t, False) for name, t in state.items()}
        self.base = nn.ParameterDict(base)
        self.adapter = nn.Parameter(torch.zeros(size // 400))


def run(
    folder: Path,
    *,
    size: int = GIB,
    rounds: int = 5,
    settle: float = 2.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    progress("making the state")
    model = Tuned(size)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    limit = Contender("digests of all bytes", partial(_hash_all, tensors), "limit")
    with ExitStack() as stack:
        ours = [
            _Ours(stack, OURS, folder / "reuse", model, settle, reuse=True),
            _Ours(stack, FULL, folder / "full", model, settle),
        ]
        if not (missing := missing_package("s3fs")):
            options = stack.enter_context(served())
            for name, reuse in ((f"{OURS}, to S3", True), (f"{FULL}, to S3", False)):
                root = f"s3://{BUCKET}/{'reuse' if reuse else 'full'}"
                ours.append(_Ours(stack, name, root, model, settle, reuse, options))
        contenders = [limit, *(each.contender for each in ours)]
        for saver in SAVERS:
            if saver.name.startswith(PEERS):
                place = folder / "peer"
                contenders.append(
                    Contender(
                        saver.name,
                        partial(saver.save, tensors, place),
                        prepare=partial(clean_folder, place, settle),
                        finish=partial(shutil.rmtree, place),
                        missing=saver.missing,
                    )
                )
        samples = measure(contenders, rounds, progress=progress)
        rows = rows_of(samples)
        for row in rows:
            for each in ours:
                if each.contender.name == row.name:
                    progress(f"stall of {row.name}")
                    row.extra |= each.facts(rounds)
    fastest = best_limit(samples)
    mine = samples[OURS].median
    ratio = mine / fastest if mine and fastest else None
    next(row for row in rows if row.name == OURS).checks = [
        Check("the time of the digests", 2.0, ratio, at_least=False, unit="x"),
        Check("a full save", 3.0, times_faster(samples, OURS, FULL), unit="x"),
    ]
    return Report(
        "reuse",
        f"Second save of a module of {size_text(size)}, of which 1 % trains",
        rows,
        {"size": size, "rounds": rounds, "settle": settle},
        [
            f"{rounds} interleaved rounds after one that is not counted, durable; the part that "
            "trains changes before each. stall: until save_async returns.",
            f"S3: {missing}"
            if missing
            else "S3: a server that keeps objects in memory, in a "
            "process of its own on the same machine. sent: bodies of all requests of one save.",
        ],
    )


class _Ours:
    """Saves of ours into one root, and what becomes of the bytes of the last one."""

    def __init__(
        self,
        stack: ExitStack,
        name: str,
        root: Path | str,
        model: Tuned,
        settle: float,
        reuse: bool = False,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.settle, self.sent = model, settle, 0
        self.steps = iter(range(1, 1 << 30))
        self.last: SaveEvent | None = None
        made = CheckpointManager(
            root,
            reuse=reuse,
            refresh_every=10_000,
            keep=KeepLast(1),
            on_event=self._watch,
            storage_options=storage_options,
        )
        self.manager = stack.enter_context(made)
        self.remote = storage_options is not None
        if self.remote:
            self._request = made.storage.request  # type: ignore[attr-defined]
            made.storage.request = self._counted  # type: ignore[attr-defined]
        self.contender = Contender(name, self._save, "ours", prepare=self._change)

    def facts(self, rounds: int) -> dict[str, str]:
        """What a row says beside the time."""
        assert self.last is not None
        written = f"{(self.last.nbytes - self.last.reused) / MIB:.1f} MiB"
        sent = f"{self.sent / MIB:.1f} MiB"
        stalls = []
        for _ in range(rounds):
            self._change()
            start = perf_counter()
            handle = self.manager.save_async(next(self.steps), {"model": self.model})
            stalls.append(perf_counter() - start)
            handle.result()
        found = {"written": f"{written} of {self.last.nbytes / MIB:.0f}"}
        found |= {"sent": sent} if self.remote else {}
        return {**found, "stall": f"{statistics.median(stalls):.3f} s"}

    def _watch(self, event: SaveEvent) -> None:
        if event.kind == "committed":
            self.last = event

    async def _counted(self, method: str, sender: Any = None, **parameters: Any) -> Any:
        self.sent += len(parameters.get("Body", b""))
        return await self._request(method, sender, **parameters)

    def _change(self) -> None:
        with torch.no_grad():
            self.model.adapter += 1
        rest(self.settle)
        self.sent = 0

    def _save(self) -> None:
        self.manager.save(next(self.steps), {"model": self.model})


def _hash_all(tensors: dict[str, torch.Tensor]) -> None:
    with Workers(cores(), "digests") as workers:
        workers.run([partial(_hash, memory_of(tensor)) for tensor in tensors.values()])


def _hash(memory: memoryview) -> None:
    for at in range(0, len(memory), CHUNK_BYTES):
        chunk_digest(memory[at : at + CHUNK_BYTES])
