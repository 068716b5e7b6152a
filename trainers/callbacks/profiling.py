"""Where the time of a run goes, and its memory: a trace of some steps, and the peak of memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, supported_activities

from .protocol import Logs, TrainerCallback, TrainerState

log = logging.getLogger(__name__)

GIB = 1024**3
ROWS = 30
ACTIVITIES = supported_activities()  # type: ignore[no-untyped-call]  # the CPU, and CUDA where it is


class ProfilerCallback:
    """Profiles num_steps optimizer steps from start_step on. Every rank writes
    `<output_dir>/trace_rank<rank>.json`; rank 0 prints what cost the most.

    A run that is resumed later than start_step begins with its first step; one that ends within
    the window writes what there is.

    start_step: number of the step before the first one (default 3: three steps to warm up).
    num_steps: optimizer steps (default 5).
    output_dir: folder of the traces (default "benchmarks/profiles").
    with_stack, with_flops, record_shapes: as torch.profiler takes them (default True).
    """

    def __init__(
        self,
        start_step: int = 3,
        num_steps: int = 5,
        output_dir: str = "benchmarks/profiles",
        with_stack: bool = True,
        with_flops: bool = True,
        record_shapes: bool = True,
    ) -> None:
        self.start_step, self.num_steps, self.output_dir = start_step, num_steps, output_dir
        self.how: dict[str, Any] = {"with_stack": with_stack, "with_flops": with_flops}
        self.how["record_shapes"] = record_shapes
        self._profile: profile | None = None
        self._ends_at: int | None = None  # None: not begun
        self._rank = 0

    def on_train_begin(self, trainer: Any, **_: Any) -> None:
        self._rank, self._ends_at = trainer.rank, None

    def on_step_begin(self, state: TrainerState, **_: Any) -> None:
        if self._ends_at is None and state.global_step >= self.start_step:
            self._ends_at = state.global_step + self.num_steps
            self._profile = profile(activities=ACTIVITIES, **self.how)
            self._profile.start()

    def on_step_end(self, state: TrainerState, **_: Any) -> None:
        if self._ends_at is not None and state.global_step >= self._ends_at:
            self.close()

    def on_train_end(self, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """End the profile, if there is one, and write it."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        path = Path(self.output_dir) / f"trace_rank{self._rank}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
        except OSError as error:
            log.warning("no trace in %s: %s", path, error)
        if self._rank == 0:
            averages = profile.key_averages()
            keys = ["cpu_time_total", "device_time_total"]
            for key in keys if len(ACTIVITIES) > 1 else keys[:1]:
                print("=" * 80, averages.table(sort_by=key, row_limit=ROWS), "=" * 80, sep="\n")
            print(f"profile: {path}", flush=True)


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

    def on_train_begin(self, trainer: Any, **_: Any) -> None:
        device = torch.device(trainer.device)
        self._device = device if device.type == "cuda" else None
        self._rank, self.peak = trainer.rank, 0
        if self._device is not None and self.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history()
            self._recording = True

    def on_log(self, state: TrainerState, logs: Logs, **_: Any) -> None:
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

    def on_train_end(self, state: TrainerState, **_: Any) -> None:
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
