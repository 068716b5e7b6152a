"""A profile of some steps, as a trace that browsers and Perfetto show."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch.profiler import profile, supported_activities

from .protocol import TrainerState

log = logging.getLogger(__name__)

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
        self.with_stack, self.with_flops, self.record_shapes = with_stack, with_flops, record_shapes
        self._profile: profile | None = None
        self._ends_at: int | None = None  # None: not begun
        self._rank = 0

    def on_train_begin(self, trainer: Any, **kwargs: Any) -> None:
        self._rank, self._ends_at = trainer.rank, None

    def on_step_begin(self, state: TrainerState, **kwargs: Any) -> None:
        if self._ends_at is None and state.global_step >= self.start_step:
            self._ends_at = state.global_step + self.num_steps
            self._profile = profile(
                activities=ACTIVITIES,
                with_stack=self.with_stack,
                with_flops=self.with_flops,
                record_shapes=self.record_shapes,
            )
            self._profile.start()

    def on_step_end(self, state: TrainerState, **kwargs: Any) -> None:
        if self._ends_at is not None and state.global_step >= self._ends_at:
            self.close()

    def on_train_end(self, **kwargs: Any) -> None:
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
