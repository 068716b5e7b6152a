"""Peak memory of the accelerators."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from .protocol import TrainerCallback, TrainerState

GIB = 1024**3

log = logging.getLogger(__name__)


class PeakMemory(TrainerCallback):
    """Follows the peak of memory on every rank; CUDA only.

    summary_writer: peaks go there at every log (default None: nowhere).
    show_details: statistics of the allocator, to the writer or the log (default False).
    do_log: a line of all ranks at every log (default False).
    enable_memory_snapshot: every rank records allocations from the beginning of training, which may
        cost more than 1 GiB, and writes a snapshot at the first log (default False).
    file_prefix: the snapshots are `<file_prefix>_rank<rank>.pickle`.
    """

    def __init__(
        self,
        summary_writer: Any = None,
        show_details: bool = False,
        do_log: bool = False,
        enable_memory_snapshot: bool = False,
        file_prefix: str = "memory_snapshot",
    ) -> None:
        self.writer, self.show_details, self.do_log = summary_writer, show_details, do_log
        self.enable_memory_snapshot, self.file_prefix = enable_memory_snapshot, file_prefix
        self.peak = self._rank = 0  # bytes, of this rank
        self._device: torch.device | None = None
        self._recording = False

    def on_train_begin(self, trainer: Any, **kwargs: Any) -> None:
        device = torch.device(trainer.device)
        self._device = device if device.type == "cuda" else None
        self._rank, self.peak = trainer.rank, 0
        if self._device is not None and self.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history()
            self._recording = True

    def on_log(self, state: TrainerState, logs: Mapping[str, Any], **kwargs: Any) -> None:
        if self._device is None:
            return
        self._snapshot()
        peaks = logs.get("peak_mem_allocated")
        if peaks is None:
            return
        self.peak = max(self.peak, peaks[self._rank])
        if not state.is_world_process_zero:
            return
        for rank, peak in enumerate(peaks if self.writer is not None else ()):
            self.writer.add_scalar(f"peak_memory_rank{rank}", peak, state.global_step)
        if self.do_log:
            shown = ", ".join(f"{peak / GIB:.3f}" for peak in peaks)
            log.info("peak memory by rank (GiB): %s", shown)
        if self.show_details and (self.do_log or self.writer is not None):
            self._details(state)
        if self.writer is not None:
            self.writer.flush()

    def _details(self, state: TrainerState) -> None:
        stats = torch.cuda.memory_stats(self._device)
        text = "\n".join(f"{name}: {value}" for name, value in stats.items())
        if self.writer is not None:
            self.writer.add_text("memory_stats", f"```\n{text}\n```", state.global_step)
        else:
            log.info("memory of rank %d:\n%s", self._rank, text)

    def _snapshot(self) -> None:
        if not self._recording:
            return
        path = f"{self.file_prefix}_rank{self._rank}.pickle"
        try:
            torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]
        except Exception as error:
            log.warning("%s: no memory snapshot in %s: %s", self.name, path, error)
        finally:
            self.close()

    def on_train_end(self, state: TrainerState, **kwargs: Any) -> None:
        if self._device is None:
            return
        self._snapshot()
        self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device))
        log.info("peak memory of rank %d: %.3f GiB", self._rank, self.peak / GIB)
        if self.show_details and not self.do_log and state.is_world_process_zero:
            self._details(state)

    def close(self) -> None:
        """Stop recording."""
        if self._recording:
            self._recording = False
            torch.cuda.memory._record_memory_history(enabled=None)
