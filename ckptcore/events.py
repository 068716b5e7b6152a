"""What happens to saves, for those who watch: monitoring, logging, TensorBoard.

    CheckpointManager(root, on_event=print)
    CheckpointManager(root, on_event=TensorBoardEvents("runs/a/tensorboard"))

"queued" and "skipped" come from the thread that calls `save_async`, the others from the one that
writes, at the time when it happens: "committed" means that the checkpoint exists. A watcher that
raises is warned of and otherwise ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from .arguments import check_path

Kind = Literal[
    "queued", "staged", "committed", "failed", "skipped", "deleted", "uploaded", "upload_failed"
]


@dataclass(frozen=True, slots=True)
class SaveEvent:
    """One event of a save, a deletion or an upload, as this rank sees it (the last two are seen by
    rank 0 alone).

    kind: "queued", "staged", "committed", "failed", "skipped", "deleted", "uploaded" or
        "upload_failed".
    step: int, of the checkpoint.
    rank: int, of this process (default 0).
    name: text, the checkpoint's folder in the root; None where it has none yet.
    seconds: since the save was called for, or the upload began (default 0).
    nbytes: bytes staged, or committed on all ranks, deleted or uploaded (default 0).
    timings: dict of seconds by phase on this rank.
    error: what a failed save or upload failed with (default None).
    time: seconds since the epoch, when it happened.
    root: the tier that something was uploaded to, or deleted from (default None: the manager's own
        root).
    retries: int, requests to the storage that this rank has tried again since the save was called
        for (default 0).
    reused: int, of the bytes committed by this rank, those that were taken over from the checkpoint
        before (default 0).
    """

    kind: Kind
    step: int
    rank: int = 0
    name: str | None = None
    seconds: float = 0.0
    nbytes: int = 0
    timings: dict[str, float] = field(default_factory=dict)
    error: BaseException | None = None
    time: float = field(default_factory=time.time)
    root: str | None = None
    retries: int = 0
    reused: int = 0


OnEvent = Callable[[SaveEvent], Any]


class TensorBoardEvents:
    """Writes events as scalars: checkpoint/<kind> (1 at the step), /seconds, /retries, /megabytes
    and /seconds_<phase>.

    writer: a SummaryWriter, or the folder for a new one. Raises InvalidState for anything else.
    """

    def __init__(self, writer: Any) -> None:
        if not hasattr(writer, "add_scalar"):
            folder = check_path("TensorBoardEvents: writer (a SummaryWriter, or a folder)", writer)
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(folder)
        self.writer = writer

    def __call__(self, event: SaveEvent) -> None:
        def put(name: str, value: float) -> None:
            self.writer.add_scalar(f"checkpoint/{name}", value, event.step, walltime=event.time)

        put(event.kind, 1.0)
        if event.kind in ("committed", "failed"):
            put("seconds", event.seconds)
            put("retries", event.retries)
            for phase, seconds in event.timings.items():
                put(f"seconds_{phase}", seconds)
        if event.kind == "committed":
            put("megabytes", event.nbytes / 1e6)
        if event.kind != "staged":  # what is in the file is what survives the process
            self.writer.flush()
